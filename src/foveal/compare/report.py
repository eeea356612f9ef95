"""One HTML file that needs nothing else: the table, charts as inline SVG, and what everything means.

Needs the extra ``foveal[report]``.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foveal.compare import charts
from foveal.compare.results import MEANING, Comparison, Measurement, Sample, amount, rate

MIB = 2**20
COLUMNS = ("prefill", "decode", "cache", "PPL", "KL", "top-1", "recall")


def render(result: Comparison) -> str:
    """The report as one HTML document: no script, no font, no image from elsewhere."""
    environment = Environment(loader=PackageLoader("foveal.compare"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    names = [m.method for m in result.finished]
    return environment.get_template("report.html").render(
        result=result,
        written=datetime.date.today().isoformat(),
        columns=COLUMNS,
        rows=[(m, rows(m) if m.samples else None) for m in result.measurements],
        meaning=MEANING,
        figures=[(title, text, Markup(svg)) for title, text, svg in figures(result, names)],
        heat=[(m.method, [m.recall_at(d) for d in result.setup.depths]) for m in result.finished],
    )


def rows(m: Measurement) -> list[tuple[str, str]]:
    """The figures of a method as (value, small print), in the order of the columns."""
    prefill, decode = m.prefill, m.decode
    low, high = m.recall.interval
    return [
        (f"{prefill.median:.2f} s", f"{prefill.low:.2f}-{prefill.high:.2f}"),
        (f"{rate(decode.median)}/s", f"{rate(decode.low)}-{rate(decode.high)}"),
        (amount(m.held_bytes), f"peak {amount(m.peak_bytes)}"),
        (f"{m.perplexity:.2f}", ""),
        (f"{m.divergence:.3f}", "nats"),
        (f"{m.agreement.rate:.0%}", f"of {m.agreement.trials}"),
        (f"{m.recall.found}/{m.recall.trials}", f"{low * 100:.0f}-{high * 100:.0f}%"),
    ]


def figures(result: Comparison, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Title, reading help and SVG of each chart."""
    if not names:
        return []

    def points(x: Callable[[Measurement], float], y: Callable[[Measurement], float]) -> list[tuple[str, float, float]]:
        return [(m.method, x(m), y(m)) for m in result.finished]

    def held(m: Measurement) -> float:
        return m.held_bytes / MIB

    lines = {m.method: memory(middle(m.samples)) for m in result.finished}
    return [
        (
            "Memory against recall",
            "Best is top left: hidden facts found with a small cache. Bars are Wilson's 95% intervals.",
            charts.scatter(
                points(held, lambda m: 100 * m.recall.rate),
                x="cache after the context (MiB)",
                y="facts found (%)",
                bars={m.method: tuple(100 * end for end in m.recall.interval) for m in result.finished},
                top=100.0,
            ),
        ),
        (
            "Memory against distance from full attention",
            "Best is bottom left: the same predictions with a small cache.",
            charts.scatter(
                points(held, lambda m: m.divergence), x="cache after the context (MiB)", y="KL divergence (nats)"
            ),
        ),
        (
            "Speed against distance from full attention",
            "Best is bottom right: the same predictions, faster. In a small model the cache is a small part of a step.",
            charts.scatter(
                points(lambda m: m.decode.median, lambda m: m.divergence),
                x="decoded tokens per second",
                y="KL divergence (nats)",
            ),
        ),
        (
            "Memory over time",
            "Bytes of keys and values after every layer of the prefill and every decoded token, in the round with the "
            "median prefill time. A flat line at the end is decoding under a budget.",
            charts.lines(lines, x="time (s)", y="cache (MiB)"),
        ),
    ]


def middle(samples: Sequence[Sample]) -> Sample:
    """The sample whose prefill took the median time (the faster of two)."""
    return sorted(samples, key=lambda sample: sample.prefill_seconds)[(len(samples) - 1) // 2]


def memory(sample: Sample) -> list[tuple[float, float]]:
    """Seconds and MiB."""
    return [(seconds, size / MIB) for seconds, size in sample.trace if math.isfinite(seconds)]
