"""``foveal train mqar``: what it prints and writes, and one clear line for every mistake."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foveal import cli
from foveal.train import Run, runner

TINY = ["--pairs=2", "--length=8", "--vocab=10", "--dim=16", "--head-dim=16", "--layers=1", "--steps=4", "--batch=4"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "out", Console(width=200))


def mqar(*arguments):
    return CliRunner().invoke(cli.app, ["train", "mqar", *TINY, *arguments])


def test_table_and_file(tmp_path):
    result = mqar(
        "--mechanism", "delta_rule", "--mechanism", "linear", "--settings", "feature_map=relu", "--out", "a.json"
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "delta_rule",
        "linear feature_map=relu",
        "chance",
        "0.500",
        "256",
        "pairs 2, length 8",
        "Wrote a.json",
    ):
        assert part in text, part
    run = Run.from_dict(json.loads((tmp_path / "a.json").read_text()))
    assert [outcome.settings.get("feature_map") for outcome in run.outcomes] == [None, "relu"]
    assert run.setup["model"]["dim"] == 16
    assert run.setup["recipe"]["steps"] == 4


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a.json").write_text("mine")
    result = mqar("--mechanism", "linear", "--out", "a.json")
    assert result.exit_code == 2
    assert result.stderr.strip() == "foveal: out: 'a.json' exists, expected a new file"
    assert (tmp_path / "a.json").read_text() == "mine"


def test_ctrl_c_prints_and_writes_the_best_so_far(tmp_path, monkeypatch):
    real, calls = runner.accuracy, []

    def interrupts(*args):
        calls.append(1)
        if len(calls) == 3:  # the second mechanism's check; the first had one and a test
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "accuracy", interrupts)
    result = mqar("--mechanism", "softmax", "--mechanism", "linear", "--out", "a.json")
    assert result.exit_code == 130
    assert "linear was interrupted; it had not been checked yet." in " ".join(result.stdout.split())
    run = Run.from_dict(json.loads((tmp_path / "a.json").read_text()))
    assert run.outcomes[0].tested is not None
    assert run.interrupted


MISTAKES = {
    "unknown mechanism": (
        ["--mechanism", "delta_rul"],
        "mechanism: unknown name 'delta_rul'; did you mean 'delta_rule'",
    ),
    "twice": (["--mechanism", "linear", "--mechanism", "linear"], "mechanism: has 'linear' twice"),
    "pairs": (["--mechanism", "linear", "--pairs", "0"], "pairs: has 0, expected an int >= 1"),
    "length": (["--mechanism", "linear", "--length", "5"], "length: has 5, expected an int >= 6"),
    "vocab": (["--mechanism", "linear", "--vocab", "5"], "vocab: has 5, expected an int >= 6"),
    "head width": (["--mechanism", "linear", "--head-dim", "0"], "head_dim: has 0, expected an int >= 1"),
    "rope": (["--mechanism", "softmax", "--rope", "0"], "rope: has 0.0, expected a finite number > 1"),
    "odd rope": (
        ["--mechanism", "softmax", "--head-dim", "5", "--rope", "1e4"],
        "head_dim: has 5, expected an even number",
    ),
    "lr": (["--mechanism", "linear", "--lr", "0"], "lr: has 0.0, expected a finite number > 0"),
    "steps": (["--mechanism", "linear", "--steps", "-1"], "steps: has -1, expected an int >= 1"),
    "seed": (["--mechanism", "linear", "--seed", "-1"], "seed: has -1, expected an int >= 0"),
    "threads": (["--mechanism", "linear", "--threads", "0"], "threads: has 0, expected at least 1"),
    "out": (["--mechanism", "linear", "--out", "none/a.json"], "out: 'none/a.json' cannot be written"),
    "setting of none": (["--mechanism", "softmax", "--settings", "phi=1"], "settings: no mechanism has 'phi'"),
    "malformed": (["--mechanism", "softmax", "--settings", "window"], "settings: has 'window', expected name=value"),
    "bad value": (["--mechanism", "linear", "--settings", "feature_map=sin"], "linear: feature_map has 'sin'"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_status_2(arguments, message):
    result = mqar(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("foveal: ")
    assert message in lines[0]
