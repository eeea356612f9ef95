"""Train a small decoder on a task, once for each mechanism, and see what it recalls of sequences it never saw."""

from __future__ import annotations

import ast
import copy
import dataclasses
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import foveal
from foveal import registry
from foveal.spec import Mechanism
from foveal.train.model import Config, Decoder
from foveal.train.results import Check, Outcome, Run
from foveal.train.task import IGNORED, Task, require_int

TRAINING, CHECKING, TESTING = range(3)  # streams of sequences; no seed of one is a seed of another


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        steps: most batches.
        batch: sequences of a batch.
        lr: highest learning rate of AdamW.
        seed: seed of weights and sequences.
        warmup: share of the steps in which the rate rises from 0; afterwards it falls along a cosine.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        every: steps between two checks.
        held_out: sequences of a check; the test has four times as many.
        target: held-out accuracy that ends the training; above 1 none does.

    Raises:
        ValueError: naming the setting that is out of range.
    """

    steps: int = 600
    batch: int = 32
    lr: float = 1e-2
    seed: int = 0
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    every: int = 50
    held_out: int = 256
    target: float = 0.995

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "every", "held_out"):
            require_int(name, getattr(self, name), 1)
        require_int("seed", self.seed, 0)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: has {value}, expected a finite number > 0")
        for name, high in (("warmup", 1.0), ("weight_decay", math.inf), ("target", math.inf)):
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise ValueError(f"{name}: has {value}, expected a number >= 0" + (" and <= 1" if high == 1 else ""))

    def rate(self, step: int) -> float:
        """Share of the highest learning rate in a step, counted from 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))

    def generator(self, stream: int) -> torch.Generator:
        """The source of one stream of sequences."""
        return torch.Generator().manual_seed(3 * self.seed + stream)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is.

    Args:
        mechanism: its key.
        number: how many mechanisms are finished.
        step: batches that this one has been trained on.
        loss: of the last batch.
        best: its highest held-out accuracy so far.
    """

    mechanism: str
    number: int
    step: int
    loss: float
    best: float


def train(
    task: Task,
    mechanism: str | Mechanism | type[Mechanism],
    config: Config | None = None,
    recipe: Recipe | None = None,
    on_step: Callable[[int, float, float], None] | None = None,
) -> Outcome:
    """Train one mechanism.  An interrupt (Ctrl-C) ends the training and what was reached is returned.

    The same seed, threads and machine give the same bits, and the caller's random state is left alone.

    Args:
        task: what to learn.
        mechanism: key or mechanism, as for :func:`foveal.attention`.
        config: shape of the model.
        recipe: how to train.
        on_step: called after every batch with its number, its loss and the best held-out accuracy.

    Raises:
        ValueError: if the mechanism is unknown or not causal.
    """
    config, recipe, spec = config or Config(), recipe or Recipe(), causal(mechanism)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Decoder(task.vocab, config, spec)
    checks: list[Check] = []
    best, weights = -1.0, model.state_dict()
    tested, problem, interrupted = None, "", False
    try:
        for check in _checks(task, model, recipe, on_step):
            checks.append(check)
            if check.accuracy > best:
                best, weights = check.accuracy, copy.deepcopy(model.state_dict())
        model.load_state_dict(weights)
        tested = accuracy(model, task, 4 * recipe.held_out, recipe.generator(TESTING))
    except KeyboardInterrupt:
        interrupted = True
    except Diverged as error:
        problem = str(error)
    settings = {name: getattr(spec, name) for name in spec.settings()}
    state = config.state(spec, task.length)
    return Outcome(spec.name, settings, model.size, state, tuple(checks), tested, problem, interrupted)


def configured(keys: Sequence[str], settings: Sequence[str] = ()) -> list[Mechanism]:
    """The mechanisms behind keys, each with those of the settings that it knows.

    Args:
        keys: keys or aliases.
        settings: ``"name=value"``, the value in Python's notation, or a bare word for a text.

    Raises:
        ValueError: if a key is unknown, or a setting is malformed, out of range, or known to no mechanism.
    """
    classes = [registry.get(key) for key in keys]
    chosen: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not (name and equals and value):
            raise ValueError(f"settings: has {setting!r}, expected name=value")
        if not any(name in cls.settings() for cls in classes):
            known = sorted({known for cls in classes for known in cls.settings()})
            raise ValueError(f"settings: no mechanism has {name!r}, expected one of {', '.join(known) or 'none'}")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            chosen[name] = value
    return [cls(**{name: value for name, value in chosen.items() if name in cls.settings()}) for cls in classes]


def causal(mechanism: str | Mechanism | type[Mechanism]) -> Mechanism:
    """The mechanism, refused if it cannot hide the future.

    Raises:
        ValueError: if it is unknown or not causal.
    """
    spec = registry.resolve(mechanism)
    if True not in spec.causal_modes:
        raise ValueError(f"mechanism: {spec.name} sees the future, expected one that can hide it")
    return spec


class Diverged(Exception):
    """The loss is no number any more."""


def _checks(
    task: Task, model: Decoder, recipe: Recipe, on_step: Callable[[int, float, float], None] | None
) -> Iterator[Check]:
    """Train, and look at held-out sequences now and then, until they are answered well enough."""
    start = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate)
    sequences, unseen = recipe.generator(TRAINING), recipe.generator(CHECKING)
    losses: list[float] = []
    best = 0.0
    for step in range(1, recipe.steps + 1):
        loss = _loss(model, *task.batch(recipe.batch, sequences))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise Diverged(f"the loss is {losses[-1]} at step {step}; try a smaller lr")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step, losses[-1], best)
        if step % recipe.every == 0 or step == recipe.steps:
            score = accuracy(model, task, recipe.held_out, unseen)
            best = max(best, score)
            yield Check(step, sum(losses) / len(losses), score, time.perf_counter() - start)
            losses.clear()
            if score >= recipe.target:
                return


def _loss(model: Decoder, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy at the judged positions."""
    judged = targets != IGNORED
    return nn.functional.cross_entropy(model(tokens, judged), targets[judged])


