"""The command ``foveal``: compare methods, look mechanisms and policies up, certify one of your own.

Needs the extra ``foveal[cli]``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import foveal
from foveal import registry
from foveal.compare.methods import DEFAULT
from foveal.compare.runner import BUDGET, CONTINUATION, LENGTH, ROUNDS, check_sizes, entries
from foveal.train import MQAR, Config, Recipe

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"foveal: the command line needs the package {missing.name}; pip install 'foveal[cli]'")

BAD_INPUT, INTERRUPTED, FAILED = 2, 130, 1
DEMO_MODEL = "SmolLM2-135M-Instruct"

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Every efficient attention in one call, on your model and your text.",
)
out, err = Console(), Console(stderr=True)


def stop(message: object, code: int = BAD_INPUT) -> NoReturn:
    """End with one line on standard error."""
    text = " ".join(str(message).split())
    err.print(f"foveal: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what a user can get wrong into one line and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        stop(error)
    except ImportError as error:
        stop(f"the package {error.name} is missing; what foveal needs comes with pip install 'foveal[hf,cli,report]'")


def version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        out.print(f"foveal {foveal.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main_options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Every efficient attention in one call, on your model and your text."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def compare(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, GGUF file or hub id of a decoder model.", show_default=DEMO_MODEL),
    ] = None,
    document: Annotated[
        pathlib.Path | None,
        typer.Option(help="A UTF-8 text file.", show_default="Python's language reference"),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the context.")] = LENGTH,
    methods: Annotated[
        str, typer.Option(help="Names with commas: full, any policy, any softmax mechanism, or mechanism+policy.")
    ] = ",".join(DEFAULT),
    budget: Annotated[
        str, typer.Option(help="Entries kept or read per key head, or a share of the length such as 0.25.")
    ] = str(BUDGET),
    seed: Annotated[int, typer.Option(help="Seed of the hidden facts.")] = 0,
    rounds: Annotated[int, typer.Option(help="How often everything is measured, with other facts each time.")] = ROUNDS,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of torch.", show_default="torch's choice"),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", help="Write all figures and raw rounds to this file."),
    ] = None,
    html_file: Annotated[
        pathlib.Path | None,
        typer.Option("--html", help="Write the report to this file.", show_default="a new foveal-compare.html"),
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no report.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files named by --json and --html.")] = False,
) -> None:
    """Measure what methods cost and what they lose, on a pretrained model and a document.

    Ctrl-C ends early and keeps what is finished.  Bad input ends with status 2.
    """
    with plain_errors():
        files = targets(json_file, html_file, no_html=no_html, force=force)
        if "html" in files:
            importlib.import_module("foveal.compare.report")  # a missing package shows now, not after the run
        plan = prepare(model, document, length, methods, parse_budget(budget), seed, rounds, threads)
    from foveal.compare import execute
    from foveal.compare.table import progress, show

    for line in [introduction(plan), *plan.setup.lines]:
        out.print(line, markup=False, highlight=False)
    with progress(err, plan.setup.rounds) as update:
        result = execute(plan, update)
    out.print()
    show(result, out)
    if result.finished:
        write(result, files)
    if result.interrupted:
        kept = "kept what was finished" if result.finished else "nothing was finished, nothing is written"
        stop(f"interrupted; {kept}", INTERRUPTED)
    if any(measurement.failed for measurement in result.measurements):
        stop("some methods failed, see the notes above", FAILED)


def introduction(plan: Any) -> str:
    """What the run is about to do."""
    names, setup = ", ".join(method.name for method in plan.measured), plan.setup
    return (
        f"Comparing {names}: each reads {setup.length} tokens, predicts the next {setup.continuation} and is asked for "
        f"the facts that were hidden in them. Ctrl-C ends early and keeps what is finished."
    )


def parse_budget(text: str) -> int | float:
    """An int, or a float if it is written as one.

    Raises:
        ValueError: if it is no number.
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise ValueError(f"budget: has {text!r}, expected a number of entries such as 384, or a share such as 0.25")


