"""MesaNet: the memory answers each query with the ridge regression over everything that was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class Mesa(Recurrence, name="mesa"):
    r"""Solve the regression of values on keys anew at every token, and predict at the query.

    .. math::
        H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top, \qquad G_t = \gamma_t G_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \frac{1}{\sqrt{K}}\, G_t^\top \left(H_t + \mathrm{Diag}(\lambda)\right)^{-1} q_t

    with :math:`\gamma_t = \exp(\texttt{log\_decay}_t)`.  The map :math:`G_t^\top (H_t + \Lambda)^{-1}` has the least
    weighted squared error over all pairs seen so far plus a ridge :math:`\lambda`: the optimum that one step of the
    delta rule only moves towards.  The system is solved exactly, by a Cholesky factor per token, where the paper
    iterates conjugate gradients; that takes O(T K^2) memory.  The paper has no scale and keeps :math:`\lambda` above
    0.25.

    Args:
        normalize_qk: divide q and k by their 2-norm first, as the paper does.
    """

    aliases: ClassVar[tuple[str, ...]] = ("mesanet", "mesa_net")
    paper: ClassVar[Paper] = Paper(
        "2506.05233", "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training", "von Oswald et al.", 2025
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (K * K * K / 3 + K * V + 64 * (K * K + K + V))",
        decode="K * K * K / 3 + K * V",
        state="K * K + K * V",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate"),
        "beta": Input("B H T", low=0.0, high=1.0, doc="weight of the pair in the regression"),
        "ridge": Input(
            "H K", low=0.25, accepted=(1e-4, float("inf")), doc="regulariser by channel", optional=True, start=1.0
        ),
    }

    normalize_qk: bool = True

    def __post_init__(self) -> None:
        self.require_choice("normalize_qk", (False, True))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        if self.normalize_qk:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        write, log_decay = inputs["beta"][..., None] * k, inputs["log_decay"][..., None]
        # H_t of every token: a memory of one row, whose values are outer products
        one, pairs = torch.ones_like(log_decay), (write[..., :, None] * k[..., None, :]).flatten(-2)
        H = recur(Terms(one, one, pairs, log_decay=log_decay), scale=1.0).view(*k.shape, k.shape[-1])
        factor = torch.linalg.cholesky(H + torch.diag_embed(inputs["ridge"])[:, None])
        read = torch.cholesky_solve(q[..., None], factor)[..., 0]
        return recur(Terms(read, write, v, log_decay=log_decay))

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor, beta: Tensor, ridge: Tensor
    ) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        o = []
        for t in range(len(q)):
            age = torch.stack([log_decay[s + 1 : t + 1].sum() for s in range(t + 1)])
            weight = beta[: t + 1] * age.exp()
            H = k[: t + 1].T @ (weight[:, None] * k[: t + 1])
            G = k[: t + 1].T @ (weight[:, None] * v[: t + 1])
            x = torch.linalg.solve((H + torch.diag(ridge)).double(), q[t].double())  # torch solves in no half precision
            o.append(scale * G.T @ x.to(q.dtype))
        return torch.stack(o)
