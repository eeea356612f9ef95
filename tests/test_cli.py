"""The command line: what each command prints, and one clear line with status 2 for every mistake."""

import json

import pytest
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import foveal
from foveal import cli
from foveal.compare import runner
from tests.compare import tiny

RUN = ["--length", "300", "--budget", "64", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs in an empty folder with one document."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(tiny.TEXT)


def foveal_command(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def comparing(folder, *arguments):
    return foveal_command("compare", "--model", folder, "--document", "text.txt", *RUN, *arguments)


def said(result):
    return " ".join(result.stderr.split())


def test_no_arguments_print_help():
    result = foveal_command()
    assert result.exit_code == 0
    for command in ("compare", "list", "show", "find", "check"):
        assert command in result.stdout


def test_version():
    assert foveal_command("--version").stdout == f"foveal {foveal.__version__}\n"


def test_list_names_everything():
    text = foveal_command("list").stdout
    for key in (*foveal.list_mechanisms(), *foveal.list_policies()):
        assert f" {key} " in text


def test_show():
    text = foveal_command("show", "snapkv").stdout
    for part in ("snapkv (policy)", "2404.14469", "budget=1024", "policies/eviction/snapkv.py", "softmax"):
        assert part in text
    assert "delta_rule (mechanism)" in foveal_command("show", "DeltaNet").stdout
    result = foveal_command("show", "snapvk")
    assert result.exit_code == 2
    assert "foveal: name: unknown 'snapvk'; did you mean snapkv" in said(result)


def test_find():
    text = foveal_command("find", "2412.06464").stdout
    assert "1 found" in text
    assert "gated_delta_rule" in text
    result = foveal_command("find", "no such thing")
    assert (result.exit_code, said(result)) == (
        1,
        "foveal: text: nothing matches 'no such thing'; `foveal list` shows all",
    )
    assert foveal_command("find", " ").exit_code == 2


def test_check(monkeypatch):
    from foveal import testing

    monkeypatch.setattr(
        testing, "certify", lambda path: iter([("law-a", None), ("law-b", AssertionError("0 is not 1"))])
    )
    result = foveal_command("check", "mine.py")
    assert result.exit_code == 1
    assert "1 of 2 laws hold" in result.stdout
    assert "AssertionError: 0 is not 1" in result.stdout


def test_check_of_no_file():
    result = foveal_command("check", "missing.py")
    assert result.exit_code == 2
    assert said(result) == "foveal: path: 'missing.py' is no file, expected a Python file with a spec"


def test_compare_writes_what_it_found(folder, tmp_path):
    result = comparing(folder, "--methods", "full,snapkv,quest", "--json", "out.json", "--html", "out.html")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert [m["name"] for m in data["methods"]] == ["full", "snapkv", "quest"]
    assert data["setup"]["document"] == "text.txt"
    assert data["setup"]["threads"] == 1
    assert "<svg" in (tmp_path / "out.html").read_text()
    for part in ("snapkv", "Wilson", "Wrote out.json", "Wrote out.html", "300 tokens"):
        assert part in result.stdout


def test_the_default_report_never_overwrites(folder, tmp_path):
    (tmp_path / "foveal-compare.html").write_text("mine")
    assert comparing(folder, "--methods", "full").exit_code == 0
    assert (tmp_path / "foveal-compare.html").read_text() == "mine"
    assert "<svg" in (tmp_path / "foveal-compare-2.html").read_text()


def test_no_report_if_none_is_wanted(folder, tmp_path):
    assert comparing(folder, "--methods", "full", "--no-html").exit_code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text.txt"]


def test_overwriting_must_be_asked_for(folder, tmp_path):
    (tmp_path / "out.json").write_text("mine")
    refused = comparing(folder, "--methods", "full", "--json", "out.json")
    assert refused.exit_code == 2
    assert said(refused) == "foveal: json: 'out.json' exists, expected a new file, or --force to overwrite it"
    assert (tmp_path / "out.json").read_text() == "mine"
    assert comparing(folder, "--methods", "full", "--no-html", "--json", "out.json", "--force").exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["format"] == 1


def interrupt_at(monkeypatch, name):
    real = runner.measure

    def stops(model, method, *args):
        if method.name == name:
            raise KeyboardInterrupt
        return real(model, method, *args)

    monkeypatch.setattr(runner, "measure", stops)


def test_ctrl_c_keeps_and_writes_what_is_finished(folder, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, "h2o")
    result = comparing(folder, "--methods", "full,h2o,tova", "--json", "out.json", "--html", "out.html")
    assert result.exit_code == 130
    assert said(result).endswith("foveal: interrupted; kept what was finished")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["interrupted"] is True
    assert [len(m["rounds"]) for m in data["methods"]] == [1, 0, 0]
    assert "not finished" in (tmp_path / "out.html").read_text()
    assert "Interrupted; finished of 1 round: full 1, h2o 0, tova 0." in " ".join(result.stdout.split())


def test_ctrl_c_before_anything_is_finished_writes_nothing(folder, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, "full")
    result = comparing(folder, "--methods", "full,h2o", "--json", "out.json")
    assert result.exit_code == 130
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text.txt"]


def test_a_failing_method_ends_with_status_1(folder, monkeypatch):
    real = runner.measure

    def fails(model, method, *args):
        if method.name == "h2o":
            raise RuntimeError("no memory")
        return real(model, method, *args)

    monkeypatch.setattr(runner, "measure", fails)
    result = comparing(folder, "--methods", "full,h2o", "--no-html")
    assert result.exit_code == 1
    assert "h2o failed after 0 rounds: RuntimeError: no memory." in " ".join(result.stdout.split())


@pytest.fixture
def files(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "zero").write_bytes(b"text\0text")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "short").write_text("The quick brown fox.")
    (tmp_path / "folder").mkdir()
    T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=97, decoder_start_token_id=0)
    ).save_pretrained(tmp_path / "t5")
    BertForMaskedLM(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=97)
    ).save_pretrained(tmp_path / "bert")
    for name in ("t5", "bert"):
        tiny.tokenizer().save_pretrained(tmp_path / name)


