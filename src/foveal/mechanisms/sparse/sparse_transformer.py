"""Sparse Transformer: each query reads its neighbourhood and a regular sample of the past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.call import Positions
from foveal.engines.block_sparse import Blocks, BlockSparse, Queries
from foveal.spec import Cost, Limit, Paper


@dataclass(frozen=True)
class SparseTransformer(BlockSparse, name="sparse_transformer"):
    r"""Factor the past into a neighbourhood and a regular sample, so that two layers connect every pair.

    .. math::
        o_t = \sum_{j \in A^{(1)}_t \cup A^{(2)}_t} \mathrm{softmax}_j\left(q_t^\top k_j / \sqrt{K}\right) v_j

    with j <= t and, for stride l and c summary positions,

    - strided: :math:`A^{(1)}_t = \{t - l, \dots, t\}` and :math:`A^{(2)}_t = \{j : (t - j) \bmod l = 0\}`;
    - fixed: :math:`A^{(1)}_t = \{j : \lfloor j / l \rfloor = \lfloor t / l \rfloor\}` and
      :math:`A^{(2)}_t = \{j : j \bmod l \ge l - c\}`.

    ``stride >= T`` is causal softmax attention.  The paper leaves open how a head of the second kind treats its own
    key in the fixed pattern, where early rows would see nothing: it is always visible here.

    Args:
        pattern: ``"strided"`` (images, audio) or ``"fixed"`` (text).
        stride: l, about the square root of the length.
        summary: c, positions at the end of each stride that later queries read in the fixed pattern.
        heads: ``"merged"`` lets every head read the union; ``"split"`` gives even heads the first set and odd
            heads the second.
        block_size: keys per block of the engine; it changes the speed, not the result.

    Raises:
        ValueError: if a setting is out of range or unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("strided", "fixed", "factorized")
    paper: ClassVar[Paper] = Paper(
        "1904.10509", "Generating Long Sequences with Sparse Transformers", "Child, Gray, Radford, Sutskever", 2019
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (stride + block_size + sample * T / stride / 2) * (K + V)",
        decode="(stride + sample * T / stride) * (K + V)",
        state="T * (K + V)",
    )
    per_head: ClassVar[bool] = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"stride": 5, "block_size": 4},
        {"pattern": "fixed", "stride": 6, "summary": 2, "block_size": 4},
        {"stride": 4, "heads": "split", "block_size": 4},
        {"pattern": "fixed", "stride": 6, "summary": 2, "heads": "split", "block_size": 4},
    )
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit({"stride": 4096}, "softmax", why="the neighbourhood is the whole past"),
        Limit({"pattern": "fixed", "stride": 6, "summary": 6}, "softmax", why="every position is a summary"),
    )

    pattern: str = "strided"
    stride: int = 128
    summary: int = 16
    heads: str = "merged"
    block_size: int = 32

    def __post_init__(self) -> None:
        self.require_choice("pattern", ("strided", "fixed"))
        self.require_choice("heads", ("merged", "split"))
        for name in ("stride", "block_size", "summary"):
            self.require_int(name)
        if self.pattern == "fixed" and self.summary > self.stride:
            raise self.fail("summary", self.summary, f"at most stride={self.stride}")

    def variables(self) -> dict[str, Any]:
        """Adds ``sample``: sampled positions per stride."""
        return super().variables() | {"sample": self.summary if self.pattern == "fixed" else 1}

    def layouts(self, length: int) -> list[Tensor]:
        """As they come; and the sample: one run of blocks per residue (strided), or all summary positions (fixed)."""
        every = torch.arange(length)
        if self.pattern == "fixed":
            return [every, every[every % self.stride >= self.stride - self.summary]]
        rows = -(-length // self.stride)
        columns = torch.arange(min(self.stride, length))[:, None] + self.stride * torch.arange(rows)
        columns = torch.nn.functional.pad(columns, (0, -rows % self.block_size), value=length)
        return [every, columns.masked_fill(columns >= length, -1).flatten()]

    def select(self, queries: Queries, keys: Blocks) -> Tensor:
        position = queries.last
        if self.pattern == "fixed":
            near = keys.last >= position - position % self.stride
            sample = torch.ones_like(near)
        else:
            near = keys.last >= position - self.stride
            sample = keys.first % self.stride == position % self.stride
        first, second = (keys.part == 0) & near, (keys.part == 1) & sample
        if self.heads == "merged":
            return first | second
        even, own = keys.head % 2 == 0, keys.last >= position
        return torch.where(even, first, second | ((keys.part == 0) & own))

    def sees(self, at: Positions) -> Tensor:
        assert at.part is not None
        gap, l = at.q - at.k, self.stride
        if self.pattern == "fixed":
            first, second = at.k // l == at.q // l, at.k % l >= l - self.summary
        else:
            first, second = gap <= l, gap % l == 0
        if self.heads == "merged":
            return torch.where(at.part == 0, first, second & ~first)
        odd = torch.where(at.part == 0, gap == 0, second & (gap > 0))
        return torch.where(at.head % 2 == 0, first & (at.part == 0), odd)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        (H, T, _), S, l = q.shape, k.shape[1], self.stride
        o = torch.zeros(H, T, v.shape[-1], dtype=v.dtype)
        for h in range(H):
            for t in range(max(0, T - S), T):
                i = S - T + t
                if self.pattern == "fixed":
                    A1 = {j for j in range(S) if j // l == i // l}
                    A2 = {j for j in range(S) if j % l >= l - self.summary} | {i}
                else:
                    A1 = {j for j in range(S) if i - l <= j <= i}
                    A2 = {j for j in range(S) if (i - j) % l == 0}
                A = A1 | A2 if self.heads == "merged" else (A1, A2)[h % 2]
                keys = [j for j in sorted(A) if visible[t, j]]
                if keys:
                    o[h, t] = (scale * k[h, keys] @ q[h, t]).softmax(0) @ v[h, keys]
        return o
