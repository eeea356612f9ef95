"""What a training task is: settings, generated sequences with their targets, and what guessing would score."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveal.spec import Paper

IGNORED = -100  # the target of a position that is not judged

_tasks: dict[str, type[Task]] = {}


class Task(abc.ABC):
    """Base of tasks.

    Subclasses are frozen dataclasses with one file each; their fields are the settings.  Defining one with ``name=``
    registers it.

    Attributes:
        vocab: number of different tokens.
        length: tokens of a sequence, T.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[Paper]
    __dataclass_fields__: ClassVar[dict[str, Any]]
    vocab: int
    length: int

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.name = name
            _tasks[name] = cls

    @abc.abstractmethod
    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Fresh sequences.

        Shapes:
            tokens [size, T], targets [size, T]; a target is the right answer after the token at its position, or
            ``IGNORED``.
        """

    @property
    @abc.abstractmethod
    def chance(self) -> float:
        """Accuracy of the best guess that recalls nothing."""

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting with its value."""
        return dataclasses.asdict(self)


def names() -> list[str]:
    """The keys of all tasks, sorted."""
    return sorted(_tasks)


def get(name: str) -> type[Task]:
    """The task behind a key.

    Raises:
        ValueError: if there is none.
    """
    if name not in _tasks:
        raise ValueError(f"task: unknown name {name!r}, expected one of {', '.join(names())}")
    return _tasks[name]


def require_int(name: str, value: object, least: int, why: str = "") -> None:
    """Refuse a setting that is no whole number of at least ``least``.

    Raises:
        ValueError: naming the setting, what it is and what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: has {value!r}, expected an int >= {least}{why and ', ' + why}")
