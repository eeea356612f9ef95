"""mLSTM (xLSTM): a matrix memory with an exponential input gate and a normaliser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.engines.recurrence.program import ratio
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class MLSTM(Recurrence, name="mlstm"):
    r"""Weigh each token by an exponential input gate, and divide by what the gates add up to, but never by less than 1.

    .. math::
        C_t = f_t C_{t-1} + e^{\tilde\imath_t} k_t v_t^\top, \qquad n_t = f_t n_{t-1} + e^{\tilde\imath_t} k_t, \qquad
        h_t = \frac{C_t^\top q_t / \sqrt{K}}{\max(|n_t^\top q_t| / \sqrt{K},\, 1)}

    with :math:`f_t = \exp(\texttt{log\_decay}_t)`; the paper's sigmoid forget gate is ``log_decay = logsigmoid(f)``.
    A gate lets a late token outweigh everything before it.  The memory is kept times :math:`e^{-m_t}` with the running
    maximum :math:`m_t = \max(m_{t-1} + \log f_t, \tilde\imath_t, 0)`, so that no exponent is above 0; m cancels.  The
    paper's m has no floor of 0, which would only let :math:`e^{-m}` overflow.  Output gate and head norm belong to the
    layer.
    """

    aliases: ClassVar[tuple[str, ...]] = ("xlstm",)
    paper: ClassVar[Paper] = Paper("2405.04517", "xLSTM: Extended Long Short-Term Memory", "Beck et al.", 2024)
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * (V + 1) + 1")
    inputs: ClassVar[dict[str, Input]] = {
        "input_gate": Input("B H T", doc="natural log of the input gate, its pre-activation"),
        "log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate"),
    }

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        gate, log_decay = inputs["input_gate"][..., None], inputs["log_decay"][..., None]
        m, before = recur.running_max(gate, log_decay)
        write = (gate - m).exp().to(k.dtype) * k
        counted = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # the last column of the memory is n
        read = recur(Terms(q, write, counted, log_decay=(log_decay + before - m).to(k.dtype)))
        least = (-m).exp().to(k.dtype)
        return ratio(read[..., :-1], torch.maximum(read[..., -1:].abs(), least))

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, input_gate: Tensor, log_decay: Tensor
    ) -> Tensor:
        C, n = v.new_zeros(k.shape[-1], v.shape[-1]), v.new_zeros(k.shape[-1])
        h = []
        for t in range(len(q)):
            f, i = log_decay[t].exp(), input_gate[t].exp()
            C = f * C + i * torch.outer(k[t], v[t])
            n = f * n + i * k[t]
            h.append(scale * C.T @ q[t] / (scale * n @ q[t]).abs().clamp(min=1))
        return torch.stack(h)
