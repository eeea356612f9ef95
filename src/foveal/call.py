"""One checked call on its way to an engine, and what the engine returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foveal.state import State


@dataclasses.dataclass(frozen=True)
class Positions:
    """Where queries and keys stand, shaped to broadcast against scores [B, H, T, S].

    A position counts the real tokens before it, so that padding takes no room.  Queries are the last T positions.

    Args:
        q: [B or 1, 1, T, 1].
        k: [B or 1, 1, 1, S].
        head: query head of each row, [H, 1, 1].
        query: what a mechanism's carried inputs say of each query, by name, shaped as q.
        key: what they say of each key, shaped as k.
        part: number of the layout that each key stands in, shaped as k; None where there is one only.
    """

    q: Tensor
    k: Tensor
    head: Tensor
    query: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    key: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    part: Tensor | None = None

    def cut(self, queries: slice, keys: slice | Tensor) -> Positions:
        """The positions of a rectangle of scores."""
        query = {name: x[:, :, queries] for name, x in self.query.items()}
        key = {name: x[..., keys] for name, x in self.key.items()}
        return Positions(self.q[:, :, queries], self.k[..., keys], self.head, query, key)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of :func:`foveal.attention` after checks: layout [B, H, T, K], masks sorted by kind.

    Args:
        q, k, v: [B, H, T, K], [B, G, S, K], [B, G, S, V], any strides.
        scale: factor of the scores.
        causal: whether a query sees only keys at its own or an earlier position.
        top_left: causality that counts positions from the first query, not from the last.
        padding: bool [B, S], False where a token does not exist.
        mask: bool, broadcastable to [B, H, T, S], True where a query may see a key.
        bias: float, broadcastable to [B, H, T, S], added to the scores.
        inputs: the mechanism's own tensors by name.
        carried: those of them that keys keep, of every key, [B, S].
        state: what an earlier call left behind.
        want_state, want_lse: what to return beside the output.
        form, backend: explicit choices, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = True
    top_left: bool = False
    padding: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    carried: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: State | None = None
    want_state: bool = False
    want_lse: bool = False
    form: str | None = None
    backend: str | None = None

    def replace(self, **changes: Any) -> Call:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    def key_positions(self) -> Tensor:
        """Positions of the keys, [B or 1, S]: real tokens count up from 0, leading padding is negative."""
        S = self.k.shape[2]
        slot = torch.arange(S, device=self.k.device)[None]
        if self.padding is None:
            return slot
        count = self.padding.cumsum(-1)
        first = (count == 0).sum(-1, keepdim=True)
        return torch.where(count == 0, slot - first, count - 1)

    def positions(self) -> Positions:
        """Positions of queries and keys; the last query stands at the last key."""
        T, S = self.q.shape[2], self.k.shape[2]
        k = self.key_positions()
        if self.top_left:
            q = torch.arange(T, device=k.device)[None]
        elif T <= S:
            q = k[:, S - T :]
        else:
            start = k[:, :1] if S else k.new_zeros(k.shape[0], 1)
            q = torch.cat((start - torch.arange(T - S, 0, -1, device=k.device), k), -1)
        head = torch.arange(self.q.shape[1], device=k.device)[:, None, None]
        query = {name: self.inputs[name][:, None, :, None] for name in self.carried}
        key = {name: x[:, None, None] for name, x in self.carried.items()}
        return Positions(q[:, None, :, None], k[:, None, None], head, query, key)


@dataclasses.dataclass(frozen=True)
class Result:
    """What an engine returns: output [B, H, T, V], and the extras that were asked for."""

    output: Tensor
    state: State | None = None
    lse: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run a call: a name, the function, and why it cannot run this call, or None if it can."""

    name: str
    run: Callable[[Call], Result]
    why_not: str | None = None


def choose(backends: list[Backend], call: Call, mechanism: str) -> Backend:
    """The backend asked for, or the first that can run; an explicit request never falls back.

    Raises:
        ValueError: if the requested backend is unknown or cannot run this call, with its reason.
    """
    by_name = {backend.name: backend for backend in backends}
    if call.backend is None:
        able = [backend for backend in backends if backend.why_not is None]
        if not able:
            reasons = "; ".join(f"{backend.name}: {backend.why_not}" for backend in backends)
            raise ValueError(f"{mechanism}: no backend can run this call, expected another one ({reasons})")
        return able[0]
    if call.backend not in by_name:
        raise ValueError(f"{mechanism}: backend has {call.backend!r}, expected one of {sorted(by_name)}")
    chosen = by_name[call.backend]
    if chosen.why_not is not None:
        raise ValueError(f"{mechanism}: backend has {call.backend!r}, which cannot run here: {chosen.why_not}")
    return chosen
