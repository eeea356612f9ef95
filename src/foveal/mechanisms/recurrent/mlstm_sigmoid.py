"""mLSTM with a sigmoid input gate: no normaliser and nothing to stabilise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class MLSTMSigmoid(Recurrence, name="mlstm_sigmoid"):
    r"""Write each token as far as a sigmoid input gate lets it in.

    .. math::
        C_t = f_t C_{t-1} + \sigma(\tilde\imath_t)\, k_t v_t^\top, \qquad h_t = C_t^\top q_t / \sqrt{K}

    with :math:`f_t = \exp(\texttt{log\_decay}_t)`.  Bounded gates need neither the normaliser nor the running maximum
    of the exponential form, at the same loss in the paper; the head norm of the layer around it takes the scale out.
    """

    aliases: ClassVar[tuple[str, ...]] = ("mlstm_sig",)
    paper: ClassVar[Paper] = Paper(
        "2503.14376",
        "Tiled Flash Linear Attention: More Efficient Linear RNN and xLSTM Kernels",
        "Beck, Pöppel, Lippe, Hochreiter",
        2025,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "input_gate": Input("B H T", doc="pre-activation of the input gate"),
        "log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate"),
    }
    limits: ClassVar = (
        Limit(
            {},
            "linear",
            {"feature_map": "identity", "normalize": False},
            inputs=lambda x: (
                {"input_gate": torch.full_like(x["input_gate"], 50.0), "log_decay": torch.zeros_like(x["log_decay"])},
                {},
            ),
            why="open gates",
        ),
    )

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, input_gate: Tensor, log_decay: Tensor) -> Terms:
        return Terms(q, input_gate.sigmoid()[..., None] * k, v, log_decay=log_decay[..., None])

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, input_gate: Tensor, log_decay: Tensor
    ) -> Tensor:
        # the parallel form: log D_ts = log f_{s+1} + ... + log f_t + log sigmoid(i_s)
        F = log_decay.cumsum(0)
        log_D = F[:, None] - F + torch.nn.functional.logsigmoid(input_gate)
        visible = torch.ones_like(log_D).tril() == 1
        D = log_D.where(visible, -torch.inf).exp()
        return (scale * (q @ k.mT) * D) @ v
