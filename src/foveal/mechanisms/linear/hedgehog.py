"""Hedgehog: exponential features that are trained to mimic softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.linear_log_normal import exponential
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class Hedgehog(Recurrence, name="hedgehog"):
    r"""Learn features whose linear attention is as spiky and as monotone in q'k as softmax is.

    .. math::
        o_t = \frac{\sum_{j} \phi_q(q_t)^\top \phi_k(k_j)\, v_j}{\sum_{j} \phi_q(q_t)^\top \phi_k(k_j)}, \qquad
        \phi(x) = \left[e^{W x + b},\; e^{-W x - b}\right]

    One affine map per head, for queries and keys each, starts at the identity and is trained by
    :func:`distillation_loss` before the whole model is.  ``scale`` is left to W.  With ``"softmax"`` each feature
    vector is divided by its sum: that cancels for queries, but evens out the keys.

    Args:
        feature_map: ``"exp"`` as above, or ``"softmax"``, the paper's bounded variant.

    Raises:
        ValueError: if ``feature_map`` is unknown.
    """

    paper: ClassVar[Paper] = Paper(
        "2402.04347",
        "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
        "Zhang, Bhatia, Kumbong, Ré",
        2024,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (2 * K * V + 2 * K * K + 64 * (2 * K + V))",
        decode="2 * K * V + 2 * K * K",
        state="2 * K * (V + 1) + (feature_map == 'exp')",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "query_weight": Input("H K K", doc="W of the queries", optional=True, start="eye"),
        "query_bias": Input("H K", doc="b of the queries", optional=True, start=0.0),
        "key_weight": Input("H K K", doc="W of the keys", optional=True, start="eye"),
        "key_bias": Input("H K", doc="b of the keys", optional=True, start=0.0),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"feature_map": "softmax"})

    feature_map: str = "exp"

    def __post_init__(self) -> None:
        self.require_choice("feature_map", ("exp", "softmax"))

    def log_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Natural log of phi(x), [..., H, T, 2 K]."""
        mapped = x @ weight.mT + bias[:, None]
        both = torch.cat((mapped, -mapped), -1)
        return both.log_softmax(-1) if self.feature_map == "softmax" else both

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        log_q = self.log_features(q, inputs["query_weight"], inputs["query_bias"])
        log_k = self.log_features(k, inputs["key_weight"], inputs["key_bias"])
        if self.feature_map == "exp":
            return exponential(recur, log_q, log_k, v)
        return recur(Terms(log_q.exp(), log_k.exp(), v, normalize=True))

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        visible: Tensor,
        query_weight: Tensor,
        query_bias: Tensor,
        key_weight: Tensor,
        key_bias: Tensor,
    ) -> Tensor:
        a = torch.einsum("tk,mk->tm", q, query_weight) + query_bias
        b = torch.einsum("sk,mk->sm", k, key_weight) + key_bias
        sums = a[:, None] + b
        log_weight = torch.logaddexp(sums, -sums).logsumexp(-1)
        if self.feature_map == "softmax":
            log_weight = log_weight - torch.logaddexp(b, -b).logsumexp(-1)
        return log_weight.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def distillation_loss(
    spec: Hedgehog,
    q: Tensor,
    k: Tensor,
    *,
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    r"""Mean soft cross-entropy of the learned weights against those of softmax; it needs O(T S) memory.

    .. math::
        -\frac{1}{B H T} \sum_{t, j} \mathrm{softmax}_j(\mathrm{scale}\; q_t^\top k_j)
        \log \frac{\phi_q(q_t)^\top \phi_k(k_j)}{\sum_i \phi_q(q_t)^\top \phi_k(k_i)}

    Args:
        spec: whose feature map is trained.
        q: queries of the teacher [B, H, T, K].
        k: its keys [B, H, S, K], heads repeated; the last key stands beside the last query.
        query_weight, query_bias, key_weight, key_bias: what is trained, as in the mechanism.
        causal: whether a query sees the keys up to its own place only.
        scale: factor of the teacher's scores; None is K ** -0.5.
    """
    T, S = q.shape[-2], k.shape[-2]
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1) & causal
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    teacher = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    log_q = spec.log_features(q, query_weight, query_bias)
    log_k = spec.log_features(k, key_weight, key_bias)
    student = (log_q[..., :, None, :] + log_k[..., None, :, :]).logsumexp(-1)
    log_weights = student.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return -(teacher * log_weights).sum(-1).mean()
