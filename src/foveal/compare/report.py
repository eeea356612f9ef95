"""One HTML file that needs nothing else: the table, charts as inline SVG, and what everything means.

Needs the extra ``foveal[report]``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foveal.compare import charts
from foveal.compare.results import MEANING, Comparison, Measurement, Sample, amount, short

MIB = 2**20
MEMORY, TOKENS = "cache after the context (MiB)", "decoded tokens per second"
RECALL = "Best is top left: hidden facts found with a small cache. Bars are Wilson's 95% intervals."
DISTANCE = "Best is bottom left: the same predictions with a small cache. Full attention is at 0 by definition."
SPEED = "Best is bottom right: the same predictions, faster. In a small model the cache is a small part of a step."
TIME = (
    "Keys and values after every layer of the prefill and every decoded token, in the round with the median prefill "
    "time. A line that is flat at the end decodes under a budget."
)
COLUMNS = ("prefill", "decode", "cache", "PPL", "KL", "top-1", "recall")


def render(result: Comparison) -> str:
    """The report as one HTML document: no script, no font, no image from elsewhere."""
    environment = Environment(loader=PackageLoader("foveal.compare"), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template("report.html").render(
        result=result,
        written=datetime.date.today().isoformat(),
        columns=COLUMNS,
        rows=[(m, rows(m) if m.samples else None) for m in result.measurements],
        meaning=MEANING,
        figures=[(title, text, Markup(svg)) for title, text, svg in figures(result)],
        heat=[(m.method, [m.recall_at(d) for d in result.setup.depths]) for m in result.finished],
    )


def rows(m: Measurement) -> list[tuple[str, str]]:
    """The figures of a method as (value, small print), in the order of the columns."""
    prefill, decode = m.prefill, m.decode
    low, high = m.recall.interval
    return [
        (f"{short(prefill.median)} s", f"{short(prefill.low)}-{short(prefill.high)}"),
        (f"{short(decode.median)}/s", f"{short(decode.low)}-{short(decode.high)}"),
        (amount(m.held_bytes), f"peak {amount(m.peak_bytes)}"),
        (f"{m.perplexity:.2f}", ""),
        (f"{m.divergence:.3f}", "nats"),
        (f"{m.agreement.rate:.0%}", f"of {m.agreement.trials}"),
        (f"{m.recall.found}/{m.recall.trials}", f"{low * 100:.0f}-{high * 100:.0f}%"),
    ]


def figures(result: Comparison) -> list[tuple[str, str, str]]:
    """Title, reading help and SVG of each chart that the finished methods allow."""
    done = result.finished
    others = [m for m in done if m.method != "full"]
    found = [("Memory against recall", RECALL, recall_chart(done))] if done else []
    if others:
        sizes = [(m.method, m.held_bytes / MIB, m.divergence) for m in others]
        speeds = [(m.method, m.decode.median, m.divergence) for m in others]
        own = f" Full attention decodes {short(done[0].decode.median)} tokens a second."
        found.append(("Memory against distance from full attention", DISTANCE, distance_chart(sizes, MEMORY)))
        found.append(("Speed against distance from full attention", SPEED + own, distance_chart(speeds, TOKENS)))
    if done:
        series = {m.method: memory(middle(m.samples)) for m in done}
        found.append(("Memory over time", TIME, charts.lines(series, x="time (s)", y="cache (MiB)")))
    return found


def recall_chart(done: Sequence[Measurement]) -> str:
    """Facts found over the size of the cache."""
    points = [(m.method, m.held_bytes / MIB, 100 * m.recall.rate) for m in done]
    bars = {m.method: tuple(100 * end for end in m.recall.interval) for m in done}
    return charts.scatter(points, x=MEMORY, y="facts found (%)", bars=bars, top=100.0)


def distance_chart(points: Sequence[tuple[str, float, float]], x: str) -> str:
    """Divergence from full attention over a cost."""
    return charts.scatter(points, x=x, y="KL divergence (nats)", log=True, first=1)


def middle(samples: Sequence[Sample]) -> Sample:
    """The sample whose prefill took the median time (the faster of two)."""
    return sorted(samples, key=lambda sample: sample.prefill_seconds)[(len(samples) - 1) // 2]


def memory(sample: Sample) -> list[tuple[float, float]]:
    """Seconds and MiB."""
    return [(seconds, size / MIB) for seconds, size in sample.trace]
