"""H2O: keep the tokens that have drawn the most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Eviction, attention_paid
from foveal.spec import Paper


@dataclass(frozen=True)
class H2O(Eviction, name="h2o"):
    r"""Keep the heavy hitters, whose attention summed over all queries is largest, and the recent half.

    .. math::
        s_j = \frac{1}{H/G} \sum_{h} \sum_{t \ge j} \mathrm{softmax}_j\left(q_{h,t}^\top k_j / \sqrt{K}\right)

    over the H/G query heads that share a key head (the paper has one each; the mean is our choice).  Sums go on
    while decoding, and each new token costs the weakest old one its place.  Older tokens have been seen by more
    queries: a known bias of the method.  Scoring a prompt costs O(T^2 K) per head, as much as attention.

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).
        recent: share of the budget that the most recent tokens hold.

    Raises:
        ValueError: if ``budget`` or ``recent`` is out of range.
    """

    aliases: ClassVar[tuple[str, ...]] = ("heavy_hitter_oracle", "heavy_hitters")
    paper: ClassVar[Paper] = Paper(
        "2306.14048",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        "Zhang et al.",
        2023,
    )
    while_decoding: ClassVar[bool] = True

    budget: int | float = 1024
    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("recent", -1e-9, 1, "a share in [0, 1]")

    def protected(self) -> tuple[int | float, int | float]:
        return 0, float(self.recent)

    def observes(self) -> int | None:
        return None

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        total = torch.zeros(k.shape[:3], device=k.device) if past is None else past
        for weight in attention_paid(k, queries, real=real, scale=scale):
            total = total + weight.sum(3).mean(2)
        return total

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        (G, S, _), (H, W, _) = k.shape, queries.shape
        s = torch.zeros(G, S, dtype=k.dtype)
        for h in range(H):
            g = h // (H // G)
            for t in range(S - W, S):
                q = queries[h, t - (S - W)]
                s[g, : t + 1] += (scale * k[g, : t + 1] @ q).softmax(0) / (H // G)
        return s
