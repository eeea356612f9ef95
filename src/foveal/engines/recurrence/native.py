"""The recurrence on CPUs in compiled code: an op that torch can trace, differentiate and count.

What the kernel computes, and how it keeps every exponent at or below 0, stands in ``native/recurrence.hpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foveal import counting, native
from foveal.call import Call
from foveal.engines.recurrence.program import Terms
from foveal.state import RecurrentState

CHUNK = 64
STEPS = 4  # up to so many tokens go one after the other: below, a chunk's set-up costs more than it saves
FORWARD, BACKWARD, STEP = range(3)
OPTIONAL = ("log_decay", "u", "w", "state", "normalizer")

_library: Any = torch.library.Library("foveal", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "recurrence(Tensor read, Tensor write, Tensor value, Tensor? log_decay, Tensor? u, Tensor? w, Tensor? state, "
    "Tensor? normalizer, float scale, bool normalize, bool steps, bool save) "
    "-> (Tensor output, Tensor last, Tensor last_normalizer, Tensor entering, Tensor written, Tensor weight)"
)
_library.define(
    "recurrence_backward(Tensor read, Tensor write, Tensor value, Tensor? log_decay, Tensor? u, Tensor? w, "
    "Tensor? state, Tensor? normalizer, Tensor output, Tensor entering, Tensor written, Tensor weight, "
    "Tensor grad_output, Tensor? grad_last, Tensor? grad_last_normalizer, float scale, bool normalize) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def why_not(call: Call) -> str | None:
    """Why the kernel cannot run a call, in one sentence, or None if it can."""
    if call.form == "parallel":
        return "the compiled kernel has the chunked and the recurrent form"
    return native.why_not(call.q, call.k, call.v)


def kernel(terms: Terms, scale: float, state: RecurrentState | None, form: str | None) -> tuple[Tensor, RecurrentState]:
    """One recurrence in the form asked for, or the best one."""
    read, write, normalize = terms.read, terms.write, terms.normalize
    u, w = (None, None) if terms.erase is None else terms.erase
    matrix = None if state is None else state.matrix.float()
    normalizer = None if state is None or state.normalizer is None else state.normalizer.float()
    inputs = read, write, terms.value, terms.log_decay, None if u is write else u, w, matrix, normalizer
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    steps = form == "recurrent" or (form is None and read.shape[2] <= STEPS)
    if counting.counted() or save or not steps or torch.compiler.is_compiling():
        run: Any = torch.ops.foveal.recurrence
        output, last, last_normalizer, *_ = run(*inputs, scale, normalize, steps, save)
    else:  # a decode step is all overhead: past the dispatcher
        output, last, last_normalizer = _step(*inputs, scale, normalize)
    return output, RecurrentState(last, last_normalizer if normalize else None)


def _forward(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    state: Tensor | None,
    normalizer: Tensor | None,
    scale: float,
    normalize: bool,
    steps: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    outputs = _empty(read, write, value, log_decay, u, w, state, normalizer, scale, normalize, steps, save)
    output, *others = outputs
    words = _sizes(read, write, value, log_decay, u, w, normalize)
    state, normalizer = (x if x is None else x.contiguous() for x in (state, normalizer))
    words += native.address(state), native.address(normalizer), *native.view(output), *map(native.address, others)
    # what a backward pass needs is made chunk by chunk, so steps that save anything run as chunks
    native.recurrence(words, scale, STEP if steps and not save else FORWARD)
    return outputs


def _step(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    state: Tensor | None,
    normalizer: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward pass without gradients, with no more overhead than the outputs' memory and one call.

    ``torch.empty`` takes 3.6 us for a size as a tuple, 2.6 us for numbers, and ``empty_like`` 2.0 us.
    """
    B, H, T, K = read.shape
    V = value.shape[-1]
    words = _sizes(read, write, value, log_decay, u, w, normalize)
    output = torch.empty(B, H, T, V, dtype=torch.float32)
    last_normalizer = torch.empty(B, H, K, dtype=torch.float32) if normalize else None
    before = weights = 0
    if state is None:
        last = torch.empty(B, H, K, V, dtype=torch.float32)
    else:
        state = state.contiguous()
        last = torch.empty_like(state)
        before = state.data_ptr()
    if normalizer is not None:
        normalizer = normalizer.contiguous()
        weights = normalizer.data_ptr()
    words += before, weights, output.data_ptr(), native.DENSE, last.data_ptr()
    words.append(0 if last_normalizer is None else last_normalizer.data_ptr())
    native.recurrence(words, scale, STEP)
    return output, last, last_normalizer


