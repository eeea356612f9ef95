"""Linear attention (linear transformer): softmax replaced by a product of feature maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Paper

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: elu(x) + 1,
    "relu": torch.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Linear(Recurrence, name="linear"):
    r"""Weigh the past by the product of positive features, so that a running sum replaces the cache.

    .. math::
        o_t = \frac{\sum_{j \le t} (\phi(q_t)^\top \phi(k_j))\, v_j}{\sum_{j \le t} \phi(q_t)^\top \phi(k_j)},
        \qquad \phi(x) = \mathrm{elu}(x) + 1

    Scores have no exponential, so rows stay flat: equal keys give the mean of the values seen so far.  With the
    normaliser, ``scale`` cancels.

    Args:
        feature_map: phi: ``"elu"`` is elu(x) + 1, ``"relu"`` is max(x, 0), ``"identity"`` is x.
        normalize: divide by the sum of the weights, as the paper does; without it the output is the plain sum,
            times ``scale``.

    Raises:
        ValueError: if ``feature_map`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("linear_attention", "linear_transformer", "elu")
    paper: ClassVar[Paper] = Paper(
        "2006.16236",
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        "Katharopoulos, Vyas, Pappas, Fleuret",
        2020,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V + K * normalize")
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"normalize": False}, {"feature_map": "identity", "normalize": False})

    feature_map: str = "elu"
    normalize: bool = True

    def __post_init__(self) -> None:
        self.require_choice("feature_map", FEATURE_MAPS)
        self.require_choice("normalize", (False, True))

    def terms(self, q: Tensor, k: Tensor, v: Tensor) -> Terms:
        phi = FEATURE_MAPS[self.feature_map]
        return Terms(read=phi(q), write=phi(k), value=v, normalize=self.normalize)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        if self.feature_map == "elu":
            phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        else:
            phi_q, phi_k = (x.clamp(min=0) if self.feature_map == "relu" else x for x in (q, k))
        weight: Tensor = scale * (phi_q @ phi_k.mT) * visible
        if self.normalize:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight @ v
