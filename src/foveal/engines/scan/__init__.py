r"""Elementwise linear recurrence over a vector state, for networks whose channels never mix in time.

.. math::
    h_t = a_t \odot h_{t-1} + b_t, \qquad a_t = \exp(\texttt{log\_decay}_t) \le 1

The derivation of the chunked form and of the backward pass stands in the README beside this file.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor

from foveal.call import Backend, Call
from foveal.engines.scan import eager
from foveal.engines.scan.eager import ScanTerms
from foveal.spec import Mechanism
from foveal.state import RecurrentState, State

__all__ = ["Scan", "ScanTerms"]


class Scan(Mechanism):
    """Base of mechanisms whose memory is a vector per head.  Implement :meth:`terms` and ``definition``."""

    engine: ClassVar[str] = "scan"
    forms: ClassVar[tuple[str, ...]] = ("parallel", "chunked", "recurrent")
    self_attention: ClassVar[bool] = True

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **inputs: Any) -> ScanTerms:
        """The engine's letters for q, k [B, H, T, K] and v [B, H, T, V]; their width is that of the output."""
        raise NotImplementedError

    def backends(self, call: Call) -> list[Backend]:
        """The torch forms, which run every call without a log-sum-exp."""
        why = "a scan has no log-sum-exp: its weights are no softmax" if call.want_lse else None
        return [Backend("torch", functools.partial(eager.run, self), why)]

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state of another engine or of another batch; the width is compared with the terms."""
        if not isinstance(state, RecurrentState):
            raise self.fail("initial_state", type(state).__name__, "RecurrentState")
        if state.matrix.shape[:3] != (rows, call.q.shape[1], 1):
            raise self.fail("initial_state", f"matrix {tuple(state.matrix.shape)}", "[B, H, 1, V] of the same call")
