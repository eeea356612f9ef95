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

from foveal.call import Backend, Call
from foveal.engines.block_sparse import eager
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
    def first(self) -> Tensor:
        """Smallest position in each block, [N]; larger than any position if the block is empty."""
        return self.position.masked_fill(self.position < 0, torch.iinfo(torch.long).max).amin(-1)

    @property
    def last(self) -> Tensor:
        """Largest position in each block, [N]; -1 if the block is empty."""
        return self.position.amax(-1)


class BlockSparse(SoftmaxAttention):
    """Base of mechanisms that choose key blocks.  Implement :meth:`select` and ``definition``."""

    engine: ClassVar[str] = "block_sparse"
    causal_modes: ClassVar[tuple[bool, ...]] = (True,)

    block_size: int

    def layouts(self, length: int) -> list[Tensor]:
        """Orders in which positions are cut into blocks; -1 leaves a slot empty.  Default: one, as they come."""
        return [torch.arange(length)]

    @property
    def in_order(self) -> bool:
        """Whether keys stay as they come, so that blocks are views of them."""
        return type(self).layouts is BlockSparse.layouts

    def select(self, q: Tensor, blocks: Blocks, position: Tensor, *args: Any, **inputs: Any) -> Tensor:
        """The blocks that each query reads, bool, broadcastable to [B, H, T, N].

        A block that no query may see costs work and changes nothing: the engine applies causality to the token.

        Args:
            q: [B, H, T, K], not scaled.
            blocks: the keys.
            position: of the queries, [B or 1, 1, T, 1].
        """
        raise NotImplementedError

    def sees(self, query: Tensor, key: Tensor, part: Tensor, head: Tensor) -> Tensor | None:
        """Which tokens of a chosen block count beside causality, or None for all.

        A key that stands in several layouts must count in one of them only.  All four arguments broadcast together.
        """
        return None

    def backends(self, call: Call) -> list[Backend]:
        """The torch forms, which run every call."""
        return [Backend("torch", functools.partial(eager.run, self))]
