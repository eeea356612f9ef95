"""Retention (RetNet): linear attention whose heads forget at fixed, different rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Limit, Paper


@dataclass(frozen=True)
class Retention(Recurrence, name="retention"):
    r"""Weigh the past by an exponential window, one width per head.

    .. math::
        o_t = \frac{1}{\sqrt{K}} \sum_{j \le t} \gamma_h^{t - j} (q_t^\top k_j)\, v_j, \qquad \gamma_h = 1 - 2^{-a - h}

    The paper also rotates q and k (xPos) and normalises each head's output; both belong to the layer around it.
    A hidden token takes no time: t - j counts real tokens only.

    Args:
        slowest: a, so that head 0 has gamma = 1 - 2^-a.

    Raises:
        ValueError: if ``slowest`` is not above 0.
    """

    aliases: ClassVar[tuple[str, ...]] = ("retnet",)
    paper: ClassVar[Paper] = Paper(
        "2307.08621", "Retentive Network: A Successor to Transformer for Large Language Models", "Sun et al.", 2023
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    per_head: ClassVar[bool] = False
    limits: ClassVar = (
        Limit(
            {"slowest": 60.0},
            "linear",
            {"feature_map": "identity", "normalize": False},
            why="gamma = 1 forgets nothing",
        ),
    )

    slowest: float = 5.0

    def __post_init__(self) -> None:
        self.require_number("slowest", 0, float("inf"), "a number above 0")

    def log_gamma(self, like: Tensor) -> Tensor:
        """Natural log of each head's decay, [H]."""
        head = torch.arange(like.shape[-3], dtype=like.dtype, device=like.device)
        return torch.log1p(-(2.0 ** (-self.slowest - head)))

    def terms(self, q: Tensor, k: Tensor, v: Tensor) -> Terms:
        decay = self.log_gamma(k)[:, None, None].expand(*k.shape[:3], 1)
        return Terms(read=q, write=k, value=v, log_decay=decay)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        H, T, _ = q.shape
        t, h = torch.arange(T), torch.arange(H, dtype=q.dtype)
        gamma = 1 - 2.0 ** (-self.slowest - h)
        weight = gamma[:, None, None] ** (t[:, None] - t).clamp(min=0)
        return scale * (q @ k.mT * weight).tril() @ v
