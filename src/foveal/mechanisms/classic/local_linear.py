"""Local linear attention: a weighted linear regression around each query, where softmax takes a weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.regression import LocalRegression
from foveal.spec import Cost, Input, Paper


@dataclass(frozen=True)
class LocalLinear(LocalRegression, name="local_linear"):
    r"""Fit values by a line in the keys, weighted by closeness to the query, and answer with its value at the query.

    .. math::
        o_t = \hat b, \qquad \hat b, \hat W = \mathrm{argmin}_{b, W}
        \sum_{j \le t} w_{tj} \left(|v_j - b - W (k_j - q_t)|^2 + \lambda |W|^2\right),
        \qquad w_{tj} = \exp(q_t^\top k_j / \sqrt{K})

    Softmax attention is the fit of b alone, so it is the limit of a large ridge :math:`\lambda`; a small one reproduces
    values that are affine in the keys wherever the query stands, which no mean of values can.  Weights sum to 1 and may
    be negative.  The ridge counts beside the sum of the weights, as in the official code, so it does not depend on the
    size of the scores; the paper writes it alone.  Exact: conjugate gradients, one pass over the keys each, run
    to the precision of the dtype unless told to stop earlier, and gradients differentiate the solution, not the
    iterations.  The paper RMS-norms q and k first.

    Args:
        iterations: most passes of the ``"chunked"`` form; None is twice the key width, which suffices.
        tolerance: residual relative to the right side at which they stop; 0 is the precision of the dtype.

    Raises:
        ValueError: if ``iterations`` is no positive int or ``tolerance`` is not in [0, 1).
    """

    aliases: ClassVar[tuple[str, ...]] = ("lla", "flashlla", "local_linear_attention")
    paper: ClassVar[Paper] = Paper(
        "2510.01450",
        "Local Linear Attention: An Optimal Interpolation of Linear and Softmax Attention For Test-Time Regression",
        "Zuo, Yin, Zeng, Li, Zhu, Wang",
        2025,
    )
    cost: ClassVar[Cost] = Cost(
        train="T * T / 2 * (2 * K * (iterations or K) + 3 * K + V)",
        decode="T * (2 * K * (iterations or K) + 3 * K + V)",
        state="T * (K + V)",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "ridge": Input(
            "H", low=0.0, accepted=(1e-8, float("inf")), doc="penalty of the slope", optional=True, start=10.0
        )
    }

    iterations: int | None = None
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations is not None:
            self.require_int("iterations")
        if self.tolerance != 0:
            self.require_number("tolerance", 0, 0.999999, "a number in [0, 1)")

    def ridge(self, **inputs: Tensor) -> Tensor:
        return inputs["ridge"][:, None, None]

    def solver(self, key_width: int, eps: float) -> tuple[int, float]:
        return self.iterations or 2 * key_width, max(self.tolerance, eps)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, ridge: Tensor) -> Tensor:
        o = []
        for q_i, seen in zip(q, visible, strict=True):
            if not seen.any():
                o.append(torch.zeros_like(v[:1].sum(0)))
                continue
            score = scale * k[seen] @ q_i
            w, z = (score - score.max()).exp(), k[seen] - q_i
            omega, mu = w.sum(), z.T @ w
            Sigma = z.T @ (w[:, None] * z) + ridge * omega * torch.eye(len(q_i), dtype=q.dtype)
            rho = torch.linalg.solve(Sigma.double(), mu.double()).to(q.dtype)  # torch solves in no half precision
            o.append((w * (1 - z @ rho)) @ v[seen] / (omega - mu @ rho))
        return torch.stack(o)
