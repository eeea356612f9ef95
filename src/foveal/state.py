"""What decoding carries from call to call: one class per engine, with the same handful of operations."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound="State")


@dataclasses.dataclass(frozen=True)
class State:
    """Base of decoding states: a frozen record of tensors whose first axis is the batch (or the packed sequence)."""

    def map(self: S, change: Callable[[Tensor], Tensor]) -> S:
        """The state with a function applied to each of its tensors, those of states inside it included."""

        def changed(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(changed(part) for part in x)
            return x.map(change) if isinstance(x, State) else change(x)

        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{n: changed(x) for n, x in values.items() if x is not None})

    def tensors(self) -> list[Tensor]:
        """Every tensor that the state holds."""
        found: list[Tensor] = []
        self.map(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
        return found

    def index_select(self: S, index: Tensor) -> S:
        """The rows ``index`` of the batch in that order, as beam search needs."""
        return self.map(lambda x: x.index_select(0, index))

    def detach(self: S) -> S:
        """The state without its history of gradients, for truncated back-propagation."""
        return self.map(Tensor.detach)

    def to(self: S, target: torch.device | torch.dtype | str) -> S:
        """The state on another device, or its floating-point tensors in another dtype."""
        if isinstance(target, torch.dtype):
            return self.map(lambda x: x.to(target) if x.is_floating_point() else x)
        return self.map(lambda x: x.to(target))

    @property
    def nbytes(self) -> int:
        """Bytes that the state's tensors take in memory, counted by storage."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in self.tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    @classmethod
    def join(cls: type[S], states: list[S]) -> S:
        """One state whose batch is that of all the given ones in turn."""
        values: dict[str, Any] = {}
        for f in dataclasses.fields(cls):
            parts = [getattr(state, f.name) for state in states]
            values[f.name] = parts[0]
            if isinstance(parts[0], Tensor):
                values[f.name] = torch.cat(parts)
            elif isinstance(parts[0], State):
                values[f.name] = type(parts[0]).join(parts)
            elif isinstance(parts[0], tuple):
                values[f.name] = tuple(type(same[0]).join(list(same)) for same in zip(*parts, strict=True))
        return cls(**values)

    def content(self) -> dict[str, Any]:
        """The state as plain values: its class and its tensors, without history and in memory of their own."""

        def plain(x: Any) -> Any:
            if isinstance(x, tuple):
                return [plain(part) for part in x]
            if isinstance(x, State):
                return x.content()
            return x.detach().clone() if isinstance(x, Tensor) else x

        return {"class": type(self).__name__} | {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a new file.

        Raises:
            FileExistsError: if there is a file already.
        """
        content = self.content()  # before the file exists, so that a failure leaves none behind
        with open(path, "xb") as file:
            torch.save(content, file)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> State:
        """Read a state that :meth:`save` wrote; nothing in the file is executed.

        Raises:
            ValueError: if the file holds no state.
        """
        content = torch.load(path, weights_only=True)
        known = {cls.__name__: cls for cls in State.__subclasses__()}
        if not isinstance(content, dict) or content.get("class") not in known:
            raise ValueError(f"path: {os.fspath(path)!r} holds no state of foveal, expected a file from State.save")

        def built(x: Any) -> Any:
            if isinstance(x, list):
                return tuple(built(part) for part in x)
            if not isinstance(x, dict):
                return x
            return known[x["class"]](**{n: built(y) for n, y in x.items() if n != "class"})

        state: State = built(content)
        return state


@dataclasses.dataclass(frozen=True)
class RecurrentState(State):
    """The memory of a recurrence, fp32 (float64 for float64 inputs).

    Args:
        matrix: S [B, H, K, V].
        normalizer: running sum of the writing vectors [B, H, K], for mechanisms that divide by it.
    """

    matrix: Tensor
    normalizer: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ChainedState(State):
    """The memories of a mechanism that runs several recurrences, in their order.

    Args:
        parts: one state per recurrence.
    """

    parts: tuple[State, ...]


@dataclasses.dataclass(frozen=True)
class KeyValueState(State):
    """The keys and values that later queries may still see.

    Args:
        k: [B, G, S, K].
        v: [B, G, S, V].
        padding: bool [B, S], False where a token does not exist; None if all do.
    """

    k: Tensor
    v: Tensor
    padding: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, padding: Tensor | None) -> KeyValueState:
        """The state with later keys and values appended."""
        joined = None
        if self.padding is not None or padding is not None:
            joined = torch.cat((self.real(), KeyValueState(k, v, padding).real()), 1)
        return KeyValueState(torch.cat((self.k, k), 2), torch.cat((self.v, v), 2), joined)

    def real(self) -> Tensor:
        """Which tokens exist, bool [B, S]."""
        if self.padding is not None:
            return self.padding
        return torch.ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool, device=self.k.device)

    @classmethod
    def join(cls, states: list[KeyValueState]) -> KeyValueState:
        """One state for all batches in turn; shorter ones get padding in front."""
        longest = max(state.k.shape[2] for state in states)

        def front(x: Tensor, axis: int) -> Tensor:
            shape = list(x.shape)
            shape[axis] = longest - shape[axis]
            return torch.cat((x.new_zeros(shape), x), axis)

        return cls(
            torch.cat([front(state.k, 2) for state in states]),
            torch.cat([front(state.v, 2) for state in states]),
            torch.cat([front(state.real(), 1) for state in states]),
        )

    def keep(self, wanted: Tensor) -> KeyValueState:
        """Only the wanted tokens, bool [B, S], in memory of their own; rows may keep different numbers."""
        if wanted.numel() == 0:
            return self
        count = wanted.sum(1)
        width = int(count.max())
        if width == wanted.shape[1]:
            return self
        order = torch.argsort(wanted.to(torch.int8), dim=1, stable=True)[:, wanted.shape[1] - width :]
        index = order[:, None, :, None]
        k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.k, self.v))
        return KeyValueState(k, v, None if int(count.min()) == width else wanted.gather(1, order))
