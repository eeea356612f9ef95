"""The rules by which mechanisms turn estimates into a choice, each written once.

Estimates are [..., N] over the last axis, -inf (or weight 0) where nothing may be chosen.  ``forced`` is bool and
broadcasts to them; what it names is always chosen and counts towards the budget.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top(scores: Tensor, count: int, forced: Tensor | None = None) -> Tensor:
    """The ``count`` best of each row, bool; fewer where a row has fewer finite scores, more only if more are forced."""
    scores = scores.detach()
    if forced is not None:
        scores = scores.masked_fill(forced, torch.inf)
    best = scores.topk(min(count, scores.shape[-1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (scores > -torch.inf)
    return chosen if forced is None else chosen | forced


def mass(
    weights: Tensor, share: float | Tensor, *, crossing: bool = True, least: int = 1, forced: Tensor | None = None
) -> Tensor:
    """The fewest of each row, in falling order, that hold ``share`` of the row's sum, bool.

    Args:
        weights: at least 0.
        share: between 0 and 1; a tensor broadcasts to [..., 1].
        crossing: whether the one that reaches the share is chosen too.
        least: how many are chosen at least, those of weight 0 left out.
        forced: chosen first; what they hold counts.
    """
    weights = weights.detach()
    order = weights if forced is None else weights + forced * (weights.amax(-1, keepdim=True) + 1)
    place = order.sort(dim=-1, descending=True, stable=True).indices
    sorted_weights = weights.gather(-1, place)
    held = sorted_weights.cumsum(-1)
    wanted = share * weights.sum(-1, keepdim=True)
    taken = (held - sorted_weights < wanted) if crossing else (held <= wanted)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    taken = (taken | (rank < least)) & (sorted_weights > 0)
    chosen = torch.zeros_like(taken).scatter(-1, place, taken)
    return chosen if forced is None else chosen | forced
