"""RWKV-7 (Goose): a generalised delta rule whose erasing key, erasing rate and decay are vectors of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal.engines.recurrence import Recurrence, Terms
from foveal.mechanisms.recurrent.comba import erasing_before_decay
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class RWKV7(Recurrence, name="rwkv7"):
    r"""Decay each channel, and erase along a key other than the one that is written, at a rate per channel.

    .. math::
        S_t = \left(\mathrm{Diag}(w_t) - (a_t \odot \hat\kappa_t)\, \hat\kappa_t^\top\right) S_{t-1} + k_t v_t^\top,
        \qquad o_t = S_t^\top q_t / \sqrt{K}, \qquad \hat\kappa_t = \kappa_t / |\kappa_t|

    with :math:`w_t = \exp(\texttt{log\_decay}_t)`, the removal key :math:`\kappa` and the in-context learning rate a.
    The erasure reads the state before it has decayed.  The paper keeps w above :math:`\exp(-e^{-1/2}) = 0.545`; gates
    below :math:`e^{-30}` count as :math:`e^{-30}`.  k is the paper's replacement key :math:`\tilde k`, q its
    receptance, and there is no scale, so pass ``scale=1.0`` for its models.  The bonus of the current token comes after
    the group norm and belongs, with token shift and gate, to the layer.
    """

    aliases: ClassVar[tuple[str, ...]] = ("rwkv_7", "goose")
    paper: ClassVar[Paper] = Paper(
        "2503.14456", 'RWKV-7 "Goose" with Expressive Dynamic State Evolution', "Peng et al.", 2025
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input(
            "B H T K",
            low=-math.exp(-0.5),
            high=0.0,
            accepted=(-math.inf, 0.0),
            doc="natural log of the decay of each key channel",
        ),
        "removal": Input("B H T K", doc="key along which is erased; it is divided by its 2-norm"),
        "rate": Input("B H T K", low=0.0, high=1.0, doc="in-context learning rate: how much of it is erased"),
    }
    limits: ClassVar = (
        Limit(
            {},
            "gla",
            inputs=lambda x: (x | {"rate": torch.zeros_like(x["rate"])}, {"log_decay": x["log_decay"]}),
            why="nothing is erased",
        ),
    )

    def terms(self, q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, removal: Tensor, rate: Tensor) -> Terms:
        removal = normalize(removal, dim=-1)
        return erasing_before_decay(Terms(q, k, v, log_decay, (rate * removal, removal)), removal)

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        log_decay: Tensor,
        removal: Tensor,
        rate: Tensor,
    ) -> Tensor:
        kappa, w = removal / removal.norm(dim=-1, keepdim=True), log_decay.exp()
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            transition = torch.diag(w[t]) - torch.outer(rate[t] * kappa[t], kappa[t])
            S = transition @ S + torch.outer(k[t], v[t])
            o.append(scale * S.T @ q[t])
        return torch.stack(o)
