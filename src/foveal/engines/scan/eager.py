"""The torch form of the scan: doubling inside a chunk, one step from chunk to chunk.

No exponent above 0 is ever formed: decays enter as products of factors that are at most 1.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveal import counting
from foveal.call import Call, Result
from foveal.precision import upcast
from foveal.state import RecurrentState

if TYPE_CHECKING:
    from foveal.engines.scan import Scan

CHUNK = 64


@dataclasses.dataclass(frozen=True)
class ScanTerms:
    """What a mechanism hands to the engine.

    Args:
        log_decay: natural log of a, <= 0, [B, H, T, D].
        write: b [B, H, T, D].
    """

    log_decay: Tensor
    write: Tensor


def run(spec: Scan, call: Call) -> Result:
    """Compute a call in fp32 (float64 for float64), whatever the inputs' precision."""
    k, v = (x.repeat_interleave(call.group, 1) if call.group > 1 else x for x in (call.k, call.v))
    q, k, v = upcast(call.q), upcast(k), upcast(v)
    terms = spec.terms(q, k, v, **{name: x.to(q.dtype) for name, x in call.inputs.items()})
    log_decay, write = terms.log_decay, terms.write
    if call.padding is not None:  # hidden tokens neither write nor decay
        real = call.padding[:, None, :, None]
        log_decay, write = log_decay.where(real, 0), write.where(real, 0)
    B, H, T, D = write.shape
    start = write.new_zeros(B, H, 1, D)
    if call.state is not None:
        assert isinstance(call.state, RecurrentState)
        if call.state.matrix.shape != start.shape:
            raise spec.fail("initial_state", f"matrix {tuple(call.state.matrix.shape)}", f"{tuple(start.shape)}")
        start = call.state.matrix.to(write.dtype)
    if write.numel() == 0:
        return Result(write, RecurrentState(start) if call.want_state else None)
    size = {"parallel": T, "recurrent": 1}.get(call.form or "", min(CHUNK, T))
    counting.counted()
    h: Tensor = scan(log_decay, write, start, size)
    return Result(h, RecurrentState(h[:, :, -1:]) if call.want_state else None)


@torch.library.custom_op(
    "foveal::scan", mutates_args=(), schema="(Tensor log_decay, Tensor write, Tensor start, int size) -> Tensor"
)
def scan(log_decay: Tensor, write: Tensor, start: Tensor, size: int) -> Tensor:
    """h_t = exp(log_decay_t) h_{t-1} + write_t over the axis T of [B, H, T, D], from h_0 = start [B, H, 1, D].

    Args:
        log_decay, write, start: see above.
        size: tokens of a chunk; 1 takes one step after the other, T is all at once.
    """
    B, H, T, D = write.shape
    padded = (torch.nn.functional.pad(x, (0, 0, 0, -T % size)) for x in (log_decay.exp(), write))
    decay, h = (x.reshape(B, H, -1, size, D) for x in padded)
    step = 1
    while step < size:  # now h_t counts the last `step` tokens, and decay_t is the product of their factors
        reached = (decay[..., step:, :] * h[..., :-step, :], decay[..., step:, :] * decay[..., :-step, :])
        h = torch.cat((h[..., :step, :], h[..., step:, :] + reached[0]), -2)
        decay = torch.cat((decay[..., :step, :], reached[1]), -2)
        step *= 2
    entering = []
    for chunk, kept in zip(h[..., -1:, :].unbind(2), decay[..., -1:, :].unbind(2), strict=True):
        entering.append(start)
        start = kept * start + chunk
    whole: Tensor = h + decay * torch.stack(entering, 2)
    return whole.reshape(B, H, -1, D)[:, :, :T].contiguous()


@scan.register_fake
def _shape(log_decay: Tensor, write: Tensor, start: Tensor, size: int) -> Tensor:
    return torch.empty_like(write, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    log_decay, _, start, ctx.size = inputs
    ctx.save_for_backward(log_decay, start, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """The same recurrence from the end to the start; of the forward pass only its decays and results are kept."""
    log_decay, start, h = ctx.saved_tensors
    later = torch.cat((log_decay[:, :, 1:], torch.zeros_like(start)), 2)
    written = scan(later.flip(2), grad.flip(2), torch.zeros_like(start), ctx.size).flip(2)
    decayed = written * log_decay.exp()
    return decayed * torch.cat((start, h[:, :, :-1]), 2), written, decayed[:, :, :1], None


scan.register_autograd(_backward, setup_context=_keep)


def _flops(log_decay: Tensor, write: Tensor, start: Tensor, size: int, **_: Any) -> int:
    """Twice the multiply-adds: two in each round of doubling."""
    return int(2 * write.numel() * max(2 * (size - 1).bit_length(), 1))


counting.count(torch.ops.foveal.scan, _flops)
