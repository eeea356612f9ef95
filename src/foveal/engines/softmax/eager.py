"""The torch forms of softmax attention: dense, tiled over queries, and torch's own SDPA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foveal.call import Call, Positions, Result
from foveal.precision import upcast, upcast_on_cpu
from foveal.state import ChainedState, KeyValueState

if TYPE_CHECKING:
    from foveal.engines.softmax import SoftmaxAttention

TILE = 256  # queries per tile of the chunked form


def softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Row softmax over visible scores, and its log-sum-exp; rows that see nothing give 0 and -inf, gradient 0."""
    scores = scores.masked_fill(~visible, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (scores - peak).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return weight / total, (total.log() + peak).masked_fill(empty, -torch.inf).squeeze(-1)


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """[B, H, T, X] @ [B, G, X, Y] -> [B, H, T, Y] with the heads of a group side by side: right is never expanded."""
    B, H, T, _ = left.shape
    G = right.shape[1]
    if H == G:
        return left @ right
    return (left.reshape(B, G, H // G * T, left.shape[-1]) @ right).view(B, H, T, right.shape[-1])


def visibility(spec: SoftmaxAttention, call: Call, at: Positions, inputs: dict[str, Tensor]) -> Tensor:
    """Which key each query may see, bool, broadcastable to [B, H, T, S]; the user's own mask is applied elsewhere."""
    visible = (at.k <= at.q) | (not call.causal)
    before, after = spec.reach()
    if before is not None or after is not None:
        inside = torch.ones_like(visible)
        if before is not None:
            inside = inside & (at.q - at.k <= before)
        if after is not None:
            inside = inside & (at.k - at.q <= after)
        visible = visible & (inside | ((at.k >= 0) & (at.k < spec.always_visible())))
    mask_mod = spec.mask_mod(**inputs)
    return visible if mask_mod is None else visible & mask_mod(at)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a tile of queries needs, with everything that belongs to them."""

    k: Tensor
    v: Tensor
    at: Positions
    padding: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


def cut(call: Call, at: Positions, queries: slice, keys: slice | Tensor) -> Keys:
    """Everything that belongs to a tile."""

    def tile(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[:, :, queries] if x.shape[2] > 1 else x
        return x[..., keys] if x.shape[3] > 1 else x

    padding = None if call.padding is None else call.padding[:, keys]
    return Keys(
        call.k[:, :, keys], call.v[:, :, keys], at.cut(queries, keys), padding, tile(call.mask), tile(call.bias)
    )


def attend(
    spec: SoftmaxAttention, call: Call, q: Tensor, keys: Keys, inputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a tile, every score in memory at once."""
    visible = visibility(spec, call, keys.at, inputs)
    if keys.padding is not None:
        visible = visible & keys.padding[:, None, None]
    if keys.mask is not None:
        visible = visible & keys.mask
    scores = grouped(q * call.scale, keys.k.mT)
    score_mod = spec.score_mod(**inputs)
    if score_mod is not None:
        scores = score_mod(scores, keys.at)
    if keys.bias is not None:
        scores = scores + keys.bias
    weight, lse = softmax(scores, visible)
    return grouped(weight, keys.v), lse


def parallel(spec: SoftmaxAttention, call: Call, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """All scores at once: O(T S) memory."""
    at = call.positions()
    return attend(spec, call, call.q, cut(call, at, slice(None), slice(None)), inputs)


def needed(spec: SoftmaxAttention, call: Call, at: Positions, queries: slice) -> slice | Tensor:
    """The keys that a tile of queries can see at all: a slice, or indices when the first keys stay visible too."""
    before, after = spec.reach()
    S = call.k.shape[2]
    if call.causal:
        after = 0 if after is None else min(after, 0)
    if (before is None and after is None) or S == 0 or at.q.numel() == 0:
        return slice(0, S)
    first, last = at.q[:, :, queries].amin(2), at.q[:, :, queries].amax(2)
    k = at.k[:, 0]
    if torch.compiler.is_compiling():
        return slice(0, S)
    start = 0 if before is None else int((k < first - before).sum(-1).min())
    stop = S if after is None else int((k <= last + after).sum(-1).max())
    # some of the always visible keys may stand behind padding
    always = 0 if spec.always_visible() == 0 else int((k < spec.always_visible()).sum(-1).max())
    if always == 0 or start <= always:
        return slice(0 if always else start, stop)
    return torch.cat((torch.arange(min(always, stop)), torch.arange(start, max(start, stop)))).to(k.device)


def chunked(spec: SoftmaxAttention, call: Call, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One tile of queries after the other, only over keys in reach: O(TILE S) memory, also in backward."""
    at, T = call.positions(), call.q.shape[2]
    outputs, lses = [], []
    differentiable = torch.is_grad_enabled() and T > TILE
    for start in range(0, max(T, 1), TILE):
        queries = slice(start, min(start + TILE, T))
        q, keys = call.q[:, :, queries], cut(call, at, queries, needed(spec, call, at, queries))
        if differentiable:  # keeping every tile's weights for backward would need O(T S) memory
            output, lse = checkpoint(attend, spec, call, q, keys, inputs, use_reentrant=False)
        else:
            output, lse = attend(spec, call, q, keys, inputs)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def with_state(call: Call, carried: tuple[str, ...] = ()) -> Call:
    """The call with the keys and values of its state in front of its own, and with what the keys carry beside them."""
    cache, kept = call.state.parts if isinstance(call.state, ChainedState) else (call.state, None)
    if carried:
        tags = torch.stack([call.inputs[name] for name in carried], -1)[:, None]  # [B, 1, S, names]
        if isinstance(kept, KeyValueState):
            tags = torch.cat((kept.k, tags), 2)
        call = call.replace(carried=dict(zip(carried, tags[:, 0].unbind(-1), strict=True)))
    if cache is None:
        return call
    assert isinstance(cache, KeyValueState)
    everything = cache.extend(call.k, call.v, call.padding)
    return call.replace(k=everything.k, v=everything.v, padding=everything.padding, state=None)


def final_state(spec: SoftmaxAttention, call: Call) -> KeyValueState | ChainedState:
    """The keys and values that a later query can still see, and what they carry."""
    state = KeyValueState(call.k, call.v, call.padding)
    before, always = spec.reach()[0], spec.always_visible()
    wanted = state.real()
    if before is not None and not (always and not spec.shift_invariant):
        count = wanted.cumsum(1)
        recent = count > count[:, -1:] - before
        wanted = wanted & (recent | (count <= always))
        state = state.keep(wanted)
    if not call.carried:
        return state
    tags = torch.stack(list(call.carried.values()), -1)[:, None]
    kept = KeyValueState(tags, tags[..., :0], call.padding)
    return ChainedState((state, kept.keep(wanted) if state.k is not call.k else kept))


def combine(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Softmax over the union of disjoint key sets, from the output [..., V] and log-sum-exp [...] over each."""
    lses = torch.stack([lse for _, lse in parts], -1)
    share, lse = softmax(lses, lses > -torch.inf)
    output = sum((share[..., i, None] * part for i, (part, _) in enumerate(parts)), torch.zeros_like(parts[0][0]))
    return output, lse


def skip_hidden(call: Call) -> Call:
    """Blank keys that the user's mask hides from every query, so that a NaN in them reaches nothing."""
    hides = call.mask if call.mask is not None else None if call.bias is None else call.bias > -torch.inf
    if hides is None or hides.requires_grad:
        return call
    B, H, _, S = hides.shape[0], hides.shape[1], hides.shape[2], call.k.shape[2]
    G = call.k.shape[1]
    seen = hides.any(2)
    if H > 1:
        seen = seen.view(B, G, H // G, seen.shape[-1]).any(2)  # H // G, not -1: there may be no keys
    seen = seen.expand(B, seen.shape[1], S)[..., None]
    return call.replace(k=call.k.where(seen, 0), v=call.v.where(seen, 0))


def floats(call: Call) -> dict[str, Tensor]:
    """The call's inputs in the precision that engines compute in; whole numbers stay."""
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in call.inputs.items()}


def run(spec: SoftmaxAttention, call: Call) -> Result:
    """Our own forms, in fp32 for half precision."""
    call = skip_hidden(with_state(call, spec.carried))
    state = final_state(spec, call) if call.want_state else None
    wide = call.replace(q=upcast(call.q), k=upcast(call.k), v=upcast(call.v))
    if call.bias is not None:
        wide = wide.replace(bias=call.bias.to(wide.q.dtype))
    inputs = floats(call)
    output, lse = (parallel if call.form == "parallel" else chunked)(spec, wide, inputs)
    output, lse = with_sinks(spec, call, output, lse)
    return Result(output, state, lse if call.want_lse else None)


def with_sinks(spec: SoftmaxAttention, call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Let each head's sink logit take part in the sums of a result without it."""
    sink = spec.sink_logits(**floats(call))
    if sink is None:
        return output, lse
    sink, empty = sink[:, None].expand_as(lse), lse == -torch.inf
    share = (lse - sink).masked_fill(empty, -torch.inf).sigmoid()[..., None]
    return output * share, torch.where(empty, sink, torch.logaddexp(lse.masked_fill(empty, 0.0), sink))


def sdpa(spec: SoftmaxAttention, call: Call) -> Result:
    """Torch's own kernel, which accumulates half precision in fp32."""
    call = skip_hidden(with_state(call, spec.carried))
    state = final_state(spec, call) if call.want_state else None
    wide = call.replace(q=upcast_on_cpu(call.q), k=upcast_on_cpu(call.k), v=upcast_on_cpu(call.v))
    T, S = call.q.shape[2], call.k.shape[2]
    everything = call.padding is None and call.mask is None and call.bias is None
    triangle = everything and call.causal and T == S
    mask = None
    if not triangle and not (everything and ((T == 1 and not call.top_left) or not call.causal)):
        mask = _sdpa_mask(spec, wide)
    output = torch.nn.functional.scaled_dot_product_attention(
        wide.q, wide.k, wide.v, mask, is_causal=triangle, scale=call.scale, enable_gqa=call.group > 1
    )
    return Result(output, state)


def _sdpa_mask(spec: SoftmaxAttention, call: Call) -> Tensor:
    visible = visibility(spec, call, call.positions(), {})
    if call.padding is not None:
        visible = visible & call.padding[:, None, None]
    if call.mask is not None:
        visible = visible & call.mask
    if call.bias is None:
        return visible
    return call.bias.to(call.q.dtype).masked_fill(~visible, -torch.inf)
