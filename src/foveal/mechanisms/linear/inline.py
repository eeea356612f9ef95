"""Injective linear attention (InLine): rows sum to 1 by subtraction instead of division."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.engines.recurrence.program import ratio
from foveal.mechanisms.linear.linear import FEATURE_MAPS
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class InLine(Recurrence, name="inline"):
    r"""Centre each row of scores instead of dividing it by its sum, so that different queries keep different rows.

    .. math::
        o_t = \sum_j \left(s_{tj} - \frac{1}{N} \sum_m s_{tm} + \frac{1}{N}\right) v_j, \qquad
        s_{tj} = \frac{\mathrm{scale}}{N}\, \phi(q_t)^\top \phi(k_j)

    N counts the visible keys, up to t in the causal form.  Rows sum to 1 but may hold negative weights; phi(q) = 0
    gives the mean of the values.  The paper leaves the factor scale / N to the features; it stands here as in the
    official code and keeps the output's size independent of N.  The paper's residual over a 3 x 3 neighbourhood
    belongs to the layer around it.

    Args:
        feature_map: phi: ``"identity"`` (the paper's default), ``"relu"``, or ``"elu"`` for elu(x) + 1.

    Raises:
        ValueError: if ``feature_map`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("inline_attention", "injective_linear_attention")
    paper: ClassVar[Paper] = Paper(
        "2412.06590",
        "Bridging the Divide: Reconsidering Softmax and Linear Attention",
        "Han, Pu, Xia, Han, Pan, Li, Lu, Song, Huang",
        2024,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (K * V + 64 * (K + 2 * V))", decode="(K + 1) * (V + 1)", state="(K + 1) * (V + 1)"
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"feature_map": "relu"})

    feature_map: str = "identity"

    def __post_init__(self) -> None:
        self.require_choice("feature_map", FEATURE_MAPS)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        phi = FEATURE_MAPS[self.feature_map]
        weighted, total, mean = mean_scores(recur, phi(q), phi(k), v)
        return mean + recur.scale * (weighted - total * mean)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        N = visible.sum(-1, keepdim=True, dtype=q.dtype)
        if self.feature_map != "identity":
            q, k = ((x.exp() * (x <= 0) + (x + 1) * (x > 0)) if self.feature_map == "elu" else x * (x > 0)
                    for x in (q, k))  # fmt: skip
        s = scale / N * (q @ k.mT) * visible
        weight = (s - s.sum(-1, keepdim=True) / N + 1 / N) * visible
        return weight @ v


def mean_scores(recur: Recur, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With s = phi_q' phi_k / N: the sum of s v [B, H, T, V], of s [B, H, T, 1], and the mean value.

    Two recurrences: values and ones under the keys, and under a key of 1.
    """
    values = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    scored = recur(Terms(phi_q, phi_k, values), scale=1.0)
    plain = recur(Terms(torch.ones_like(phi_q[..., :1]), torch.ones_like(phi_k[..., :1]), values), scale=1.0)
    count = plain[..., -1:]
    scored = ratio(scored, count)
    return scored[..., :-1], scored[..., -1:], ratio(plain[..., :-1], count)
