"""Log-linear Mamba-2: the past in buckets of doubling size, each with a memory and a weight of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.recurrent.mamba2 import Mamba2
from foveal.spec import Cost, Input, Limit, Paper

PAPER = Paper("2506.04761", "Log-Linear Attention", "Guo, Yang, Goel, Xing, Dao, Kim", 2025)
COST = Cost(
    train="max(levels - 1, 1) * T * (K * V + 64 * (K + V))",
    decode="max(levels - 1, 1) * K * V",
    state="max(levels - 1, 1) * K * V + 1",
)
LEVEL_WEIGHTS = Input("B H T L", low=0.0, doc="weight of each level, the query's own token first, L = levels")
RESET = -1e3  # its exponential is 0 in float64; a larger one would cost the sums of decays their last digits


def by_level(recur: Recur, terms: Terms, weights: Tensor) -> Tensor:
    """The reads of a recurrence, each bucket of the past weighed by its level.

    With tokens counted from 0, key j is at level l >= 1 of query t if bit l - 1 is the highest in which they differ:
    then both lie in one block of 2^l tokens, j in its first half and t in its second.  So level l is the recurrence
    that starts afresh with every block, writes in first halves and is read in second ones.  The last level is whatever
    the others leave of the whole.

    Args:
        recur: the recurrences of the call.
        terms: what the whole would be computed from, without a skip.
        weights: [B, H, T, L].
    """
    t = recur.positions()[0].long() - 1
    own = recur.scale * (terms.read * terms.write).sum(-1, keepdim=True) * terms.value
    last, levels = weights[..., -1:], weights.shape[-1]
    output = last * recur(terms) + (weights[..., :1] - last) * own
    log_decay = torch.zeros_like(terms.write[..., :1]) if terms.log_decay is None else terms.log_decay
    alone = recur.call.state is None and not recur.call.want_state
    for level in range(1, levels - 1):
        half = 2 ** (level - 1)
        if alone and half >= t.shape[2]:
            break  # no query is that far into the sequence, and no later call will ask
        second, fresh = t // half % 2 == 1, t % (2 * half) == 0
        part = replace(
            terms,
            read=terms.read.where(second, 0),
            write=terms.write.where(~second, 0),
            log_decay=log_decay.masked_fill(fresh, RESET),
        )
        output = output + (weights[..., level, None] - last) * recur(part)
    return output


@dataclass(frozen=True)
class LogLinearMamba2(Recurrence, name="log_linear_mamba2"):
    r"""Keep logarithmically many memories instead of one: fine for the near past, coarse for the far one.

    .. math::
        o_t = \mathrm{scale} \sum_{l=0}^{L-1} \lambda_t^{(l)} \left(S_t^{(l)}\right)^\top q_t + D_h v_t, \qquad
        S_t^{(l)} = \sum_{j \in B_t^{(l)}} e^{A_h (\Delta_{j+1} + \dots + \Delta_t)}\, \Delta_j k_j v_j^\top

    The buckets are those of a Fenwick tree: level 0 is the token itself, and the tokens before it are cut, from the
    nearest on, into one bucket of :math:`2^{l-1}` tokens for every bit l - 1 that is set in t, counted from 0.  Equal
    weights of 1 are Mamba-2.  The paper needs :math:`L = \lceil \log_2 T \rceil + 1` levels; here their number is
    fixed, and the last level takes in everything that is further back.  The whole costs O(T log T), one recurrence per
    level.

    Args:
        levels: L; it separates levels up to :math:`2^{L-1}` tokens.

    Raises:
        ValueError: if ``levels`` is below 1.
    """

    paper: ClassVar[Paper] = PAPER
    cost: ClassVar[Cost] = COST
    inputs: ClassVar[dict[str, Input]] = {**Mamba2.inputs, "level_weights": LEVEL_WEIGHTS}
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"levels": 5},)
    limits: ClassVar = (
        Limit(
            {"levels": 4},
            "mamba2",
            inputs=lambda x: (
                x | {"level_weights": torch.ones_like(x["level_weights"])},
                {n: y for n, y in x.items() if n != "level_weights"},
            ),
            why="levels that weigh alike",
        ),
    )

    levels: int = 16

    def __post_init__(self) -> None:
        self.require_int("levels")

    def widths(self, key_width: int) -> dict[str, int]:
        return {"L": self.levels}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        terms = Mamba2().terms(q, k, v, dt=inputs["dt"], A=inputs["A"])
        output = by_level(recur, terms, inputs["level_weights"])
        return output if "D" not in inputs else output + inputs["D"][:, None, None] * v

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        dt: Tensor,
        A: Tensor,
        level_weights: Tensor,
        D: Tensor | None = None,
    ) -> Tensor:
        o = []
        for t in range(len(q)):
            bucket, end = {t: 0}, t  # level of each key
            while end > 0:  # the lowest set bit of what is left is the size of the next bucket
                size = end & -end
                bucket |= dict.fromkeys(range(end - size, end), min(size.bit_length(), self.levels - 1))
                end -= size
            w = torch.stack(
                [level_weights[t, bucket[j]] * (A * dt[j + 1 : t + 1].sum()).exp() * dt[j] for j in range(t + 1)]
            )
            o.append(scale * (w * (k[: t + 1] @ q[t])) @ v[: t + 1] + (0 if D is None else D * v[t]))
        return torch.stack(o)