def prepare(
    model: str | None,
    document: pathlib.Path | None,
    length: int,
    methods: str,
    budget: int | float,
    seed: int,
    rounds: int,
    threads: int | None,
) -> Any:
    """Check what costs nothing first, then load the model and check the rest; returns a plan."""
    from foveal.compare import methods as names
    from foveal.compare import plan, read

    chosen = methods.split(",")
    check_sizes(length, CONTINUATION, rounds)
    names.parse(chosen, entries(budget, length))
    text, title = read(document)
    set_threads(threads)
    from foveal import hf

    with err.status(f"Loading {model or DEMO_MODEL}"):
        network, tokenizer = hf.load(model)
    return plan(
        network,
        tokenizer,
        text,
        methods=chosen,
        length=length,
        budget=budget,
        seed=seed,
        rounds=rounds,
        model_name=pathlib.Path(model).name if model else DEMO_MODEL,
        document_name=title,
    )


def targets(
    json_file: pathlib.Path | None, html_file: pathlib.Path | None, *, no_html: bool, force: bool
) -> dict[str, pathlib.Path]:
    """Where results go, by format; nothing is overwritten unasked.

    Raises:
        ValueError: if a named file exists or cannot be created.
    """
    if no_html and html_file is not None:
        raise ValueError("html: given beside --no-html, expected one of the two")
    if not no_html and html_file is None:
        html_file = unused(pathlib.Path("foveal-compare.html"))
    files = {"json": json_file, "html": html_file}
    named = {kind: file for kind, file in files.items() if file is not None}
    if len(set(named.values())) < len(named):
        raise ValueError(f"html: has {str(html_file)!r}, which --json names too, expected another file")
    for kind, file in named.items():
        if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
            raise ValueError(f"{kind}: {str(file)!r} cannot be written, expected a file in an existing folder")
        if file.exists() and not force:
            raise ValueError(f"{kind}: {str(file)!r} exists, expected a new file, or --force to overwrite it")
    return named


def unused(file: pathlib.Path) -> pathlib.Path:
    """The file itself, or the first numbered neighbour that does not exist."""
    number, candidate = 2, file
    while candidate.exists():
        candidate = file.with_stem(f"{file.stem}-{number}")
        number += 1
    return candidate


def write(result: Any, files: dict[str, pathlib.Path]) -> None:
    """Write the formats asked for, and say where."""
    from foveal.compare.report import render

    for kind, file in files.items():
        content = render(result) if kind == "html" else json.dumps(result.to_dict(), indent=1) + "\n"
        try:
            file.write_text(content, encoding="utf-8")
        except OSError as error:
            stop(f"{kind}: {str(file)!r} cannot be written: {error.strerror}", FAILED)
        out.print(f"Wrote {file}", highlight=False, markup=False)


@app.command("list")
def list_all() -> None:
    """List every mechanism and cache policy."""
    for kind in registry.FOLDERS:
        out.print(overview(f"{kind}: {len(registry.names(kind))}", registry.classes(kind)))


def overview(title: str, classes: list[Any]) -> Table:
    """Key, first sentence and paper of some specs."""
    found = Table("key", "what it does", "paper", title=title, title_justify="left")
    for cls in classes:
        found.add_row(cls.name, summary(cls), f"{cls.paper.authors} {cls.paper.year}")
    return found


def summary(cls: Any) -> str:
    """First sentence of a class's docstring."""
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


@app.command()
def show(name: Annotated[str, typer.Argument(help="Key or alias of a mechanism or a policy.")]) -> None:
    """Show a mechanism or a policy: formula, settings, paper, cost, file."""
    found = [cls for cls in matches(name) if name.lower().replace("-", "_") in (cls.name, *cls.aliases)]
    if not found:
        stop(f"name: unknown {name!r}; {nearest(name)}")
    for cls in found:
        out.print(f"{cls.name} ({cls.kind})", style="bold", highlight=False)
        out.print(inspect.getdoc(cls), markup=False, highlight=False, soft_wrap=True)
        facts = {"paper": f"{cls.paper.title}, {cls.paper.authors} {cls.paper.year}", "link": cls.paper.link}
        if cls.kind == "mechanism":
            facts |= {"engine": cls.engine, "train": cls.cost.train, "decode": cls.cost.decode, "state": cls.cost.state}
            facts["own tensors"] = ", ".join(cls.inputs) or "none"
        facts |= {"settings": ", ".join(f"{k}={v!r}" for k, v in cls.settings().items()), "file": registry.path(cls)}
        out.print()
        for key, value in facts.items():
            out.print(f"{key:>12}  {value}", markup=False, highlight=False, soft_wrap=True)


