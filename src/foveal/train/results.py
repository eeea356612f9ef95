"""Plain results of training: what each mechanism reached, and on what; to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from foveal import registry

FORMAT = 1

MEANING = {
    "parameters": "trained numbers of the whole model",
    "state": "numbers that one head keeps for decoding after the whole sequence",
    "accuracy": "share of right answers in held-out sequences, with the weights of the best check",
    "chance": "accuracy of the best guess that recalls nothing",
    "steps": "batches until the held-out accuracy reached the target, or all of them",
    "seconds": "of training, checks included",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One look at held-out sequences.

    Args:
        step: batches trained so far.
        loss: mean training loss since the check before.
        accuracy: share of right answers in sequences that no other check has seen.
        seconds: since the start of the training.
    """

    step: int
    loss: float
    accuracy: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one mechanism reached.

    Args:
        mechanism: its key.
        settings: its settings.
        parameters: trained numbers of the whole model.
        state: numbers that one head keeps for decoding after the whole sequence.
        checks: in order.
        tested: accuracy of the best check's weights on the test sequences; None if the training was cut short.
        problem: what went wrong, empty if nothing did.
        interrupted: whether Ctrl-C cut it short.
    """

    mechanism: str
    settings: dict[str, Any]
    parameters: int
    state: int
    checks: tuple[Check, ...] = ()
    tested: float | None = None
    problem: str = ""
    interrupted: bool = False

    @property
    def label(self) -> str:
        """Its key and the settings that are not the default, ``"linear feature_map=relu"``."""
        usual = registry.get(self.mechanism).settings()
        return " ".join([self.mechanism, *(f"{k}={v}" for k, v in self.settings.items() if v != usual.get(k))])

    @property
    def best(self) -> Check | None:
        """The first check with the highest accuracy."""
        return max(self.checks, key=lambda check: check.accuracy, default=None)

    @property
    def accuracy(self) -> float | None:
        """On the test sequences, or the best check's if the training was cut short; None before the first check."""
        return self.tested if self.tested is not None or self.best is None else self.best.accuracy

    @property
    def steps(self) -> int:
        """Batches up to the last check."""
        return self.checks[-1].step if self.checks else 0

    @property
    def seconds(self) -> float:
        """Seconds up to the last check."""
        return self.checks[-1].seconds if self.checks else 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that one run found.

    Args:
        task: its key.
        chance: accuracy of the best guess that recalls nothing.
        setup: settings of the task, the model and the training, and the machine.
        outcomes: one for each mechanism that was started.
        seconds: how long it took.
    """

    task: str
    chance: float
    setup: dict[str, dict[str, Any]]
    outcomes: tuple[Outcome, ...]
    seconds: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C stopped it before the end."""
        return any(outcome.interrupted for outcome in self.outcomes)

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before trusting the figures."""
        remarks = []
        for outcome in self.outcomes:
            if outcome.interrupted:
                kept = "the figures are those of its best check" if outcome.checks else "it had not been checked yet"
                remarks.append(f"{outcome.label} was interrupted; {kept}.")
            if outcome.problem:
                remarks.append(f"{outcome.label}: {outcome.problem}.")
        return remarks

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON knows it."""
        return {"format": FORMAT, **dataclasses.asdict(self), "meaning": MEANING}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """The run that :meth:`to_dict` wrote.

        Raises:
            ValueError: if the data have another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"format: has {data.get('format')!r}, expected {FORMAT}")
        fields = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        outcomes = [
            Outcome(
                **{
                    **outcome,
                    "settings": {k: tuple(v) if isinstance(v, list) else v for k, v in outcome["settings"].items()},
                    "checks": tuple(Check(**check) for check in outcome["checks"]),
                }
            )
            for outcome in data["outcomes"]
        ]
        return cls(**{**fields, "outcomes": tuple(outcomes)})


def check_new(file: pathlib.Path) -> None:
    """Refuse a file that exists or cannot be created.

    Raises:
        ValueError: if so.
    """
    if file.exists():
        raise ValueError(f"out: {str(file)!r} exists, expected a new file")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"out: {str(file)!r} cannot be written, expected a file in an existing folder")


def write(run: Run, file: pathlib.Path) -> None:
    """Write a run as JSON; never over an existing file.

    Raises:
        FileExistsError: if there is one.
    """
    with file.open("x", encoding="utf-8") as stream:
        stream.write(json.dumps(run.to_dict(), indent=1) + "\n")
