"""Softmax attention as a recurrent network: one recurrence per order of its exponential, cut at an order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.based import taylor
from foveal.spec import Cost, Paper

FEATURES = "(1 + (order > 0) * K + (order > 1) * K * (K + 1) // 2 + (order > 2) * K * (K + 1) * (K + 2) // 6)"


@dataclass(frozen=True)
class SoftmaxRNN(Recurrence, name="softmax_rnn"):
    r"""Unroll softmax into recurrences over Kronecker powers of q and k, and keep the first orders.

    .. math::
        o_t = G_t \sum_{n=0}^{N} \frac{\mathrm{scale}^n}{n!} \left(H_t^{(n)}\right)^\top q_t^{\otimes n}, \qquad
        H_t^{(n)} = H_{t-1}^{(n)} + k_t^{\otimes n} v_t^\top

    Order 1 alone is linear attention; N to infinity with the sum as normaliser is softmax, with an error of
    |u|^(N+1) exp(|u|) / (N+1)! in each weight, u = scale q'k.  The paper reads G_t as a gate and finds that a vector
    norm of the output serves as well.  Odd N with ``"sum"`` can divide by a number near 0.  The state grows with
    K^N; equal entries of a Kronecker power are kept once.

    Args:
        order: N, from 0 to 3.
        normalizer: G_t: ``"sum"`` is 1 / (sum of weights), ``"norm"`` is 1 / (2-norm of the output), ``"none"`` is 1.

    Raises:
        ValueError: if ``order`` is not in 0..3 or ``normalizer`` is unknown.
    """

    paper: ClassVar[Paper] = Paper(
        "2507.23632",
        "On the Expressiveness of Softmax Attention: A Recurrent Neural Network Perspective",
        "Mongaras, Larson",
        2025,
    )
    cost: ClassVar[Cost] = Cost(
        train=f"T * {FEATURES} * (V + 64)",
        decode=f"{FEATURES} * V",
        state=f"{FEATURES} * (V + (normalizer == 'sum'))",
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    linear_in_values: ClassVar[bool] = False  # with "norm"
    examples: ClassVar = (
        {},
        {"order": 0},
        {"order": 1, "normalizer": "none"},
        {"order": 3, "normalizer": "norm"},
    )

    order: int = 2
    normalizer: str = "sum"

    def __post_init__(self) -> None:
        self.require_choice("order", (0, 1, 2, 3))
        self.require_choice("normalizer", ("none", "norm", "sum"))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        q, k = (taylor(x, self.order) for x in recur.scaled(q, k))
        o = recur(Terms(q, k, v, normalize=self.normalizer == "sum"), scale=1.0)
        return normalize(o, dim=-1) if self.normalizer == "norm" else o

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        o, total = torch.zeros(len(q), v.shape[-1], dtype=q.dtype), torch.zeros(len(q), 1, dtype=q.dtype)
        for n in range(self.order + 1):
            weight = scale**n / math.factorial(n) * (q @ k.mT) ** n * visible
            o, total = o + weight @ v, total + weight.sum(-1, keepdim=True)
        if self.normalizer == "sum":
            return o / total
        return o / o.norm(dim=-1, keepdim=True) if self.normalizer == "norm" else o
