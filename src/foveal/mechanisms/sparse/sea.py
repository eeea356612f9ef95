"""SEA: softmax over the keys that an estimated, compressed attention map picks, beside the mean of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.call import Call, Result
from foveal.engines.gather import Gather, Keys
from foveal.precision import upcast
from foveal.spec import Cost, Input, Limit, Paper
from foveal.state import KeyValueState


def estimation_loss(estimate: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of the map that ``estimate`` [B, H, T, C] stands for and a teacher's causal one [B, H, T, T].

    The teacher's weights are summed over the keys of each column; without them ``estimate`` learns nothing, as a choice
    has no gradient.
    """
    T, C = weights.shape[-1], estimate.shape[-1]
    n, j, c = torch.arange(1, T + 1)[:, None], torch.arange(T), torch.arange(C)
    column = (((j + 1) * C - 1) // n).clamp(max=C - 1).to(weights.device)  # beyond the diagonal weights are 0
    target = weights.new_zeros(estimate.shape).scatter_add(-1, column.expand_as(weights), weights)
    empty = ((c + 1) * n // C == c * n // C).to(weights.device)
    found = estimate.masked_fill(empty, -torch.inf).log_softmax(-1).masked_fill(empty, 0.0)
    return -(target * found).sum(-1).mean()


@dataclass(frozen=True)
class SEA(Gather, name="sea"):
    r"""Let a coarse estimate of the attention map say which keys are worth exact attention.

    .. math::
        o_t = p_t \sum_{j \in M_t} \mathrm{softmax}_{j \in M_t}\left(q_t^\top k_j / \sqrt{K}\right) v_j
        + (1 - p_t)\, \frac{1}{n} \sum_{j \le n} v_j

    Column c of C of the estimate stands for the positions from floor(c n / C) to floor((c + 1) n / C) - 1 of the n keys
    that a query sees.  M are the first ``top_k`` keys of the columns in falling order of their estimate, so
    ``top_k`` >= n and p = 1 is softmax attention.  The estimate and p are inputs: the paper computes them by a linear
    attention, a perceptron and a convolution over the map, which belong to the layer, and trains them
    on a softmax teacher, see :func:`estimation_loss`.  The paper keeps whole columns and shares the budget between the
    heads; here every head and query reads exactly ``top_k`` keys.

    Args:
        top_k: keys that a query reads.
        columns: C.

    Raises:
        ValueError: if a setting is no positive int.
    """

    aliases: ClassVar[tuple[str, ...]] = ("sea_attention",)
    paper: ClassVar[Paper] = Paper(
        "2310.01777", "SEA: Sparse Linear Attention with Estimated Attention Mask", "Lee, Kim, Willette, Hwang", 2023
    )
    cost: ClassVar[Cost] = Cost(
        train="T * (min(top_k, T) * (K + V) + V)", decode="min(top_k, T) * (K + V) + T * V", state="T * (K + V)"
    )
    inputs: ClassVar[dict[str, Input]] = {
        "estimate": Input("B H T C", doc="logit of each column of the compressed attention map"),
        "confidence": Input("B H T", low=0.0, high=1.0, doc="p, the share of exact attention in the output"),
    }
    causal_modes: ClassVar[tuple[bool, ...]] = (True, False)
    examples: ClassVar = ({"top_k": 5, "columns": 7}, {"top_k": 9, "columns": 3})
    limits: ClassVar = (
        Limit(
            {},
            "softmax",
            inputs=lambda x: (x | {"confidence": torch.ones_like(x["confidence"])}, {}),
            why="a budget for all keys and full confidence",
        ),
    )

    top_k: int = 64
    columns: int = 128

    def __post_init__(self) -> None:
        self.require_int("top_k")
        self.require_int("columns")

    def widths(self, key_width: int) -> dict[str, int]:
        return {"C": self.columns}

    def choose(self, q: Tensor, seen: Tensor, keys: Keys, prepared: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        (B, H, T, C), S = inputs["estimate"].shape, keys.k.shape[2]
        order = inputs["estimate"].sort(dim=-1, descending=True, stable=True).indices
        first = order * seen // C
        filled = ((order + 1) * seen // C - first).cumsum(-1)  # keys in the columns up to each, in order
        i = torch.arange(min(self.top_k, S), device=q.device).expand(B, H, T, -1).contiguous()
        rank = torch.searchsorted(filled, i, right=True).clamp(max=C - 1)
        behind = filled.gather(-1, rank) - i  # places from the end of the column
        position = ((order.gather(-1, rank) + 1) * seen // C - behind).clamp(0, S - 1)
        slots = keys.slot[:, None, None].expand(B, H, T, S).gather(-1, position)
        return slots, (i < seen).to(q.dtype)

    def run(self, call: Call) -> Result:
        result = super().run(call.replace(want_state=True))
        state, (T, S) = result.state, (call.q.shape[2], call.k.shape[2])
        assert isinstance(state, KeyValueState)
        if S == 0:
            return Result(result.output, state if call.want_state else None)
        v, real = upcast(state.v), state.real()[:, None, :, None]
        total, count = (v * real).cumsum(2), real.cumsum(2)
        mean = (total / count.clamp(min=1)).repeat_interleave(call.group, 1)
        mean = mean[:, :, mean.shape[2] - T :] if call.causal else mean[:, :, -1:]
        p = call.inputs["confidence"].to(mean.dtype)[..., None]
        return Result(p * result.output + (1 - p) * mean, state if call.want_state else None)

    def definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        visible: Tensor,
        estimate: Tensor,
        confidence: Tensor,
    ) -> Tensor:
        o = []
        for t in range(len(q)):
            n, C = int(visible[t].sum()), self.columns
            M: list[int] = []
            logit = estimate[t].tolist()
            for c in sorted(range(C), key=[-x for x in logit].__getitem__):
                M.extend(range(c * n // C, (c + 1) * n // C))
            M = M[: self.top_k]
            sparse = (scale * k[M] @ q[t]).softmax(-1) @ v[M]
            o.append(confidence[t] * sparse + (1 - confidence[t]) * v[:n].mean(0))
        return torch.stack(o)
