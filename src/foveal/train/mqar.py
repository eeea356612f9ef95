"""Multi-query associative recall: name the value that stood behind a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveal.spec import Paper
from foveal.train.task import IGNORED, Task, require_int

BLANK = 0
POWER = 0.01  # the paper's: gaps between the pairs and a question follow gap^(POWER - 1)


@dataclass(frozen=True)
class MQAR(Task, name="mqar"):
    r"""Read pairs of a key and a value, then answer each key with its value.

    .. math::
        k_1 v_1 \dots k_P v_P \; \cdot \; k_{\pi(1)} \; \cdot \; \cdot \; k_{\pi(2)} \cdots, \qquad
        \text{after } k_i \text{ the answer is } v_i

    Keys are different tokens of the lower half of the vocabulary, values different tokens of the upper half, bound
    anew in every sequence, so that nothing can be learned by heart.  Each key is asked for once, at a place drawn with
    probability proportional to its distance from the pairs to the power of -0.99, as in the paper; all other places
    hold a blank, token 0.  Only the answers count, for the loss as for the accuracy.

    A model that only knows which values a sequence holds answers one in P rightly: that is :attr:`chance`.

    Args:
        pairs: P, number of pairs.
        length: tokens of a sequence.
        vocab: number of different tokens: a blank, keys and values.

    Raises:
        ValueError: if the pairs and their questions are longer than the sequence, or the vocabulary has too few keys.
    """

    paper: ClassVar[Paper] = Paper(
        "2312.04927", "Zoology: Measuring and Improving Recall in Efficient Language Models", "Arora et al.", 2023
    )

    pairs: int = 20
    length: int = 64
    vocab: int = 128

    def __post_init__(self) -> None:
        require_int("pairs", self.pairs, 1)
        require_int("length", self.length, 3 * self.pairs, f"three tokens for each of {self.pairs} pairs")
        require_int("vocab", self.vocab, 2 * self.pairs + 2, f"a blank, keys and values for {self.pairs} pairs")

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values of the sequence."""
        return 1 / self.pairs

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Fresh sequences; see :meth:`Task.batch`."""
        start, half = 2 * self.pairs, self.vocab // 2

        def different(scores: Tensor) -> Tensor:
            return scores.topk(self.pairs).indices

        keys = 1 + different(torch.rand(size, half - 1, generator=generator))
        values = half + different(torch.rand(size, self.vocab - half, generator=generator))
        # the largest log(u) / p are a draw without replacement with chances proportional to p
        gap = torch.arange(1, self.length - start + 1, dtype=torch.float64)
        drawn = torch.rand(size, len(gap), generator=generator, dtype=torch.float64).log() / gap ** (POWER - 1)
        places = start + different(drawn)
        tokens = torch.full((size, self.length), BLANK)
        tokens[:, :start] = torch.stack((keys, values), 2).flatten(1)
        targets = torch.full_like(tokens, IGNORED)
        return tokens.scatter(1, places, keys), targets.scatter(1, places, values)
