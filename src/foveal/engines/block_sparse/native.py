"""Block-sparse attention on the compiled kernel of the softmax engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.call import Call, Result
from foveal.engines.block_sparse import eager
from foveal.engines.softmax import native
from foveal.engines.softmax.eager import combine

if TYPE_CHECKING:
    from foveal.engines.block_sparse import BlockSparse


def why_not(spec: BlockSparse, call: Call) -> str | None:
    """Why the kernel cannot run a call, in one sentence, or None if it can."""
    from foveal.engines.block_sparse import BlockSparse

    if type(spec).sees is not BlockSparse.sees:
        return "the compiled kernel reads whole blocks, and this mechanism leaves out some of their tokens"
    return native.why_not(spec, call)


def run(spec: BlockSparse, call: Call) -> Result:
    """Choose blocks, then attend to them; half precision is computed in fp32 as it is loaded."""
    work, state = eager.prepare(spec, call)
    if work is None:
        return eager.empty(call, state)
    call, layout, queries = work.call, work.layout, work.queries
    low, high, top, place = native.bounds(call, work.at)
    choice = queries.row[:, None].int()
    hidden = native.hidden_queries(call)
    if hidden is not None:
        choice = choice.masked_fill(hidden[:, None], -1)
    slot = position = None
    if not layout.plain:
        slot = layout.slot.where(layout.real, -1).flatten(1)[:, None].int()
        position = layout.position.flatten()[None, None].int()
    plan = native.Plan(
        choice, low, high, top, place, slot, position, work.blocks, blocks=len(layout.part), size=spec.block_size
    )
    output, lse = native.attend(call, plan)
    if work.columns is not None and work.columns.shape[2]:
        single = native.Plan(choice, low, high, top, place, *_places(layout, work.columns), shown=work.blocks,
            blocks=-(-work.columns.shape[2] // native.SIZE), shown_size=spec.block_size, apart=True,
        )  # fmt: skip
        output, lse = combine([(output.to(lse.dtype), lse), native.attend(call, single)])
    return Result(output, state, lse if call.want_lse else None)


def _places(layout: eager.Layout, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Index and position of single keys [B, H, C], filled up to whole blocks."""
    columns = pad(columns, (0, -columns.shape[2] % native.SIZE), value=-1)
    B = len(columns)
    row = torch.arange(B, device=columns.device)[:, None, None]
    at = columns.clamp(min=0)  # positions are places of the first layout, which holds the keys in their order
    slot, real = (x.flatten(1).expand(B, -1)[row, at] for x in (layout.slot, layout.real))
    return slot.where(real & (columns >= 0), -1).int(), columns.int()
