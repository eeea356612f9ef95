"""A small decoder around any mechanism: embedding, pre-norm blocks of attention and MLP, head."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from foveal.layer import AttentionLayer
from foveal.spec import Mechanism
from foveal.train.task import require_int

NEAR, FAR = 1e-3, 1e-1  # where one-sided gates start, as distances from their bound
WORD, HEARD = 0.02, 0.3  # standard deviations at the start: of embeddings, and of what attention adds to them


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a model.

    Args:
        dim: width of the hidden state.
        heads: attention heads of each block.
        head_dim: K = V, width of a head.
        layers: number of blocks.
        conv: width of the short convolution over q, k and v; 0 is none.
        rope: base of rotary positions; None is none.
        expansion: width of the MLP as a multiple of ``dim``.
        tied: whether the head is the embedding.

    Raises:
        ValueError: naming the setting that is out of range.
    """

    dim: int = 64
    heads: int = 1
    head_dim: int = 32
    layers: int = 2
    conv: int = 4
    rope: float | None = None
    expansion: int = 2
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "head_dim", "layers", "expansion"):
            require_int(name, getattr(self, name), 1)
        require_int("conv", self.conv, 0)
        if self.rope is not None and not 1 < self.rope < math.inf:
            raise ValueError(f"rope: has {self.rope}, expected a finite number > 1")
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"head_dim: has {self.head_dim}, expected an even number beside rope")

    def state(self, mechanism: Mechanism, length: int) -> int:
        """Numbers that one head keeps for decoding after ``length`` tokens."""
        sizes = {"T": length, "K": self.head_dim, "V": self.head_dim}
        return round(mechanism.cost.evaluate("state", mechanism.variables() | sizes))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + MLP(norm(x))``."""

    def __init__(self, config: Config, mechanism: Mechanism) -> None:
        super().__init__()
        dim, hidden = config.dim, config.dim * config.expansion
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = AttentionLayer(
            dim, config.heads, mechanism, key_dim=config.head_dim, conv=config.conv, rope=config.rope
        )
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, dim] to [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), causal=True)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Decoder(nn.Module):
    """A causal language model without positions other than those of the mechanism, the convolution and ``rope``.

    Args:
        vocab: number of tokens.
        config: the shape.
        mechanism: what the attention layers compute.

    Shapes:
        tokens [B, T] -> logits [B, T, vocab], or [N, vocab] at the N positions of a bool ``where`` [B, T].
    """

    def __init__(self, vocab: int, config: Config, mechanism: Mechanism) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, mechanism) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=WORD)
        if config.tied:
            self.head.weight = self.embedding.weight
        for block in self.blocks:
            remember(block.attention)  # type: ignore[arg-type]
        self._balance(torch.randint(vocab, (8, 64)))

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        """The logits of what follows each token."""
        x: Any = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x if where is None else x[where]))
        return logits

    @torch.no_grad()
    def _balance(self, tokens: Tensor) -> None:
        """Scale the output projections so that attention starts equally loud, whatever the mechanism.

        Reads of unit keys come out sqrt(K) times smaller than a mean of values.  Left alone, the learning rate that
        suits one mechanism leaves the other on the first plateau for hundreds of steps.
        """
        x: Any = self.embedding(tokens)
        for block in self.blocks:
            assert isinstance(block, Block)
            loudness = block.attention(block.attention_norm(x), causal=True).std()
            if 0 < loudness < math.inf:
                block.attention.out.weight.mul_(HEARD / loudness)
            x = block(x)

    @property
    def size(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


def remember(layer: AttentionLayer) -> None:
    """Start gates that have one bound near it, spread evenly in logarithm: a new layer should forget slowly.

    Mamba-2 and Gated DeltaNet start so.  A decay that starts at softplus(0) halves the state with every token, and then
    no gradient tells what a longer memory would have been good for.
    """
    for name, gate in layer.gates.items():
        item = layer.mechanism.inputs[name]
        if (item.low > float("-inf")) != (item.high < float("inf")):  # `Input.activation` is bound -+ softplus
            assert isinstance(gate, nn.Linear)
            steps = (torch.arange(gate.out_features) + 0.5) / gate.out_features
            distance = NEAR * (FAR / NEAR) ** steps
            with torch.no_grad():
                gate.bias.copy_(distance.expm1().log())
