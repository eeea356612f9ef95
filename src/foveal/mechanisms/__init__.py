"""One file per mechanism; the registry finds them by file name."""

from __future__ import annotations

from typing import Any

from foveal import registry


def __getattr__(name: str) -> Any:
    """A mechanism's class by its name, imported on first use."""
    return registry.by_class_name(name, "mechanism")
