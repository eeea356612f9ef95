"""Higher-order linear attention (HLA), second order: queries meet through the keys that both have seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class HLA(Recurrence, name="hla"):
    r"""Weigh past values by how alike the two queries are in the eyes of the earlier keys.

    .. math::
        o_t = \sum_{j \le t} \sum_{i \le j} \gamma^{2 t - i - j} (q_t^\top k_i)(q_j^\top k_i)\, v_j,
        \qquad O = \left(L \circ W W^\top\right) V \text{ for } \gamma = 1, \quad W = L \circ Q K^\top

    L is the causal mask and every product of q and k takes the factor ``scale``.  It runs as two recurrences: linear
    attention from q over k to k itself gives keys S_j q_j, over which a second one attends.  With decay the paper's
    correction of the mask (gamma G in its section 4.3) is not that of the masked product; this is the exact one.

    Args:
        gamma: decay per token of both moments.
        normalize: divide by the sum of the weights, which may be near 0 or negative unless features are positive; the
            paper adds an epsilon to it, here a sum of 0 gives 0.

    Raises:
        ValueError: if ``gamma`` is not in (0, 1].
    """

    aliases: ClassVar[tuple[str, ...]] = ("higher_order_linear_attention", "hla2")
    paper: ClassVar[Paper] = Paper("2510.27258", "Higher-order Linear Attention", "Zhang, Qin, Wang, Gu", 2025)
    cost: ClassVar[Cost] = Cost(
        train="T * (K * (K + V) + 64 * (3 * K + V))", decode="K * (K + V)", state="K * (K + V + normalize)"
    )
    examples: ClassVar = ({}, {"gamma": 0.9})

    gamma: float = 1.0
    normalize: bool = False

    def __post_init__(self) -> None:
        self.require_number("gamma", 0, 1, "a number in (0, 1]")
        self.require_choice("normalize", (False, True))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        seen = recur(Terms(q, k, k, log_decay=steady(self.gamma, k)))
        return recur(Terms(q, seen, v, log_decay=steady(self.gamma**2, k), normalize=self.normalize))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        q = scale * q
        values = torch.cat((v, torch.ones_like(v[:, :1])), -1)  # ones make the denominator
        S, C = k.new_zeros(k.shape[-1], k.shape[-1]), k.new_zeros(k.shape[-1], values.shape[-1])
        G, o = C, []
        for q_t, k_t, v_t in zip(q, k, values, strict=True):
            G = self.gamma**2 * G + self.gamma * torch.outer(k_t, k_t @ C)
            S = self.gamma * S + torch.outer(k_t, k_t)
            C = self.gamma * C + torch.outer(q_t, v_t)
            o.append(q_t @ (S @ C - G))
        out = torch.stack(o)
        return out[:, :-1] / out[:, -1:] if self.normalize else out[:, :-1]


def steady(decay: float, like: Tensor) -> Tensor | None:
    """The log of one decay for all tokens, [B, H, T, 1]; None for 1."""
    return None if decay == 1 else torch.full_like(like[..., :1], math.log(decay))
