"""The torch forms of block-sparse attention: masked over all keys, and block by block over its readers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveal.call import Call, Positions, Result
from foveal.engines.softmax.eager import combine, final_state, floats, grouped, skip_hidden, softmax, with_state
from foveal.precision import upcast

if TYPE_CHECKING:
    from foveal.engines.block_sparse import Blocks, BlockSparse, Queries
    from foveal.state import ChainedState, KeyValueState, State

ROWS = 128  # most queries in a tile
SCORES = 1 << 22  # scores per slab of tiles: 16 MB in fp32


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each slot of the blocks comes from.

    Args:
        slot: index into S of each block slot, [B or 1, N, block].
        real: whether the slot holds a real token, bool [B or 1, N, block].
        position: [N, block].
        part: [N].
        plain: whether slots are simply 0, 1, 2, ..., so that keys need no gathering.
    """

    slot: Tensor
    real: Tensor
    position: Tensor
    part: Tensor
    plain: bool

    def take(self, x: Tensor) -> Tensor:
        """Keys or values [B, G, S, X] as blocks [B, G, N, block, X], 0 in empty slots."""
        B, G, S, X = x.shape
        if self.plain:
            rest = self.position.numel() - S
            return (torch.nn.functional.pad(x, (0, 0, 0, rest)) if rest else x).reshape(B, G, *self.position.shape, X)
        index = self.slot.expand(B, *self.slot.shape[1:]).reshape(B, 1, -1, 1).expand(B, G, -1, X)
        return x.gather(2, index).view(B, G, *self.position.shape, X).where(self.real[:, None, ..., None], 0)


@dataclasses.dataclass(frozen=True)
class Work:
    """A call with its keys laid out and its blocks chosen."""

    call: Call
    at: Positions
    layout: Layout
    queries: Queries
    blocks: Tensor
    columns: Tensor | None


def prepare(spec: BlockSparse, call: Call) -> tuple[Work | None, KeyValueState | ChainedState | None]:
    """Choose what each query reads, in fp32 for half precision; None if there is nothing to read or nobody asks."""
    call = skip_hidden(with_state(call, spec.carried))
    state = final_state(spec, call) if call.want_state else None
    if call.k.numel() == 0 or call.q.numel() == 0:
        return None, state
    wide = call.replace(q=upcast(call.q), k=upcast(call.k))
    at = wide.positions()
    layout, queries = lay_out(spec, wide), lay_out_queries(spec, wide, at)
    return Work(call, at, layout, queries, *chosen_blocks(spec, wide, layout, queries)), state


def run(spec: BlockSparse, call: Call) -> Result:
    """Choose blocks, then attend to them in torch operations."""
    work, state = prepare(spec, call)
    if work is None:
        return empty(call, state)
    call = work.call.replace(q=upcast(work.call.q), k=upcast(work.call.k), v=upcast(work.call.v))
    chosen = per_query(work.blocks, work.queries)
    compute = parallel if call.form == "parallel" else chunked
    output, lse = compute(spec, call, work.layout, chosen, work.at)
    if work.columns is not None:
        columns = column_attention(spec, call, work.layout, chosen, work.columns, work.at)
        output, lse = combine([(output, lse), columns])
    return Result(output, state, lse if call.want_lse else None)


def empty(call: Call, state: State | None) -> Result:
    """The result of a call without queries or without keys."""
    lse = upcast(call.q).new_full(call.q.shape[:3], -torch.inf) if call.want_lse else None
    return Result(nothing(call), state, lse)


def chosen_blocks(spec: BlockSparse, call: Call, layout: Layout, queries: Queries) -> tuple[Tensor, Tensor | None]:
    """What the mechanism reads, bool [B, H, M, N] without blocks that hold nothing for a query, and single keys."""
    from foveal.engines.block_sparse import Choice

    keys = as_blocks(call, layout)
    choice = spec.select(queries, keys, **floats(call))
    blocks, columns = (choice.blocks, choice.columns) if isinstance(choice, Choice) else (choice, None)
    if call.causal:
        blocks = blocks & (keys.first <= queries.last)
    return blocks.expand(*call.q.shape[:2], queries.slot.shape[1], len(layout.part)), columns


