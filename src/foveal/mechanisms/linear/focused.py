"""Focused linear attention (FLatten): a power sharpens the direction of features and keeps their length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from foveal.engines.recurrence import Recurrence, Terms
from foveal.engines.recurrence.program import ratio
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class Focused(Recurrence, name="focused"):
    r"""Pull features towards their nearest axis, so that like directions weigh more and unlike ones less.

    .. math::
        o_t = \frac{\sum_j f_p(q_t)^\top f_p(k_j)\, v_j}{\sum_j f_p(q_t)^\top f_p(k_j)}, \qquad
        f_p(x) = \frac{|y|}{|y^p|}\, y^p, \qquad y = \frac{\max(x, 0)}{\mathrm{softplus}(\tau)}

    The power is taken channel by channel and |f_p(x)| = |y|.  ``power=1`` is linear attention with relu features.
    Rows ignore the length of q, and ``scale`` cancels.  A row without any weight is 0; the official code adds 1e-6 to
    features and sums instead.  Norms run over one head, as the formula says; that code takes them over all heads
    before the split.  The paper's depth-wise convolution of v, which lifts the rank
    of the map, and its positional term of k belong to the layer around it.

    Args:
        power: p.

    Raises:
        ValueError: if ``power`` is not above 0.
    """

    aliases: ClassVar[tuple[str, ...]] = ("flatten", "focused_linear_attention", "flatten_transformer")
    paper: ClassVar[Paper] = Paper(
        "2308.00442",
        "FLatten Transformer: Vision Transformer using Focused Linear Attention",
        "Han, Pan, Han, Song, Huang",
        2023,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V + K")
    inputs: ClassVar[dict[str, Input]] = {
        "temperature": Input("H K", doc="tau: each channel is divided by softplus of it", optional=True, start=0.0)
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"power": 0.7})
    limits: ClassVar = (Limit({"power": 1.0}, "linear", {"feature_map": "relu"}, why="a power of 1 changes nothing"),)

    power: float = 3.0

    def __post_init__(self) -> None:
        self.require_number("power", 0, float("inf"), "a number above 0")

    def focus(self, x: Tensor, temperature: Tensor) -> Tensor:
        """f_p of [B, H, T, K]; the largest channel, divided out before the power, cancels."""
        y = torch.relu(x) / softplus(temperature)[:, None]
        positive = y.masked_fill(y == 0, 1.0)  # a power below 1 has no gradient at 0
        sharp = ((positive / y.detach().amax(-1, keepdim=True).clamp(min=1e-30)) ** self.power).masked_fill(y == 0, 0.0)
        return ratio(y.norm(dim=-1, keepdim=True) * sharp, sharp.norm(dim=-1, keepdim=True))

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, temperature: Tensor) -> Terms:
        return Terms(self.focus(q, temperature), self.focus(k, temperature), v, normalize=True)

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, temperature: Tensor
    ) -> Tensor:
        def f(x: Tensor) -> Tensor:
            y = x.clamp(min=0) / (1 + temperature.exp()).log()
            largest = y.amax(-1, keepdim=True)  # |y^p| may underflow
            direction = y / torch.where(largest > 0, largest, 1.0)
            power = torch.where(y > 0, direction, 1.0) ** self.power * (y > 0)
            length = power.norm(dim=-1, keepdim=True)
            kept: Tensor = power * y.norm(dim=-1, keepdim=True) / torch.where(length > 0, length, 1.0)
            return kept

        weight = f(q) @ f(k).mT * visible
        total = weight.sum(-1, keepdim=True)
        return weight / torch.where(total > 0, total, 1.0) @ v
