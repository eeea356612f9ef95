"""Performer (FAVOR+): softmax weights estimated without bias by positive random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.constant import constant
from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.mechanisms.linear.linear_log_normal import exponential
from foveal.spec import Cost, Paper

RELU_FLOOR = 1e-3  # keeps every weight of the relu kernel above 0


@dataclass(frozen=True)
class Performer(Recurrence, name="performer"):
    r"""Estimate the exponential kernel of softmax by random features that are all positive.

    .. math::
        o_t = \frac{\sum_j \phi(q_t)^\top \phi(k_j)\, v_j}{\sum_j \phi(q_t)^\top \phi(k_j)}, \qquad
        \phi(x) = \frac{1}{\sqrt m} \exp\left(W \sqrt{s}\, x - \tfrac{1}{2} s |x|^2\right)

    with s = ``scale`` and Gaussian rows of W [m, K], so that the mean of phi(q)' phi(k) over W is exp(s q'k).
    Rows that are orthogonal in blocks of K, with the lengths of independent ones, lower the variance.  The error falls
    as 1 / sqrt(m) and grows fast with the size of q and k.  The paper draws W anew while it trains; here W is fixed
    by ``seed``, the same for every head.  Running maxima keep the exponentials finite and cancel.

    Args:
        features: m.
        seed: of W.
        orthogonal: make the rows of W orthogonal.
        kernel: ``"softmax"``, or ``"relu"`` for the paper's generalised attention with
            phi(x) = max(W sqrt(s) x, 0) + 0.001.

    Raises:
        ValueError: if ``kernel`` is unknown, ``features`` is below 1 or ``seed`` below 0.
    """

    aliases: ClassVar[tuple[str, ...]] = ("favor", "favor_plus")
    paper: ClassVar[Paper] = Paper("2009.14794", "Rethinking Attention with Performers", "Choromanski et al.", 2020)
    cost: ClassVar[Cost] = Cost(
        train="T * features * (V + 2 * K + 64)",
        decode="features * (V + 2 * K)",
        state="features * (V + 1) + (kernel == 'softmax')",
    )
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({"features": 20}, {"features": 12, "orthogonal": False, "kernel": "relu", "seed": 3})

    features: int = 256
    seed: int = 0
    orthogonal: bool = True
    kernel: str = "softmax"

    def __post_init__(self) -> None:
        self.require_int("features")
        self.require_int("seed", least=0)
        self.require_choice("orthogonal", (False, True))
        self.require_choice("kernel", ("softmax", "relu"))

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        q, k = recur.scaled(q, k)
        W: Tensor = gaussian(self.features, q.shape[-1], self.seed, self.orthogonal).to(q)
        if self.kernel == "relu":
            phi_q, phi_k = (torch.relu(x @ W.mT) + RELU_FLOOR for x in (q, k))
            return recur(Terms(phi_q, phi_k, v, normalize=True))
        log_q, log_k = (x @ W.mT - x.square().sum(-1, keepdim=True) / 2 for x in (q, k))
        return exponential(recur, log_q, log_k, v)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        W: Tensor = gaussian(self.features, q.shape[-1], self.seed, self.orthogonal).to(q.dtype)
        weight = q.new_zeros(visible.shape)
        for w in W:
            a, b = scale**0.5 * (q @ w), scale**0.5 * (k @ w)
            if self.kernel == "relu":
                weight = weight + torch.outer(a.clamp(min=0) + RELU_FLOOR, b.clamp(min=0) + RELU_FLOOR)
            else:
                norms = scale * (q.square().sum(-1)[:, None] + k.square().sum(-1))
                weight = weight + (a[:, None] + b - norms / 2).exp() / len(W)
        weight = weight * visible
        return weight / weight.sum(-1, keepdim=True) @ v


@constant
def gaussian(rows: int, width: int, seed: int, orthogonal: bool) -> Tensor:
    """Standard normal rows [rows, width], float64; if orthogonal, blocks of ``width`` rows are at right angles."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = draw(rows, width)
    if not orthogonal:
        return drawn
    Q, R = torch.linalg.qr(draw(-(-rows // width), width, width))
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # without the signs Q is no uniform rotation
    rotated: Tensor = Q.mT.flatten(0, 1)[:rows] * drawn.norm(dim=-1, keepdim=True)
    return rotated
