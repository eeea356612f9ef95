r"""Linear recurrence over a matrix state: one contract for linear attention, decay and delta rules.

.. math::
    S_t = D_t S_{t-1} - u_t (w_t^\top D_t S_{t-1}) + p_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top r_t

with D_t = diag(exp(log_decay_t)).  The derivation of the chunked form stands in the README beside this file.

A mechanism runs one recurrence (:meth:`Recurrence.terms`) or a program of several (:meth:`Recurrence.compute`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor

from foveal.call import Backend, Call
from foveal.engines.recurrence import eager, native
from foveal.engines.recurrence.program import Kernel, Recur, Terms, run
from foveal.spec import Mechanism
from foveal.state import ChainedState, RecurrentState, State

__all__ = ["Recur", "Recurrence", "Terms"]


class Recurrence(Mechanism):
    """Base of mechanisms whose memory is a K x V matrix per head.  Implement :meth:`terms` and ``definition``."""

    engine: ClassVar[str] = "recurrence"
    forms: ClassVar[tuple[str, ...]] = ("parallel", "chunked", "recurrent")
    self_attention: ClassVar[bool] = True

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **inputs: Any) -> Terms:
        """The engine's letters for q, k [B, H, T, K] and v [B, H, T, V]; the engine scales what is read."""
        raise NotImplementedError

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Any) -> Tensor:
        """The output [B, H, T, V]; override it where one recurrence is not the whole mechanism."""
        return recur(self.terms(q, k, v, **inputs))

    def backends(self, call: Call) -> list[Backend]:
        """Compiled kernels for CPUs, Triton kernels for GPUs, and torch forms that run every call without lse."""
        why = "a recurrence has no log-sum-exp: its weights are no softmax" if call.want_lse else None
        gpu, why_no_gpu = _gpu(call)
        return [
            Backend("native", functools.partial(run, self, native.kernel), why or native.why_not(call)),
            Backend("triton", functools.partial(run, self, gpu), why or why_no_gpu),
            Backend("torch", functools.partial(run, self, eager.kernel), why),
        ]

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state of another engine or of another batch; each recurrence compares its own shapes."""
        if not isinstance(state, RecurrentState | ChainedState):
            raise self.fail("initial_state", type(state).__name__, "RecurrentState")
        if not call.causal:
            raise self.fail("initial_state", "a state beside causal=False", "none: every query sees every key")
        for tensor in state.tensors():
            if tensor.shape[:2] != (rows, call.q.shape[1]):
                raise self.fail(
                    "initial_state",
                    f"matrix {tuple(tensor.shape)}",
                    f"[B, H, K, V] with {(rows, call.q.shape[1])} first",
                )


def _gpu(call: Call) -> tuple[Kernel, str | None]:
    """The Triton kernels and why they cannot run a call; Triton is imported where a GPU or the caller asks for it."""
    if call.q.device.type == "cpu" and call.backend != "triton":
        return eager.kernel, "the Triton kernels run on GPUs, not on cpu"
    from foveal.engines.recurrence import gpu

    return gpu.kernel, gpu.available() or gpu.why_not(call)
