"""DeltaProduct: several delta-rule steps per token, so that one transition is a product of Householder matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.engines.recurrence import Recur, Recurrence
from foveal.mechanisms.recurrent.delta_rule import DeltaRule
from foveal.mechanisms.recurrent.gated_delta_rule import GatedDeltaRule
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class DeltaProduct(Recurrence, name="delta_product"):
    r"""Take several steps of the delta rule per token, each with its own key, value and writing strength.

    .. math::
        S_{t,i} = S_{t,i-1} + \beta_{t,i}\, k_{t,i} \left(v_{t,i} - S_{t,i-1}^\top k_{t,i}\right)^\top, \quad
        S_{t,0} = \alpha_t S_{t-1}, \qquad S_t = S_{t,n}, \quad o_t = S_t^\top q_t / \sqrt{K}

    A product of n reflections :math:`I - \beta k k^\top` with :math:`\beta` up to 2 reaches every rotation in n
    dimensions, which lets the state track permutations of n + 1 things; one step is the delta rule.  The first key and
    value are k and v, the others come as inputs.  With the forget gate :math:`\alpha_t = \exp(\texttt{log\_decay}_t)`
    it is Gated DeltaProduct; without the input nothing is forgotten.

    Args:
        steps: n, steps per token.
        normalize_qk: divide q and all keys by their 2-norm first, as the paper does; without it the recurrence is
            stable only while ``beta * |k|^2 <= 2``.

    Raises:
        ValueError: if ``steps`` is below 1.
    """

    aliases: ClassVar[tuple[str, ...]] = ("deltaproduct", "gated_delta_product")
    paper: ClassVar[Paper] = Paper(
        "2502.10297",
        "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products",
        "Siems, Carstensen, Zela, Hutter, Pontil, Grazzi",
        2025,
    )
    cost: ClassVar[Cost] = Cost(train="steps * T * (K * V + 64 * (K + V))", decode="steps * K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "k_more": Input("B H T N K", doc="keys of the steps after the first, N = steps - 1"),
        "v_more": Input("B H T N V", doc="values of the steps after the first"),
        "beta": Input("B H T M", low=0.0, high=2.0, doc="writing strength of each step, M = steps; above 1 reflects"),
        "log_decay": Input(
            "B H T", high=0.0, doc="natural log of the forget gate before the first step", optional=True
        ),
    }
    linear_in_values: ClassVar[bool] = False  # nor in v alone: the further values add to it
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"steps": 3})
    limits: ClassVar = (
        Limit(
            {"steps": 1},
            "delta_rule",
            inputs=lambda x: (x, {"beta": x["beta"][..., 0]}),
            why="one step per token",
        ),
        Limit(
            {"steps": 1},
            "gated_delta_rule",
            inputs=lambda x: (
                x | {"log_decay": -x["beta"][..., 0]},
                {"beta": x["beta"][..., 0], "log_decay": -x["beta"][..., 0]},
            ),
            why="one step per token, with a forget gate",
        ),
    )

    steps: int = 2
    normalize_qk: bool = True

    def __post_init__(self) -> None:
        self.require_int("steps")
        self.require_choice("normalize_qk", (False, True))

    def widths(self, key_width: int) -> dict[str, int]:
        return {"N": self.steps - 1, "M": self.steps}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        keys, values = (
            torch.cat((x[..., None, :], inputs[more]), 3).flatten(2, 3) for x, more in ((k, "k_more"), (v, "v_more"))
        )
        # q asks after the last step, the gate acts before the first; hidden tokens are 0 in every letter
        asks, beta = pad(q[..., None, :], (0, 0, self.steps - 1, 0)).flatten(2, 3), inputs["beta"].flatten(2)
        if "log_decay" in inputs:
            log_decay = pad(inputs["log_decay"][..., None], (0, self.steps - 1)).flatten(2)
            rule = GatedDeltaRule(self.normalize_qk)
            terms = rule.terms(asks, keys, values, beta=beta, log_decay=log_decay)
        else:
            terms = DeltaRule(self.normalize_qk).terms(asks, keys, values, beta=beta)
        return recur(terms)[:, :, self.steps - 1 :: self.steps]

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        k_more: Tensor,
        v_more: Tensor,
        beta: Tensor,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        if self.normalize_qk:
            q, k, k_more = (x / x.norm(dim=-1, keepdim=True) for x in (q, k, k_more))
        S, eye = v.new_zeros(k.shape[-1], v.shape[-1]), torch.eye(k.shape[-1], dtype=k.dtype)
        o = []
        for t in range(len(q)):
            if log_decay is not None:
                S = log_decay[t].exp() * S
            for i in range(self.steps):
                k_i, v_i = (k[t], v[t]) if i == 0 else (k_more[t, i - 1], v_more[t, i - 1])
                S = (eye - beta[t, i] * torch.outer(k_i, k_i)) @ S + beta[t, i] * torch.outer(k_i, v_i)
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
