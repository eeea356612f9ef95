"""Plan a comparison, refuse what cannot be compared, and run it round by round."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import foveal
from foveal.compare.document import DEPTHS, Excerpt, excerpts
from foveal.compare.measure import advance, measure
from foveal.compare.methods import DEFAULT, Method, parse
from foveal.compare.results import Comparison, Measurement, Sample, Setup

LENGTH = 1536
BUDGET = 0.25
CONTINUATION = 64
ROUNDS = 3
PREFILL_DISCOUNT = 32  # tokens of a context that cost about as much as one decoded token


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a running comparison is.

    Args:
        method, round, phase: what it does.
        done, total: work, in decoded tokens or what costs as much.
    """

    method: str
    round: int
    phase: str
    done: float
    total: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison that can run: everything that the user could have got wrong has been checked.

    Args:
        model: a transformers decoder.
        setup: what is compared and on what.
        methods: full attention first.
        excerpts: one for each round.
        problems: why some of the methods are left out, by name.
    """

    model: Any
    setup: Setup
    methods: tuple[Method, ...]
    excerpts: tuple[Excerpt, ...]
    problems: dict[str, str]

    @property
    def measured(self) -> list[Method]:
        """The methods that are not left out."""
        return [method for method in self.methods if method.name not in self.problems]

    @property
    def work(self) -> float:
        """All that there is to do, in the unit of :class:`Progress`."""
        return len(self.measured) * sum(map(_work, self.excerpts))


def _work(excerpt: Excerpt) -> float:
    asked = sum(len(question.prompt) + len(question.answer) - 1 for question in excerpt.questions)
    return len(excerpt.context) / PREFILL_DISCOUNT + len(excerpt.continuation) - 1 + asked


def entries(budget: int | float, length: int) -> int:
    """A budget as a number of entries.

    Raises:
        ValueError: if it is not in [1, length], or as a share not in (0, 1].
    """
    count = round(budget * length) if isinstance(budget, float) and budget <= 1 else budget
    if isinstance(budget, bool) or not isinstance(count, int) or not 1 <= count <= length:
        raise ValueError(
            f"budget: has {budget}, expected a number of entries from 1 to the length {length}, or a share such as 0.25"
        )
    return count


def check_sizes(length: int, continuation: int, rounds: int) -> None:
    """Refuse sizes that are no positive numbers.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, value in {"length": length, "continuation": continuation, "rounds": rounds}.items():
        if value < 1:
            raise ValueError(f"{name}: has {value}, expected at least 1")


def plan(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    methods: Sequence[str] = DEFAULT,
    length: int = LENGTH,
    budget: int | float = BUDGET,
    seed: int = 0,
    rounds: int = ROUNDS,
    continuation: int = CONTINUATION,
    depths: Sequence[float] = DEPTHS,
    model_name: str = "",
    document_name: str = "text",
) -> Plan:
    """Check what a user wants to compare and prepare it.

    Args:
        model: a transformers decoder in evaluation mode.
        tokenizer: its tokenizer.
        text: the document.
        methods: names, as :func:`foveal.compare.methods.parse` takes them; full attention is always measured.
        length: tokens of the context, hidden facts included.
        budget: entries per key head (int), or a share of the length (float).
        seed: seed of the hidden facts.
        rounds: how often everything is measured, with other facts each time.
        continuation: predictions judged per round.
        depths: where facts are hidden, as ascending shares of the context.
        model_name, document_name: what the results call them.

    Raises:
        ValueError: naming the argument that is wrong.
        UnsupportedModel, TypeError: if the model cannot be switched at all.
    """
    from foveal.hf import models

    models.check(model)
    check_sizes(length, continuation, rounds)
    count = entries(budget, length)
    parsed = parse(methods, count)
    pieces = excerpts(
        text, tokenizer, length=length, continuation=continuation + 1, rounds=rounds, seed=seed, depths=depths
    )
    setup = Setup(
        model=model_name or type(model).__name__,
        document=document_name,
        length=length,
        continuation=continuation,
        budget=count,
        seed=seed,
        rounds=rounds,
        depths=tuple(depths),
        **_surroundings(model),
    )
    problems = {method.name: reason for method in parsed if (reason := _problem(model, method, pieces[0].context))}
    return Plan(model, setup, tuple(parsed), tuple(pieces), problems)


