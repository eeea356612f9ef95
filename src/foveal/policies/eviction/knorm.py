"""KNorm: keys of small norm are the ones that draw attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Eviction
from foveal.precision import upcast
from foveal.spec import Paper


@dataclass(frozen=True)
class KNorm(Eviction, name="knorm"):
    r"""Keep the entries whose keys have the smallest norm.

    .. math::
        s_j = -\lVert k_j \rVert_2

    Rotary embedding does not change norms, so no query and no position is needed.  The paper leaves the first two
    layers whole; here every layer has the same budget.  Scoring costs O(S K) per key head.

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).

    Raises:
        ValueError: if ``budget`` is out of range.
    """

    aliases: ClassVar[tuple[str, ...]] = ("l2_norm", "key_norm")
    paper: ClassVar[Paper] = Paper(
        "2406.11430",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        "Devoto, Zhao, Scardapane, Minervini",
        2024,
    )

    budget: int | float = 1024

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(upcast(k), dim=-1)
        return -norm

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        G, S, _ = k.shape
        return torch.tensor([[-float((k[g, j] ** 2).sum().sqrt()) for j in range(S)] for g in range(G)], dtype=k.dtype)