def per_query(blocks: Tensor, queries: Queries) -> Tensor:
    """The choice [B, H, M, N] of each query, [B, H, T, N]."""
    if queries.slot.shape[2] == 1:
        return blocks
    B, H, _, N = blocks.shape
    row = queries.row[:, None, :, None]
    chosen = blocks.gather(2, row.clamp(min=0).expand(B, H, -1, N))
    return chosen & (row >= 0)


def lay_out_queries(spec: BlockSparse, call: Call, at: Positions) -> Queries:
    """Cut the queries into blocks at multiples of ``query_size`` among the positions of the keys."""
    from foveal.engines.block_sparse import Queries

    (_, _, T, _), S, R = call.q.shape, call.k.shape[2], spec.query_size
    position = at.q[:, 0, :, 0]
    real = torch.ones_like(position, dtype=torch.bool)
    if call.padding is not None and T <= S and (call.causal or T == S):
        real = call.padding[:, S - T :]
    if R == 1:
        slot = torch.arange(T, device=position.device)[None, :, None]
        return Queries(call.q[:, :, :, None], real[..., None], position[..., None], slot, slot[..., 0], call.causal)
    number = position.div(R, rounding_mode="floor")
    largest = torch.iinfo(torch.long).max
    first = number.masked_fill(~real, largest).amin(-1, keepdim=True)
    row = torch.where(real, number - first, -1)
    M = max(int(row.max()) + 1, 1)
    # a mask may hide tokens between others, so that positions, not places in memory, say where a query goes
    flat = torch.where(real, row * R + position % R, M * R)
    t = torch.arange(T, device=position.device).expand_as(flat)
    slot = flat.new_full((len(flat), M * R + 1), -1).scatter(1, flat, t)[:, :-1].view(-1, M, R)
    held = slot >= 0
    where = position.gather(1, slot.clamp(min=0).flatten(1)).view_as(slot).masked_fill(~held, -1)
    queries = Queries(call.q, held, where, slot, row, call.causal)
    return dataclasses.replace(queries, q=queries.lay(call.q))


def nothing(call: Call) -> Tensor:
    """Output 0 for queries that see nothing, with gradient 0 for every tensor."""
    B, H, T, _ = call.q.shape
    none = sum((x.flatten()[:0].sum() for x in (call.q, call.k)), call.v.flatten()[:0].sum())
    return call.v.new_zeros(B, H, T, call.v.shape[-1]) + none