def _surroundings(model: Any) -> dict[str, Any]:
    """What the setup says of the model, the machine and the software."""
    import transformers

    from foveal.hf.models import decoder_config

    config = decoder_config(model)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": config.num_hidden_layers,
        "query_heads": config.num_attention_heads,
        "key_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "positions": getattr(config, "max_position_embeddings", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "foveal": foveal.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _problem(model: Any, method: Method, context: Sequence[int]) -> str | None:
    """Why a method is left out: it would equal full attention, or the model cannot be switched to it."""
    from foveal.hf import UnsupportedModel

    try:
        with torch.inference_mode(), method.on(model) as new_cache:
            advance(model, torch.tensor([context[:2]], device=model.device), new_cache())
    except UnsupportedModel as error:
        return str(error)
    return method.idle(len(context))


def execute(plan: Plan, on_progress: Callable[[Progress], None] | None = None) -> Comparison:
    """Run a plan: in every round each method in turn, so that a busy moment of the machine favours nobody.

    The order of the methods rotates from round to round; full attention comes first, since it is the reference.
    An interrupt (Ctrl-C) ends the run and what is finished is returned.  A method that fails is dropped from
    further rounds and its error reported; only full attention's failure ends the run.

    Args:
        plan: from :func:`plan`.
        on_progress: called after every step.
    """
    start, interrupted = time.perf_counter(), False
    samples: dict[str, list[Sample]] = {method.name: [] for method in plan.methods}
    errors: dict[str, str] = {}
    try:
        _warm_up(plan)
        for number, excerpt in enumerate(plan.excerpts):
            reference: Tensor | None = None
            for method in _order(plan.measured, number):
                if method.name in errors:
                    continue
                tick = _ticker(plan, method, number, on_progress)
                try:
                    sample, logits = measure(plan.model, method, excerpt, reference, tick)
                except Exception as error:
                    if reference is None:
                        raise
                    errors[method.name] = f"{type(error).__name__}: {str(error).strip()}"
                    continue
                reference = logits if reference is None else reference
                samples[method.name].append(sample)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start
    return Comparison(
        plan.setup, tuple(_measurement(plan, m, samples, errors) for m in plan.methods), interrupted, seconds
    )


def _measurement(plan: Plan, method: Method, samples: dict[str, list[Sample]], errors: dict[str, str]) -> Measurement:
    name = method.name
    problem = plan.problems.get(name) or errors.get(name, "")
    return Measurement(name, method.settings, tuple(samples[name]), problem, failed=name in errors)


def _order(methods: list[Method], number: int) -> list[Method]:
    """Full attention, then the others starting from another one in each round."""
    first, others = methods[0], methods[1:]
    shift = number % max(1, len(others))
    return [first, *others[shift:], *others[:shift]]


def _warm_up(plan: Plan) -> None:
    """A short untimed call, so that the first method does not pay for what torch does once."""
    with torch.inference_mode(), plan.methods[0].on(plan.model) as new_cache:
        few = plan.excerpts[0].context[:64]
        advance(plan.model, torch.tensor([few], device=plan.model.device), new_cache())


def _ticker(
    plan: Plan, method: Method, number: int, on_progress: Callable[[Progress], None] | None
) -> Callable[[str, int], None]:
    """What :func:`measure` tells its progress to."""
    position = [m.name for m in _order(plan.measured, number)].index(method.name)
    done = len(plan.measured) * sum(map(_work, plan.excerpts[:number])) + position * _work(plan.excerpts[number])

    def tick(phase: str, tokens: int) -> None:
        nonlocal done
        done += tokens / PREFILL_DISCOUNT if phase == "reading" else tokens
        if on_progress is not None:
            on_progress(Progress(method.name, number + 1, phase, done, plan.work))

    return tick


def run(
    model: Any, tokenizer: Any, text: str, *, on_progress: Callable[[Progress], None] | None = None, **options: Any
) -> Comparison:
    """Compare methods on a model and a text; options are those of :func:`plan`."""
    return execute(plan(model, tokenizer, text, **options), on_progress)
