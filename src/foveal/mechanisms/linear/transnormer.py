"""TransNormer's norm attention: linear attention whose output is normalised instead of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu, rms_norm

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class TransNormer(Recurrence, name="transnormer"):
    r"""Drop the denominator of linear attention, whose gradients are unbounded, and normalise the output vector.

    .. math::
        o_t = g \odot \frac{z_t}{\sqrt{\tfrac{1}{V} |z_t|^2 + \epsilon}}, \qquad
        z_t = \mathrm{scale} \sum_j \left(\phi(q_t)^\top \phi(k_j)\right) v_j

    The norm runs over the channels of one head.  The paper has no scale, which cancels up to epsilon: ``scale=1.0``
    is its formula.  The paper's early layers use attention within blocks instead (DiagAttention), which is no
    recurrence and is left out.

    Args:
        feature_map: phi: ``"elu+1"`` (the paper's T2) or ``"elu"`` (T1), whose weights may be negative.
        eps: epsilon.

    Raises:
        ValueError: if ``feature_map`` is unknown or ``eps`` is not above 0.
    """

    aliases: ClassVar[tuple[str, ...]] = ("norm_attention",)
    paper: ClassVar[Paper] = Paper(
        "2210.10340", "The Devil in Linear Transformer", "Qin, Han, Sun, Li, Kong, Barnes, Zhong", 2022
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "gain": Input("H V", doc="factor of each output channel", optional=True, start=1.0)
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    linear_in_values: ClassVar[bool] = False
    examples: ClassVar = ({}, {"feature_map": "elu", "eps": 1e-3})

    feature_map: str = "elu+1"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.require_choice("feature_map", ("elu", "elu+1"))
        self.require_number("eps", 0, float("inf"), "a number above 0")

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        phi_q, phi_k = (elu(x) + (self.feature_map == "elu+1") for x in (q, k))
        z = recur(Terms(phi_q, phi_k, v))
        return inputs["gain"][:, None] * rms_norm(z, z.shape[-1:], eps=self.eps)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, gain: Tensor) -> Tensor:
        offset = 0.0 if self.feature_map == "elu+1" else 1.0
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) - offset for x in (q, k))
        z = scale * (phi_q @ phi_k.mT * visible) @ v
        return gain * z / (z.square().mean(-1, keepdim=True) + self.eps).sqrt()
