"""Measure one method on one excerpt: cost by clock and by counted bytes, quality against full attention."""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foveal.compare.document import Excerpt, Question
from foveal.compare.methods import Method
from foveal.compare.results import Sample

FORK_BYTES = 2**30  # copies of the cache that questions are asked on at a time


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished what it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def advance(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    """Feed tokens [B, T]; logits after the last of them, [B, vocabulary]."""
    accepted = inspect.signature(model.forward).parameters
    call = {"cache" if "cache" in accepted else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in accepted:
        call["logits_to_keep"] = 1
    logits: Tensor = model(input_ids=tokens, **call).logits[:, -1]
    return logits


@contextlib.contextmanager
def metered(model: Any, cache: Any) -> Iterator[list[tuple[float, int]]]:
    """Note the seconds since the start and the bytes that the cache holds after each decoder layer."""
    from foveal.hf.cache import nbytes

    start, trace = clock(model.device), [(0.0, nbytes(cache))]

    def note(*ignored: Any) -> None:
        trace.append((time.perf_counter() - start, nbytes(cache)))

    handles = [layer.register_forward_hook(note) for layer in getattr(model.get_decoder(), "layers", ())]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    r"""KL divergence :math:`\sum_i p_i (\log p_i - \log q_i)` in nats, in float64.

    Shapes:
        logits of p and of q, [N, vocabulary] each -> [N].
    """
    p, q = (x.double().log_softmax(-1) for x in (reference, other))
    return (p.exp() * (p - q).masked_fill(p == -torch.inf, 0.0)).sum(-1).clamp(min=0.0)


def measure(
    model: Any, method: Method, excerpt: Excerpt, reference: Tensor | None, tick: Callable[[str, int], None]
) -> tuple[Sample, Tensor]:
    """One sample, and the logits after each token of the continuation.

    Everything after the context is fed one token at a time, as in generation: some methods do other things with
    several tokens at once.  The first prediction is left out, since a policy compresses after it.

    Args:
        model: on the device where it is measured, not switched.
        method: what it is switched to.
        excerpt: what is read.
        reference: the logits that full attention gave, or None if this is full attention.
        tick: told of each phase and the tokens it has fed.

    Shapes:
        reference [N, vocabulary] -> sample, logits [N, vocabulary].
    """
    from foveal.hf.cache import nbytes

    device = model.device
    with torch.inference_mode(), method.on(model) as new_cache:
        cache = new_cache()
        tick("reading", 0)
        with metered(model, cache) as trace:
            start = clock(device)
            advance(model, torch.tensor([excerpt.context], device=device), cache)
            prefill_seconds = clock(device) - start
        held = nbytes(cache)
        peak = max(held, getattr(cache, "peak_nbytes", 0), *(size for _, size in trace))
        tick("reading", len(excerpt.context))
        own, step_seconds = follow(model, copy.deepcopy(cache), excerpt.continuation[:-1], trace, tick)
        found = answers(model, cache, excerpt.questions, tick)
    reference = own if reference is None else reference
    target = torch.tensor(excerpt.continuation[1:], device=device)
    sample = Sample(
        prefill_seconds=prefill_seconds,
        step_seconds=step_seconds,
        peak_bytes=peak,
        held_bytes=held,
        trace=tuple(trace),
        surprise=tuple((-own.double().log_softmax(-1).gather(1, target[:, None])[:, 0]).tolist()),
        divergence=tuple(kl_divergence(reference, own).tolist()),
        agreement=tuple((own.argmax(-1) == reference.argmax(-1)).tolist()),
        depths=tuple(question.depth for question in excerpt.questions),
        found=found,
    )
    return sample, own


def follow(
    model: Any, cache: Any, tokens: Sequence[int], trace: list[tuple[float, int]], tick: Callable[[str, int], None]
) -> tuple[Tensor, tuple[float, ...]]:
    """Feed tokens one at a time: logits after each, [N, vocabulary], and seconds for each; the trace goes on."""
    from foveal.hf.cache import nbytes

    logits, seconds = [], []
    for token in tokens:
        start = clock(model.device)
        logits.append(advance(model, torch.tensor([[token]], device=model.device), cache)[0].float())
        seconds.append(clock(model.device) - start)
        trace.append((trace[-1][0] + seconds[-1], nbytes(cache)))
        tick("continuing", 1)
    return torch.stack(logits), tuple(seconds)


def answers(
    model: Any, cache: Any, questions: tuple[Question, ...], tick: Callable[[str, int], None]
) -> tuple[bool, ...]:
    """Whether greedy decoding would give each answer, asked on copies of a cache that has read the context.

    Greedy decoding gives the answer exactly if each of its tokens is the most likely one after those before it.
    Questions of equal length are asked side by side.
    """
    from foveal.hf.cache import nbytes

    rows = max(1, FORK_BYTES // max(1, nbytes(cache)))
    groups: dict[tuple[int, int], list[int]] = {}
    for number, question in enumerate(questions):
        groups.setdefault((len(question.prompt), len(question.answer)), []).append(number)
    found = [False] * len(questions)
    for members in groups.values():
        for first in range(0, len(members), rows):
            batch = members[first : first + rows]
            for number, hit in zip(batch, _ask(model, cache, [questions[n] for n in batch], tick), strict=True):
                found[number] = hit
    return tuple(found)


def _ask(model: Any, cache: Any, questions: list[Question], tick: Callable[[str, int], None]) -> list[bool]:
    fork = copy.deepcopy(cache)
    if len(questions) > 1:
        fork.batch_repeat_interleave(len(questions))
    tokens = torch.tensor([[*question.prompt, *question.answer] for question in questions], device=model.device)
    begin = len(questions[0].prompt)
    right = torch.ones(len(questions), dtype=torch.bool, device=model.device)
    for place in range(tokens.shape[1] - 1):
        logits = advance(model, tokens[:, place : place + 1], fork)
        if place + 1 >= begin:
            right &= logits.argmax(-1) == tokens[:, place + 1]
        tick("asking", len(questions))
    return right.tolist()
