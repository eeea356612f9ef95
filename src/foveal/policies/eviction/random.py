"""Random eviction: the baseline that every policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Eviction
from foveal.spec import Paper


@dataclass(frozen=True)
class Random(Eviction, name="random"):
    r"""Keep a random set of entries, a new one for each key head.

    .. math::
        s_j \sim U(0, 1)

    What it loses is what a budget costs without any insight.  The same seed keeps the same entries, whatever the
    batch.  Scoring costs O(S).

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).
        seed: seed of the choice.

    Raises:
        ValueError: if ``budget`` is out of range.
    """

    paper: ClassVar[Paper] = Paper(
        "", "Baseline without a paper", "folklore", 2023, url="https://github.com/NVIDIA/kvpress"
    )

    budget: int | float = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_int("seed", 0)

    def draws(self, G: int, S: int) -> Tensor:
        """Uniform numbers [G, S], counted from the last slot so that padding in front changes nothing."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(S, G, generator=generator).flip(0).T

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        B, G, S, _ = k.shape
        return self.draws(G, S).to(k.device).expand(B, G, S)

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        return self.draws(*k.shape[:2])
