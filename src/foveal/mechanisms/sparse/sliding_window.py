"""Sliding-window attention: softmax over the last keys only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from foveal.mechanisms.classic.softmax import Softmax
from foveal.spec import Limit, Paper


@dataclass(frozen=True)
class SlidingWindow(Softmax, name="sliding_window"):
    r"""Attend to the last w keys, the query's own included.

    .. math::
        o_t = \sum_{j = \max(0, t - w + 1)}^{t} \mathrm{softmax}_j\left(q_t^\top k_j / \sqrt{K}\right) v_j

    ``window >= T`` is causal softmax attention; a stack of L layers reaches back L (w - 1) positions.

    Args:
        window: an int w keeps w keys, the query's own included; a pair (left, right) keeps that many on each side.
        sinks: number of first keys that stay visible outside the window.
        softcap: bound of the scores' magnitude; None is no bound.
        alibi: subtract a distance, by a slope per head, from the scores.
    """

    aliases: ClassVar[tuple[str, ...]] = ("local", "swa", "longformer_local")
    paper: ClassVar[Paper] = Paper(
        "2004.05150", "Longformer: The Long-Document Transformer", "Beltagy, Peters, Cohan", 2020
    )
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"window": 8}, {"window": 5, "sinks": 3})
    limits: ClassVar[tuple[Limit, ...]] = (
        Limit({"window": 4096}, "softmax", why="a window longer than the sequence hides nothing"),
        Limit({"window": 8}, "softmax", {"window": 8}, why="the same term of the same engine"),
    )

    window: int | tuple[int, int] | None = 512