MISTAKES = {
    "missing document": (["--document", "none.txt"], "document: 'none.txt' is missing, expected a text file"),
    "document is a folder": (["--document", "folder"], "document: 'folder' is a folder, expected a text file"),
    "binary document": (["--document", "binary"], "document: 'binary' is not UTF-8 at byte 0, expected a text file"),
    "zero bytes": (["--document", "zero"], "document: 'zero' has a zero byte at 4, expected a text file"),
    "empty document": (["--document", "empty"], "document: 'empty' is empty, expected a text"),
    "short document": (["--document", "short"], "document: has 8 tokens, expected at least"),
    "unknown method": (["--methods", "full,snapvk"], "methods: unknown method 'snapvk'; did you mean snapkv"),
    "no method": (["--methods", ","], "methods: has an empty name, expected some of full,"),
    "twice": (["--methods", "h2o,h2o"], "methods: has 'h2o' twice"),
    "untrained recurrence": (["--methods", "mamba2"], "attention: mamba2 needs"),
    "budget 0": (["--budget", "0"], "budget: has 0, expected a number of entries from 1 to the length 300"),
    "budget above length": (["--budget", "301"], "budget: has 301, expected a number of entries from 1"),
    "budget no number": (["--budget", "half"], "budget: has 'half', expected a number of entries such as 384"),
    "budget nan": (["--budget", "nan"], "budget: has nan, expected a number of entries"),
    "budget of a policy": (["--methods", "snapkv", "--budget", "8"], "snapkv: budget has 8"),
    "length 0": (["--length", "0"], "length: has 0, expected at least 1"),
    "length too small": (["--length", "80"], "length: has 80, expected at least"),
    "no rounds": (["--rounds", "0"], "rounds: has 0, expected at least 1"),
    "no threads": (["--threads", "0"], "threads: has 0, expected at least 1"),
    "missing model": (["--model", "./nowhere"], "model: './nowhere'"),
    "model is a text": (["--model", "text.txt"], "model: 'text.txt'"),
    "encoder-decoder": (["--model", "t5"], "expected a decoder"),
    "encoder": (["--model", "bert"], "model: BertLMHeadModel attends in both directions, expected a decoder"),
    "json in no folder": (["--json", "none/out.json"], "json: 'none/out.json' cannot be written"),
    "html is a folder": (["--html", "folder"], "html: 'folder' cannot be written"),
    "one file for both": (["--html", "a", "--json", "a"], "html: has 'a', which --json names too"),
    "html and no html": (["--html", "a.html", "--no-html"], "html: given beside --no-html"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_status_2(folder, files, arguments, message):
    result = comparing(folder, *arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("Loading")]
    assert len(lines) == 1, lines
    assert lines[0].startswith("foveal: ")
    assert message in lines[0]
    assert "Traceback" not in result.output
