"""The gated delta rule (Gated DeltaNet): forget everything a little, then overwrite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.mechanisms.recurrent.delta_rule import DeltaRule
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class GatedDeltaRule(Recurrence, name="gated_delta_rule"):
    r"""Forget everything a little, then overwrite what the key already holds.

    .. math::
        S_t = \alpha_t S_{t-1} + \beta_t k_t \left(v_t - \alpha_t S_{t-1}^\top k_t\right)^\top,
        \qquad o_t = S_t^\top q_t / \sqrt{K}

    with :math:`\alpha_t = \exp(\texttt{log\_decay}_t)`.  Gates of 1 are the delta rule.  The erasure reads the
    decayed state, as in the official code.

    Args:
        normalize_qk: divide q and k by their 2-norm first, as the paper does; without it the recurrence is stable
            only while ``beta * |k|^2 <= 2``.
    """

    aliases: ClassVar[tuple[str, ...]] = ("gated_deltanet", "gated_delta_net", "gdn")
    paper: ClassVar[Paper] = Paper(
        "2412.06464", "Gated Delta Networks: Improving Mamba2 with Delta Rule", "Yang, Kautz, Hatamizadeh", 2024
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate"),
        **DeltaRule.inputs,
    }
    limits: ClassVar = (
        Limit(
            {},
            "delta_rule",
            inputs=lambda x: (x | {"log_decay": torch.zeros_like(x["beta"])}, {"beta": x["beta"]}),
            why="gates of 1 forget nothing",
        ),
    )

    normalize_qk: bool = True

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, log_decay: Tensor) -> Terms:
        ungated = DeltaRule(self.normalize_qk).terms(q, k, v, beta=beta)
        return replace(ungated, log_decay=log_decay[..., None])

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor, beta: Tensor) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = log_decay[t].exp() * S
            S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
