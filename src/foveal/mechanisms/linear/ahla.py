"""Asymmetric higher-order linear attention (AHLA): linear attention applied twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Terms
from foveal.engines.recurrence.program import ratio
from foveal.mechanisms.linear.hla import HLA, steady
from foveal.spec import Cost


@dataclass(frozen=True)
class AHLA(HLA, name="ahla"):
    r"""Attend to what earlier tokens have attended to, with the same queries and keys.

    .. math::
        o_t = \sum_{j \le t} \gamma^{t - j} \sum_{j \le i \le t} (q_t^\top k_i)(q_i^\top k_j)\, v_j,
        \qquad O = W (W V) \text{ for } \gamma = 1, \quad W = L \circ Q K^\top

    L is the causal mask and every product of q and k takes the factor ``scale``.  Two hops in one layer: a query finds
    a token by its key and takes what that token's query finds.

    Args:
        gamma: decay per token of both states.
        normalize: divide by the sum of the weights, which may be near 0 or negative unless features are positive; the
            paper adds an epsilon to it, here a sum of 0 gives 0.

    Raises:
        ValueError: if ``gamma`` is not in (0, 1].
    """

    aliases: ClassVar[tuple[str, ...]] = ("asymmetric_higher_order_linear_attention",)
    cost: ClassVar[Cost] = Cost(
        train="T * 2 * (K * V + 64 * (K + V))", decode="2 * K * V", state="2 * K * (V + normalize)"
    )

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        o = torch.cat((v, torch.ones_like(v[..., :1])), -1) if self.normalize else v
        for _ in range(2):
            o = recur(Terms(q, k, o, log_decay=steady(self.gamma, k)))
        return ratio(o[..., :-1], o[..., -1:]) if self.normalize else o

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        t = torch.arange(len(q), dtype=q.dtype)
        W = (scale * q @ k.mT * self.gamma ** (t[:, None] - t).clamp(min=0)).tril()
        weight = W @ W
        return (weight / weight.sum(-1, keepdim=True) if self.normalize else weight) @ v
