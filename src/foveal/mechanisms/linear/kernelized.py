"""Kernelized transformer: random features whose frequencies are drawn from a learned mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.linear_log_normal import exponential
from foveal.mechanisms.linear.performer import gaussian
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class Kernelized(Recurrence, name="kernelized"):
    r"""Learn the kernel through the distribution of its random frequencies, a mixture of Gaussians.

    .. math::
        o_t = \frac{\sum_j \phi(q_t)^\top \phi(k_j)\, v_j}{\sum_j \phi(q_t)^\top \phi(k_j)}, \qquad
        \omega_m = \mu_c + \sigma_c \odot n_m, \quad n_m \sim N(0, I), \quad c = m \bmod C

    with x = sqrt(``scale``) times q or k, and :math:`\phi(x) = e^{\Omega x - |x|^2 / 2}` (``"prf"``) or
    :math:`\phi(x) = [\cos \Omega x, \sin \Omega x]` (``"rks"``).  At mu = 0 and sigma = 1 they estimate exp(q'k) and
    the Gaussian kernel.  Weights of the latter may be negative and their sum near 0: the positive features are the
    stable ones.  The paper draws n anew while it trains; here ``seed`` fixes it, the same for every head.  Its
    frequencies from a network or from FastFood are left out.

    Args:
        features: number of frequencies M.
        components: C, Gaussians in the mixture, which share the frequencies evenly.
        feature_map: ``"prf"`` for positive features, ``"rks"`` for cosines and sines.
        seed: of n.

    Raises:
        ValueError: if a number is too small or ``feature_map`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("kernelized_transformer", "gmm_prf", "gmm_rks")
    paper: ClassVar[Paper] = Paper(
        "2110.08323", "On Learning the Transformer Kernel", "Chowdhury, Solomou, Dubey, Sachan", 2021
    )
    cost: ClassVar[Cost] = Cost(
        train="T * features * (1 + (feature_map == 'rks')) * (V + 2 * K + 64)",
        decode="features * (1 + (feature_map == 'rks')) * (V + 2 * K)",
        state="features * (1 + (feature_map == 'rks')) * (V + 1) + (feature_map == 'prf')",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "mean": Input("H C K", doc="mu of each Gaussian", optional=True, start=0.0),
        "deviation": Input("H C K", low=0.0, doc="sigma of each Gaussian", optional=True, start=1.0),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({"features": 20}, {"features": 9, "components": 1, "feature_map": "rks", "seed": 1})
    limits: ClassVar = (
        Limit(
            {"features": 20},
            "performer",
            {"features": 20, "orthogonal": False},
            why="mu = 0 and sigma = 1 are the Performer's independent features",
        ),
    )

    features: int = 128
    components: int = 2
    feature_map: str = "prf"
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_int("features")
        self.require_int("components")
        self.require_choice("feature_map", ("prf", "rks"))
        self.require_int("seed", least=0)

    def widths(self, key_width: int) -> dict[str, int]:
        return {"C": self.components}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        component = torch.arange(self.features, device=q.device) % self.components
        mean, deviation = (inputs[name].index_select(1, component) for name in ("mean", "deviation"))
        n: Tensor = gaussian(self.features, q.shape[-1], self.seed, False).to(q)
        omega = mean + deviation * n
        q, k = recur.scaled(q, k)
        if self.feature_map == "rks":
            phi_q, phi_k = (torch.cat((y.cos(), y.sin()), -1) for y in (q @ omega.mT, k @ omega.mT))
            return recur(Terms(phi_q, phi_k, v, normalize=True))
        log_q, log_k = (x @ omega.mT - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
        return exponential(recur, log_q, log_k, v)

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, mean: Tensor, deviation: Tensor
    ) -> Tensor:
        n: Tensor = gaussian(self.features, q.shape[-1], self.seed, False).to(q.dtype)
        c = [m % self.components for m in range(self.features)]
        omega = mean[c] + deviation[c] * n
        x, y = scale**0.5 * q[:, None], scale**0.5 * k[None]
        if self.feature_map == "rks":
            weight: Tensor = ((x - y) @ omega.mT).cos().mean(-1) * visible
            return weight / weight.sum(-1, keepdim=True) @ v
        exponent: Tensor = (x + y) @ omega.mT - (x.square() + y.square()).sum(-1, keepdim=True) / 2
        return exponent.logsumexp(-1).masked_fill(~visible, -torch.inf).softmax(-1) @ v