@torch.no_grad()
def accuracy(model: Decoder, task: Task, count: int, generator: torch.Generator) -> float:
    """Share of right answers at the judged positions of fresh sequences."""
    tokens, targets = task.batch(count, generator)
    judged = targets != IGNORED
    right: Tensor = model(tokens, judged).argmax(-1) == targets[judged]
    return right.double().mean().item()


def run(
    task: Task,
    mechanisms: Sequence[str | Mechanism | type[Mechanism]],
    config: Config | None = None,
    recipe: Recipe | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Train several mechanisms on the same sequences, one after the other.

    An interrupt (Ctrl-C) ends the run; what is finished, and the best of what is not, is returned.

    Args:
        task: what to learn.
        mechanisms: keys or mechanisms, each once.
        config: shape of the model.
        recipe: how to train.
        on_progress: called after every batch.

    Raises:
        ValueError: if there is no mechanism, or one is unknown, not causal or named twice.
    """
    config, recipe = config or Config(), recipe or Recipe()
    specs = [causal(mechanism) for mechanism in mechanisms]
    if not specs:
        raise ValueError("mechanism: none is named, expected at least one")
    for spec in specs:
        if specs.count(spec) > 1:
            raise ValueError(f"mechanism: has {spec.name!r} twice, expected every mechanism once")
    start, outcomes = time.perf_counter(), []
    for number, spec in enumerate(specs):
        outcomes.append(train(task, spec, config, recipe, _reporter(on_progress, spec.name, number)))
        if outcomes[-1].interrupted:
            break
    return Run(task.name, task.chance, _setup(task, config, recipe), tuple(outcomes), time.perf_counter() - start)


def _reporter(
    on_progress: Callable[[Progress], None] | None, name: str, number: int
) -> Callable[[int, float, float], None]:
    def report(step: int, loss: float, best: float) -> None:
        if on_progress is not None:
            on_progress(Progress(name, number, step, loss, best))

    return report


def _setup(task: Task, config: Config, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Enough to run it again."""
    return {
        "task": task.settings,
        "model": dataclasses.asdict(config),
        "recipe": dataclasses.asdict(recipe),
        "machine": {
            "cores": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
            "foveal": foveal.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
