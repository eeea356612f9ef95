r"""Linear recurrence over a matrix state: one contract for linear attention, decay and delta rules.

.. math::
    S_t = D_t S_{t-1} - u_t (w_t^\top D_t S_{t-1}) + p_t v_t^\top, \qquad o_t = \mathrm{scale}\; S_t^\top r_t

with D_t = diag(exp(log_decay_t)).  The derivation of the chunked form stands in the README beside this file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from foveal.call import Backend, Call
from foveal.engines.recurrence import eager
from foveal.spec import Mechanism
from foveal.state import RecurrentState, State


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a mechanism hands to the engine.

    Args:
        read: r [B, H, T, K]; the engine applies ``scale``.
        write: p [B, H, T, K].
        value: v [B, H, T, V].
        log_decay: natural log of D, <= 0; [B, H, T, 1] for one decay per head, [B, H, T, K] for one per channel.
        erase: the pair (u, w), each [B, H, T, K].
        skip: added to the output, broadcastable to [B, H, T, V]; it is not scaled.
        normalize: divide the output by r_t' n_t, where n_t is the state that values of 1 would have left.
    """

    read: Tensor
    write: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    skip: Tensor | None = None
    normalize: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Terms:
        """A function applied to every tensor with a full T axis; ``skip`` does not enter the state and is left."""
        erase = None if self.erase is None else (change(self.erase[0]), change(self.erase[1]))
        decay = None if self.log_decay is None else change(self.log_decay)
        return dataclasses.replace(
            self,
            read=change(self.read),
            write=change(self.write),
            value=change(self.value),
            log_decay=decay,
            erase=erase,
        )


class Recurrence(Mechanism):
    """Base of mechanisms whose memory is a K x V matrix per head.  Implement :meth:`terms` and ``definition``."""

    engine: ClassVar[str] = "recurrence"
    forms: ClassVar[tuple[str, ...]] = ("parallel", "chunked", "recurrent")
    self_attention: ClassVar[bool] = True

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **inputs: Any) -> Terms:
        """The engine's letters for q, k [B, H, T, K] and v [B, H, T, V]."""
        raise NotImplementedError

    def backends(self, call: Call) -> list[Backend]:
        """The torch forms, which run every call without a log-sum-exp."""
        why = "a recurrence has no log-sum-exp: its weights are no softmax" if call.want_lse else None
        return [Backend("torch", functools.partial(eager.run, self), why)]

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state of another engine or of other shapes."""
        if not isinstance(state, RecurrentState):
            raise self.fail("initial_state", type(state).__name__, "RecurrentState")
        want = (rows, call.q.shape[1], self.state_width(call.q.shape[-1]), call.v.shape[-1])
        if tuple(state.matrix.shape) != want:
            raise self.fail("initial_state", f"matrix {tuple(state.matrix.shape)}", f"[B, H, K, V] = {want}")

    def state_width(self, key_width: int) -> int:
        """Rows of the state's matrix; more than K for feature maps that widen."""
        return key_width
