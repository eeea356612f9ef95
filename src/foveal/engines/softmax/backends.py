"""Who can run a call of softmax attention, and why the others cannot."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from foveal.call import Backend, Call, Result
from foveal.engines.softmax import eager, native

if TYPE_CHECKING:
    from foveal.engines.softmax import SoftmaxAttention


FEW = 1 << 17  # scores of a call, up to which SDPA's smaller overhead counts for more than our kernel's rate


def backends(spec: SoftmaxAttention, call: Call) -> list[Backend]:
    """All backends, best first."""
    compiled = Backend("native", functools.partial(run_native, spec), native.why_not(spec, call))
    sdpa = Backend("sdpa", functools.partial(eager.sdpa, spec), why_no_sdpa(spec, call))
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    first = [sdpa, compiled] if B * H * T * S <= FEW else [compiled, sdpa]
    return [*first, Backend("torch", functools.partial(eager.run, spec))]


def run_native(spec: SoftmaxAttention, call: Call) -> Result:
    """The compiled kernel; half precision is computed in fp32 as it is loaded."""
    call = eager.skip_hidden(eager.with_state(call, spec.carried))
    state = eager.final_state(spec, call) if call.want_state else None
    output, lse = native.attend(call, native.plan(spec, call), *terms(spec, call))
    output, lse = eager.with_sinks(spec, call, output, lse)
    return Result(output, state, lse if call.want_lse else None)


def terms(spec: SoftmaxAttention, call: Call) -> tuple[float, torch.Tensor | None]:
    """Soft cap and slopes as the kernel takes them."""
    found = spec.score_terms(call.q.shape[1])
    assert found is not None
    cap, slopes = found
    return cap, None if slopes is None else torch.tensor(slopes)


def why_no_sdpa(spec: SoftmaxAttention, call: Call) -> str | None:
    """Why torch's scaled_dot_product_attention cannot run this call."""
    inputs = call.inputs
    if call.form is not None:
        return f"a form was asked for ({call.form}); SDPA chooses its own"
    if spec.score_mod(**inputs) is not None:
        return "it has no score functions (soft cap, ALiBi)"
    if spec.mask_mod(**inputs) is not None or spec.reach() != (None, None):
        return "it does not skip the keys that a window or a mask function hides"
    if spec.sink_logits(**inputs) is not None:
        return "it has no sink logits"
    if not call.scale > 0:
        return f"its causal kernel gives NaN for a scale that is not above 0, here {call.scale:g}"
    if call.want_lse:
        return "it returns no log-sum-exp"
    if call.q.shape[-1] != call.v.shape[-1]:
        return f"its fast kernels need K == V, here K={call.q.shape[-1]} and V={call.v.shape[-1]}"
    if call.k.shape[2] == 0 and call.state is None:
        return "there are no keys"
    return None
