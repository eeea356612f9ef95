"""Magnitude-aware linear attention (MALA): the length of a query sharpens its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu

from foveal.engines.recurrence import Recur, Recurrence
from foveal.engines.recurrence.program import ratio
from foveal.mechanisms.linear.inline import mean_scores
from foveal.spec import Cost, Paper


@dataclass(frozen=True)
class MALA(Recurrence, name="mala"):
    r"""Let the length of the query, which division by the sum cancels, sharpen the row again.

    .. math::
        o_t = \sum_j \left(\beta_t s_{tj} - \gamma_t\right) v_j, \qquad
        \beta_t = 1 + \frac{1}{\sum_m s_{tm}}, \quad \gamma_t = \frac{1}{N} \sum_m s_{tm}, \quad
        s_{tj} = \frac{\mathrm{scale}}{N} \phi(q_t)^\top \phi(k_j)

    with phi(x) = elu(x) + 1.  It is normalised linear attention plus the centred scores: rows sum to 1, weights may
    be negative, and phi(q) near 0 is plain linear attention.  N counts the visible keys, up to t in the causal form;
    the factor scale / N is that of the official code and keeps the output's size independent of N.  The official
    code also rotates phi(q) and phi(k), adds a depth-wise convolution of v and gates the output: all are left to the
    layer around it.
    """

    aliases: ClassVar[tuple[str, ...]] = ("magnitude_aware_linear_attention",)
    paper: ClassVar[Paper] = Paper(
        "2507.00698", "Rectifying Magnitude Neglect in Linear Attention", "Fan, Huang, Ai, He", 2025
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (K * V + 64 * (K + 2 * V))", decode="(K + 1) * (V + 1)", state="(K + 1) * (V + 1)"
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        weighted, total, mean = mean_scores(recur, elu(q) + 1, elu(k) + 1, v)
        return ratio(weighted, total) + recur.scale * (weighted - total * mean)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        N = visible.sum(-1, keepdim=True, dtype=q.dtype)
        s = scale / N * (phi_q @ phi_k.mT) * visible
        beta = 1 + 1 / s.sum(-1, keepdim=True)
        gamma = s.sum(-1, keepdim=True) / N
        return (beta * s - gamma * visible) @ v
