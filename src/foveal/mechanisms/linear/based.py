"""Based: softmax's exponential cut after its second order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.constant import constant
from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Limit, Paper


@dataclass(frozen=True)
class Based(Recurrence, name="based"):
    r"""Replace the exponential of softmax by its Taylor polynomial of second order, which factorises.

    .. math::
        o_t = \frac{\sum_{j \le t} \left(1 + u_{tj} + \tfrac{1}{2} u_{tj}^2\right) v_j}
        {\sum_{j \le t} \left(1 + u_{tj} + \tfrac{1}{2} u_{tj}^2\right)}, \qquad u_{tj} = \mathrm{scale}\; q_t^\top k_j

    Weights are at least 1/2, so nothing is ever ignored; small scores give softmax up to their third power.  The state
    grows with K^2: the paper projects q and k to K = 16, and sets windowed softmax and short convolutions beside it.
    Each product of two channels is kept once, not twice as in the paper's code.
    """

    paper: ClassVar[Paper] = Paper(
        "2402.18668",
        "Simple linear attention language models balance the recall-throughput tradeoff",
        "Arora, Eyuboglu, Zhang, Timalsina, Alberti",
        2024,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (1 + K + K * (K + 1) // 2) * (V + 64)",
        decode="(1 + K + K * (K + 1) // 2) * V",
        state="(1 + K + K * (K + 1) // 2) * (V + 1)",
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    limits: ClassVar = (Limit({}, "softmax_rnn", {"order": 2}, why="both cut the exponential after order 2"),)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        q, k = recur.scaled(q, k)
        return recur(Terms(taylor(q, 2), taylor(k, 2), v, normalize=True))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        u = scale * q @ k.mT
        weight = (1 + u + u**2 / 2) * visible
        return weight / weight.sum(-1, keepdim=True) @ v


def taylor(x: Tensor, order: int) -> Tensor:
    """Features [..., comb(K + order, order)] whose inner product is sum_n (x'y)^n / n!, n <= order."""
    return torch.cat([power(x, n) for n in range(order + 1)], -1)


def power(x: Tensor, order: int) -> Tensor:
    """Features [..., comb(K + order - 1, order)] whose inner product is (x'y)^order / order!.

    By the multinomial theorem: every monomial once, divided by the root of the product of its exponents' factorials.
    """
    if order == 0:
        return torch.ones_like(x[..., :1])
    factors, weights = monomials(x.shape[-1], order)
    product: Tensor = weights.to(x)
    for index in factors:
        product = product * x.index_select(-1, index.to(x.device))
    return product


@constant
def monomials(width: int, order: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The channels that each monomial multiplies, one index [n] per factor, and the weights [n]."""
    chosen = list(itertools.combinations_with_replacement(range(width), order))
    weights = [math.prod(math.factorial(times) for times in Counter(one).values()) ** -0.5 for one in chosen]
    return torch.tensor(chosen).unbind(1), torch.tensor(weights, dtype=torch.float64)
