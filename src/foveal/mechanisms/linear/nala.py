"""Norm-aware linear attention (NaLaFormer): the length of a query sets the power of its features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class NaLa(Recurrence, name="nala"):
    r"""Raise the direction of q to a power that grows with its length, and compare signs without losing any.

    .. math::
        o_t = \frac{\sum_j w_{tj} v_j}{\sum_j w_{tj}}, \qquad
        w_{tj} = \sum_c \left|\frac{q_{t,c}}{|q_t|}\right|^{\lambda (1/2 + \tanh |q_t|)} |k_{j,c}|^\lambda
        \cos\left(\theta(q_{t,c}) - \theta(k_{j,c})\right)

    A longer query makes a flatter set of features steeper, as in softmax; plain linear attention forgets the length.
    With theta = pi/4 sign(x) channels of unlike sign add nothing, which is the official code's split into positive
    and negative parts; theta = pi/4 tanh(x) damps them smoothly, the cosine of the paper's first version as far as
    it can be told.  A row without any weight is 0.  ``scale`` does not enter.  Rotation, depth-wise convolution,
    norm and gate belong to the layer around it.

    Args:
        power: lambda.
        direction: ``"sign"`` or ``"tanh"``, what theta is made of.

    Raises:
        ValueError: if ``power`` is not above 0 or ``direction`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("nalaformer", "norm_aware_linear_attention")
    paper: ClassVar[Paper] = Paper(
        "2506.21137",
        "NaLaFormer: Norm-Aware Linear Attention for Transformer Models",
        "Meng, Luo, Huo, Wang, Li, Zhang",
        2025,
    )
    cost: ClassVar[Cost] = Cost(train="T * 2 * (K * V + 64 * (K + V / 2))", decode="2 * K * V", state="2 * K * (V + 1)")
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"direction": "tanh", "power": 2.0})

    power: float = 3.0
    direction: str = "sign"

    def __post_init__(self) -> None:
        self.require_number("power", 0, float("inf"), "a number above 0")
        self.require_choice("direction", ("sign", "tanh"))

    def halves(self, x: Tensor, size: Tensor) -> Tensor:
        """The sizes [..., K] of all channels on two axes that stand for the angle, [..., 2 K]."""
        if self.direction == "sign":
            return torch.cat((size * (x > 0), size * (x < 0)), -1)
        angle = math.pi / 4 * x.tanh()
        return torch.cat((size * angle.cos(), size * angle.sin()), -1)

    def terms(self, q: Tensor, k: Tensor, v: Tensor) -> Terms:
        length = q.norm(dim=-1, keepdim=True)
        share = (q / length.masked_fill(length == 0, 1.0)).abs()  # hidden queries are 0
        read = share.masked_fill(share == 0, 1.0) ** (self.power * (0.5 + length.tanh()))
        write = k.abs().masked_fill(k == 0, 1.0) ** self.power
        read, write = read.masked_fill(share == 0, 0.0), write.masked_fill(k == 0, 0.0)
        return Terms(self.halves(q, read), self.halves(k, write), v, normalize=True)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        norm = q.square().sum(-1, keepdim=True).sqrt()
        p = self.power * (0.5 + norm.tanh())
        size = (q.abs() / norm).pow(p)[:, None] * k.abs().pow(self.power)[None]
        if self.direction == "sign":
            cosine = (q[:, None] * k[None] > 0).to(q.dtype)
        else:
            cosine = (math.pi / 4 * (q.tanh()[:, None] - k.tanh()[None])).cos()
        weight = (size * cosine).sum(-1) * visible
        total = weight.sum(-1, keepdim=True)
        return weight / torch.where(total > 0, total, 1.0) @ v
