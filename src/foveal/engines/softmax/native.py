"""Softmax attention on CPUs in compiled code: an op that torch can trace, differentiate and count.

One kernel serves the softmax and the block-sparse engine: ``native/attention.hpp`` says what it computes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveal import counting, native
from foveal.call import Call, Positions

if TYPE_CHECKING:
    from foveal.engines.softmax import SoftmaxAttention

SIZE = 64  # keys per block where the mechanism has none of its own
FORWARD, BACKWARD = range(2)
EVERYWHERE = 2**31 - 2  # beyond any position, and an int32 with its successor

_library: Any = torch.library.Library("foveal", "FRAGMENT")  # type: ignore[no-untyped-call]
_PLAN = (
    "Tensor choice, Tensor low, Tensor high, Tensor top, Tensor place, Tensor? slot, Tensor? position, "
    "Tensor? chosen, Tensor? shown, Tensor? bias, Tensor? mask, Tensor? slopes"
)
_NUMBERS = "int blocks, int size, int shown_size, bool apart, float scale, float cap"
_library.define(f"attention(Tensor q, Tensor k, Tensor v, {_PLAN}, {_NUMBERS}) -> (Tensor output, Tensor lse)")
_library.define(
    f"attention_backward(Tensor q, Tensor k, Tensor v, {_PLAN}, Tensor output, Tensor lse, Tensor grad_output, "
    f"Tensor? grad_lse, bool want_bias, {_NUMBERS}) -> (Tensor q, Tensor k, Tensor v, Tensor bias)"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What each query sees, as the kernel takes it; tables are int32 and broadcast over B and H.

    Args:
        choice: row of ``chosen`` that each query follows, [B or 1, H or 1, T]; -1 for a query that does not exist.
        low, high: first and last position that a query sees, shaped alike.
        top: positions below it are seen, too.
        place: position of each query.
        slot: index of the key in each place of the blocks, [B or 1, H or 1, N * size], -1 for none; None: as they come.
        position: of each place, shaped alike; None: as they come.
        chosen: bool [B, H, M, N], None for every block.
        shown: bool [B, H, M, N']: keys in these blocks of ``shown_size`` positions are left out.
        blocks, size: N and keys per block.
        apart: whether the tables of places differ between the heads of a group.
    """

    choice: Tensor
    low: Tensor
    high: Tensor
    top: Tensor
    place: Tensor
    slot: Tensor | None = None
    position: Tensor | None = None
    chosen: Tensor | None = None
    shown: Tensor | None = None
    blocks: int = 0
    size: int = SIZE
    shown_size: int = 1
    apart: bool = False


def why_not(spec: SoftmaxAttention, call: Call) -> str | None:
    """Why the kernel cannot run a call, in one sentence, or None if it can."""
    if call.form == "parallel":
        return "the compiled kernel has the chunked form"
    if spec.mask_mod(**call.inputs) is not None:
        return "the compiled kernel knows windows and blocks, no mask functions"
    if spec.score_terms(call.q.shape[1]) is None:
        return "the compiled kernel knows the soft cap and ALiBi, no other score functions"
    if call.bias is not None and call.bias.requires_grad and call.bias.shape[2] > 1 and torch.is_grad_enabled():
        return "the compiled kernel has the gradient of a bias per key only, not per query and key"
    return native.why_not(call.q, call.k, call.v)


def hidden_queries(call: Call) -> Tensor | None:
    """Which queries a mask hides, bool [B, T], or None: those of causal attention stand beside their own keys."""
    T, S = call.q.shape[2], call.k.shape[2]
    return None if call.padding is None or not call.causal or T > S else ~call.padding[:, S - T :]


