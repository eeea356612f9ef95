"""SnapKV: keep what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from foveal.engines.cache import Eviction, attention_paid
from foveal.spec import Paper


@dataclass(frozen=True)
class SnapKV(Eviction, name="snapkv"):
    r"""Keep the tokens to which the last W queries of the prompt pay attention, with their neighbours.

    .. math::
        a_j = \frac{1}{W\,H/G} \sum_{h,t} \mathrm{softmax}_j\left(q_{h,t}^\top k_j / \sqrt{K}\right),
        \qquad s_j = \frac{1}{w} \sum_{|i - j| \le w/2} a_i

    over the H/G query heads that share a key head (the official code repeats the keys and lets every query head
    choose; the mean keeps the grouped cache grouped).  The W observing tokens always survive and count towards the
    budget; their own columns are not pooled into their neighbours.  Generated tokens are never evicted.  Scoring
    costs O(W S K) per head, once.

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).
        window: W, observing queries.
        kernel: w, odd width of the mean over neighbours; sums at the border are divided by w too.

    Raises:
        ValueError: if ``budget`` is out of range or below ``window``, or ``kernel`` is even.
    """

    paper: ClassVar[Paper] = Paper(
        "2404.14469", "SnapKV: LLM Knows What You are Looking for Before Generation", "Li et al.", 2024
    )

    budget: int | float = 1024
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_int("window")
        self.require_int("kernel")
        if isinstance(self.budget, int) and self.budget < self.window:
            raise self.fail("budget", self.budget, f"at least window={self.window}")
        if self.kernel % 2 == 0:
            raise self.fail("kernel", self.kernel, "an odd int >= 1")

    def protected(self) -> tuple[int | float, int | float]:
        return 0, self.window

    def observes(self) -> int | None:
        return self.window

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        W = queries.shape[2]
        (weight,) = attention_paid(k, queries, real=real, scale=scale, tile=W)
        paid = weight.sum((2, 3)) / (weight.shape[2] * W)
        paid[..., k.shape[2] - W :] = 0
        return avg_pool1d(paid, self.kernel, stride=1, padding=self.kernel // 2)

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        (G, S, _), (H, W, _) = k.shape, queries.shape
        a = torch.zeros(G, S, dtype=k.dtype)
        for h in range(H):
            g = h // (H // G)
            for t in range(S - W, S):
                row = (scale * k[g, : t + 1] @ queries[h, t - (S - W)]).softmax(0)
                a[g, : S - W] += row[: S - W] / (W * (H // G))
        half = self.kernel // 2
        return torch.stack([a[:, max(0, j - half) : j + half + 1].sum(1) / self.kernel for j in range(S)], 1)
