"""StreamingLLM: the first tokens and the last ones, at the positions of their slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Eviction
from foveal.spec import Paper


@dataclass(frozen=True)
class StreamingLLM(Eviction, name="streaming_llm"):
    r"""Keep the first tokens, which soak up attention, and the most recent ones.

    .. math::
        \mathrm{kept}(t) = \{0, \dots, a - 1\} \cup \{t - (b - a) + 1, \dots, t\}

    with a sinks and a budget of b.  Positions are those of the slots in the cache, as in the paper: kept tokens
    stand side by side, and the model never meets a distance beyond b.  The prompt itself is read with full attention
    before it is cut, where the paper streams it.  Scoring costs nothing.

    Args:
        budget: b, entries kept per key head (int), or a share of the tokens seen (float).
        sinks: a, first tokens that always stay.

    Raises:
        ValueError: if ``budget`` is out of range or not above ``sinks``.
    """

    aliases: ClassVar[tuple[str, ...]] = ("attention_sinks", "streaming")
    paper: ClassVar[Paper] = Paper(
        "2309.17453", "Efficient Streaming Language Models with Attention Sinks", "Xiao, Tian, Chen, Han, Lewis", 2023
    )
    while_decoding: ClassVar[bool] = True
    slots: ClassVar[bool] = True

    budget: int | float = 1024
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_int("sinks", 0)
        if isinstance(self.budget, int) and self.budget <= self.sinks:
            raise self.fail("budget", self.budget, f"more than sinks={self.sinks}")

    def protected(self) -> tuple[int | float, int | float]:
        return self.sinks, 1

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        B, G, S, _ = k.shape
        return torch.arange(S, dtype=torch.float32, device=k.device).expand(B, G, S)

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        G, S, _ = k.shape
        return torch.tensor([[float(j) for j in range(S)] for _ in range(G)], dtype=k.dtype)
