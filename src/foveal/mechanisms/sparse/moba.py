"""MoBA: each query picks the blocks of the past whose mean key it likes best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.engines.block_sparse import Blocks, BlockSparse, Queries
from foveal.spec import Cost, Limit, Paper


@dataclass(frozen=True)
class MoBA(BlockSparse, name="moba"):
    r"""Attend to the own block and to the past blocks whose mean key the query likes best.

    .. math::
        g_{t,n} = q_t^\top \tfrac{1}{|I_n|} \sum_{j \in I_n} k_j, \qquad
        o_t = \sum_{j \le t,\, j \in V_t} \mathrm{softmax}_j\left(q_t^\top k_j / \sqrt{K}\right) v_j, \qquad
        V_t = I_{\lfloor t / b \rfloor} \cup \bigcup_{n \in \mathrm{top}_{c - 1}(g_{t, \cdot})} I_n

    over past blocks n < floor(t / b), with b tokens each and c blocks per query, the own one included.  Ties
    are broken arbitrarily.  The choice is piecewise constant: gradients flow through the chosen blocks only.
    ``top_k >= ceil(T / block_size)`` is causal softmax attention, ``top_k = 1`` attention inside blocks.  Each query
    head chooses for itself, as in the official code.

    Args:
        block_size: b, tokens per key block.
        top_k: c, blocks per query, its own included.

    Raises:
        ValueError: if ``block_size`` or ``top_k`` is below 1.
    """

    aliases: ClassVar[tuple[str, ...]] = ("mixture_of_block_attention",)
    paper: ClassVar[Paper] = Paper(
        "2502.13189", "MoBA: Mixture of Block Attention for Long-Context LLMs", "Lu et al.", 2025
    )
    cost: ClassVar[Cost] = Cost(
        train="T * min(top_k * block_size, T / 2) * (K + V) + T**2 / block_size * K",
        decode="top_k * block_size * (K + V) + T * K",
        state="T * (K + V)",
    )
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"block_size": 4, "top_k": 2}, {"block_size": 5, "top_k": 3})
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit({"block_size": 4, "top_k": 64}, "softmax", why="all blocks are chosen"),
        Limit({"block_size": 4096, "top_k": 1}, "softmax", why="one block holds everything"),
    )

    block_size: int = 64
    top_k: int = 8

    def __post_init__(self) -> None:
        self.require_int("block_size")
        self.require_int("top_k")

    def select(self, queries: Queries, keys: Blocks) -> Tensor:
        q = queries.q[:, :, :, 0].detach()
        own = queries.last.div(self.block_size, rounding_mode="floor")
        number = torch.arange(keys.k.shape[2], device=q.device)
        mean = keys.mean.detach().repeat_interleave(q.shape[1] // keys.k.shape[1], 1)
        likes = (q @ mean.mT).masked_fill(number >= own, -torch.inf)
        best = likes.topk(min(self.top_k - 1, len(number)), dim=-1).indices
        past = torch.zeros_like(likes, dtype=torch.bool).scatter(-1, best, True) & (number < own)
        return past | (number == own)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        b, o, shift = self.block_size, torch.zeros(len(q), v.shape[-1], dtype=v.dtype), len(k) - len(q)
        for t in range(max(0, -shift), len(q)):
            own = (t + shift) // b
            block = [[j for j in range(len(k)) if j // b == n] for n in range(own + 1)]
            like = [(q[t] @ k[block[n]].mean(0)).item() for n in range(own)]
            best = sorted(range(own), key=lambda n: -like[n])[: self.top_k - 1]
            keys = [j for n in (*best, own) for j in block[n] if visible[t, j]]
            if keys:
                o[t] = (scale * k[keys] @ q[t]).softmax(0) @ v[keys]
        return o
