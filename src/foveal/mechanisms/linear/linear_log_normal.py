"""Linear log-normal attention: exponential features whose spread is matched to that of softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper
from foveal.state import RecurrentState

LOWEST = -6e4  # stands for the maximum of nothing; finite in every precision


@dataclass(frozen=True)
class LinearLogNormal(Recurrence, name="linear_log_normal"):
    r"""Weigh by exponentials of q and k themselves, so that the weights are log-normal as those of softmax are.

    .. math::
        o_t = \frac{\sum_j \left(\sum_c e^{\alpha q_{t,c} + \beta k_{j,c}}\right) v_j}
        {\sum_j \sum_c e^{\alpha q_{t,c} + \beta k_{j,c}}}

    alpha and beta replace ``scale``.  The paper measures them on each batch, which cannot stream: here they are
    parameters, and :func:`moment_matching` fits them to samples of q and k.  A running maximum of the keys, part of
    the state, keeps the exponentials finite without changing the result.  The paper's block-diagonal softmax branch
    is a layer of its own and is left out.
    """

    aliases: ClassVar[tuple[str, ...]] = ("lln", "linear_lognormal")
    paper: ClassVar[Paper] = Paper(
        "2311.13541", "Linear Log-Normal Attention with Unbiased Concentration", "Nahshan, Kampeas, Haleva", 2023
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V + K + 1")
    inputs: ClassVar[dict[str, Input]] = {
        "alpha": Input(
            "H", doc="exponent of the queries; 2.1 matches softmax at K = 64 and variance 1", optional=True, start=2.1
        ),
        "beta": Input("H", doc="exponent of the keys", optional=True, start=2.1),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        alpha, beta = (inputs[name][:, None, None] for name in ("alpha", "beta"))
        return exponential(recur, alpha * q, beta * k, v)

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, alpha: Tensor, beta: Tensor
    ) -> Tensor:
        weight = ((alpha * q)[:, None] + (beta * k)[None]).exp().sum(-1) * visible
        return weight / weight.sum(1, keepdim=True) @ v


def exponential(recur: Recur, log_read: Tensor, log_write: Tensor, v: Tensor) -> Tensor:
    """Normalised linear attention with the features exp(log_read) and exp(log_write), [B, H, T, M] each.

    Queries are divided by their largest feature and the state by the largest feature written so far: both cancel.
    """
    before, peak = running_peak(recur, log_write)
    write = (log_write - peak).clamp(max=0).exp()  # hidden tokens may stand above the peak
    read = (log_read - log_read.detach().amax(-1, keepdim=True)).exp()
    return recur(Terms(read, write, v, log_decay=before - peak if recur.causal else None, normalize=True))


def running_peak(recur: Recur, x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number among x [B, H, T, M] before and up to each token, [B, H, T, 1]; a part of the state.

    Without causality the largest of all stands for every token.  No gradient passes.
    """
    here = x.detach().amax(-1, keepdim=True)
    if recur.call.padding is not None:
        here = here.masked_fill(~recur.call.padding[:, None, :, None], LOWEST)
    state = recur.taken((*x.shape[:2], 1, 1), False)
    start = here.new_full((*x.shape[:2], 1, 1), LOWEST) if state is None else state.matrix.to(x.dtype)
    peaks = torch.cat((start, here), 2).cummax(2).values
    last = peaks[:, :, -1:]
    recur.after.append(RecurrentState(last))
    return (peaks[:, :, :-1], peaks[:, :, 1:]) if recur.causal else (last, last)


def moment_matching(
    q: Tensor, k: Tensor, *, scale: float | None = None, samples: int = 20000, seed: int = 0
) -> tuple[Tensor, Tensor]:
    r"""Fit alpha and beta [...] to samples: log weights get the variance that softmax gives them.

    .. math::
        \alpha = \frac{s}{\sqrt 2\,\sigma_q}, \quad \beta = \frac{s}{\sqrt 2\,\sigma_k}, \qquad
        \mathrm{Var}\Big[\log \sum_c e^{s z_c}\Big] = \mathrm{scale}^2 K \sigma_q^2 \sigma_k^2, \quad z \sim N(0, I)

    The left variance is simulated.  The paper takes a line through it; here the line runs between the two simulated
    points around the wanted variance, which also holds for small ones.

    Args:
        q: samples of queries [..., N, K] with mean 0.
        k: samples of keys [..., M, K] with mean 0.
        scale: factor of the softmax scores; None is K ** -0.5.
        samples: number of simulated weights.
        seed: of the simulation.
    """
    K = q.shape[-1]
    std_q, std_k = (x.double().flatten(-2).std(-1) for x in (q, k))
    wanted = (K * (K**-0.5 if scale is None else scale) ** 2 * (std_q * std_k).square()).cpu()
    z = torch.randn(samples, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    squares = torch.linspace(0, 8, 33, dtype=torch.float64).square()
    variances = torch.stack([(s * z).logsumexp(-1).var() for s in squares.sqrt()])
    above = torch.searchsorted(variances, wanted).clamp(1, len(squares) - 1)
    low, high = variances[above - 1], variances[above]
    square = squares[above - 1] + (wanted - low) / (high - low) * (squares[above] - squares[above - 1])
    s = (square.to(std_q.device) / 2).sqrt()
    return (s / std_q).to(q.dtype), (s / std_k).to(k.dtype)
