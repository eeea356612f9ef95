"""RWKV-6 (Finch): decay per channel by the token, and a bonus for the current token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Limit, Paper


@dataclass(frozen=True)
class RWKV6(Recurrence, name="rwkv6"):
    r"""Read the memory before the current token enters it, and add that token by a learned weight of its own.

    .. math::
        o_t = \frac{1}{\sqrt{K}} \left(S_{t-1} + \mathrm{Diag}(u)\, k_t v_t^\top\right)^\top q_t, \qquad
        S_t = \mathrm{Diag}(w_t)\, S_{t-1} + k_t v_t^\top

    with :math:`w_t = \exp(\texttt{log\_decay}_t)` per channel and the bonus u.  In the paper q is r, the receptance,
    and there is no scale, so pass ``scale=1.0`` for its models.  The paper has :math:`w = \exp(-\exp(d))` of a
    projected d and learns u freely; here u starts at 1, where the current token counts like any other.  Token shift,
    group norm and gate belong to the layer.
    """

    aliases: ClassVar[tuple[str, ...]] = ("rwkv_6", "finch")
    paper: ClassVar[Paper] = Paper(
        "2404.05892", "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", "Peng et al.", 2024
    )
    cost: ClassVar[Cost] = Cost(train="T * (K * V + 64 * (K + V))", decode="K * V", state="K * V")
    inputs: ClassVar[dict[str, Input]] = {
        "log_decay": Input("B H T K", high=0.0, doc="natural log of the decay of each key channel"),
        "bonus": Input("H K", doc="weight of the current token, by channel", optional=True, start=1.0),
    }
    limits: ClassVar = (
        Limit(
            {},
            "linear",
            {"feature_map": "identity", "normalize": False},
            inputs=lambda x: ({"log_decay": torch.zeros_like(x["log_decay"])}, {}),
            why="no decay, and the current token counts like any other",
        ),
    )

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        # S_{t-1} is the engine's state one token earlier: everything but q moves back by an empty token.  Hidden
        # tokens are 0 in every letter.
        late = [pad(x, (0, 0, 1, 0)) for x in (k, v, inputs["log_decay"])]
        past = recur(Terms(pad(q, (0, 0, 0, 1)), late[0], late[1], log_decay=late[2]))[:, :, :-1]
        return past + recur.scale * (q * inputs["bonus"][:, None] * k).sum(-1, keepdim=True) * v

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, log_decay: Tensor, bonus: Tensor) -> Tensor:
        S = v.new_zeros(k.shape[-1], v.shape[-1])
        o = []
        for t in range(len(q)):
            kv = torch.outer(k[t], v[t])
            o.append(scale * (S + torch.diag(bonus) @ kv).T @ q[t])
            S = log_decay[t].exp()[:, None] * S + kv
        return torch.stack(o)
