"""A cache policy of your own, complete in one file: ``foveal check examples/my_policy.py`` certifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal import Paper
from foveal.engines.cache import Eviction


@dataclass(frozen=True)
class MyPolicy(Eviction, name="my_policy"):
    r"""Keep the entries whose keys point away from the mean key.

    .. math::
        s_j = -\cos(k_j, m), \qquad m = \tfrac{1}{S} \sum_i k_i / \lVert k_i \rVert_2

    No query is needed.  Scoring costs O(S K) per key head.

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).

    Raises:
        ValueError: if ``budget`` is out of range.
    """

    paper: ClassVar[Paper] = Paper(
        "2504.15364",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference",
        "Park et al.",
        2025,
    )

    budget: int | float = 1024

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        direction = normalize(k.float(), dim=-1) * real[:, None, :, None]
        mean = direction.sum(2, keepdim=True)
        return -(direction * normalize(mean, dim=-1)).sum(-1)

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        S = k.shape[1]
        rows = []
        for keys in k:
            mean = sum(keys[i] / keys[i].norm() for i in range(S)) / S
            rows.append(torch.stack([-(keys[j] @ mean) / (keys[j].norm() * mean.norm()) for j in range(S)]))
        return torch.stack(rows)
