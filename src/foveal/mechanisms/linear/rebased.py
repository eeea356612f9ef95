"""ReBased: a learned parabola of the score in softmax's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.based import power
from foveal.spec import Cost, Input, Paper

EPS = 1e-5  # added to the variance


@dataclass(frozen=True)
class ReBased(Recurrence, name="rebased"):
    r"""Weigh the past by the square of a score whose zero is learned, so that tokens can be ignored entirely.

    .. math::
        o_t = \frac{\sum_{j \le t} (q_t'^\top k_j')^2\, v_j}{\sum_{j \le t} (q_t'^\top k_j')^2}, \qquad
        q' = \gamma_q \odot \mathrm{norm}(q) + \beta_q, \quad k' = \gamma_k \odot \mathrm{norm}(k) + \beta_k

    where norm subtracts the mean and divides by the standard deviation over the channels, without an affine map.
    ``scale`` cancels.  The paper adds a small number to the denominator; here a query whose weights are all exactly
    0 returns 0.  The state grows with K^2: the paper projects q and k to K = 16.
    """

    paper: ClassVar[Paper] = Paper(
        "2402.10644",
        "Linear Transformers with Learnable Kernel Functions are Better In-Context Models",
        "Aksenov, Balagansky, Lo Cicero Vaina, Shaposhnikov, Gorbatovski, Gavrilov",
        2024,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * K * (K + 1) // 2 * (V + 64)",
        decode="K * (K + 1) // 2 * V",
        state="K * (K + 1) // 2 * (V + 1)",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "query_gain": Input("H K", doc="gamma of the queries", optional=True, start=1.0),
        "query_bias": Input("H K", doc="beta of the queries", optional=True, start=0.0),
        "key_gain": Input("H K", doc="gamma of the keys", optional=True, start=1.0),
        "key_bias": Input("H K", doc="beta of the keys", optional=True, start=0.0),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        gain_q, bias_q, gain_k, bias_k = (inputs[name][:, None] for name in self.inputs)
        q = gain_q * layer_norm(q, q.shape[-1:], eps=EPS) + bias_q
        k = gain_k * layer_norm(k, k.shape[-1:], eps=EPS) + bias_k
        return recur(Terms(power(q, 2), power(k, 2), v, normalize=True))

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        visible: Tensor,
        query_gain: Tensor,
        query_bias: Tensor,
        key_gain: Tensor,
        key_bias: Tensor,
    ) -> Tensor:
        def affine(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            return gamma * (x - mean) / (variance + EPS).sqrt() + beta

        weight = (affine(q, query_gain, query_bias) @ affine(k, key_gain, key_bias).mT) ** 2 * visible
        total = weight.sum(-1, keepdim=True)
        return weight / total.where(total > 0, 1.0) @ v
