"""One file per KV-cache policy; the registry finds them by file name."""

from __future__ import annotations

from typing import Any

from foveal import registry


def __getattr__(name: str) -> Any:
    """A policy's class by its name, imported on first use."""
    return registry.by_class_name(name, "policy")
