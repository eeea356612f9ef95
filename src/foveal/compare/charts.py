"""Two small charts as SVG text: points and lines, with units, grid and names beside the marks.

Colours are CSS classes (``c0``, ``c1``, ...), so that the page decides what is readable on its background.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 52, 302, 12, 260  # the plot's edges; names stand to the right of it
HEIGHT = 300
ROW, LETTER = 15, 7.6  # height of a name, width of a letter


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``, in steps of 1, 2 or 5 times a power of ten."""
    span = (high - low) or abs(high) or 1.0
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float, least: float = 1e-5) -> list[float]:
    """Powers of ten around positive values; what is below ``least`` is drawn there."""
    first = math.floor(math.log10(max(low, least)) + 1e-9)
    last = math.ceil(math.log10(max(high, least)) - 1e-9)
    return [10.0**n for n in range(first, max(last, first + 1) + 1)]


def dodge(places: Sequence[float], gap: float = 5.0) -> list[float]:
    """Places of which those that coincide stand side by side."""
    moved = list(places)
    for place in set(map(round, places)):
        same = [n for n, other in enumerate(places) if round(other) == place]
        for rank, n in enumerate(same):
            moved[n] += (rank - (len(same) - 1) / 2) * gap
    return moved


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, at least ``gap`` apart and inside [low, high] if there is room."""
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    places = [0.0] * len(wanted)
    below = low - gap
    for n in order:
        below = places[n] = max(wanted[n], below + gap)
    above = high + gap
    for n in reversed(order):
        above = places[n] = min(places[n], above - gap)
    return places


class Frame:
    """The axes of a chart and the way from values to places in it; the y axis may be logarithmic."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], x: str, y: str, top: float | None = None, log: bool = False
    ) -> None:
        self.x_ticks, self.titles, self.log = ticks(0.0, max(xs)), (x, y), log
        self.y_ticks = decades(min(ys), max(ys)) if log else ticks(0.0, top or max(ys))

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a value is drawn."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        up = math.log(max(y, low) / low) / math.log(high / low) if self.log else y / high
        return LEFT + x / self.x_ticks[-1] * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    def svg(self, marks: str, ends: Sequence[tuple[str, float, float]], first: int = 0) -> str:
        """The chart around its marks, with a name for each of their ends."""
        parts = [names(ends, first)]
        for value in self.x_ticks:
            x, y = self.at(value, self.y_ticks[0])
            parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{value:g}</text>')
        for value in self.y_ticks:
            x, y = self.at(0, value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:.10g}</text>')
        across, up = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.titles[0])}</text>')
        turned = f'transform="translate(11 {up:.1f}) rotate(-90)"'
        parts.append(f'<text {turned} text-anchor="middle">{escape(self.titles[1])}</text>')
        width = RIGHT + 20 + LETTER * max(len(name) for name, _, _ in ends)
        title = escape(f"{self.titles[1]} against {self.titles[0]}")
        return f'<svg viewBox="0 0 {width:.0f} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}{marks}</svg>'


def names(ends: Sequence[tuple[str, float, float]], first: int = 0) -> str:
    """Names in a column on the right, each joined to the place (x, y) of its mark; ``first`` is the first colour."""
    places = spread([y for _, _, y in ends], ROW, TOP + 6, BOTTOM)
    parts, column = [], RIGHT + 14
    for n, ((name, x, y), place) in enumerate(zip(ends, places, strict=True), first):
        parts.append(f'<path class="lead c{n % 10}" d="M{x:.1f} {y:.1f}L{column - 3} {place:.1f}"/>')
        parts.append(f'<text class="name c{n % 10}" x="{column}" y="{place + 4:.1f}">{escape(name)}</text>')
    return "".join(parts)


def scatter(
    points: Sequence[tuple[str, float, float]],
    *,
    x: str,
    y: str,
    bars: Mapping[str, tuple[float, ...]] | None = None,
    top: float | None = None,
    log: bool = False,
    first: int = 0,
) -> str:
    """Named points; those with equal x stand side by side.

    Args:
        points: name, x and y of each.
        x, y: what the axes are, with units.
        bars: lower and upper end of a vertical bar by name.
        top: end of the y axis; None is the highest point's.
        log: whether the y axis is logarithmic.
        first: number of the first colour.
    """
    frame = Frame([p[1] for p in points], [p[2] for p in points], x, y, top, log)
    marks, ends = [], []
    columns = dodge([frame.at(across, up)[0] for _, across, up in points])
    for n, ((name, _, value), column) in enumerate(zip(points, columns, strict=True), first):
        up = frame.at(0, value)[1]
        if bars is not None:
            low, high = (frame.at(0, end)[1] for end in bars[name])
            marks.append(f'<path class="bar c{n % 10}" d="M{column:.1f} {low:.1f}V{high:.1f}"/>')
        marks.append(f'<circle class="c{n % 10}" cx="{column:.1f}" cy="{up:.1f}" r="4.5"/>')
        ends.append((name, column, up))
    return frame.svg("".join(marks), ends, first)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> str:
    """Named lines.

    Args:
        series: points (x, y) of each line in order.
        x, y: what the axes are, with units.
    """
    every = list(itertools.chain.from_iterable(series.values()))
    frame = Frame([p[0] for p in every], [p[1] for p in every], x, y)
    marks, ends = [], []
    for n, (name, points) in enumerate(series.items()):
        places = [frame.at(*point) for point in points]
        path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
        marks.append(f'<path class="line c{n % 10}" d="M{path}"/>')
        ends.append((name, *places[-1]))
    return frame.svg("".join(marks), ends)
