"""Cottention: attention by cosine similarity, without a denominator per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class Cottention(Recurrence, name="cottention"):
    r"""Weigh by the cosine between query and key, divided by a learned power of the number of keys.

    .. math::
        o_t = \sum_j \frac{\hat q_t^\top \hat k_j}{n_j^{\sigma(m)}}\, v_j, \qquad \hat x = \frac{x}{|x|}

    with sigma the sigmoid and one m per head.  n_j is the number of keys in the bidirectional form.  In the causal one
    it is the number of tokens up to j, as in the official code, or up to t.  Weights lie between -1 and 1 and do not
    sum to 1; the length of q and k, and ``scale``, do not enter.

    Args:
        count: ``"key"`` counts up to the key, ``"query"`` up to the query.

    Raises:
        ValueError: if ``count`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("cosine_attention", "cos_attention")
    paper: ClassVar[Paper] = Paper(
        "2409.18747", "Cottention: Linear Transformers With Cosine Attention", "Mongaras, Dohm, Larson", 2024
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V + 1")
    inputs: ClassVar[dict[str, Input]] = {
        "exponent": Input("H", doc="m: the number of keys counts to the power sigmoid(m)", optional=True, start=0.5)
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"count": "query"})

    count: str = "key"

    def __post_init__(self) -> None:
        self.require_choice("count", ("key", "query"))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        _, place = recur.positions()
        if not recur.causal:
            place = place[:, :, -1:]
        n = place.clamp(min=1) ** inputs["exponent"].sigmoid()[:, None, None]  # padding in front has place 0
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        if recur.causal and self.count == "query":
            return recur(Terms(q / n, k, v), scale=1.0)
        return recur(Terms(q, k, v / n), scale=1.0)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, exponent: Tensor) -> Tensor:
        cosine = q @ k.mT / torch.outer(q.square().sum(-1).sqrt(), k.square().sum(-1).sqrt()) * visible
        seen = visible.sum(1, dtype=q.dtype)  # by each query
        n = seen[:, None] if self.count == "query" or visible.all() else seen[None]
        return cosine / n ** (1 / (1 + (-exponent).exp())) @ v
