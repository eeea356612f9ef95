"""Scaled dot-product attention, with the modifications that real models use as settings."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.call import Positions
from foveal.engines.softmax import ScoreMod, SoftmaxAttention
from foveal.spec import Cost, Input, Limit, Paper


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of ALiBi: 2^(-8 h / H), h = 1..H, for H a power of two; else those of the next lower power of two, then
    every other one of the next higher.
    """
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


@dataclass(frozen=True)
class Softmax(SoftmaxAttention, name="softmax"):
    r"""Weigh every visible key by the exponential of its score.

    .. math::
        o_t = \sum_{j \in V_t} \frac{\exp(s_{tj})}{\sum_{i \in V_t} \exp(s_{ti}) + \exp(z_h)} v_j, \qquad
        s_{tj} = c \tanh\left(\frac{q_t^\top k_j}{c \sqrt{K}}\right) - m_h\, |t - j|

    with V_t the visible keys, c the soft cap (none: the score itself), m_h the slope of ALiBi (off: 0) and z_h a
    learned sink logit (absent: no such term).  The soft cap acts before ALiBi.

    Args:
        window: None sees everything; an int w keeps w keys, the query's own included (non-causal: w - 1 on each
            side beside its own); a pair (left, right) keeps that many on each side beside its own.
        sinks: number of first keys that stay visible outside the window.
        softcap: c, bound of the scores' magnitude; None is no bound.
        alibi: subtract a distance, by a slope per head, from the scores.

    Raises:
        ValueError: if ``window``, ``sinks`` or ``softcap`` is out of range.
    """

    aliases: ClassVar[tuple[str, ...]] = ("sdpa", "full", "vanilla", "alibi")
    paper: ClassVar[Paper] = Paper("1706.03762", "Attention Is All You Need", "Vaswani et al.", 2017)
    cost: ClassVar[Cost] = Cost(
        train="T * min(T / 2, seen + 256) * (K + V)",
        decode="min(T, seen) * (K + V)",
        state="min(T, seen - 1) * (K + V)",
    )
    inputs: ClassVar[dict[str, Input]] = {
        "sink_logits": Input("H", doc="logit per head that takes part in the sum without a value", optional=True)
    }
    per_head: ClassVar[bool] = False
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"window": 8, "sinks": 2},
        {"window": (5, 2), "softcap": 1.5},
        {"alibi": True},
    )
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit({"window": 4096}, "softmax", why="a window longer than the sequence hides nothing"),
        Limit({"window": (7, 0)}, "softmax", {"window": 8}, why="a pair is inclusive of the query's own key"),
        Limit({"softcap": 1e6}, "softmax", why="a high cap bounds nothing"),
    )

    window: int | tuple[int, int] | None = None
    sinks: int = 0
    softcap: float | None = None
    alibi: bool = False

    def __post_init__(self) -> None:
        pair = self.window if isinstance(self.window, tuple) else (self.window,)
        least = 0 if isinstance(self.window, tuple) else 1
        whole = all(isinstance(x, Integral) and not isinstance(x, bool) and x >= least for x in pair)
        if self.window is not None and not (whole and len(pair) == 2 - least):
            raise self.fail("window", repr(self.window), "an int >= 1, a pair (left, right) of ints >= 0, or None")
        self.require_int("sinks", 0)
        if self.softcap is not None:
            self.require_number("softcap", 0, float("inf"), "a number above 0, or None")
        self.require_choice("alibi", (False, True))

    def reach(self) -> tuple[int | None, int | None]:
        if self.window is None:
            return None, None
        return self.window if isinstance(self.window, tuple) else (self.window - 1, self.window - 1)

    def always_visible(self) -> int:
        return self.sinks

    def score_terms(self, heads: int) -> tuple[float, list[float] | None]:
        return self.softcap or 0.0, alibi_slopes(heads) if self.alibi else None

    def score_mod(self, **inputs: Tensor) -> ScoreMod | None:
        if self.softcap is None and not self.alibi:
            return None

        def modify(scores: Tensor, at: Positions) -> Tensor:
            if self.softcap is not None:
                scores = self.softcap * (scores / self.softcap).tanh()
            if self.alibi:
                slope = scores.new_tensor(alibi_slopes(scores.shape[1]))[at.head]
                scores = scores - slope * (at.q - at.k).abs()
            return scores

        return modify

    def sink_logits(self, **inputs: Tensor) -> Tensor | None:
        return inputs.get("sink_logits")

    def definition(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor, sink_logits: Tensor | None = None
    ) -> Tensor:
        H, T, S = q.shape[0], q.shape[1], k.shape[1]
        out = torch.zeros(H, T, v.shape[-1], dtype=q.dtype)
        left, right = self.reach()
        for h in range(H):
            slope = alibi_slopes(H)[h] if self.alibi else 0.0
            for t in range(T):
                here = S - T + t
                keys = [
                    j
                    for j in range(S)
                    if visible[t, j] and (left is None or j < self.sinks or (here - left <= j <= here + (right or 0)))
                ]
                if not keys:
                    continue
                s = scale * (k[h, keys] @ q[h, t])
                s = s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)
                s = s - slope * torch.tensor([abs(here - j) for j in keys], dtype=q.dtype)
                z = torch.zeros(0, dtype=q.dtype) if sink_logits is None else sink_logits[h, None]
                p = torch.cat((s, z)).softmax(0)[: len(keys)]
                out[h, t] = p @ v[h, keys]
        return out
