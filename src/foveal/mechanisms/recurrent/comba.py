"""Comba: a delta rule with closed-loop control, whose erasing strength and read-out are corrected by feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recurrence, Terms
from foveal.mechanisms.recurrent.delta_rule import DeltaRule
from foveal.spec import Cost, Input, Limit, Paper

FORGOTTEN = -30.0  # e^-30 of a memory beside what is written is below the last digit of fp32


def erasing_before_decay(terms: Terms, seen: Tensor) -> Terms:
    """The terms with an erasure that reads the undecayed state: w' S_{t-1} = (w / alpha)' (alpha S_{t-1}).

    Gates below e^-30 count as e^-30, which bounds 1 / alpha.

    Args:
        terms: terms with a decay and an erasure, whose w is not used.
        seen: w [B, H, T, K].
    """
    assert terms.log_decay is not None and terms.erase is not None
    log_decay = terms.log_decay.clamp(min=FORGOTTEN)
    return Terms(terms.read, terms.write, terms.value, log_decay, (terms.erase[0], seen * (-log_decay).exp()))


@dataclass(frozen=True)
class Comba(Recurrence, name="comba"):
    r"""Forget a little and, by a strength of its own, what the key holds; read with the key taken off the query.

    .. math::
        S_t = \left(\alpha_t - b\, \beta_t k_t k_t^\top\right) S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = S_t^\top (q_t - d\, k_t) / \sqrt{K}

    with :math:`\alpha_t = \exp(\texttt{log\_decay}_t)`, the state feedback b and the output correction d, a number per
    head each.  The transition is a scalar plus a matrix of rank one: unlike in the gated delta rule the erasure reads
    the state before it has decayed.  Gates below :math:`e^{-30}` count as :math:`e^{-30}`.  The paper's d starts at 1
    or, in small models, at 0.02; the default is 1.

    Args:
        normalize_qk: divide q and k by their 2-norm first, as the paper does.
    """

    paper: ClassVar[Paper] = Paper(
        "2506.02475",
        "Comba: Improving Bilinear RNNs with Closed-loop Control",
        "Hu, Pan, Du, Lan, Tang, Wen, Liang, Sun",
        2025,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T", high=0.0, doc="natural log of the forget gate"),
        "beta": Input("B H T", low=0.0, high=1.0, doc="writing strength"),
        "feedback": Input("H", low=0.0, high=1.0, doc="erasing strength as a share of beta", optional=True, start=0.5),
        "correction": Input("H", doc="how much of the key is taken off the query", optional=True, start=1.0),
    }
    limits: ClassVar = (
        Limit(
            {},
            "delta_rule",
            inputs=lambda x: (
                {
                    "log_decay": torch.zeros_like(x["beta"]),
                    "beta": x["beta"],
                    "feedback": x["beta"].new_ones(x["beta"].shape[1]),
                    "correction": x["beta"].new_zeros(x["beta"].shape[1]),
                },
                {"beta": x["beta"]},
            ),
            why="nothing forgotten, full feedback, no correction",
        ),
    )

    normalize_qk: bool = True

    def __post_init__(self) -> None:
        self.require_choice("normalize_qk", (False, True))

    def terms(self, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Terms:
        if self.normalize_qk:
            q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        terms = DeltaRule(normalize_qk=False).terms(
            q - inputs["correction"][:, None, None] * k, k, v, beta=inputs["beta"]
        )
        gated = Terms(terms.read, terms.write, v, inputs["log_decay"][..., None], terms.erase)
        return erasing_before_decay(gated, inputs["feedback"][:, None, None] * k)

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        log_decay: Tensor,
        beta: Tensor,
        feedback: Tensor,
        correction: Tensor,
    ) -> Tensor:
        if self.normalize_qk:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        b, d = feedback, correction
        S, eye = v.new_zeros(k.shape[-1], v.shape[-1]), torch.eye(k.shape[-1], dtype=k.dtype)
        o = []
        for t in range(len(q)):
            transition = log_decay[t].exp() * eye - b * beta[t] * torch.outer(k[t], k[t])
            S = transition @ S + beta[t] * torch.outer(k[t], v[t])
            o.append(scale * S.T @ (q[t] - d * k[t]))
        return torch.stack(o)
