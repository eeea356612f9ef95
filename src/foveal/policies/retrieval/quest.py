"""Quest: read only the pages whose keys might matter to the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Selection
from foveal.spec import Paper


@dataclass(frozen=True)
class Quest(Selection, name="quest"):
    r"""Read the pages with the highest upper bound of the query's score, and leave the rest of the cache unread.

    .. math::
        b_P = \sum_{h} \sum_c \max(q_{h,c}\, lo_{P,c},\; q_{h,c}\, hi_{P,c}) \ge \sum_h q_h^\top k_j
        \quad \text{for every } j \in P

    over the query heads that share a key head (the paper's models have one each; the sum is our choice).  The
    newest page is always read; the prompt and the first two layers are dense.  Nothing is evicted: memory grows by
    2 / p of the keys, and a step reads budget / S + 2 / p of the cache.

    Args:
        budget: entries read per key head and step (int), or a share of the tokens seen (float); rounded up to pages.
        page: p, tokens per page.

    Raises:
        ValueError: if ``budget`` or ``page`` is out of range.
    """

    paper: ClassVar[Paper] = Paper(
        "2406.10774",
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        "Tang, Zhao, Zhu, Xiao, Kasikci, Han",
        2024,
    )

    budget: int | float = 1024
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_int("page")

    def dense_layers(self) -> int:
        return 2

    def select(self, q: Tensor, low: Tensor, high: Tensor, *, count: int) -> Tensor:
        (B, G, P, K), empty = low.shape, low[..., 0] == torch.inf
        grouped = q.reshape(B, G, -1, K)
        if bool(empty.any()):  # 0 times inf
            low, high = low.masked_fill(empty[..., None], 0.0), high.masked_fill(empty[..., None], 0.0)
        bound = (grouped.clamp(min=0) @ high.mT + grouped.clamp(max=0) @ low.mT).sum(2)
        bound = bound.masked_fill(empty, -torch.inf)
        newest = (~empty).sum(-1, keepdim=True) - 1
        bound = bound.scatter(-1, newest.clamp(min=0), torch.inf)
        return bound.topk(min(count, P), dim=-1).indices.sort(-1).values

    def definition(self, q: Tensor, k: Tensor, *, count: int) -> list[set[int]]:
        (G, S, K), H = k.shape, len(q)
        chosen = []
        for g in range(G):
            pages = [k[g, start : start + self.page] for start in range(0, S, self.page)]
            heads = range(g * (H // G), (g + 1) * (H // G))
            bound = [
                sum(max(float(q[h, c] * page[:, c].amin()), float(q[h, c] * page[:, c].amax())) for h in heads
                    for c in range(K))
                for page in pages[:-1]
            ]  # fmt: skip
            best = sorted(range(len(bound)), key=lambda n: -bound[n])[: count - 1]
            chosen.append({*best, len(pages) - 1})
        return chosen
