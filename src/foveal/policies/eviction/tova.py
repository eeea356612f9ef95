"""TOVA: the newest query decides which cached token to omit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.engines.cache import Eviction, attention_paid
from foveal.spec import Paper


@dataclass(frozen=True)
class TOVA(Eviction, name="tova"):
    r"""Omit the token to which the newest query pays the least attention, one choice for all heads of a layer.

    .. math::
        s_j = \frac{1}{H} \sum_{h} \mathrm{softmax}_j\left(q_{h,T}^\top k_j / \sqrt{K}\right)

    Nothing is protected but the newest token, and nothing is accumulated.  Scoring costs O(S K) per head and step.

    Args:
        budget: entries kept per key head (int), or a share of the tokens seen (float).

    Raises:
        ValueError: if ``budget`` is out of range.
    """

    aliases: ClassVar[tuple[str, ...]] = ("token_omission_via_attention",)
    paper: ClassVar[Paper] = Paper(
        "2401.06104", "Transformers are Multi-State RNNs", "Oren, Hassid, Yarden, Adi, Schwartz", 2024
    )
    while_decoding: ClassVar[bool] = True

    budget: int | float = 1024

    def protected(self) -> tuple[int | float, int | float]:
        return 0, 1

    def observes(self) -> int | None:
        return 1

    def score(
        self, k: Tensor, v: Tensor, queries: Tensor, *, real: Tensor, scale: float, past: Tensor | None = None
    ) -> Tensor:
        (weight,) = attention_paid(k, queries, real=real, scale=scale)
        return weight.mean((1, 2, 3))[:, None].expand(k.shape[:3])

    def definition(self, k: Tensor, v: Tensor, queries: Tensor, *, scale: float) -> Tensor:
        (G, S, _), H = k.shape, len(queries)
        paid = [(scale * k[h // (H // G)] @ queries[h, -1]).softmax(0) for h in range(H)]
        return torch.stack(paid).mean(0).expand(G, S)
