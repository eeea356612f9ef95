"""Results of training as a table in the terminal, and a bar while it lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from foveal.train.results import MEANING, Outcome, Run
from foveal.train.runner import Progress

COLUMNS = ("parameters", "state", "accuracy", "chance", "steps", "seconds")


def table(run: Run) -> Table:
    """One row per mechanism; a dash where it was not checked once."""
    found = Table(header_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
    found.add_column("mechanism", overflow="fold")
    for name in COLUMNS:
        found.add_column(name, justify="right")
    for outcome in run.outcomes:
        found.add_row(outcome.label, *cells(outcome, run.chance))
    return found


def cells(outcome: Outcome, chance: float) -> list[str]:
    """The figures of one mechanism, in the order of ``COLUMNS``."""
    size = [f"{outcome.parameters:,}", f"{outcome.state:,}"]
    if outcome.accuracy is None:
        return [*size, "-", f"{chance:.3f}", "-", "-"]
    return [*size, f"{outcome.accuracy:.3f}", f"{chance:.3f}", str(outcome.steps), f"{outcome.seconds:.0f}"]


def show(run: Run, console: Console) -> None:
    """Print the table, the remarks, what the numbers mean, and on what they were measured."""
    console.print(table(run))
    for remark in run.remarks:
        console.print(f"Note: {remark}", style="yellow", markup=False, highlight=False)
    meanings = Table.grid(padding=(0, 2))
    for name in COLUMNS:
        meanings.add_row(name, MEANING[name], style="dim")
    console.print(meanings)
    for part, settings in run.setup.items():
        line = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
        console.print(f"{part}: {line}", style="dim", markup=False, highlight=False)


@contextlib.contextmanager
def progress(console: Console, mechanisms: int, steps: int) -> Iterator[Callable[[Progress], None]]:
    """A bar with the current mechanism, its loss and what it recalls so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(at: Progress) -> None:
            text = f"{at.mechanism} ({at.number + 1} of {mechanisms}): loss {at.loss:.3f}, accuracy {at.best:.3f}"
            bar.update(task, completed=at.step, total=steps, description=text)

        yield update
