"""HGRN: a hierarchically gated network, whose channels forget and take in by one gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.scan import Scan, ScanTerms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class HGRN(Scan, name="hgrn"):
    r"""Let each value channel keep a running mean, as long as a gate of its own decides.

    .. math::
        h_t = f_t \odot h_{t-1} + (1 - f_t) \odot v_t, \qquad o_t = h_t

    with :math:`f_t = \exp(\texttt{log\_decay}_t)` per value channel.  Each output lies between the values seen so far
    and 0.  v is the paper's input i.  There are no keys and no queries: q and k have no part, nor has ``scale``; the
    paper's output gate and norm belong to the layer.  The paper keeps f above a bound that rises with depth,
    :math:`f = \gamma + (1 - \gamma)\, \sigma(x)`, which is the caller's to compute, and also turns h by a fixed complex
    phase; here is the real recurrence, as in the authors' later code.
    """

    paper: ClassVar[Paper] = Paper(
        "2311.04823", "Hierarchically Gated Recurrent Neural Network for Sequence Modeling", "Qin, Yang, Zhong", 2023
    )
    cost: ClassVar[Cost] = Cost(train="12 * T * V", decode="V", state="V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T V", high=0.0, doc="natural log of the forget gate of each value channel")
    }
    linear_in_values: ClassVar[bool] = False  # channels weigh the past differently: there is no one map

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor) -> ScanTerms:
        return ScanTerms(log_decay, -torch.expm1(log_decay) * v)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor) -> Tensor:
        f, h, o = log_decay.exp(), torch.zeros_like(v[0]), []
        for t in range(len(v)):
            h = f[t] * h + (1 - f[t]) * v[t]
            o.append(h)
        return torch.stack(o)
