"""Fastmax (FAST): a polynomial of standardised queries and keys in softmax's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import layer_norm

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.based import taylor
from foveal.spec import Cost, Paper

EPS = 1e-5  # added to the variance


@dataclass(frozen=True)
class Fastmax(Recurrence, name="fastmax"):
    r"""Standardise each query and key, then weigh by a polynomial of their product instead of its exponential.

    .. math::
        o_t = \frac{\sum_j f(\mathrm{scale}\; \hat q_t^\top \hat k_j)\, v_j}
        {\sum_j f(\mathrm{scale}\; \hat q_t^\top \hat k_j)}, \qquad
        f(u) = \sum_{l=0}^{p} \frac{u^l}{l!}, \qquad \hat x = \frac{x - \mathrm{mean}(x)}{\mathrm{std}(x)}

    Mean and standard deviation run over the channels of one token, so lengths and offsets of q and k do not matter.
    The paper leaves the size of the product open: here ``scale`` has its usual meaning, and the product has standard
    deviation 1.  Order 1 gives negative weights where scale q'k is below -1; ``scale = 1 / K`` excludes it.  The
    paper's dropout of moments is left out.

    Args:
        order: p, 1 or 2.

    Raises:
        ValueError: if ``order`` is neither 1 nor 2.
    """

    aliases: ClassVar[tuple[str, ...]] = ("fast", "factorizable_attention")
    paper: ClassVar[Paper] = Paper(
        "2402.07901",
        "FAST: Factorizable Attention for Speeding up Transformers",
        "Gerami, Hoover, Dulepet, Duraiswami",
        2024,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (1 + K + (order - 1) * K * (K + 1) // 2) * (V + 64)",
        decode="(1 + K + (order - 1) * K * (K + 1) // 2) * V",
        state="(1 + K + (order - 1) * K * (K + 1) // 2) * (V + 1)",
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({}, {"order": 1})

    order: int = 2

    def __post_init__(self) -> None:
        self.require_choice("order", (1, 2))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        q, k = recur.scaled(*(layer_norm(x, x.shape[-1:], eps=EPS) for x in (q, k)))
        return recur(Terms(taylor(q, self.order), taylor(k, self.order), v, normalize=True))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        q, k = (x - x.mean(-1, keepdim=True) for x in (q, k))
        q, k = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() for x in (q, k))
        u = scale * q @ k.mT
        weight = (1 + u if self.order == 1 else 1 + u + u**2 / 2) * visible
        return weight / weight.sum(-1, keepdim=True) @ v
