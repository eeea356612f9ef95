"""Mamba-2's state space duality: a discretised state space model as a gated recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class Mamba2(Recurrence, name="mamba2"):
    r"""Decay and write by the same step size, as a discretised state space model does.

    .. math::
        S_t = e^{\Delta_t A_h} S_{t-1} + \Delta_t k_t v_t^\top, \qquad
        o_t = \mathrm{scale}\; S_t^\top q_t + D_h v_t

    In the paper's letters q is C, k is B, v is x and K is the state size N; the paper has no scale, so pass
    ``scale=1.0`` for its models.  Models that share B and C between heads pass expanded views of them.  The short
    convolution, the gate and the output norm around it belong to the layer.
    """

    aliases: ClassVar[tuple[str, ...]] = ("ssd", "mamba_2")
    paper: ClassVar[Paper] = Paper(
        "2405.21060",
        "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
        "Dao, Gu",
        2024,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "dt": Input("B H T", low=0.0, doc="step size after softplus"),
        "A": Input("H", high=0.0, doc="rate of decay per unit of time, negative"),
        "D": Input("H", doc="weight of the current value past the state", optional=True),
    }

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, dt: Tensor, A: Tensor, D: Tensor | None = None) -> Terms:
        skip = None if D is None else D[:, None, None] * v
        return Terms(q, dt[..., None] * k, v, log_decay=(dt * A[:, None])[..., None], skip=skip)

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        dt: Tensor,
        A: Tensor,
        D: Tensor | None = None,
    ) -> Tensor:
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = (dt[t] * A).exp() * S + dt[t] * torch.outer(k[t], v[t])
            o.append(scale * S.T @ q[t] + (0 if D is None else D * v[t]))
        return torch.stack(o)
