"""Higher-order linear attention of third order."""

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
class HLA3(HLA, name="hla3"):
    r"""Collect what like-minded earlier queries have attended to.

    .. math::
        o_t = \sum_{u \le t} \sum_{i, j \le u} \gamma^{3 t - u - i - j}
        (q_t^\top k_i)(q_u^\top k_i)(q_u^\top k_j)\, v_j,
        \qquad O = \left(L \circ W W^\top\right) W V \text{ for } \gamma = 1, \quad W = L \circ Q K^\top

    L is the causal mask and every product of q and k takes the factor ``scale``.  Three recurrences: what u has
    attended to among the keys, and among the values, and attention over the first that returns the second.  The paper
    states this masked product, but its streaming form (theorem 7.1) sums over the triples of which two share the
    latest place instead; here the product holds.

    Args:
        gamma: decay per token of every moment.
        normalize: divide by the sum of the weights, which may be near 0 or negative unless features are positive; the
            paper adds an epsilon to it, here a sum of 0 gives 0.

    Raises:
        ValueError: if ``gamma`` is not in (0, 1].
    """

    aliases: ClassVar[tuple[str, ...]] = ("third_order_linear_attention",)
    cost: ClassVar[Cost] = Cost(
        train="T * (K * (K + 2 * V) + 64 * (4 * K + 2 * V))",
        decode="K * (K + 2 * V)",
        state="K * (K + 2 * (V + normalize))",
    )

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        value = torch.cat((v, torch.ones_like(v[..., :1])), -1) if self.normalize else v
        decay = steady(self.gamma, k)
        seen, found = (recur(Terms(q, k, x, log_decay=decay)) for x in (k, value))
        o = recur(Terms(q, seen, found, log_decay=steady(self.gamma**3, k)))
        return ratio(o[..., :-1], o[..., -1:]) if self.normalize else o

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        q = scale * q
        values = torch.cat((v, torch.ones_like(v[:, :1])), -1)  # ones make the denominator
        S, P = k.new_zeros(k.shape[-1], k.shape[-1]), k.new_zeros(k.shape[-1], values.shape[-1])
        F, o = P, []
        for q_t, k_t, v_t in zip(q, k, values, strict=True):
            S = self.gamma * S + torch.outer(k_t, k_t)
            P = self.gamma * P + torch.outer(k_t, v_t)
            F = self.gamma**3 * F + torch.outer(S @ q_t, q_t @ P)
            o.append(q_t @ F)
        out = torch.stack(o)
        return out[:, :-1] / out[:, -1:] if self.normalize else out[:, :-1]