def _sizes(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    normalize: bool,
) -> list[int]:
    """Sizes, kinds and letters, as every call of the kernel begins."""
    decay = 0 if log_decay is None else 1 if log_decay.shape[-1] == 1 else 2
    erase = 0 if w is None else 1 if u is None else 2
    return [
        *read.shape, value.shape[-1], decay, erase, normalize,
        *native.view(read), *native.view(write), *native.view(value), *native.view(log_decay),
        *native.view(u), *native.view(w),
    ]  # fmt: skip


def _empty(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    state: Tensor | None,
    normalizer: Tensor | None,
    scale: float,
    normalize: bool,
    steps: bool,
    save: bool,
) -> tuple[Tensor, ...]:
    """Memory for the outputs; also what tracing sees."""
    B, H, T, K = read.shape
    V, columns = value.shape[-1], value.shape[-1] + normalize

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=read.device)

    return (
        new(B, H, T, V),
        new(B, H, K, V),
        new(B, H, K) if normalize else new(0),
        new(B, H, -(-T // CHUNK), K, columns) if save else new(0),
        new(B, H, T, columns) if save and w is not None else new(0),
        new(B, H, T) if save and normalize else new(0),
    )


def _backward(
    read: Tensor,
    write: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    u: Tensor | None,
    w: Tensor | None,
    state: Tensor | None,
    normalizer: Tensor | None,
    output: Tensor,
    entering: Tensor,
    written: Tensor,
    weight: Tensor,
    grad_output: Tensor,
    grad_last: Tensor | None,
    grad_last_normalizer: Tensor | None,
    scale: float,
    normalize: bool,
) -> tuple[Tensor, ...]:
    letters = (read, write, value, log_decay, u, w)
    grads = _empty_grads(*letters, state, normalizer)
    *rows, grad_state, grad_normalizer = grads
    grad_last, grad_last_normalizer = (x if x is None else x.contiguous() for x in (grad_last, grad_last_normalizer))
    words = _sizes(*letters, normalize)
    words += 0, 0, *native.view(output), 0, 0
    words += map(native.address, (entering, written, weight))
    words += native.view(grad_output)
    for x, grad in zip(letters, rows, strict=True):
        words += native.view(None if x is None else grad)
    words += map(native.address, (grad_last, grad_last_normalizer, grad_state, grad_normalizer))
    native.recurrence(words, scale, BACKWARD)
    return grads


def _empty_grads(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Memory for one gradient per input, in its dtype; empty for those that are not there."""
    device = next(x for x in inputs if x is not None).device
    return tuple(
        torch.empty(0, device=device) if x is None else torch.empty(x.shape, dtype=x.dtype, device=device)
        for x in inputs
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.normalize, _, _ = inputs
    out, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, out if ctx.normalize else out.new_empty(0, 0, 0, 0), *saved)


def _differentiate(
    ctx: Any, grad_output: Tensor | None, grad_last: Tensor | None, grad_last_normalizer: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("foveal: backend 'native' has no second derivatives, expected backend='torch' for them")
    tensors = ctx.saved_tensors
    if grad_output is None:  # a loss on the final state alone
        grad_output = torch.zeros(1, dtype=torch.float32).expand(*tensors[0].shape[:3], tensors[2].shape[-1])
    counting.counted()
    grads = torch.ops.foveal.recurrence_backward(
        *tensors, grad_output, grad_last, grad_last_normalizer if ctx.normalize else None, ctx.scale, ctx.normalize
    )
    found = [None if x is None else grad for x, grad in zip(tensors[:8], grads, strict=True)]
    return (*found, None, None, None, None)


def _trace_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _empty_grads(*arguments[:8])


def _count(read: Tensor, write: Tensor, value: Tensor, log_decay: Any, u: Any, w: Any, *_: Any, **__: Any) -> int:
    """Twice the multiply-adds of the chunks' products; triangles count half."""
    (B, H, T, K), V = read.shape, value.shape[-1]
    systems = 1 if w is None else 2 if u is None else 4
    state = 2 if w is None else 3 if u is None else 4
    return int(2 * B * H * T * (state * K * V + systems * CHUNK * (K + V) / 2))


def _count_backward(*letters: Any, **rest: Any) -> int:
    """About 2.2 times the forward pass: the products of every gradient, and those within chunks again."""
    return int(2.2 * _count(*letters, **rest))


_library.impl("recurrence", _forward, "CPU")
_library.impl("recurrence_backward", _backward, "CPU")
torch.library.register_fake("foveal::recurrence", _empty, lib=_library)
torch.library.register_fake("foveal::recurrence_backward", _trace_backward, lib=_library)
torch.library.register_autograd("foveal::recurrence", _differentiate, setup_context=_remember, lib=_library)
counting.count(torch.ops.foveal.recurrence, _count)
counting.count(torch.ops.foveal.recurrence_backward, _count_backward)
