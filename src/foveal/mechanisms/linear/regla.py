"""ReGLA: gated linear attention with bounded features, a refined gate and a norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class ReGLA(Recurrence, name="regla"):
    r"""Let a second gate push the forget gate off its flat ends, and keep features between 0 and 1.

    .. math::
        S_t = \mathrm{Diag}(F_t)\, S_{t-1} + \phi(k_t) v_t^\top, \qquad
        F_t = (1 - r_t)\, g_t^2 + r_t \left(1 - (1 - g_t)^2\right), \qquad
        \phi(x) = e^{W x - \max_c (W x)_c}

    and the output is the RMS norm of :math:`\mathrm{scale}\, S_t^\top \phi(q_t)` over the channels of one head, times a
    gain.  r = 1/2 leaves F = g; elsewhere F lies between g^2 and 1 - (1 - g)^2.  The paper divides the product of
    features by its standard deviation for Gaussian inputs: like ``scale``, a constant, which the norm cancels up to
    epsilon.  The paper's text leaves the kind of norm open.

    Args:
        eps: epsilon of the norm.

    Raises:
        ValueError: if ``eps`` is not above 0.
    """

    aliases: ClassVar[tuple[str, ...]] = ("refined_gla",)
    paper: ClassVar[Paper] = Paper(
        "2502.01578", "ReGLA: Refining Gated Linear Attention", "Lu, Kobyzev, Rezagholizadeh, Chen, Langlais", 2025
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (K * V + 2 * K * K + 64 * (K + V))", decode="K * V + 2 * K * K", state="K * V"
    )
    inputs: ClassVar[dict[str, Input]] = {
        "log_gate": Input("B H T K", high=0.0, doc="natural log of the forget gate g of each key channel"),
        "refine": Input("B H T K", low=0.0, high=1.0, doc="refining gate r"),
        "query_weight": Input("H K K", doc="W of the queries", optional=True, start="eye"),
        "key_weight": Input("H K K", doc="W of the keys", optional=True, start="eye"),
        "gain": Input("H V", doc="factor of each output channel", optional=True, start=1.0),
    }
    linear_in_values: ClassVar[bool] = False

    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.require_number("eps", 0, float("inf"), "a number above 0")

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        read, write = (safe_exp(x @ inputs[name].mT) for x, name in ((q, "query_weight"), (k, "key_weight")))
        log_decay = refined(inputs["log_gate"], inputs["refine"])
        o = recur(Terms(read, write, v, log_decay=log_decay))
        return inputs["gain"][:, None] * rms_norm(o, o.shape[-1:], eps=self.eps)

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        log_gate: Tensor,
        refine: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        gain: Tensor,
    ) -> Tensor:
        S, o = v.new_zeros(k.shape[-1], v.shape[-1]), []
        for q_t, k_t, v_t, log_g, r in zip(q, k, v, log_gate, refine, strict=True):
            a, b, g = query_weight @ q_t, key_weight @ k_t, log_g.exp()
            F = (1 - r) * g.square() + r * (1 - (1 - g).square())
            S = F[:, None] * S + torch.outer((b[:, None] - b).amin(1).exp(), v_t)
            z = scale * S.T @ (a[:, None] - a).amin(1).exp()
            o.append(gain * z / (z.square().mean() + self.eps).sqrt())
        return torch.stack(o)


def safe_exp(x: Tensor) -> Tensor:
    """Exponentials divided by the largest of them."""
    return (x - x.amax(-1, keepdim=True)).exp()


def refined(log_g: Tensor, r: Tensor) -> Tensor:
    """Natural log of F = g (1 + (1 - g)(2 r - 1)), exact where g is near 1; the factor of g is at least epsilon."""
    bent = -log_g.expm1() * (2 * r - 1)
    return log_g + bent.clamp(min=torch.finfo(bent.dtype).eps - 1).log1p()
