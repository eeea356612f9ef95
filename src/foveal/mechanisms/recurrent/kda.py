"""Kimi Delta Attention: the delta rule with a forget gate per key channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.mechanisms.recurrent.delta_rule import DeltaRule
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class KDA(Recurrence, name="kda"):
    r"""Let every key channel forget at its own rate, then overwrite what the key still holds.

    .. math::
        S_t = \left(I - \beta_t k_t k_t^\top\right) \mathrm{Diag}(\alpha_t)\, S_{t-1} + \beta_t k_t v_t^\top,
        \qquad o_t = S_t^\top q_t / \sqrt{K}

    with :math:`\alpha_t = \exp(\texttt{log\_decay}_t)` per channel.  It stands to the gated delta rule as gated linear
    attention stands to retention: channels serve as memories of different length.  The short convolution, the output
    gate and the norm of the paper's layer stand around it.

    Args:
        normalize_qk: divide q and k by their 2-norm first, as the paper does; without it the recurrence is stable
            only while ``beta * |k|^2 <= 2``.
    """

    aliases: ClassVar[tuple[str, ...]] = ("kimi_delta_attention", "kimi_linear")
    paper: ClassVar[Paper] = Paper(
        "2510.26692", "Kimi Linear: An Expressive, Efficient Attention Architecture", "Kimi Team", 2025
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T K", high=0.0, doc="natural log of the forget gate of each key channel"),
        **DeltaRule.inputs,
    }
    limits: ClassVar = (
        Limit(
            {},
            "gated_delta_rule",
            inputs=lambda x: (
                x | {"log_decay": x["log_decay"][..., :1].expand_as(x["log_decay"])},
                x | {"log_decay": x["log_decay"][..., 0]},
            ),
            why="channels that forget alike",
        ),
    )

    normalize_qk: bool = True

    def __post_init__(self) -> None:
        self.require_choice("normalize_qk", (False, True))

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor) -> Terms:
        return replace(DeltaRule(self.normalize_qk).terms(q, k, v, beta=beta), log_decay=log_decay)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor, beta: Tensor) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        S, eye = v.new_zeros(k.shape[-1], v.shape[-1]), torch.eye(k.shape[-1], dtype=k.dtype)
        o = []
        for t in range(len(q)):
            erase = eye - beta[t] * torch.outer(k[t], k[t])
            S = erase @ torch.diag(log_decay[t].exp()) @ S + beta[t] * torch.outer(k[t], v[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
