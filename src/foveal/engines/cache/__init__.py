"""Which cached tokens survive, and which are read: a policy sees tensors only, the engine does the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.precision import upcast
from foveal.spec import Paper, Spec


@dataclasses.dataclass(frozen=True)
class Kept:
    """The survivors of an eviction.

    Args:
        index: slots that survive, ascending in each row and head, [B, G, n]; padding comes first.
        real: which of them hold a token, bool [B, n].
    """

    index: Tensor
    real: Tensor

    def take(self, x: Tensor) -> Tensor:
        """The kept entries of [B, G, S] or [B, G, S, X], in memory of their own."""
        return take(x, self.index)


def take(x: Tensor, index: Tensor) -> Tensor:
    """The entries ``index`` [B, G, n] of [B, G, S] or [B, G, S, X] of each row and head."""
    if x.dim() == 3:
        return x.gather(2, index)
    B, G, S, X = x.shape
    # whole vectors are copied, which a gather of single numbers does not
    rows = index + S * torch.arange(B * G, device=x.device).reshape(B, G, 1)
    return x.reshape(-1, X).index_select(0, rows.flatten()).reshape(B, G, -1, X)


class Policy(Spec):
    """Base of cache policies.  ``budget`` is a number of entries per key/value head, or a share of the tokens seen."""

    kind: ClassVar[str] = "policy"
    frees_memory: ClassVar[bool] = True
    paper: ClassVar[Paper]

    budget: int | float

    def __post_init__(self) -> None:
        whole = isinstance(self.budget, int) and not isinstance(self.budget, bool) and self.budget >= 1
        share = isinstance(self.budget, float) and 0 < self.budget <= 1
        if not (whole or share):
            raise self.fail("budget", repr(self.budget), "an int >= 1 (entries) or a float in (0, 1] (share of tokens)")

    def limit(self, seen: Tensor) -> Tensor:
        """Entries that each row may keep, given the real tokens it has seen, [B]; at least one."""
        if isinstance(self.budget, int):
            return torch.full_like(seen, self.budget)
        return (self.budget * seen.double()).round().long().clamp(min=1)


class Eviction(Policy):
    """Base of policies that drop entries for good.  Implement :meth:`score` and :meth:`definition`."""

    while_decoding: ClassVar[bool] = False
    slots: ClassVar[bool] = False

    def protected(self) -> tuple[int | float, int | float]:
        """How many of the first and last tokens survive whatever their score; a float is a share of the limit."""
        return 0, 0

    def guarded(self, limit: Tensor) -> tuple[Tensor, Tensor]:
        """The same for each row under its limit [B]: a limit too small for both is for the last tokens."""
        first, last = (
            (x * limit.double()).long() if isinstance(x, float) else torch.full_like(limit, x) for x in self.protected()
        )
        last = torch.minimum(last, limit)
        return torch.minimum(first, limit - last), last

    def observes(self) -> int | None:
        """How many of the latest queries :meth:`score` looks at: 0 is none, None is all of the call."""
        return 0

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        """What each entry is worth, [B, G, S]; the higher survive.

        Args:
            k, v: cached keys (after rotary embedding) and values, [B, G, S, K] and [B, G, S, V].
            queries: the last queries of the call (after rotary embedding), [B, H, W, K]; they belong to the last W
                slots.
            real: which slots hold a token, bool [B, S].
            scale: factor of the scores in the model.
            past: what this method returned for the same entries at the previous call, 0 for new ones.
        """
        raise NotImplementedError

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        """The same for one row without padding and its first call, in plain loops: [G, S, K], [H, W, K] -> [G, S]."""
        raise NotImplementedError

    def keep(self, scores: Tensor, real: Tensor, limit: Tensor) -> Kept:
        """The survivors of scores [B, G, S] under a limit [B] for each row; of equal scores the earlier slots win."""
        first, last = (x[:, None] for x in self.guarded(limit))
        order = real.cumsum(1)
        rank = scores.masked_fill(((order <= first) & real)[:, None], torch.finfo(scores.dtype).max)
        rank = rank.masked_fill(((order > order[:, -1:] - last) & real)[:, None], torch.inf)
        rank = rank.masked_fill(~real[:, None], -torch.inf)
        count = torch.minimum(limit, real.sum(1))
        if bool((count == real.shape[1] - 1).all()):
            return self._all_but_one(rank)
        # stable, unlike topk: which of equal scores survive must not depend on other rows
        best = rank.sort(dim=-1, descending=True, stable=True).indices[..., : int(count.max())]
        chosen = torch.arange(best.shape[-1], device=best.device) < count[:, None]
        index = best.masked_fill(~chosen[:, None], -1).sort(-1).values
        return Kept(index.clamp(min=0), index[:, 0] >= 0)

    def _all_but_one(self, rank: Tensor) -> Kept:
        """The same where every row loses one entry, as at a decode step: no sorting."""
        last = rank.shape[-1] - 1
        worst = last - rank.flip(-1).argmin(-1, keepdim=True)
        slot = torch.arange(last, device=rank.device)
        index = slot + (slot >= worst)
        return Kept(index, torch.ones(len(rank), last, dtype=torch.bool, device=rank.device))


class Selection(Policy):
    """Base of policies that keep everything and read some pages at each decode step."""

    frees_memory: ClassVar[bool] = False

    page: int

    def dense_layers(self) -> int:
        """How many of the first layers read everything."""
        return 0

    def select(self, q: Tensor, low: Tensor, high: Tensor, *, count: int) -> Tensor:
        """The pages that each key head's queries read, [B, G, count].

        Args:
            q: queries of one step, [B, H, K].
            low, high: smallest and largest value of each channel over the page's tokens, [B, G, P, K].  Rows with
                fewer tokens end in pages without one: +inf and -inf.
            count: pages to read, the newest included.
        """
        raise NotImplementedError

    def definition(self, q: Tensor, k: Tensor, *, count: int) -> list[set[int]]:
        """The same for one row without padding, from its keys: q [H, K], k [G, S, K] -> a set of pages per key head."""
        raise NotImplementedError


def attention_paid(k: Tensor, queries: Tensor, *, real: Tensor, scale: float, tile: int = 256) -> Iterator[Tensor]:
    """Yield the attention that tiles of the last queries pay to each key, causal, [B, G, H / G, tile, S], fp32 or more.

    Tiles keep memory at O(tile S) where a policy needs every query of a long prompt.
    """
    (B, G, S, K), W = k.shape, queries.shape[2]
    k, grouped = upcast(k), upcast(queries).reshape(B, G, -1, W, K)
    slot = torch.arange(S, device=k.device)
    for start in range(0, W, tile):
        rows = slice(start, min(start + tile, W))
        tiled = grouped[:, :, :, rows]
        scores = (scale * tiled.flatten(2, 3) @ k.mT).reshape(*tiled.shape[:4], S)
        own = torch.arange(S - W + rows.start, S - W + rows.stop, device=k.device)
        seen = (slot <= own[:, None]) & real[:, None, None, None]
        weight = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        yield weight * real[:, None, None, S - W + rows.start : S - W + rows.stop, None]


class PageSummary:
    """Smallest and largest value of each channel over pages of tokens, kept up to date as keys arrive.

    Pages count real tokens, so that padding neither fills nor shifts them.
    """

    def __init__(self, page: int) -> None:
        self.page = page
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def append(self, k: Tensor, position: Tensor, real: Tensor) -> None:
        """Take in new keys [B, G, n, K] at positions [B, n], real [B, n]; only their pages are touched."""
        B, G, _, K = k.shape
        pages = max(int(position.max()), 0) // self.page + 1
        low, high = self.low, self.high
        if low is None or high is None:
            low, high = k.new_full((B, G, pages, K), torch.inf), k.new_full((B, G, pages, K), -torch.inf)
        if pages > low.shape[2]:
            more = (0, 0, 0, pages - low.shape[2])
            low, high = pad(low, more, value=torch.inf), pad(high, more, value=-torch.inf)
        index = (position.clamp(min=0) // self.page)[:, None, :, None].expand(k.shape)
        real = real[:, None, :, None]
        self.low = low.scatter_reduce(2, index, k.masked_fill(~real, torch.inf), "amin")
        self.high = high.scatter_reduce(2, index, k.masked_fill(~real, -torch.inf), "amax")

    def index_select(self, index: Tensor) -> None:
        """Keep the rows ``index`` of the batch in that order."""
        if self.low is not None and self.high is not None:
            self.low, self.high = self.low[index], self.high[index]
