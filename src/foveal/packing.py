"""Packed sequences for every engine: sequences of like length become a left-padded batch, and back.

An engine sees batches and padding only.  Lengths are grouped by powers of two, so that padding at most doubles the
work.  Left padding puts the last query of every sequence beside its last key: bottom-right causality holds for each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveal.call import Call, Result

if TYPE_CHECKING:
    from foveal.spec import Mechanism
    from foveal.state import State


def bounds(cu_seqlens: Tensor, length: int, argument: str, mechanism: Mechanism) -> list[int]:
    """The boundaries as a list.

    Raises:
        TypeError: if they are not an int32 or int64 tensor.
        ValueError: if they do not start at 0, decrease, or do not end at the number of tokens.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{mechanism.name}: {argument} is {kind}, expected an int32 or int64 tensor")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise mechanism.fail(argument, f"shape {tuple(cu_seqlens.shape)}", "[N + 1] boundaries of N >= 1 sequences")
    marks: list[int] = cu_seqlens.tolist()
    if marks[0] != 0 or marks[-1] != length:
        raise mechanism.fail(argument, f"ends {marks[0]} and {marks[-1]}", f"0 and the number of tokens, {length}")
    if any(b < a for a, b in itertools.pairwise(marks)):
        raise mechanism.fail(argument, f"boundaries that decrease: {marks}", "ascending ones")
    return marks


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Sequences of like length: their numbers [N], and the token of each slot [N, length], -1 where there is none."""

    sequences: Tensor
    queries: Tensor
    keys: Tensor


def _slots(starts: Tensor, ends: Tensor) -> Tensor:
    width = max(int((ends - starts).max()), 1)
    token: Tensor = ends[:, None] - torch.arange(width, 0, -1, device=ends.device)
    return torch.where(token >= starts[:, None], token, -1)


def buckets(query_marks: list[int], key_marks: list[int], device: torch.device) -> list[Bucket]:
    """Group the sequences so that the longest of a group is less than twice as long as the shortest."""
    groups: dict[tuple[int, int], list[int]] = {}
    for n in range(len(query_marks) - 1):
        key = tuple(int(marks[n + 1] - marks[n]).bit_length() for marks in (query_marks, key_marks))
        groups.setdefault((key[0], key[1]), []).append(n)
    cu_q, cu_k = (torch.tensor(marks, device=device) for marks in (query_marks, key_marks))
    found = []
    for members in groups.values():
        index = torch.tensor(members, device=device)
        found.append(Bucket(index, _slots(cu_q[index], cu_q[index + 1]), _slots(cu_k[index], cu_k[index + 1])))
    return found


def _gather(x: Tensor, slots: Tensor, axis: int) -> Tensor:
    """Tokens of a packed [1, ...] tensor as a batch: the token axis becomes [N, length], N moves to the front."""
    if x.shape[axis] == 0:  # all sequences are empty: a slot that padding hides stands for them
        x = x.new_zeros(*x.shape[:axis], 1, *x.shape[axis + 1 :])
    taken = x.index_select(axis, slots.clamp(min=0).flatten())
    return taken.reshape(*x.shape[1:axis], *slots.shape, *x.shape[axis + 1 :]).movedim(axis - 1, 0)


def run(
    call: Call, query_marks: list[int], key_marks: list[int], mechanism: Mechanism, compute: Callable[[Call], Result]
) -> Result:
    """Compute each packed sequence as if it were alone."""
    outputs, lses, states, order, members = [], [], [], [], []
    for bucket in buckets(query_marks, key_marks, call.q.device):
        padding = bucket.keys >= 0
        if call.padding is not None:
            padding = padding & _gather(call.padding, bucket.keys, 1)
        inputs = {}
        for name, x in call.inputs.items():
            axes = mechanism.inputs[name].axes
            if "T" in axes:
                inputs[name] = _gather(x, bucket.queries, axes.index("T"))
            else:
                inputs[name] = x.expand(len(bucket.sequences), *x.shape[1:]) if axes[0] == "B" else x
        part = compute(
            call.replace(
                q=_gather(call.q, bucket.queries, 2),
                k=_gather(call.k, bucket.keys, 2),
                v=_gather(call.v, bucket.keys, 2),
                padding=padding,
                inputs=inputs,
                state=None if call.state is None else call.state.index_select(bucket.sequences),
            )
        )
        real = bucket.queries >= 0
        order.append(bucket.queries[real])
        outputs.append(part.output.movedim(2, 1)[real])
        if part.lse is not None:
            lses.append(part.lse.movedim(2, 1)[real])
        if part.state is not None:
            states.append(part.state)
            members.append(bucket.sequences)
    back = torch.cat(order).argsort()
    output = torch.cat(outputs)[back].movedim(0, 1)[None]
    lse = torch.cat(lses)[back].movedim(0, 1)[None] if lses else None
    return Result(output, _join(states, torch.cat(members).argsort()) if states else None, lse)


def _join(states: list[State], order: Tensor) -> State:
    """One state for all sequences, in their order; ragged axes of key-value states are padded in front."""
    return type(states[0]).join(states).index_select(order)
