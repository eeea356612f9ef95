"""The laws of cache policies: one function per law."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from foveal import registry
from foveal.engines.cache import Eviction, PageSummary, Policy, Selection
from foveal.testing.mechanism import expect, note

Law = Callable[[Any], None]
close = torch.testing.assert_close
EXACT = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-6)}  # relative and absolute, by the dtype of the scores
SCALE = 0.4


def draw(B: int, S: int, *, H: int = 4, G: int = 2, K: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and as many queries, in float64."""
    g = torch.Generator().manual_seed(seed)
    k, v, q = (torch.randn(B, heads, S, K, generator=g, dtype=torch.float64) for heads in (G, G, H))
    return k, v, q


def scored(policy: Eviction, k: Tensor, v: Tensor, q: Tensor, real: Tensor | None = None) -> Tensor:
    """The policy's scores after one call over everything."""
    real = torch.ones(len(k), k.shape[2], dtype=torch.bool) if real is None else real
    wanted = policy.observes()
    q = q if wanted is None else q[:, :, q.shape[2] - min(wanted, q.shape[2]) :]
    return policy.score(k, v, q, real=real, scale=SCALE)


def score_equals_definition(policy: Eviction) -> None:
    """Scores of a batch equal the float64 definition of each row, for one token and for many, in either precision."""
    for S in (57, 6, 1):
        k, v, q = draw(2, S)
        wanted = policy.observes()
        seen = q if wanted is None else q[:, :, S - min(wanted, S) :]
        want = torch.stack([policy.definition(k[b], v[b], seen[b], scale=SCALE) for b in range(2)])
        for dtype in EXACT:
            got = scored(policy, *(x.to(dtype) for x in (k, v, q)))
            rtol, atol = EXACT.get(got.dtype, EXACT[torch.float32])
            close(got.double(), want.double(), rtol=rtol, atol=atol, msg=note(f"S={S}, {dtype}"))


def padding_changes_nothing(policy: Eviction) -> None:
    """A left-padded row keeps what it keeps alone, and never padding in favour of a token."""
    k, v, q = draw(2, 60)
    pads = 17
    real = torch.ones(2, 60, dtype=torch.bool)
    real[1, :pads] = False
    limit = torch.tensor([40, 40])
    kept = policy.keep(scored(policy, k, v, q, real), real, limit)
    alone = [x[1:, :, pads:] for x in (k, v, q)]
    own = policy.keep(scored(policy, *alone), real[1:, pads:], limit[1:])
    assert torch.equal(kept.index[1] - pads, own.index[0]), "a row's choice depends on its padding"
    for budget in (50, 300):  # more than the padded row has
        kept = policy.keep(scored(policy, k, v, q, real), real, torch.tensor([budget, budget]))
        assert kept.real.sum(1).tolist() == [min(budget, 60), 43], "padding was kept as if it were a token"
        assert (kept.index[1, :, -43:] == torch.arange(pads, 60)).all(), "a token was lost to padding"


def budget_is_exact(policy: Eviction) -> None:
    """Exactly the budget, or everything if there is less; positions ascend; at least one survives."""
    for S in (57, 3, 1):
        k, v, q = draw(2, S)
        real = torch.ones(2, S, dtype=torch.bool)
        for budget in (1, 20, S, 200):
            kept = policy.keep(scored(policy, k, v, q), real, torch.tensor([budget, budget]))
            assert kept.index.shape[-1] == min(budget, S), f"{kept.index.shape[-1]} kept of {S}, budget {budget}"
            assert kept.real.all()
            assert (kept.index.diff(dim=-1) > 0).all(), "positions must ascend: their order is the causal mask"
    equal = torch.zeros(2, 2, 30)
    kept = policy.keep(equal, torch.ones(2, 30, dtype=torch.bool), torch.tensor([7, 7]))
    assert kept.index.shape[-1] == 7, "equal scores must not change the number kept"
    beside = policy.keep(equal, torch.ones(2, 30, dtype=torch.bool), torch.tensor([7, 21]))
    own = beside.index[0][:, beside.real[0]]
    assert torch.equal(own, kept.index[0]), "which of equal scores survive depends on another row"
    share = dataclasses.replace(policy, budget=0.25)
    assert share.limit(torch.tensor([100, 4, 1, 0])).tolist() == [25, 1, 1, 1]


def protected_tokens_survive(policy: Eviction) -> None:
    """The first and last tokens that the policy protects are there, also behind padding, the newest above all."""
    k, v, q = draw(2, 90)
    real = torch.ones(2, 90, dtype=torch.bool)
    real[1, :13] = False
    for budget in (1, 2, 20):
        limit = torch.tensor([budget, budget])
        kept = policy.keep(scored(policy, k, v, q, real), real, limit)
        first, last = (int(x[0]) for x in policy.guarded(limit))
        assert first + last <= budget
        for b, start in enumerate((0, 13)):
            for slot in (*range(start, start + first), *range(90 - last, 90)):
                assert (kept.index[b] == slot).any(-1).all(), f"protected slot {slot} was evicted"


