"""The delta rule (DeltaNet): write the difference between the new value and what the key already holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class DeltaRule(Recurrence, name="delta_rule"):
    r"""Overwrite what the key already holds instead of adding to it.

    .. math::
        S_t = S_{t-1} + \beta_t k_t \left(v_t - S_{t-1}^\top k_t\right)^\top, \qquad o_t = S_t^\top q_t / \sqrt{K}

    Each step is one step of gradient descent on :math:`\tfrac12 |S^\top k_t - v_t|^2` with rate :math:`\beta_t`.
    Orthogonal keys of norm 1 with :math:`\beta = 1` are stored exactly.

    Args:
        normalize_qk: divide q and k by their 2-norm first, as the paper's models do; without it the recurrence is
            stable only while ``beta * |k|^2 <= 2``.
    """

    aliases: ClassVar[tuple[str, ...]] = ("deltanet", "delta_net", "fast_weight")
    paper: ClassVar[Paper] = Paper(
        "2406.06484",
        "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        "Yang, Wang, Zhang, Shen, Kim",
        2024,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "beta": Input("B H T", low=0.0, high=1.0, accepted=(0.0, 2.0), doc="writing strength; up to 2 reflects")
    }
    limits: ClassVar = (
        Limit(
            {},
            "gated_delta_rule",
            inputs=lambda x: (x, x | {"log_decay": torch.zeros_like(x["beta"])}),
            why="the gated rule with gates of 1",
        ),
    )

    normalize_qk: bool = True

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Terms:
        if self.normalize_qk:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        write = beta[..., None] * k
        return Terms(read=q, write=write, value=v, erase=(write, k))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, beta: Tensor) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
