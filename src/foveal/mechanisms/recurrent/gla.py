"""Gated linear attention: a forget gate per key channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class GLA(Recurrence, name="gla"):
    r"""Let every key channel forget at a rate that the token decides.

    .. math::
        S_t = \mathrm{Diag}(\alpha_t)\, S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top q_t / \sqrt{K}

    with :math:`\alpha_t = \exp(\texttt{log\_decay}_t)` per channel.  Gates of 1 are linear attention without
    normaliser; gates that are equal over the channels are retention with data-dependent decay.
    """

    aliases: ClassVar[tuple[str, ...]] = ("gated_linear_attention",)
    paper: ClassVar[Paper] = Paper(
        "2312.06635",
        "Gated Linear Attention Transformers with Hardware-Efficient Training",
        "Yang, Wang, Shen, Panda, Kim",
        2023,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T K", high=0.0, doc="natural log of the forget gate of each key channel")
    }
    limits: ClassVar = (
        Limit(
            {},
            "linear",
            {"feature_map": "identity", "normalize": False},
            inputs=lambda x: ({"log_decay": torch.zeros_like(x["log_decay"])}, {}),
            why="gates of 1 forget nothing",
        ),
    )

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor) -> Terms:
        return Terms(read=q, write=k, value=v, log_decay=log_decay)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor) -> Tensor:
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            S = log_decay[t].exp()[:, None] * S + torch.outer(k[t], v[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