def the_best_survive(policy: Eviction) -> None:
    """No evicted token scores above a kept one, by the definition."""
    k, v, q = draw(1, 80)
    limit = torch.tensor([20])
    first, last = (int(x) for x in policy.guarded(limit))
    wanted = policy.observes()
    seen = q if wanted is None else q[:, :, 80 - min(wanted, 80) :]
    scores = policy.definition(k[0], v[0], seen[0], scale=SCALE)
    kept = policy.keep(scored(policy, k, v, q), torch.ones(1, 80, dtype=torch.bool), limit)
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, kept.index[0], True)
    middle = slice(first, 80 - last)
    worst = scores.masked_fill(~chosen, torch.inf)[:, middle].amin(-1)
    missed = scores.masked_fill(chosen, -torch.inf)[:, middle].amax(-1)
    assert (worst >= missed - 1e-6).all(), "an evicted token scores above a kept one"


def selection_equals_definition(policy: Selection) -> None:
    """The pages read are those of the definition, the newest always among them."""
    for S in (3 * policy.page, 5 * policy.page + 3, policy.page + 1):
        k, _, q = draw(2, S)
        summary = PageSummary(policy.page)
        real = torch.ones(2, S, dtype=torch.bool)
        for span in (slice(0, 1), slice(1, S // 2), slice(S // 2, S - 1), slice(S - 1, S)):  # arrives in pieces
            summary.append(k[:, :, span], torch.arange(S).expand(2, S)[:, span], real[:, span])
        assert summary.low is not None
        assert summary.high is not None
        got = policy.select(q[:, :, -1], summary.low, summary.high, count=2)
        for b in range(2):
            want = policy.definition(q[b, :, -1], k[b], count=2)
            assert [set(pages.tolist()) for pages in got[b]] == want


def bound_is_never_below_a_score(policy: Selection) -> None:
    """A page's summary bounds every key of it, and padding takes no part."""
    k = draw(2, 4 * policy.page + 1)[0]
    real = torch.rand(2, k.shape[2], generator=torch.Generator().manual_seed(1)) > 0.3
    k = k.masked_fill(~real[:, None, :, None], 1e4)
    position = real.cumsum(1) - 1
    summary = PageSummary(policy.page)
    summary.append(k, position, real)
    assert summary.low is not None
    assert summary.high is not None
    for b, slot in real.nonzero().tolist():
        page = int(position[b, slot]) // policy.page
        inside = (k[b, :, slot] >= summary.low[b, :, page]) & (k[b, :, slot] <= summary.high[b, :, page])
        assert inside.all(), "a key lies outside its page's bounds"
    assert summary.high[summary.high > -torch.inf].max() < 1e4, "padding entered a summary"


def bad_settings_are_named(policy: Policy) -> None:
    """Budgets of 0, below 0, above 1 as a share, and of the wrong kind are refused by name."""
    for budget in (0, -3, 0.0, 1.5, True, "many", None):
        wrong: Any = budget
        with expect(policy, "budget"):
            dataclasses.replace(policy, budget=wrong)


def documented(policy: Policy) -> None:
    """The docstring has a formula and every setting; the paper is there."""
    doc = type(policy).__doc__ or ""
    assert ".. math::" in doc, "no formula"
    for field in dataclasses.fields(policy):
        assert re.search(rf"^\s+{field.name}: ", doc, re.MULTILINE), f"setting {field.name} is not described"
    assert policy.paper.title


EVICTION: tuple[Law, ...] = (
    score_equals_definition,
    padding_changes_nothing,
    budget_is_exact,
    protected_tokens_survive,
    the_best_survive,
)
SELECTION: tuple[Law, ...] = (selection_equals_definition, bound_is_never_below_a_score)
EVERY: tuple[Law, ...] = (bad_settings_are_named, documented)


def small(cls: type[Policy]) -> Policy:
    """Settings that make a short sequence interesting."""
    wanted = {"budget": 40, "window": 8, "page": 4}
    return cls(**{f.name: wanted[f.name] for f in dataclasses.fields(cls) if f.name in wanted})


def cases_of(cls: type[Any]) -> Iterator[tuple[str, Law, Policy]]:
    """Every law of one policy."""
    for law in (*(EVICTION if issubclass(cls, Eviction) else SELECTION), *EVERY):
        yield f"{cls.name}-{law.__name__}", law, small(cls)


def cases() -> Iterator[tuple[str, Law, Policy]]:
    """Every law of every policy in the registry."""
    for cls in registry.classes("policy"):
        yield from cases_of(cls)