def nearest(name: str) -> str:
    """A hint at the keys that look like a wrong one."""
    near = difflib.get_close_matches(name.lower(), [n for kind in registry.FOLDERS for n in registry.names(kind)], n=3)
    return f"did you mean {', '.join(near)}?" if near else "`foveal list` shows all"


def matches(text: str) -> list[Any]:
    """Matches of a text, refused if it is empty."""
    with plain_errors():
        return list(registry.find(text))


@app.command()
def find(text: Annotated[str, typer.Argument(help="Key, alias, arXiv id, word of the title, or author.")]) -> None:
    """Find mechanisms and policies by name, paper or author; status 1 if there are none."""
    found = matches(text)
    if not found:
        stop(f"text: nothing matches {text!r}; `foveal list` shows all", FAILED)
    out.print(overview(f"{len(found)} found", found))


@app.command()
def check(file: Annotated[pathlib.Path, typer.Argument(help="A Python file with a mechanism or a policy.")]) -> None:
    """Run the public laws on a mechanism or a policy of your own; status 1 if one is broken."""
    from foveal.testing import certify

    broken = total = 0
    with plain_errors():
        for case, error in certify(file):
            total += 1
            broken += error is not None
            out.print(f"{'broken' if error else 'holds ':6}  {case}", style="red" if error else None, highlight=False)
            if error is not None:
                out.print(f"        {type(error).__name__}: {error}", markup=False, highlight=False)
    out.print(f"{total - broken} of {total} laws hold", highlight=False)
    if broken:
        raise typer.Exit(FAILED)


training = typer.Typer(no_args_is_help=True, help="Train small models on a generated task, to see what they can learn.")
app.add_typer(training, name="train")


@training.command()
def mqar(
    mechanism: Annotated[list[str], typer.Option(help="Key of a mechanism; repeat it to compare several.")],
    settings: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, for every mechanism that has it; may be repeated.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of a key and a value in a sequence.")] = MQAR.pairs,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = MQAR.length,
    vocab: Annotated[int, typer.Option(help="Number of different tokens.")] = MQAR.vocab,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = Config.dim,
    heads: Annotated[int, typer.Option(help="Heads of each layer.")] = Config.heads,
    head_dim: Annotated[int, typer.Option(help="Width of a head, K = V.")] = Config.head_dim,
    layers: Annotated[int, typer.Option(help="Blocks of attention and MLP.")] = Config.layers,
    conv: Annotated[int, typer.Option(help="Width of the short convolution; 0 is none.")] = Config.conv,
    rope: Annotated[
        float | None, typer.Option(help="Base of rotary positions, such as 10000.", show_default="none")
    ] = Config.rope,
    steps: Annotated[int, typer.Option(help="Most batches of each mechanism.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Sequences of a batch.")] = Recipe.batch,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = Recipe.lr,
    target: Annotated[float, typer.Option(help="Held-out accuracy that ends the training.")] = Recipe.target,
    seed: Annotated[int, typer.Option(help="Seed of weights and sequences.")] = Recipe.seed,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.", show_default="torch's choice")] = None,
    out_file: Annotated[
        pathlib.Path | None, typer.Option("--out", help="Write everything to this new JSON file.")
    ] = None,
) -> None:
    """Recall: read pairs of a key and a value, then answer each key with its value.

    Ctrl-C ends early and keeps the best so far.  Bad input ends with status 2.
    """
    from foveal.train import results, runner, table

    with plain_errors():
        if out_file is not None:
            results.check_new(out_file)
        task, config = MQAR(pairs, length, vocab), Config(dim, heads, head_dim, layers, conv, rope)
        recipe = Recipe(steps, batch, lr, seed, target=target)
        specs = runner.configured(mechanism, settings or ())
        set_threads(threads)
        with table.progress(err, len(specs), steps) as update:
            result = runner.run(task, specs, config, recipe, update)
    table.show(result, out)
    if out_file is not None:
        with plain_errors():
            results.write(result, out_file)
        out.print(f"Wrote {out_file}", highlight=False, markup=False)
    if result.interrupted:
        stop("interrupted; kept the best so far", INTERRUPTED)
    if any(outcome.problem for outcome in result.outcomes):
        stop("some mechanisms failed, see the notes above", FAILED)


def set_threads(threads: int | None) -> None:
    """Let torch use this many threads.

    Raises:
        ValueError: if there is less than one.
    """
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads: has {threads}, expected at least 1")
        torch.set_num_threads(threads)


def main() -> None:
    """Entry point of the command ``foveal``."""
    app()
