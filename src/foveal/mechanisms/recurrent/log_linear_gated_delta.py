"""Log-linear Gated DeltaNet: the gated delta rule with a memory per bucket of the past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence
from foveal.mechanisms.recurrent.gated_delta_rule import GatedDeltaRule
from foveal.mechanisms.recurrent.log_linear_mamba2 import COST, LEVEL_WEIGHTS, PAPER, by_level
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class LogLinearGatedDelta(Recurrence, name="log_linear_gated_delta"):
    r"""Split the memory of the gated delta rule by how long ago it was written, and weigh the parts by the token.

    .. math::
        o_t = \frac{1}{\sqrt{K}} \sum_{l=0}^{L-1} \lambda_t^{(l)} \left(S_t^{(l)}\right)^\top q_t, \qquad
        S_t^{(l)} = \sum_{j \in B_t^{(l)}} \Big(\prod_{i=t}^{j+1} \alpha_i (I - \beta_i k_i k_i^\top)\Big)
        \beta_j k_j v_j^\top

    with the buckets of ``log_linear_mamba2``: every memory forgets and is erased by every token, but takes in only its
    own.  Equal weights of 1 are the gated delta rule.  The last level takes in everything that is further back.

    Args:
        levels: L; it separates levels up to :math:`2^{L-1}` tokens.
        normalize_qk: divide q and k by their 2-norm first.

    Raises:
        ValueError: if ``levels`` is below 1.
    """

    aliases: ClassVar[tuple[str, ...]] = ("log_linear_gated_deltanet",)
    paper: ClassVar[Paper] = PAPER
    cost: ClassVar[Cost] = COST
    inputs: ClassVar[dict[str, Input]] = {**GatedDeltaRule.inputs, "level_weights": LEVEL_WEIGHTS}
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"levels": 4},)
    limits: ClassVar = (
        Limit(
            {"levels": 5},
            "gated_delta_rule",
            inputs=lambda x: (
                x | {"level_weights": torch.ones_like(x["level_weights"])},
                {n: y for n, y in x.items() if n != "level_weights"},
            ),
            why="levels that weigh alike",
        ),
    )

    levels: int = 16
    normalize_qk: bool = True

    def __post_init__(self) -> None:
        self.require_int("levels")
        self.require_choice("normalize_qk", (False, True))

    def widths(self, key_width: int) -> dict[str, int]:
        return {"L": self.levels}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        rule = GatedDeltaRule(self.normalize_qk)
        terms = rule.terms(q, k, v, beta=inputs["beta"], log_decay=inputs["log_decay"])
        return by_level(recur, terms, inputs["level_weights"])

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        log_decay: Tensor,
        beta: Tensor,
        level_weights: Tensor,
    ) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        # the decoding rule: one memory per level; a carry runs through the levels that are full, as in a counter
        top = len(q).bit_length() + 1
        S = [v.new_zeros(k.shape[-1], v.shape[-1]) for _ in range(top + 1)]
        eye, o = torch.eye(k.shape[-1], dtype=k.dtype), []
        for t in range(len(q)):
            if t > 0:
                carry = (t & -t).bit_length()
                S[carry] = S[carry] + torch.stack(S[:carry]).sum(0)
                S[:carry] = [torch.zeros_like(S[0]) for _ in range(carry)]
            S = [log_decay[t].exp() * (eye - beta[t] * torch.outer(k[t], k[t])) @ level for level in S]
            S[0] = beta[t] * torch.outer(k[t], v[t])
            read = [level_weights[t, min(n, self.levels - 1)] * level.T @ q[t] for n, level in enumerate(S)]
            o.append(scale * torch.stack(read).sum(0))
        return torch.stack(o)
