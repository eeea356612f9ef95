"""foveal: every efficient attention, one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foveal import registry
from foveal.api import Attention, Route, attention, explain, find, get, list_mechanisms, list_policies
from foveal.layer import AttentionLayer
from foveal.spec import Cost, Input, Limit, Mechanism, Paper
from foveal.state import ChainedState, KeyValueState, RecurrentState, State

if TYPE_CHECKING:
    from foveal.mechanisms import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "AttentionLayer",
    "ChainedState",
    "Cost",
    "Input",
    "KeyValueState",
    "Limit",
    "Mechanism",
    "Paper",
    "RecurrentState",
    "Route",
    "State",
    "attention",
    "explain",
    "find",
    "get",
    "list_mechanisms",
    "list_policies",
]


def __getattr__(name: str) -> Any:
    """Mechanism classes by name (``foveal.MoBA``) and subpackages with heavy imports (``foveal.hf``), on first use."""
    if name in ("hf", "compare", "testing"):
        import importlib

        return importlib.import_module(f"foveal.{name}")
    if name[:1].isupper():
        for cls in registry.classes("mechanism"):
            if cls.__name__ == name:
                return cls
    raise AttributeError(f"module 'foveal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "hf", "testing", *(cls.__name__ for cls in registry.classes("mechanism"))])
