r"""Softmax over chosen blocks of keys per query, exact to the token inside them.

.. math::
    o_t = \sum_{j \in V_t} \mathrm{softmax}_j\left(\mathrm{scale}\; q_t^\top k_j\right) v_j,
    \qquad V_t = \{ j : \mathrm{block}(j) \in C_t,\ j \text{ seen by } t \}

Keys may be laid out in several orders (parts), so that a pattern that is scattered over positions becomes blocks.
The derivation stands in the README beside this file.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.call import Backend, Call, Positions
from foveal.engines.block_sparse import eager, native
from foveal.engines.softmax import SoftmaxAttention


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The keys as an engine sees them: laid out in blocks, part after part.

    Args:
        k: keys [B, G, N, block, K], 0 where a slot is empty.
        real: whether a slot holds a real token, bool [B, N, block].
        position: position of each slot, [N, block]; empty slots of a layout are -1.
        part: number of the layout that each block belongs to, [N].
        head: [H, 1, 1], to broadcast against [B, H, T, N].
    """

    k: Tensor
    real: Tensor
    position: Tensor
    part: Tensor
    head: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean of the keys of each block, [B, G, N, K]; 0 for an empty block."""
        return self.k.sum(3) / self.real.sum(-1)[:, None, :, None].clamp(min=1)

    @property
    def first(self) -> Tensor:
        """Smallest position in each block, [N]; larger than any position if the block is empty."""
        return self.position.masked_fill(self.position < 0, torch.iinfo(torch.long).max).amin(-1)

    @property
    def last(self) -> Tensor:
        """Largest position in each block, [N]; -1 if the block is empty."""
        return self.position.amax(-1)


@dataclasses.dataclass(frozen=True)
class Queries:
    """The queries as an engine sees them: laid out in blocks of consecutive positions that share one choice.

    Args:
        q: queries [B, H, M, R, K], not scaled; 0 where a slot is empty.
        real: whether a slot holds a query, bool [B or 1, M, R].
        position: position of each slot's query among the keys, [B or 1, M, R]; -1 where a slot is empty.
        slot: which of the T queries stands in each slot, [B or 1, M, R]; -1 for none.
        row: the block of each query, [B or 1, T]; -1 for a query that a mask hides.
        causal: whether the call is causal.
    """

    q: Tensor
    real: Tensor
    position: Tensor
    slot: Tensor
    row: Tensor
    causal: bool

    @property
    def first(self) -> Tensor:
        """Smallest position in each block, [B or 1, 1, M, 1], to compare with [N] of the key blocks."""
        none = torch.iinfo(torch.long).max
        return self.position.masked_fill(~self.real, none).amin(-1)[:, None, :, None]

    @property
    def last(self) -> Tensor:
        """Largest position in each block, [B or 1, 1, M, 1]; below any position if the block is empty."""
        none = torch.iinfo(torch.long).min
        return self.position.masked_fill(~self.real, none).amax(-1)[:, None, :, None]

    @property
    def mean(self) -> Tensor:
        """Mean of each block's queries, [B, H, M, K]."""
        return self.q.sum(3) / self.real.sum(-1)[:, None, :, None].clamp(min=1)

    def lay(self, x: Tensor) -> Tensor:
        """Anything per query, [B, H, T, ...], in blocks [B, H, M, R, ...]; 0 where a slot is empty."""
        B, H = x.shape[:2]
        if self.slot.shape[2] == 1 and self.slot.shape[1] == x.shape[2]:
            return x[:, :, :, None]
        rest = x.shape[3:]
        ones = (1,) * len(rest)
        index = self.slot.clamp(min=0).flatten(1).view(-1, 1, self.slot[0].numel(), *ones)
        taken = x.gather(2, index.expand(B, H, -1, *rest)).view(B, H, *self.slot.shape[1:], *rest)
        return taken.where(self.real.view(-1, 1, *self.slot.shape[1:], *ones), 0)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a mechanism reads, if blocks alone do not say it.

    Args:
        blocks: bool, broadcastable to [B, H, M, N].
        columns: positions of single keys that every query of a head reads too, [B, H, C], -1 for none; each at most
            once.  A key that a query reads in a block already is not counted again.
    """

    blocks: Tensor
    columns: Tensor | None = None


class BlockSparse(SoftmaxAttention):
    """Base of mechanisms that choose key blocks.  Implement :meth:`select` and ``definition``."""

    engine: ClassVar[str] = "block_sparse"
    causal_modes: ClassVar[tuple[bool, ...]] = (True,)

    block_size: int

    @property
    def query_size(self) -> int:
        """How many queries of consecutive positions share one choice."""
        return 1

    def layouts(self, length: int) -> list[Tensor]:
        """Orders in which positions are cut into blocks; -1 leaves a slot empty.  Default: one, as they come."""
        return [torch.arange(length)]

    @property
    def in_order(self) -> bool:
        """Whether keys stay as they come, so that blocks are views of them."""
        return type(self).layouts is BlockSparse.layouts

    def select(self, queries: Queries, keys: Blocks, *args: Any, **inputs: Any) -> Tensor | Choice:
        """The blocks that each block of queries reads, bool, broadcastable to [B, H, M, N], or a :class:`Choice`.

        A block that no query may see costs work and changes nothing: the engine applies causality to the token.
        """
        raise NotImplementedError

    def sees(self, at: Positions) -> Tensor | None:
        """Which tokens of a chosen block count beside causality, or None for all; everything broadcasts together.

        A key that stands in several layouts must count in one of them only; ``at.part`` says in which it is asked for.
        """
        return None

    def backends(self, call: Call) -> list[Backend]:
        """The compiled kernel, and torch operations, which run every call."""
        return [
            Backend("native", functools.partial(native.run, self), native.why_not(self, call)),
            Backend("torch", functools.partial(eager.run, self)),
        ]
