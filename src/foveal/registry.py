"""From a key to the class that carries it: the file name is the key, so listing imports nothing."""

from __future__ import annotations

import difflib
import importlib
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foveal.spec import Mechanism, Spec

ROOT = pathlib.Path(__file__).parent
FOLDERS = {"mechanism": "mechanisms", "policy": "policies"}
_classes: dict[tuple[str, str], type[Spec]] = {}


def _files(folder: str) -> dict[str, str]:
    """Module by key for what the package ships, from file names alone."""
    found = sorted((ROOT / folder).glob("*/[!_]*.py"))
    return {path.stem: ".".join(("foveal", *path.relative_to(ROOT).with_suffix("").parts)) for path in found}


_FILES = {kind: _files(folder) for kind, folder in FOLDERS.items()}


def register(cls: type[Spec]) -> None:
    """Remember a class under its kind and key.

    Raises:
        ValueError: if another class already has the key.
    """
    known = _classes.get((cls.kind, cls.name))
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{cls.kind} {cls.name!r} is already defined by {known.__module__}.{known.__qualname__}")
    if known is None and cls.name in _FILES[cls.kind] and not cls.__module__.startswith("foveal."):
        raise ValueError(f"{cls.kind} {cls.name!r} is one of foveal's own; choose another name")
    _classes[cls.kind, cls.name] = cls


def names(kind: str) -> list[str]:
    """All keys of a kind, sorted: the package's own and those of third parties that are imported."""
    return sorted(_FILES[kind] | {name: "" for k, name in _classes if k == kind})


def get(key: str, kind: str = "mechanism") -> type[Any]:
    """The class behind a key or an alias.

    Raises:
        ValueError: if there is none; the message names the nearest keys.
    """
    if not isinstance(key, str):
        raise TypeError(f"{kind}: got {type(key).__name__}, expected a key such as {names(kind)[0]!r}")
    name = key.lower().replace("-", "_")
    if (kind, name) not in _classes and name in _FILES[kind]:
        importlib.import_module(_FILES[kind][name])
    if (kind, name) in _classes:
        return _classes[kind, name]
    every = {other: cls for cls in classes(kind) for other in (cls.name, *cls.aliases, cls.__name__.lower())}
    if name in every:
        return every[name]
    near = difflib.get_close_matches(name, every, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"expected one of {', '.join(names(kind))}"
    raise ValueError(f"{kind}: unknown name {key!r}; {hint}")


def classes(kind: str) -> list[type[Spec]]:
    """Every class of a kind, imported, in the order of the keys."""
    for module in _FILES[kind].values():
        importlib.import_module(module)
    return [_classes[kind, name] for name in names(kind)]


def by_class_name(name: str, kind: str) -> type[Any]:
    """The class of a kind that has this Python name; raises AttributeError, as lazy modules need it."""
    for cls in () if name.startswith("_") else classes(kind):
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"foveal has no {kind} class {name!r}")


def path(cls: type[Spec]) -> str:
    """Where a class is written, relative to the package's parent when it is ours."""
    module = importlib.import_module(cls.__module__)
    file = pathlib.Path(module.__file__ or "?")
    return str(file.relative_to(ROOT.parent)) if file.is_relative_to(ROOT.parent) else str(file)


def find(text: str) -> list[type[Spec]]:
    """Every mechanism and policy that matches a key, alias, class name, arXiv id, title word or author, best first."""
    wanted = text.lower().strip()
    if not wanted:
        raise ValueError("text: got an empty string, expected a key, alias, arXiv id, title word or author")

    def rank(cls: type[Spec]) -> int | None:
        exact = {cls.name, cls.__name__.lower(), cls.paper.arxiv, *cls.aliases}
        if wanted.removeprefix("arxiv:") in exact or wanted.replace(" ", "_") in exact:
            return 0
        words = " ".join((cls.name, *cls.aliases, cls.__name__, cls.paper.title, cls.paper.authors)).lower()
        if wanted in words or wanted.replace(" ", "_") in words:
            return 1
        return None

    ranked = [(rank(cls), cls.name, cls) for kind in FOLDERS for cls in classes(kind)]
    return [cls for _, _, cls in sorted((r, n, c) for r, n, c in ranked if r is not None)]


def resolve(mechanism: str | Mechanism | type[Mechanism]) -> Mechanism:
    """A ready mechanism from a key, a class or an instance.

    Raises:
        ValueError: if the key is unknown.
        TypeError: if it is none of these, or a class whose settings have no defaults.
    """
    from foveal.spec import Mechanism

    if isinstance(mechanism, Mechanism):
        return mechanism
    cls = mechanism if isinstance(mechanism, type) else get(mechanism)
    if not issubclass(cls, Mechanism) or not cls.name:
        raise TypeError(f"mechanism: got the class {cls.__name__}, expected a mechanism with a name")
    return cls()
