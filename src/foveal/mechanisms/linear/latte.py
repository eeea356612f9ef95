"""Latte: attention through a few latents, each with its own softmax over the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Paper
from foveal.state import RecurrentState


@dataclass(frozen=True)
class Latte(Recurrence, name="latte"):
    r"""Choose among latents, each of which keeps a softmax-weighted mean of the values.

    .. math::
        o_t = \sum_{l=1}^{K} \underbrace{\mathrm{softmax}_l(q_{t,l})}_{p(l \mid t)}\;
        \frac{\sum_j e^{k_{j,l}} v_j}{\sum_j e^{k_{j,l}}}

    The key width K is the number of latents, so few are enough; ``scale`` does not enter.  Rows are probabilities.  The
    state holds the means themselves and the log of their denominators, by which each mean decays as new weight comes:
    no exponent is above 0, whatever the keys.  The paper's Latte Macchiato, which gives one latent to a sliding
    window, is left out.
    """

    aliases: ClassVar[tuple[str, ...]] = ("latent_attention_linear",)
    paper: ClassVar[Paper] = Paper(
        "2402.17512",
        "Latte: Latent Attention for Linear Time Transformers",
        "Dolga, Maystre, Cobzarenco, Barber",
        2024,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V + K")
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        before, total, k = running_log_sum(recur, k)
        nothing = before < -1e30  # as yet there is no mean that could decay
        decay = (before - total).masked_fill(nothing, 0.0) if recur.causal else None
        return recur(Terms(q.softmax(-1), (k - total).exp(), v, log_decay=decay), scale=1.0)

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> Tensor:
        o = torch.zeros(len(q), v.shape[-1], dtype=v.dtype)
        for latent in range(k.shape[-1]):
            p_of_token = k[:, latent].expand(visible.shape).masked_fill(~visible, -torch.inf).softmax(-1)
            p_of_latent = q.softmax(-1)[:, latent]
            o = o + p_of_latent[:, None] * (p_of_token @ v)
        return o


def running_log_sum(recur: Recur, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log of the sum of exp(x) before and up to each token, and x [B, H, T, C] with its padding at the bottom.

    A part of the state.  Without causality the sum over all tokens stands for every one.
    """
    bottom = torch.finfo(x.dtype).min
    if recur.call.padding is not None:
        x = x.masked_fill(~recur.call.padding[:, None, :, None], bottom)
    state = recur.taken((*x.shape[:2], 1, x.shape[-1]), False)
    start = x.new_full((*x.shape[:2], 1, x.shape[-1]), bottom) if state is None else state.matrix.to(x.dtype)
    sums = torch.cat((start, x), 2).logcumsumexp(2)
    last = sums[:, :, -1:]
    recur.after.append(RecurrentState(last))
    return (sums[:, :, :-1], sums[:, :, 1:], x) if recur.causal else (last, last, x)
