"""Transformer-VQ: exact softmax attention over keys that are replaced by the nearest code of a codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from foveal.engines.recurrence import Recur, Recurrence, Terms
from foveal.spec import Cost, Input, Paper


def nearest(k: Tensor, codebook: Tensor) -> Tensor:
    """The code of each key: the index [B, H, T] of the nearest row of the codebook [H, C, K]."""
    return (codebook.square().sum(-1)[:, None] / 2 - k @ codebook.mT).argmin(-1)


def commitment_loss(k: Tensor, codebook: Tensor) -> Tensor:
    """Mean squared distance of the keys [B, H, T, K] to their codes, held fixed; the paper weighs it by 1e-4."""
    distance = torch.cdist(k, codebook.detach().expand(len(k), -1, -1, -1))
    return distance.amin(-1).square().mean()


@dataclass(frozen=True)
class TransformerVQ(Recurrence, name="transformer_vq"):
    r"""Quantise the keys, so that softmax needs one sum of values and one count per code instead of every key.

    .. math::
        o_t = \frac{\sum_c \exp(\mathrm{scale}\; q_t^\top C_c)\, S_{t,c}}
                   {\sum_c \exp(\mathrm{scale}\; q_t^\top C_c)\, n_{t,c}}, \qquad
        S_{t,c} = \sum_{j \le t,\, z_j = c} v_j, \quad n_{t,c} = |\{j \le t : z_j = c\}|, \qquad
        z_j = \mathrm{argmin}_c |k_j - C_c|

    This is softmax attention over the quantised keys, exactly and in linear time; if every key is a code it is softmax
    attention.  The paper's bias by distance for the keys of the current and the previous block is left out.  The
    paper moves the codes to the running mean of their keys and cuts their gradient; here they are a parameter with its
    true gradient.  Keys have none, since the nearest code does not change with them: :func:`commitment_loss` pulls
    them to their codes, and ``straight_through`` hands them the gradients of the quantised keys.  The paper layer-norms
    q and k first.

    Args:
        codes: rows of the codebook.
        straight_through: differentiate by k_j as if it were the quantised key, for all keys where the paper does so for
            those of the last two blocks.  The result is the same and no longer has this derivative; each code then
            keeps K more sums, so train with it and decode without.

    Raises:
        ValueError: if ``codes`` is no positive int or ``straight_through`` no bool.
    """

    aliases: ClassVar[tuple[str, ...]] = ("vq_attention",)
    paper: ClassVar[Paper] = Paper(
        "2309.16354", "Transformer-VQ: Linear-Time Transformers via Vector Quantization", "Lingle", 2023
    )
    cost: ClassVar[Cost] = Cost(
        train="T * codes * (2 * K + (1 + straight_through * K) * (V + 64))",
        decode="codes * (2 * K + V)",
        state="codes * (V + 1) * (1 + straight_through * K)",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "codebook": Input("H C K", doc="codes that stand for the keys", optional=True, start="normal")
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({"codes": 6}, {"codes": 1})

    codes: int = 512
    straight_through: bool = False

    def __post_init__(self) -> None:
        self.require_int("codes")
        self.require_choice("straight_through", (False, True))

    def widths(self, key_width: int) -> dict[str, int]:
        return {"C": self.codes}

    def compute(self, recur: Recur, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> Tensor:
        C = inputs["codebook"]
        q, code = recur.scale * q, one_hot(nearest(k, C), self.codes).to(q.dtype)
        score = q @ C.mT
        # the row's maximum cancels; it has to be one over codes that occurred, or all that did could underflow
        score = score.masked_fill(~self.occurred(recur, code, v.shape[-1]), -torch.inf)
        peak = score.detach().amax(-1, keepdim=True)
        read = (score - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
        if self.straight_through:  # weights change with k_j by q_t times themselves: columns that are 0 but for that
            read = torch.cat((read[..., None], read[..., None] * q[..., None, :]), -1).flatten(-2)
            moved = torch.cat((torch.ones_like(k[..., :1]), k - k.detach()), -1)
            code = (code[..., None] * moved[..., None, :]).flatten(-2)
        return recur(Terms(read, code, v, normalize=True), scale=1.0)

    def occurred(self, recur: Recur, code: Tensor, value_width: int) -> Tensor:
        """Which codes each query can meet: those of the real keys so far, or of all where it is not causal."""
        if recur.call.padding is not None:
            code = code * recur.call.padding[:, None, :, None]
        if not recur.causal:
            return code.any(2, keepdim=True)
        B, H, _, C = code.shape
        step = 1 + self.straight_through * recur.call.k.shape[-1]  # a count is the first of so many numbers of a code
        past = recur.taken((B, H, C * step, value_width), True)
        if past is None:
            return code.cumsum(2) > 0
        assert past.normalizer is not None
        return torch.cat((past.normalizer[:, :, None, ::step].to(code.dtype), code), 2).cumsum(2)[:, :, 1:] > 0

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, codebook: Tensor) -> Tensor:
        z = ((k[:, None] - codebook) ** 2).sum(-1).argmin(-1)
        quantised = codebook[z] + (k - k.detach() if self.straight_through else 0)
        score = (scale * q @ quantised.mT).masked_fill(~visible, -torch.inf)
        return score.softmax(-1) @ v
