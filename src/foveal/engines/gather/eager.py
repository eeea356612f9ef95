"""The torch form: gather each query's keys and values, tile by tile of queries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foveal.call import Call, Result
from foveal.engines.softmax.eager import TILE, softmax, with_state
from foveal.precision import upcast
from foveal.state import KeyValueState

if TYPE_CHECKING:
    from foveal.engines.gather import Gather


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a call, those of its state first.

    Args:
        k: [B, H, S, K], heads repeated.
        position: of the token in each slot among the real ones, from 0; S where there is none, [B, S].
        slot: of each position, [B, S]; real tokens come first.
    """

    k: Tensor
    position: Tensor
    slot: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """Softmax of the scaled q over chosen slots [B, H, T, N] of k and v, each counted with its weight."""
    B, H, S, _ = k.shape
    first = torch.arange(B * H, device=k.device).view(B, H, 1, 1) * S
    flat = first + slots
    k, v = (x.reshape(B * H * S, -1)[flat] for x in (k, v))
    scores = (k @ q[..., None])[..., 0]
    share, _ = softmax(scores + weight.clamp(min=torch.finfo(weight.dtype).tiny).log(), weight > 0)
    return (share[..., None, :] @ v)[..., 0, :]


def run(spec: Gather, call: Call) -> Result:
    """Compute a call in fp32 (float64 for float64), whatever the inputs' precision."""
    call = with_state(call)
    state = KeyValueState(call.k, call.v, call.padding) if call.want_state else None
    q, k, v = (upcast(x) for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(call.group, 1) if call.group > 1 else x for x in (k, v))
    T, S = q.shape[2], k.shape[2]
    if q.shape[0] * T * S == 0:
        return Result(0 * q.sum(-1, keepdim=True) + v.new_zeros(*q.shape[:3], v.shape[-1]), state)
    real = KeyValueState(call.k, call.v, call.padding).real()
    count = real.cumsum(1)
    seen = (count[:, S - T :] if call.causal else count[:, -1:].expand(-1, T))[:, None, :, None]
    order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
    keys = Keys(k.detach(), torch.where(real, count - 1, S), order)
    prepared, outputs = spec.prepare(keys), []
    own = {name: x.detach().to(q.dtype) for name, x in call.inputs.items()}
    tile = T if call.form == "parallel" else TILE
    for start in range(0, T, tile):
        part, shown = q[:, :, start : start + tile], seen[:, :, start : start + tile]
        inputs = {n: x[:, :, start : start + tile] if "T" in spec.inputs[n].axes else x for n, x in own.items()}
        slots, weight = spec.choose(part.detach(), shown, keys, prepared, **inputs)
        tensors = (part * call.scale, k, v, slots, weight.to(q.dtype))
        if torch.is_grad_enabled() and tile < T:  # gathered keys of all tiles would need O(T N K) memory
            outputs.append(checkpoint(attend, *tensors, use_reentrant=False))
        else:
            outputs.append(attend(*tensors))
    return Result(torch.cat(outputs, 2), state)
