"""Gated slot attention: softmax over a fixed number of memory slots, which forget and refill by a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper
from foveal.state import RecurrentState


@dataclass(frozen=True)
class GatedSlot(Recurrence, name="gated_slot"):
    r"""Keep keys and values in m slots that forget by a gate, and attend to the slots by a softmax.

    .. math::
        \tilde K_t = \mathrm{Diag}(\alpha_t)\, \tilde K_{t-1} + (1 - \alpha_t)\, k_t^\top, \quad
        \tilde V_t = \mathrm{Diag}(\alpha_t)\, \tilde V_{t-1} + (1 - \alpha_t)\, v_t^\top, \qquad
        o_t = \tilde V_t^\top \mathrm{softmax}\left(\tilde K_t q_t / \sqrt{K}\right)

    with :math:`\alpha_t = \exp(\texttt{log\_decay}_t)` per slot: a slot takes in of a token what it forgets for it, so
    that it holds a weighted mean of keys and one of values.  It suits pretrained softmax models, whose rows keep their
    shape.  The paper sharpens the gate, :math:`\alpha = \sigma(x)^{1/\tau}` with :math:`\tau = 8`; that is
    ``log_decay = logsigmoid(x) / 8``.

    Args:
        slots: m, memory slots per head.

    Raises:
        ValueError: if ``slots`` is below 1.
    """

    aliases: ClassVar[tuple[str, ...]] = ("gsa", "gated_slot_attention")
    paper: ClassVar[Paper] = Paper(
        "2409.07146", "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", "Zhang et al.", 2024
    )
    cost: ClassVar[Cost] = Cost(
        train="T * slots * (K + V + 64 * (K + 2))", decode="slots * (K + V)", state="slots * (K + V)"
    )
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T M", high=0.0, doc="natural log of the forget gate of each slot, M = slots")
    }
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"slots": 4}, {"slots": 1})

    slots: int = 64

    def __post_init__(self) -> None:
        self.require_int("slots")

    def widths(self, key_width: int) -> dict[str, int]:
        return {"M": self.slots}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        log_decay = inputs["log_decay"]
        taken = -torch.expm1(log_decay)
        weight = self.scores(recur, q, k, taken, log_decay).softmax(-1)
        return recur(Terms(weight, taken, v, log_decay=log_decay), scale=1.0)

    def scores(self, recur: Recur, q: Tensor, k: Tensor, taken: Tensor, log_decay: Tensor) -> Tensor:
        """What each slot's key answers, [B, H, T, M]: every slot decays alone, so it is a head of one value channel."""
        B, H, T, K = q.shape
        before = recur.taken((B, H, K, self.slots), False)
        state = None if before is None else RecurrentState(before.matrix.mT.reshape(B, H * self.slots, K, 1))
        own = Recur(self, recur.call.replace(state=state), recur.kernel)
        asks, keys = (x.repeat_interleave(self.slots, 1) for x in (q, k))
        value, decay = (x.mT.reshape(B, H * self.slots, T, 1) for x in (taken, log_decay))
        read = own(Terms(asks, keys, value, log_decay=decay))
        kept = own.after[0]
        assert isinstance(kept, RecurrentState)
        recur.after.append(RecurrentState(kept.matrix.view(B, H, self.slots, K).mT))
        return read.view(B, H, self.slots, T).mT

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor) -> Tensor:
        keys, values = k.new_zeros(self.slots, k.shape[-1]), v.new_zeros(self.slots, v.shape[-1])
        o = []
        for t in range(len(q)):
            alpha = log_decay[t].exp()[:, None]
            keys = alpha * keys + (1 - alpha) * k[t]
            values = alpha * values + (1 - alpha) * v[t]
            o.append(values.T @ (scale * keys @ q[t]).softmax(0))
        return torch.stack(o)
