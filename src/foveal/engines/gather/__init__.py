r"""Softmax over a few keys per query, each with a weight of its own.

.. math::
    o_t = \frac{\sum_i c_{ti} \exp(\mathrm{scale}\; q_t^\top k_{j(t,i)})\, v_{j(t,i)}}
               {\sum_i c_{ti} \exp(\mathrm{scale}\; q_t^\top k_{j(t,i)})}

A mechanism chooses the keys j(t, i) and the weights c; the engine gathers, weighs and keeps the cache.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor

from foveal.call import Backend, Call
from foveal.engines.gather import eager
from foveal.engines.gather.eager import Keys
from foveal.spec import Mechanism
from foveal.state import KeyValueState, State

__all__ = ["Gather", "Keys"]


class Gather(Mechanism):
    """Base of mechanisms that read a few keys per query.  Implement :meth:`choose` and ``definition``."""

    engine: ClassVar[str] = "gather"
    forms: ClassVar[tuple[str, ...]] = ("parallel", "chunked")
    self_attention: ClassVar[bool] = True

    def prepare(self, keys: Keys) -> Any:
        """What :meth:`choose` wants to know about all keys, once per call; nothing by default."""
        return None

    def choose(self, q: Tensor, seen: Tensor, keys: Keys, prepared: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The slots that each query reads and their weights c >= 0, both broadcastable to [B, H, T, N].

        A weight of 0 leaves a slot out; a slot that stands twice counts twice.

        Args:
            q: [B, H, T, K], not scaled.
            seen: how many real tokens each query sees, from the first, [B, 1, T, 1].
            keys: the keys.
            prepared: what :meth:`prepare` returned.
            inputs: the mechanism's own tensors, detached; of those with a T axis the part of these queries.
        """
        raise NotImplementedError

    def backends(self, call: Call) -> list[Backend]:
        """The torch form, which runs every call without a log-sum-exp."""
        why = "the sum over a few keys is no log-sum-exp of all" if call.want_lse else None
        return [Backend("torch", functools.partial(eager.run, self), why)]

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state of another engine or of other shapes."""
        if not isinstance(state, KeyValueState):
            raise self.fail("initial_state", type(state).__name__, "KeyValueState")
        if not call.causal:
            raise self.fail("initial_state", "a state beside causal=False", "none: every query sees every key")
        for name, mine, new in (("keys", state.k, call.k), ("values", state.v, call.v)):
            have, want = (mine.shape[0], mine.shape[1], mine.shape[3]), (rows, new.shape[1], new.shape[3])
            if have != want:
                raise self.fail("initial_state", f"{name} with (B, G, width) = {have}", want)
