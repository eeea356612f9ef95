"""Results in the terminal: a table, what its columns mean, and progress while it fills.

Needs the extra ``foveal[cli]``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from foveal.compare.results import MEANING, Comparison, Measurement, amount, short
from foveal.compare.runner import Progress


def table(result: Comparison) -> Table:
    """One row per method with spreads in small print; a dash where nothing was measured, and a remark says why."""
    found = Table(header_style="bold", pad_edge=False, collapse_padding=True, box=box.SIMPLE_HEAD)
    found.add_column("method", min_width=max(len(m.method) for m in result.measurements))
    for name in ("prefill\ns", "decode\ntokens/s", "cache\npeak", "PPL", "KL", "top-1", "recall\n95%"):
        found.add_column(name, justify="right")
    for measurement in result.measurements:
        found.add_row(measurement.method, *(cells(measurement) if measurement.samples else ["-"] * 7))
    return found


def cells(m: Measurement) -> list[str]:
    """The seven figures of a measured method, with their spread below."""
    prefill, decode, (low, high) = m.prefill, m.decode, m.recall.interval
    return [
        f"{short(prefill.median)}\n[dim]{short(prefill.low)}-{short(prefill.high)}[/]",
        f"{short(decode.median)}\n[dim]{short(decode.low)}-{short(decode.high)}[/]",
        f"{amount(m.held_bytes)}\n[dim]{amount(m.peak_bytes)}[/]",
        f"{m.perplexity:.2f}",
        f"{m.divergence:.3f}",
        f"{m.agreement.rate:.0%}",
        f"{m.recall.found}/{m.recall.trials}\n[dim]{low * 100:.0f}-{high * 100:.0f}%[/]",
    ]


def show(result: Comparison, console: Console) -> None:
    """Print the table, the remarks, what the numbers mean, and on what they were measured."""
    if result.finished:
        console.print(table(result))
    for remark in result.remarks:
        console.print(f"Note: {remark}", style="yellow", markup=False, highlight=False)
    console.print()
    legend = Table.grid(padding=(0, 2))
    for name, meaning in MEANING.items():
        legend.add_row(name, meaning, style="dim")
    console.print(legend)
    console.print()
    for line in [*result.setup.lines, f"took {result.seconds:.0f} s"]:
        console.print(line, style="dim", markup=False, highlight=False)


@contextlib.contextmanager
def progress(console: Console, rounds: int) -> Iterator[Callable[[Progress], None]]:
    """A bar with the current method, round and phase, the time that has passed and what is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Bar(*columns, *times, console=console, transient=True, speed_estimate_period=60) as bar:
        task = bar.add_task("starting", total=None)

        def update(at: Progress) -> None:
            text = f"{at.method}: {at.phase}, round {at.round} of {rounds}"
            bar.update(task, completed=at.done, total=at.total, description=text)

        yield update
