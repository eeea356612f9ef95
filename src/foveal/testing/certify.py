"""Run the laws on a spec that lives in a user's own file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from foveal import registry
from foveal.spec import Mechanism, Spec
from foveal.testing import mechanism


def load(path: str | os.PathLike[str]) -> list[type[Spec]]:
    """The specs that a Python file defines, in their order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no Python file or defines no spec with a ``name=``.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path: {os.fspath(path)!r} is no file, expected a Python file with a spec")
    module_spec = importlib.util.spec_from_file_location(f"foveal_checked_{file.stem}", file)
    if file.suffix != ".py" or module_spec is None or module_spec.loader is None:
        raise ValueError(f"path: {os.fspath(path)!r} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    module_spec.loader.exec_module(module)
    found = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Spec) and cls.name and cls.__module__ == module_spec.name
    ]
    if not found:
        raise ValueError(f"path: {os.fspath(path)!r} defines no spec, expected class Mine(Recurrence, name='mine')")
    return found


def certify(path: str | os.PathLike[str]) -> Iterator[tuple[str, Exception | None]]:
    """Yield each law's case and None, or the error that shows how it is broken.

    Raises:
        FileNotFoundError, ValueError: if the file holds no spec; its own import errors pass through.
    """
    for cls in load(path):
        for case, law, subject in cases(cls):
            yield case, verdict(law, subject)


def verdict(law: Callable[[Any], None], subject: Any) -> Exception | None:
    """None if the law holds, else the error."""
    try:
        law(subject)
    except Exception as error:
        return error
    return None


def cases(cls: type[Spec]) -> Iterator[tuple[str, Any, Any]]:
    """The laws of one class."""
    if issubclass(cls, Mechanism):
        yield from mechanism.cases_of(cls)
        return
    if cls.kind == "policy":
        policy = importlib.import_module("foveal.testing.policy")
        yield from policy.cases_of(cls)
        return
    raise ValueError(
        f"{cls.__name__}: is a {cls.kind or 'spec of no kind'}, expected one of {sorted(registry.FOLDERS)}"
    )