def bounds(
    call: Call, at: Positions, reach: tuple[int | None, int | None] = (None, None), always: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First and last visible position of each query, how many of the first keys it sees in any case, and its own."""
    own = at.q[:, :, :, 0]
    before, after = reach
    low = torch.full_like(own, -EVERYWHERE) if before is None else own - before
    high = torch.full_like(own, EVERYWHERE) if after is None else own + after
    top = torch.full_like(own, always)
    if call.causal:
        high, top = torch.minimum(high, own), torch.minimum(top, own + 1)
    return low.int(), high.int(), top.int(), own.int()


def plan(spec: SoftmaxAttention, call: Call) -> Plan:
    """Every key that causality, the reach and a mask of tokens leave."""
    low, high, top, place = bounds(call, call.positions(), spec.reach(), spec.always_visible())
    hidden = hidden_queries(call)
    choice = torch.zeros_like(place) if hidden is None else -hidden[:, None].int()
    S, slot = call.k.shape[2], None
    if call.padding is not None:
        order = torch.argsort((~call.padding).to(torch.int8), dim=-1, stable=True).int()
        real = torch.arange(S, device=order.device) < call.padding.sum(-1, keepdim=True)
        slot = torch.nn.functional.pad(order.where(real, -1), (0, -S % SIZE), value=-1)[:, None]
    return Plan(choice, low, high, top, place, slot, blocks=-(-S // SIZE))


def attend(call: Call, plan: Plan, cap: float = 0.0, slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, V] in q's dtype and log-sum-exp [B, H, T] in fp32."""
    counting.counted()
    bias = None if call.bias is None else call.bias.float()
    run: Any = torch.ops.foveal.attention
    output, lse = run(
        call.q, call.k, call.v, plan.choice, plan.low, plan.high, plan.top, plan.place, plan.slot, plan.position,
        plan.chosen, plan.shown, bias, call.mask, slopes,
        plan.blocks, plan.size, plan.shown_size, plan.apart, call.scale, cap,
    )  # fmt: skip
    return output, lse


def _table(x: Tensor | None) -> tuple[int, int, int]:
    """Address and strides of an int32 table [B or 1, H or 1, places]."""
    if x is None:
        return 0, 0, 0
    return x.data_ptr(), x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


def _field(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of a tensor that broadcasts over all four axes."""
    if x is None:
        return 0, 0, 0, 0, 0
    return x.data_ptr(), *(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _dense(x: Tensor | None) -> Tensor | None:
    """The tensor with its last axis contiguous, as the kernel walks along it."""
    return x if x is None or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _words(q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> list[int]:
    choice, low, high, top, place, slot, position, chosen, shown, bias, mask, slopes = tensors
    blocks, size, shown_size, apart, _, _ = numbers
    (B, H, T, K), G, S = q.shape, k.shape[1], k.shape[2]
    words = [B, H, G, T, S, K, v.shape[-1], blocks, size, 1 if apart else H // G, shown_size]
    words += native.view(q) + native.view(k) + native.view(v)
    for x in (choice, low, high, top, place, slot, position):
        words += _table(x)
    for x in (chosen, shown, bias, mask):
        words += _field(x)
    words.append(native.address(slopes))
    return words


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tensors, numbers = tuple(_dense(x) for x in rest[:12]), rest[12:]
    output, lse = _empty(q, k, v)
    words = _words(q, k, v, tensors, numbers)
    words += *native.view(output), native.address(lse)
    native.attention(words, numbers[4], numbers[5], FORWARD)
    return output, lse


def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Memory for the outputs; also what tracing sees."""
    B, H, T, _ = q.shape
    return (
        torch.empty((B, H, T, v.shape[-1]), dtype=q.dtype, device=q.device),
        torch.empty((B, H, T), dtype=torch.float32, device=q.device),
    )


def _backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, (output, lse, grad_output, grad_lse, _, *numbers) = tuple(_dense(x) for x in rest[:12]), rest[12:]
    grads = _empty_grads(q, k, v, *rest)
    grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
    words = _words(q, k, v, tensors, tuple(numbers))
    words += *native.view(output), native.address(lse), *native.view(grad_output), native.address(grad_lse)
    words += map(native.address, grads)
    native.attention(words, numbers[4], numbers[5], BACKWARD)
    return grads


def _empty_grads(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in fp32, 0 where nothing is added; that of the bias is summed over queries."""
    want_bias = rest[16]
    zeros = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
    bias = torch.zeros((*q.shape[:2], k.shape[2]) if want_bias else (0,), dtype=torch.float32, device=q.device)
    return zeros[0], zeros[1], zeros[2], bias


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.numbers = inputs[15:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:15], *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("foveal: backend 'native' has no second derivatives, expected backend='torch' for them")
    *inputs, output, lse = ctx.saved_tensors
    q, k, v, bias = inputs[0], inputs[1], inputs[2], inputs[12]
    if grad_output is None:  # a loss on the log-sum-exp alone
        grad_output = torch.zeros(1, dtype=torch.float32).expand(output.shape)
    want_bias = bias is not None and ctx.needs_input_grad[12]
    counting.counted()
    run: Any = torch.ops.foveal.attention_backward
    dq, dk, dv, db = run(*inputs, output, lse, grad_output, grad_lse, want_bias, *ctx.numbers)
    found: list[Tensor | None] = [None] * 21
    found[:3] = [grad.to(x.dtype) for grad, x in ((dq, q), (dk, k), (dv, v))]
    if want_bias:
        found[12] = db[:, :, None].sum_to_size(bias.shape)
    return tuple(found)


def _pairs(q: Tensor, k: Tensor, *rest: Any) -> int:
    """Pairs of a query and a key whose product is computed."""
    choice, low, high, top, _, slot, position, chosen, *_ = rest
    blocks, size = rest[-6], rest[-5]
    B, H, T, _ = q.shape
    n = torch.arange(blocks, device=q.device)
    if position is None:
        first, last = n * size, (n + 1) * size - 1
    else:
        real = position if slot is None else position.where(slot >= 0, EVERYWHERE)
        real = real.reshape(*real.shape[:2], 1, blocks, size)
        first, last = real.amin(-1), real.where(real < EVERYWHERE, -1).amax(-1)
    seen = ((first <= high[..., None]) & (last >= low[..., None])) | (first < top[..., None])
    seen = seen & (choice >= 0)[..., None]
    if chosen is not None:
        row = choice.clamp(min=0).long()[..., None].expand(B, H, T, blocks)
        seen = seen & chosen.gather(2, row)
    return int(seen.expand(B, H, T, blocks).sum()) * int(size)


def _count(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    """Two products over the pairs."""
    return 2 * _pairs(q, k, *rest) * (q.shape[-1] + v.shape[-1])


def _count_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    """Five products over the pairs: scores again, and the gradients of weights, values, queries and keys."""
    return 2 * _pairs(q, k, *rest) * (3 * q.shape[-1] + 2 * v.shape[-1])


_library.impl("attention", _forward, "CPU")
_library.impl("attention_backward", _backward, "CPU")
torch.library.register_fake("foveal::attention", _empty, lib=_library)
torch.library.register_fake("foveal::attention_backward", _empty_grads, lib=_library)
torch.library.register_autograd("foveal::attention", _differentiate, setup_context=_remember, lib=_library)
counting.count(torch.ops.foveal.attention, _count)
counting.count(torch.ops.foveal.attention_backward, _count_backward)