def lay_out(spec: BlockSparse, call: Call) -> Layout:
    """Cut every layout of the mechanism into blocks; positions count real tokens, so padding is squeezed out."""
    S, size, device = call.k.shape[2], spec.block_size, call.k.device
    orders = [torch.nn.functional.pad(order, (0, -len(order) % size), value=-1) for order in spec.layouts(S)]
    part = torch.cat([torch.full((len(order) // size,), n) for n, order in enumerate(orders)]).to(device)
    position = torch.cat(orders).to(device).view(-1, size)
    slot, real = position.clamp(min=0)[None], (position >= 0)[None]
    if call.padding is not None:
        order = torch.argsort((~call.padding).to(torch.int8), dim=-1, stable=True)  # real tokens first, in their order
        count = call.padding.sum(-1)[:, None, None]
        real = real & (slot < count)
        slot = order.gather(1, slot.expand(len(order), -1, -1).flatten(1)).view(-1, *position.shape)
    return Layout(slot, real, position, part, plain=call.padding is None and spec.in_order)


def as_blocks(call: Call, layout: Layout) -> Blocks:
    """The keys in blocks, for the mechanism's choice and for the kernel."""
    from foveal.engines.block_sparse import Blocks

    B, H = call.q.shape[:2]
    head = torch.arange(H, device=call.q.device)[:, None, None]
    real = layout.real.expand(B, *layout.real.shape[1:])
    return Blocks(layout.take(call.k), real, layout.position, layout.part, head)


def parallel(spec: BlockSparse, call: Call, layout: Layout, chosen: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """All scores at once over the laid-out keys: O(T S) work and memory."""
    B, H, T, _ = chosen.shape
    size = spec.block_size
    slot = layout.slot.flatten(1)[:, None, None]
    tags = {name: tag_of(x, slot) for name, x in call.carried.items()}
    part = layout.part.repeat_interleave(size)
    at = Positions(at.q, layout.position.flatten()[None, None, None], at.head, at.query, tags, part)
    visible = chosen.repeat_interleave(size, -1) & layout.real.flatten(1)[:, None, None]
    if call.causal:
        visible = visible & (at.k <= at.q)
    sees = spec.sees(at)
    if sees is not None:
        visible = visible & sees
    scores = grouped(call.q * call.scale, layout.take(call.k).flatten(2, 3).mT)
    if call.bias is not None:
        scores = scores + call.bias.expand(B, H, T, -1).gather(-1, slot.expand(B, H, T, -1)).to(scores.dtype)
    if call.mask is not None:
        visible = visible & call.mask.expand(B, H, T, -1).gather(-1, slot.expand(B, H, T, -1))
    weight, lse = softmax(scores, visible)
    return grouped(weight, layout.take(call.v).flatten(2, 3)), lse


def tag_of(x: Tensor, slot: Tensor) -> Tensor:
    """What keys carry, [B, S], at slots [B or 1, 1, 1, X]."""
    return x.gather(1, slot[:, 0, 0].expand(len(x), -1))[:, None, None]


def column_attention(
    spec: BlockSparse, call: Call, layout: Layout, chosen: Tensor, columns: Tensor, at: Positions
) -> tuple[Tensor, Tensor]:
    """Attention to single keys per head, positions [B, H, C], without those that a query reads in a block already."""
    (B, H, T, _), C = call.q.shape, columns.shape[2]
    if C == 0:
        return nothing(call), call.q.new_full((B, H, T), -torch.inf)
    head = torch.arange(H, device=columns.device)
    # where the key stands in the first layout, which holds the keys in their order
    slot = layout.slot.flatten(1).expand(B, -1)[
        torch.arange(B, device=head.device)[:, None, None], columns.clamp(min=0)
    ]
    pick = (torch.arange(B, device=head.device)[:, None, None], (head // call.group)[None, :, None], slot)
    k, v = call.k[pick], call.v[pick]
    tags = {
        name: x[torch.arange(B, device=head.device)[:, None, None], slot][:, :, None]
        for name, x in call.carried.items()
    }
    place = Positions(at.q, columns[:, :, None], at.head, at.query, tags, torch.zeros_like(columns[:, :, None]))
    real = layout.real.flatten(1).expand(B, -1)[
        torch.arange(B, device=head.device)[:, None, None], columns.clamp(min=0)
    ]
    visible = ((columns >= 0) & real)[:, :, None].expand(B, H, T, C)
    if call.causal:
        visible = visible & (place.k <= place.q)
    block = columns.clamp(min=0).div(spec.block_size, rounding_mode="floor")
    inside = chosen.gather(-1, block[:, :, None].expand(B, H, T, C))
    sees = spec.sees(place)
    visible = visible & ~(inside if sees is None else inside & sees)
    scores = (call.q * call.scale) @ k.mT
    if call.bias is not None:
        scores = scores + call.bias.expand(B, H, T, -1).gather(-1, slot[:, :, None].expand(B, H, T, C)).to(scores.dtype)
    if call.mask is not None:
        visible = visible & call.mask.expand(B, H, T, -1).gather(-1, slot[:, :, None].expand(B, H, T, C))
    weight, lse = softmax(scores, visible)
    return weight @ v, lse


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work list: pairs (query, chosen block) sorted by block and cut into tiles of one block and equally many rows.

    Args:
        block: flat index (b, h, n) of each tile, [tiles].
        query: query t of each row, [tiles, rows], -1 where a tile is not full.
        pair_query: flat index (b, h, t) of each pair's query, [pairs].
        pair_row: flat row (tile, row) of each pair, [pairs].
    """

    block: Tensor
    query: Tensor
    pair_query: Tensor
    pair_row: Tensor


def tiles(chosen: Tensor) -> list[Tiles]:
    """The chosen pairs of bool [B, H, T, N], blocks that are read about equally often in one list.

    A tile has as many rows as its block has readers, rounded up to a power of two: at most half of it is empty.
    """
    B, H, T, N = chosen.shape
    b, h, n, t = chosen.permute(0, 1, 3, 2).nonzero(as_tuple=True)  # comes out sorted by block
    block = (b * H + h) * N + n
    count = torch.bincount(block, minlength=B * H * N)
    rank = torch.arange(len(block), device=block.device) - (count.cumsum(0) - count)[block]
    found = []
    for exponent in range(ROWS.bit_length()):
        rows = 1 << exponent
        low, high = rows // 2, T if rows == ROWS else rows
        alike = (count > low) & (count <= high)
        per_block = torch.where(alike, (count + rows - 1) // rows, 0)
        pair = alike[block]
        if not bool(pair.any()):
            continue
        tile = (per_block.cumsum(0) - per_block)[block[pair]] + rank[pair] // rows
        row = tile * rows + rank[pair] % rows
        number = torch.arange(B * H * N, device=block.device).repeat_interleave(per_block)
        query = t.new_full((len(number) * rows,), -1).scatter(0, row, t[pair]).view(-1, rows)
        found.append(Tiles(number, query, ((b * H + h) * T + t)[pair], row))
    return found


def chunked(spec: BlockSparse, call: Call, layout: Layout, chosen: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """Only chosen pairs: each tile is one block of keys and queries that chose it; partial softmaxes merge by lse."""
    B, H, T, N = chosen.shape
    k, v = layout.take(call.k), layout.take(call.v)
    outputs, lses, queries = [], [], []
    for work in tiles(chosen):
        step = max(1, SCORES // (work.query.shape[1] * spec.block_size))
        parts = [
            tile_attention(spec, call, layout, k, v, at, work.block[i : i + step], work.query[i : i + step], H, N)
            for i in range(0, len(work.block), step)
        ]
        outputs.append(torch.cat([output for output, _ in parts]).flatten(0, 1)[work.pair_row])
        lses.append(torch.cat([lse for _, lse in parts]).flatten()[work.pair_row])
        queries.append(work.pair_query)
    if not queries:
        return nothing(call), call.q.new_full((B, H, T), -torch.inf)
    return merge(torch.cat(outputs), torch.cat(lses), torch.cat(queries), (B, H, T))


def tile_attention(
    spec: BlockSparse,
    call: Call,
    layout: Layout,
    k: Tensor,
    v: Tensor,
    at: Positions,
    block: Tensor,
    query: Tensor,
    H: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each tile's queries over its block: output [tiles, rows, V], lse [tiles, rows]."""
    n, h, b = block % N, block // N % H, block // (N * H)
    g, t = h // call.group, query.clamp(min=0)
    q = call.q[b[:, None], h[:, None], t]
    scores = (q * call.scale) @ k[b, g, n].mT
    B = len(call.q)
    slot = layout.slot.expand(B, -1, -1)[b, n][:, None]  # [tiles, 1, block]

    def own(x: Tensor) -> Tensor:
        return x.expand(B, -1, -1, -1)[b[:, None], 0, t]

    here = Positions(
        own(at.q),
        layout.position[n][:, None],
        h[:, None, None],
        {name: own(x) for name, x in at.query.items()},
        {name: x[b[:, None, None], slot] for name, x in call.carried.items()},
        layout.part[n][:, None, None],
    )
    visible = layout.real.expand(B, -1, -1)[b, n][:, None] & (query >= 0)[..., None]
    if call.causal:
        visible = visible & (here.k <= here.q)
    sees = spec.sees(here)
    if sees is not None:
        visible = visible & sees
    if call.mask is not None or call.bias is not None:
        place = (b[:, None, None], h[:, None, None], t[..., None], slot)
        full = (*call.q.shape[:3], call.k.shape[2])
        if call.bias is not None:
            scores = scores + call.bias.expand(full)[place].to(scores.dtype)
        if call.mask is not None:
            visible = visible & call.mask.expand(full)[place]
    weight, lse = softmax(scores, visible)
    return weight @ v[b, g, n], lse


def merge(output: Tensor, lse: Tensor, query: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Add up partial softmaxes [pairs, V] with their lse [pairs] per query: weights exp(lse - largest)."""
    total = shape[0] * shape[1] * shape[2]
    peak = lse.new_full((total,), -torch.inf).scatter_reduce(0, query, lse.detach(), "amax")
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (lse - peak[query]).exp()
    mass = lse.new_zeros(total).index_add(0, query, weight)
    empty = mass == 0
    mass = mass.masked_fill(empty, 1.0)
    summed = output.new_zeros(total, output.shape[-1]).index_add(0, query, weight[:, None] * output)
    merged = (summed / mass[:, None]).view(*shape, -1)
    return merged, (mass.log() + peak).masked_fill(empty, -torch.inf).view(shape)
