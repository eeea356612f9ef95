"""Tables that depend on sizes and seeds alone: computed once, and constants of a compiled graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])
REMEMBERED = 32  # results per function; the oldest goes first


def constant(function: Made) -> Made:
    """Remember the results of a function of plain numbers; torch.compile calls it instead of tracing it."""
    memory: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def remembered(*arguments: Any) -> Any:
        if arguments not in memory:
            while len(memory) >= REMEMBERED:
                memory.pop(next(iter(memory)))
            memory[arguments] = function(*arguments)
        return memory[arguments]

    # what torch.compiler.assume_constant_result sets, without loading the whole compiler at import
    remembered._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return remembered  # type: ignore[return-value]
