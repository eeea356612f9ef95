"""A trainable attention layer for any mechanism: projections, gates, short convolution, positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from foveal import packing, registry
from foveal.api import attention
from foveal.spec import Input, Mechanism
from foveal.state import State


@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """What a layer carries from call to call.

    Args:
        attention: the mechanism's state.
        tail: last inputs of the short convolution, [B, width - 1, channels], or None.
        length: real tokens seen so far, [B]; rotary positions continue from it.
    """

    attention: State
    tail: Tensor | None
    length: Tensor


class AttentionLayer(nn.Module):
    """Attention with everything that a mechanism needs to be trained.

    Every extra input that the mechanism declares gets a source: inputs with a T axis are linear functions of the
    hidden state, mapped onto their legal range; the others are parameters of the layer.

    Args:
        dim: width of the hidden state.
        heads: number of query heads, H.
        mechanism: key or mechanism, as for :func:`foveal.attention`.
        kv_heads: number of key and value heads, G; None is H.
        key_dim: K, width of each query and key head; None is ``dim // heads``.
        value_dim: V, width of each value head; None is K.
        conv: width of a causal depth-wise convolution over q, k and v (recurrences use 4); 0 is none.
        rope: base of rotary position embeddings on q and k (10000 is common); None is none.
        bias: whether the projections have biases.

    Shapes:
        hidden [B, T, dim] -> [B, T, dim].

    Raises:
        ValueError: if sizes do not fit each other.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: str | Mechanism | type[Mechanism] = "softmax",
        *,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv: int = 0,
        rope: float | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.mechanism = registry.resolve(mechanism)
        kv_heads = heads if kv_heads is None else kv_heads
        for name, value, least in (("dim", dim, 1), ("heads", heads, 1), ("kv_heads", kv_heads, 1), ("conv", conv, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: has {value!r}, expected an int >= {least}")
        if heads % kv_heads:
            raise ValueError(f"heads: has {heads}, expected a positive multiple of kv_heads={kv_heads}")
        if key_dim is None and dim % heads:
            raise ValueError(f"dim: has {dim}, expected a multiple of heads={heads}, or key_dim")
        key_dim = dim // heads if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        if rope is not None and key_dim % 2:
            raise ValueError(f"key_dim: has {key_dim}, expected an even width for rotary embeddings")
        self.sizes = {"H": heads, "G": kv_heads, "K": key_dim, "V": value_dim} | self.mechanism.widths(key_dim)
        self.widths = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
        self.rope = rope
        self.qkv = nn.Linear(dim, sum(self.widths), bias=bias)
        self.out = nn.Linear(heads * value_dim, dim, bias=bias)
        self.conv = nn.Conv1d(sum(self.widths), sum(self.widths), conv, groups=sum(self.widths)) if conv else None
        self.gates = nn.ModuleDict()
        self.constants = nn.ParameterDict()
        for name, item in self.mechanism.inputs.items():
            if item.whole:
                continue
            if "T" in item.axes:
                self.gates[name] = nn.Linear(dim, self._width(item))
            else:
                shape = [self.sizes[axis] for axis in item.axes]
                self.constants[name] = nn.Parameter(
                    torch.randn(shape) if item.start is None else item.unbounded(item.initial(self.sizes))
                )

    def _width(self, item: Input) -> int:
        sizes = [self.sizes[axis] for axis in item.axes if axis not in "BT"]
        return int(torch.tensor(sizes).prod())

    def forward(
        self,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_state: LayerState | None = None,
        output_final_state: bool = False,
        causal: bool | None = None,
        **given: Tensor,
    ) -> Any:
        """Attend within the hidden states.

        Args:
            hidden: [B, T, dim].
            mask: bool [B, T], True = keep.
            cu_seqlens: boundaries of packed sequences, B = 1.
            initial_state: what an earlier call with ``output_final_state`` returned.
            output_final_state: return ``(output, state)``.
            causal: as for :func:`foveal.attention`.
            **given: the mechanism's inputs of whole numbers, such as ``document`` [B, T].

        Raises:
            TypeError: if one of those is missing, or another one is given.
            ValueError: for a hidden state of another width, or a state beside ``cu_seqlens``.
        """
        surplus = sorted(name for name in given if name not in self.mechanism.inputs or name in self.gates)
        if surplus:
            raise TypeError(f"{', '.join(surplus)}: given, expected no such argument of {self.mechanism.name}")
        B, T = self._check(hidden, mask, cu_seqlens, initial_state, output_final_state)
        real = torch.ones(B, T, dtype=torch.bool, device=hidden.device) if mask is None else mask.expand(B, T)
        start = real.new_zeros(B, dtype=torch.long) if initial_state is None else initial_state.length
        segment = _segments(cu_seqlens, T, real)
        mixed, tail = self.qkv(hidden), None
        if self.conv is not None:
            mixed, tail = self._convolve(mixed, real, segment, None if initial_state is None else initial_state.tail)
        parts = mixed.split(self.widths, -1)
        q, k, v = (
            x.reshape(B, T, self.sizes[heads], self.sizes[width])
            for x, heads, width in zip(parts, "HGG", "KKV", strict=True)
        )
        if self.rope is not None:
            q, k = (rotate(x, positions(real, segment, start), self.rope) for x in (q, k))
        inputs: dict[str, Any] = {name: self._gate(name, gate(hidden)) for name, gate in self.gates.items()}
        inputs |= {name: self.mechanism.inputs[name].activation(x) for name, x in self.constants.items()}
        inputs |= given
        result = attention(
            q,
            k,
            v,
            self.mechanism,
            layout="bthd",
            mask=mask,
            cu_seqlens=cu_seqlens,
            causal=causal,
            initial_state=None if initial_state is None else initial_state.attention,
            output_final_state=output_final_state,
            **inputs,
        )
        if not output_final_state:
            return self.out(result.flatten(2))
        return self.out(result.output.flatten(2)), LayerState(result.state, tail, start + real.sum(1))

    def _check(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_state: LayerState | None,
        output_final_state: bool,
    ) -> tuple[int, int]:
        """Refuse arguments that do not fit; returns B and T."""
        if hidden.dim() != 3 or hidden.shape[-1] != self.qkv.in_features:
            raise ValueError(f"hidden: has shape {tuple(hidden.shape)}, expected [B, T, {self.qkv.in_features}]")
        B, T, _ = hidden.shape
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) not in ((B, T), (1, T))):
            raise ValueError(f"mask: has {mask.dtype} and shape {tuple(mask.shape)}, expected bool [B, T] = {(B, T)}")
        if cu_seqlens is not None:
            if initial_state is not None or output_final_state:
                raise ValueError("cu_seqlens: given beside a state, expected one or the other")
            if B != 1:
                raise ValueError(f"cu_seqlens: has a batch of {B}, expected B = 1")
            packing.bounds(cu_seqlens, T, "cu_seqlens", self.mechanism)
        if initial_state is not None:
            if not isinstance(initial_state, LayerState):
                raise TypeError(f"initial_state: is {type(initial_state).__name__}, expected a LayerState")
            if len(initial_state.length) != B:
                raise ValueError(f"initial_state: has {len(initial_state.length)} rows, expected B = {B}")
        return B, T

    def _gate(self, name: str, x: Tensor) -> Tensor:
        item = self.mechanism.inputs[name]
        rest = [self.sizes[axis] for axis in item.axes if axis not in "BT"]
        return item.activation(x.float()).reshape(*x.shape[:2], *rest)

    def _convolve(self, x: Tensor, real: Tensor, segment: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Causal depth-wise convolution over real tokens of the same sequence, and the inputs that the next call needs.

        Gathering each token's real predecessors, rather than shifting, is what freezes the state at padding.
        """
        assert self.conv is not None
        B, T, C = x.shape
        width = self.conv.kernel_size[0]
        tail = x.new_zeros(B, width - 1, C) if tail is None else tail
        # real tokens first, in their order, behind the tail
        order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        line = torch.cat((tail, x.gather(1, order[..., None].expand(-1, -1, C))), 1)
        count = real.cumsum(1)
        lag = torch.arange(width - 1, -1, -1, device=x.device)
        place = (count[..., None] - 1 + (width - 1) - lag).clamp(min=0).flatten(1)  # of each lag, in line
        # the tail belongs to sequence 0: it is empty when several are packed
        own = torch.cat((segment.new_zeros(B, width - 1), segment.gather(1, order)), 1)
        same = own.gather(1, place).view(B, T, width)
        fits = same == segment[..., None]
        taken = line.gather(1, place[..., None].expand(-1, -1, C)).view(B, T, width, C)
        weight = self.conv.weight[:, 0].T
        y = (taken * fits[..., None] * weight).sum(2)
        y = y if self.conv.bias is None else y + self.conv.bias
        last = real.sum(1, keepdim=True) + torch.arange(width - 1, device=x.device)
        return nn.functional.silu(y), line.gather(1, last.expand(B, -1)[..., None].expand(-1, -1, C))


def _segments(cu_seqlens: Tensor | None, T: int, real: Tensor) -> Tensor:
    """Number of the packed sequence of each token, [B, T]."""
    if cu_seqlens is None:
        return real.new_zeros(real.shape, dtype=torch.long)
    token = torch.arange(T, device=real.device)
    return torch.searchsorted(cu_seqlens.to(torch.long)[1:].contiguous(), token, right=True)[None]


def positions(real: Tensor, segment: Tensor, start: Tensor) -> Tensor:
    """How many real tokens of its own sequence stand before each token, [B, T]."""
    count = real.cumsum(1) - real.long()
    first = torch.zeros_like(count).scatter_reduce(1, segment, count, "amin", include_self=False)
    return count - first.gather(1, segment) + start[:, None]


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotary embedding of [B, T, H, K] in pairs (i, i + K/2), as Llama does."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None, None].float() * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
