"""cosFormer: non-negative scores that fade with distance as a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class CosFormer(Recurrence, name="cosformer"):
    r"""Weigh by the product of rectified q and k times a cosine that falls with their distance.

    .. math::
        o_i = \frac{\sum_j s_{ij} v_j}{\sum_j s_{ij}}, \qquad
        s_{ij} = \mathrm{relu}(q_i)^\top \mathrm{relu}(k_j) \cos\left(\frac{\pi}{2} \cdot \frac{i - j}{M}\right)

    The cosine of a difference is a product of cosines plus one of sines, hence two recurrences' worth of features.
    ``scale`` cancels.  The paper sets M to the length at hand, which cannot stream: here it is a setting, and
    positions count real tokens.  Beyond a distance of M the formula is kept, so weights turn negative: choose M at
    least as long as the longest sequence.  A query that shares no positive channel with any key returns 0.

    Args:
        length: M.

    Raises:
        ValueError: if ``length`` is below 1.
    """

    paper: ClassVar[Paper] = Paper(
        "2202.08791",
        "cosFormer: Rethinking Softmax in Attention",
        "Qin, Sun, Deng, Li, Wei, Lv, Yan, Kong, Zhong",
        2022,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (2 * K * V + 64 * (2 * K + V))", decode="2 * K * V", state="2 * K * (V + 1) + 1"
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({"length": 150},)

    length: int = 4096

    def __post_init__(self) -> None:
        self.require_int("length")

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        angles = (math.pi / 2 / self.length * positions for positions in recur.positions())
        q, k = (
            torch.cat((x.relu() * angle.cos(), x.relu() * angle.sin()), -1)
            for x, angle in zip((q, k), angles, strict=True)
        )
        return recur(Terms(q, k, v, normalize=True))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
        fade = torch.cos(torch.pi / 2 * distance.double() / self.length).to(q.dtype)
        weight = q.clamp(min=0) @ k.clamp(min=0).mT * fade * visible
        total = weight.sum(-1, keepdim=True)
        return weight / total.where(total != 0, 1.0) @ v
