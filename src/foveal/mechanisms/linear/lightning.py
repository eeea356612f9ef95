"""Lightning attention (TransNormerLLM): linear attention with a fixed decay per head and layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.recurrence import Recurrence, Terms
from foveal.spec import Cost, Limit, Paper


@dataclass(frozen=True)
class Lightning(Recurrence, name="lightning"):
    r"""Let head h forget at a fixed rate, the slower the deeper the layer, and divide by nothing.

    .. math::
        o_t = \mathrm{scale} \sum_{j \le t} \lambda_h^{t - j} (q_t^\top k_j)\, v_j, \qquad
        \lambda_h = \exp\left(-\frac{8 h}{H} \Big(1 - \frac{l}{L}\Big)\right), \quad h = 1, \dots, H

    Lightning Attention (1 and 2) is an exact way to compute this in blocks, as the engine's chunked form is.  The
    models have no scale: pass ``scale=1.0``.  Their silu of q and k, the norm and gate of the output and the rotation
    in the first layer belong to the layer around it.  A hidden token takes no time.

    Args:
        strength: 1 - l/L, from 1 in the first layer towards 0; 0 forgets nothing.
        rates: ``"linear"`` as above, or ``"geometric"``, lambda = exp(-2^(-8h/H) strength), as released models have.

    Raises:
        ValueError: if ``strength`` is not in [0, 1.001] or ``rates`` is unknown.
    """

    aliases: ClassVar[tuple[str, ...]] = ("lightning_attention", "tnl", "minimax_lightning")
    paper: ClassVar[Paper] = Paper(
        "2405.17381",
        "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning Attention",
        "Qin, Sun, Li, Shen, Sun, Zhong",
        2024,
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    per_head: ClassVar[bool] = False
    examples: ClassVar = ({"strength": 0.1}, {"rates": "geometric"})
    limits: ClassVar = (
        Limit(
            {"strength": 0.0},
            "linear",
            {"feature_map": "identity", "normalize": False},
            why="a rate of 0 forgets nothing",
        ),
    )

    strength: float = 1.0
    rates: str = "linear"

    def __post_init__(self) -> None:
        self.require_number("strength", -1e-300, 1.001, "a number in [0, 1.001]")
        self.require_choice("rates", ("linear", "geometric"))

    def log_decay(self, like: Tensor) -> Tensor:
        """Natural log of each head's lambda, [H]."""
        share = 8 * torch.arange(1, like.shape[-3] + 1, dtype=like.dtype, device=like.device) / like.shape[-3]
        return -self.strength * (share if self.rates == "linear" else 2.0**-share)

    def terms(self, q: Tensor, k: Tensor, v: Tensor) -> Terms:
        return Terms(q, k, v, log_decay=self.log_decay(k)[:, None, None].expand(*k.shape[:3], 1))

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        H, T, o = len(q), q.shape[1], []
        for h in range(1, H + 1):
            rate = 8 * h / H if self.rates == "linear" else 0.5 ** (8 * h / H)
            KV = v.new_zeros(k.shape[-1], v.shape[-1])
            for t in range(T):
                KV = math.exp(-rate * self.strength) * KV + torch.outer(k[h - 1, t], v[h - 1, t])
                o.append(scale * KV.T @ q[h - 1, t])
        return torch.stack(o).reshape(H, T, -1)
