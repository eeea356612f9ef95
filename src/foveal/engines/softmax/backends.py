"""Who can run a call of softmax attention, and why the others cannot."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from foveal.call import Backend, Call
from foveal.engines.softmax import eager

if TYPE_CHECKING:
    from foveal.engines.softmax import SoftmaxAttention


def backends(spec: SoftmaxAttention, call: Call) -> list[Backend]:
    """All backends, best first."""
    return [
        Backend("sdpa", functools.partial(eager.sdpa, spec), why_no_sdpa(spec, call)),
        Backend("torch", functools.partial(eager.run, spec)),
    ]


def why_no_sdpa(spec: SoftmaxAttention, call: Call) -> str | None:
    """Why torch's scaled_dot_product_attention cannot run this call."""
    inputs = call.inputs
    if call.form is not None:
        return f"a form was asked for ({call.form}); SDPA chooses its own"
    if spec.score_mod(**inputs) is not None:
        return "it has no score functions (soft cap, ALiBi)"
    if spec.mask_mod(**inputs) is not None:
        return "it does not skip the keys that a mask function hides"
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
