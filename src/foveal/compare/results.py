"""Plain results: what was measured of each method and round, and the figures drawn from it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

CONFIDENCE_95 = statistics.NormalDist().inv_cdf(0.975)

MEANING = {
    "prefill": "seconds to read the context; median of the rounds (lowest to highest); eviction adds its scoring here",
    "decode": "tokens a second when the continuation is fed one token at a time; median of the steps (quartiles)",
    "cache": "memory that keys and values hold after the context was read, and the most while it was read",
    "PPL": "perplexity of the document's continuation given the compressed context; lower is better, compare with full",
    "KL": "mean divergence of the next-token distributions from full attention's, in nats; 0 is the same everywhere",
    "top-1": "share of continuation tokens for which the most likely next token is that of full attention",
    "recall": "hidden facts whose five digits are all repeated when asked for after the context was compressed, with "
    "Wilson's 95% interval; the question is not known when the cache is compressed",
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its spread.

    Args:
        median, low, high: low and high are the extremes of a few values, the quartiles of many.
    """

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Share:
    """Successes among trials, with Wilson's 95% interval.

    Args:
        found, trials: counts.
    """

    found: int
    trials: int

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.found}/{self.trials} [{low * 100:.0f}-{high * 100:.0f}%]"

    @property
    def rate(self) -> float:
        """Share of successes; not a number without trials."""
        return self.found / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        r"""Wilson's :math:`\frac{p + z^2/2n \pm z \sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}`; [0, 1] without trials."""
        if not self.trials:
            return 0.0, 1.0
        p, n, z = self.rate, self.trials, CONFIDENCE_95
        middle = p + z * z / (2 * n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        widen = 1 + z * z / n
        return max(0.0, (middle - half) / widen), min(1.0, (middle + half) / widen)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One method in one round.

    Args:
        prefill_seconds: reading the context.
        step_seconds: each token of the continuation.
        peak_bytes: most that keys and values held while the context was read.
        held_bytes: what they held afterwards.
        trace: seconds since the start and bytes held, after each layer of the prefill and each decode step.
        surprise: -log p of each continuation token, in nats.
        divergence: KL divergence from full attention at each of them, in nats.
        agreement: whether the most likely token was the same.
        depths, found: where each fact was hidden, and whether it was repeated.
    """

    prefill_seconds: float
    step_seconds: tuple[float, ...]
    peak_bytes: int
    held_bytes: int
    trace: tuple[tuple[float, int], ...]
    surprise: tuple[float, ...]
    divergence: tuple[float, ...]
    agreement: tuple[bool, ...]
    depths: tuple[float, ...]
    found: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All rounds of one method.

    Args:
        method: its name.
        settings: its settings in one line.
        samples: one for each finished round.
        problem: why it was not measured, or what went wrong; empty if nothing did.
        failed: whether the problem is an error, and not that the method does not apply.
    """

    method: str
    settings: str = ""
    samples: tuple[Sample, ...] = ()
    problem: str = ""
    failed: bool = False

    @property
    def prefill(self) -> Spread:
        """Seconds: median and extremes of the rounds."""
        times = [sample.prefill_seconds for sample in self.samples]
        return Spread(statistics.median(times), min(times), max(times))

    @property
    def decode(self) -> Spread:
        """Tokens a second: from median and quartiles of the steps of all rounds."""
        times = [seconds for sample in self.samples for seconds in sample.step_seconds]
        slow, middle, fast = (1 / t for t in reversed(quartiles(times)))
        return Spread(middle, slow, fast)

    @property
    def peak_bytes(self) -> int:
        """Largest of all rounds."""
        return max(sample.peak_bytes for sample in self.samples)

    @property
    def held_bytes(self) -> int:
        """Bytes after the context was read, the largest of all rounds."""
        return max(sample.held_bytes for sample in self.samples)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprise over all continuation tokens."""
        return math.exp(statistics.fmean(x for sample in self.samples for x in sample.surprise))

    @property
    def divergence(self) -> float:
        """Mean KL divergence from full attention, in nats."""
        return statistics.fmean(x for sample in self.samples for x in sample.divergence)

    @property
    def agreement(self) -> Share:
        """Continuation tokens with the same most likely next token as full attention."""
        same = [x for sample in self.samples for x in sample.agreement]
        return Share(sum(same), len(same))

    @property
    def recall(self) -> Share:
        """Hidden facts that were repeated."""
        return self._share(None)

    def recall_at(self, depth: float) -> Share:
        """Facts hidden at one depth that were repeated."""
        return self._share(depth)

    def _share(self, depth: float | None) -> Share:
        pairs = [pair for sample in self.samples for pair in zip(sample.depths, sample.found, strict=True)]
        found = [hit for where, hit in pairs if depth is None or where == depth]
        return Share(sum(found), len(found))


@dataclasses.dataclass(frozen=True)
class Setup:
    """What was compared and on what, enough to run it again."""

    model: str
    parameters: int
    layers: int
    query_heads: int
    key_heads: int
    positions: int | None
    dtype: str
    device: str
    document: str
    length: int
    continuation: int
    budget: int
    seed: int
    rounds: int
    depths: tuple[float, ...]
    cores: int
    threads: int
    foveal: str
    torch: str
    transformers: str
    python: str

    @property
    def lines(self) -> list[str]:
        """The same in a few lines for people."""
        return [
            f"{self.model}: {self.parameters / 1e6:.3g} million parameters, {self.layers} layers, "
            f"{self.query_heads} query and {self.key_heads} key heads, {self.dtype}",
            f"{self.document}: context {self.length} tokens, continuation {self.continuation}, budget {self.budget} "
            f"entries per key head, {count(self.rounds, 'round')}, {count(len(self.depths), 'fact')} a round, "
            f"seed {self.seed}",
            f"{count(self.cores, 'core')}, {count(self.threads, 'torch thread')}, {self.device}; foveal {self.foveal}, "
            f"torch {self.torch}, transformers {self.transformers}, Python {self.python}",
        ]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that one run found.

    Args:
        setup: what was compared and on what.
        measurements: one for each method, full attention first.
        interrupted: whether it was stopped before the end.
        seconds: how long it took.
    """

    setup: Setup
    measurements: tuple[Measurement, ...]
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def finished(self) -> list[Measurement]:
        """The methods with at least one round."""
        return [measurement for measurement in self.measurements if measurement.samples]

    @property
    def remarks(self) -> list[str]:
        """What a reader must know before trusting the figures."""
        remarks = []
        if self.interrupted:
            counts = ", ".join(f"{m.method} {len(m.samples)}" for m in self.measurements if not m.problem)
            remarks.append(f"Interrupted; finished of {count(self.setup.rounds, 'round')}: {counts}.")
        reach = self.setup.length + self.setup.continuation
        if self.setup.positions is not None and reach > self.setup.positions:
            remarks.append(
                f"The model was made for {self.setup.positions} positions and the text reaches {reach}: "
                "full attention may be no good reference."
            )
        for m in self.measurements:
            if m.problem:
                state = f"failed after {count(len(m.samples), 'round')}" if m.failed else "not measured"
                remarks.append(f"{m.method} {state}: {m.problem}.")
        full = next((m for m in self.finished if m.method == "full"), None)
        if full is not None and full.recall.found < full.recall.trials:
            lost = full.recall.trials - full.recall.found
            remarks.append(
                f"The model itself, with full attention, misses {lost} of {full.recall.trials} facts: "
                "read the recall of the others against its row, not against 100%."
            )
        return remarks

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON knows it: the setup, and each method's figures and raw rounds."""
        return {
            "format": 1,
            "setup": dataclasses.asdict(self.setup),
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "remarks": self.remarks,
            "meaning": MEANING,
            "methods": [self._method(m) for m in self.measurements],
        }

    def _method(self, m: Measurement) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        if m.samples:
            figures = {
                "prefill_seconds": dataclasses.asdict(m.prefill),
                "decode_tokens_per_second": dataclasses.asdict(m.decode),
                "cache_peak_bytes": m.peak_bytes,
                "cache_held_bytes": m.held_bytes,
                "perplexity": m.perplexity,
                "kl_divergence": m.divergence,
                "top1_agreement": m.agreement.rate,
                "recall": _counted(m.recall),
                "recall_by_depth": [{"depth": d, **_counted(m.recall_at(d))} for d in self.setup.depths],
            }
        return {
            "name": m.method,
            "settings": m.settings,
            "problem": m.problem,
            "failed": m.failed,
            **figures,
            "rounds": [dataclasses.asdict(sample) for sample in m.samples],
        }


def _counted(share: Share) -> dict[str, Any]:
    low, high = share.interval
    return {"found": share.found, "trials": share.trials, "low": low, "high": high}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, interpolated between the values; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def count(number: int, thing: str) -> str:
    """``"1 round"``, ``"2 rounds"``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def short(number: float) -> str:
    """Seconds or rates for people, about three digits: ``"2.16"``, ``"17.3"``, ``"1826"``."""
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def amount(number: int) -> str:
    """Bytes for people: ``"12.3 MiB"``."""
    size, units = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return (
        f"{size:.0f} bytes"
        if units[0] == "bytes"
        else f"{size:.3g} {units[0]}"
        if size < 1000
        else f"{size:.0f} {units[0]}"
    )
