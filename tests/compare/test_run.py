"""A comparison from the plan to the written results, on a tiny random model."""

import html.parser
import io
import json
import math
import re

import pytest
import torch
from rich.console import Console

from foveal import compare
from foveal.compare import runner, table
from foveal.compare.report import render
from foveal.hf import UnsupportedModel
from tests.compare.tiny import TEXT, tokenizer
from tests.hf.tiny import make

SMALL = {"length": 300, "budget": 64, "rounds": 2, "continuation": 5}
NAMES = ["full", "softmax", "snapkv", "quest", "moba"]


@pytest.fixture(scope="module")
def result(model):
    return compare.run(model, tokenizer(), TEXT, methods=NAMES, seed=5, **SMALL)


def of(result, name):
    return next(m for m in result.measurements if m.method == name)


def test_full_attention_is_its_own_reference(result):
    full = of(result, "full")
    assert full.divergence == 0.0
    assert full.agreement.rate == 1.0


def test_the_same_mathematics_by_another_path_is_no_different(result):
    full, softmax = of(result, "full"), of(result, "softmax")
    assert softmax.divergence < 1e-6
    assert softmax.perplexity == pytest.approx(full.perplexity, rel=1e-4)
    assert softmax.recall == full.recall


def test_perplexity_is_that_of_the_continuation(result, model):
    plan = compare.plan(model, tokenizer(), TEXT, methods=["full"], seed=5, **SMALL)
    surprise = []
    for excerpt in plan.excerpts:
        ids = torch.tensor([[*excerpt.context, *excerpt.continuation]])
        with torch.inference_mode():
            logits = model(ids).logits[0].double().log_softmax(-1)
        for place in range(len(excerpt.context) + 1, ids.shape[1]):  # the first is predicted before compression
            surprise.append(-float(logits[place - 1, ids[0, place]]))
    assert len(surprise) == 10
    assert of(result, "full").perplexity == pytest.approx(math.exp(sum(surprise) / 10), rel=1e-4)


def test_bytes_are_counted(result):
    entry = 3 * 2 * 2 * 8 * 4  # layers, keys and values, key heads, width, fp32
    assert of(result, "full").held_bytes == 300 * entry
    assert of(result, "full").peak_bytes == 300 * entry
    assert of(result, "snapkv").held_bytes == 64 * entry
    # two layers are compressed when the last one has read everything
    assert of(result, "snapkv").peak_bytes == (64 + 64 + 300) * entry // 3
    assert of(result, "quest").held_bytes == 300 * entry + 19 * entry  # low and high of 19 pages of 16


def test_every_round_asks_for_every_depth(result):
    for m in result.measurements:
        assert len(m.samples) == 2
        assert m.recall.trials == 10
        assert [m.recall_at(d).trials for d in result.setup.depths] == [2] * 5
        assert m.agreement.trials == 10


def test_quality_is_reproducible(result, model):
    again = compare.run(model, tokenizer(), TEXT, methods=["full", "snapkv"], seed=5, **SMALL)
    a, b = of(result, "snapkv"), of(again, "snapkv")
    assert [s.surprise for s in a.samples] == [s.surprise for s in b.samples]
    assert [s.divergence for s in a.samples] == [s.divergence for s in b.samples]


def test_the_memory_trace_ends_with_the_last_step(result):
    for m in result.measurements:
        for sample in m.samples:
            seconds = [t for t, _ in sample.trace]
            assert seconds == sorted(seconds)
            assert len(sample.trace) == 1 + 3 + 5  # start, layers, decoded tokens
            assert sample.trace[3][1] == sample.held_bytes


def test_progress_ends_at_the_total(model):
    seen = []
    options = {**SMALL, "rounds": 2}
    compare.run(model, tokenizer(), TEXT, methods=["full", "h2o"], on_progress=seen.append, **options)
    done = [p.done for p in seen]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(seen[-1].total)
    assert [p.method for p in seen if p.phase == "reading"][::2] == ["full", "h2o", "full", "h2o"]
    assert {p.phase for p in seen} == {"reading", "continuing", "asking"}


def test_a_method_that_the_text_is_too_short_for_is_left_out_and_said_to_be(model):
    options = {**SMALL, "budget": 300, "rounds": 1}
    found = compare.run(model, tokenizer(), TEXT, methods=["full", "h2o"], **options)
    assert of(found, "h2o").samples == ()
    assert found.remarks[0] == "h2o not measured: input too short: h2o covers 300 tokens, the context has 300."


def test_an_interrupt_keeps_what_is_finished(model, monkeypatch):
    plan = compare.plan(model, tokenizer(), TEXT, methods=["full", "h2o", "tova"], **SMALL)
    real = runner.measure

    def stops(model, method, *args):
        if method.name == "h2o":
            raise KeyboardInterrupt
        return real(model, method, *args)

    monkeypatch.setattr(runner, "measure", stops)
    found = compare.execute(plan)
    assert found.interrupted
    assert [len(m.samples) for m in found.measurements] == [1, 0, 0]
    assert found.remarks[0] == "Interrupted; finished of 2 rounds: full 1, h2o 0, tova 0."
    assert model.config._attn_implementation == "sdpa"
    assert json.loads(json.dumps(found.to_dict()))["interrupted"] is True
    assert "not finished" in render(found)


def test_a_method_that_fails_does_not_end_the_others(model, monkeypatch):
    plan = compare.plan(model, tokenizer(), TEXT, methods=["full", "h2o", "tova"], **SMALL)
    real = runner.measure

    def fails(model, method, *args):
        if method.name == "h2o":
            raise RuntimeError("no memory")
        return real(model, method, *args)

    monkeypatch.setattr(runner, "measure", fails)
    found = compare.execute(plan)
    assert [len(m.samples) for m in found.measurements] == [2, 0, 2]
    assert of(found, "h2o").failed
    assert "h2o failed after 0 rounds: RuntimeError: no memory." in found.remarks


def test_every_name_can_be_compared(model):
    names = [*compare.candidates(), "sliding_window+h2o", "moba+snapkv"]
    found = compare.run(model, tokenizer(), TEXT, methods=names, **{**SMALL, "rounds": 1})
    assert [m.method for m in found.measurements] == names
    assert [m.problem for m in found.measurements] == [""] * len(names)
    both, alone = of(found, "sliding_window+h2o"), of(found, "h2o")
    assert both.held_bytes == alone.held_bytes
    assert both.divergence != alone.divergence


def test_a_text_beyond_the_models_positions_is_remarked(model):
    found = compare.run(model, tokenizer(), TEXT, methods=["full"], **{**SMALL, "length": 510, "rounds": 1})
    assert found.remarks[0].startswith("The model was made for 512 positions and the text reaches 515")


def test_a_model_that_full_attention_cannot_help_says_so(result):
    assert any(re.match(r"The model itself, with full attention, misses \d+ of 10 facts", r) for r in result.remarks)


def test_a_method_that_the_model_cannot_take_is_left_out(model, monkeypatch):
    def refuses(model):
        raise UnsupportedModel("model: keys of 'x' cannot be moved")

    monkeypatch.setattr("foveal.hf.models.rotation", refuses)
    plan = compare.plan(model, tokenizer(), TEXT, methods=["full", "streaming_llm", "h2o"], **SMALL)
    assert plan.problems == {"streaming_llm": "model: keys of 'x' cannot be moved"}


def test_a_method_without_a_term_that_the_model_needs_is_left_out():
    plan = compare.plan(make("gemma2"), tokenizer(), TEXT, methods=["full", "moba", "snapkv"], **SMALL)
    assert plan.problems == {"moba": "model: caps its scores at 50.0, which moba has no term for"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length: has 0, expected at least 1"),
        ({"rounds": 0}, "rounds: has 0, expected at least 1"),
        ({"length": 100}, r"length: has 100, expected at least \d+ to hide the facts"),
        ({"budget": 301}, "budget: has 301, expected a number of entries from 1 to the length 300"),
        ({"depths": []}, "depths: has 0 values"),
        ({"length": 9000}, r"document: has 1360 tokens, expected at least 8776 .*; this text allows --length 1584"),
    ],
)
def test_bad_input_is_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        compare.plan(model, tokenizer(), TEXT, methods=["full"], **{**SMALL, **options})


def test_the_advice_about_the_length_holds(model):
    with pytest.raises(ValueError, match="allows --length") as error:
        compare.plan(model, tokenizer(), TEXT, methods=["full"], **{**SMALL, "length": 9000})
    possible = int(re.search(r"--length (\d+)", str(error.value))[1])
    options = {**SMALL, "length": possible, "rounds": 1}
    assert len(compare.plan(model, tokenizer(), TEXT, methods=["full"], **options).excerpts[0].context) == possible


def test_json_has_everything(result):
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["format"] == 1
    assert data["setup"]["seed"] == 5
    assert data["setup"]["depths"] == [0.05, 0.25, 0.5, 0.75, 0.95]
    assert [m["name"] for m in data["methods"]] == NAMES
    figures = {
        "name", "settings", "problem", "failed", "prefill_seconds", "decode_tokens_per_second", "cache_peak_bytes",
        "cache_held_bytes", "perplexity", "kl_divergence", "top1_agreement", "recall", "recall_by_depth", "rounds",
    }  # fmt: skip
    for m in data["methods"]:
        assert set(m) == figures
        assert set(m["recall"]) == {"found", "trials", "low", "high"}
        assert [d["depth"] for d in m["recall_by_depth"]] == data["setup"]["depths"]
        assert len(m["rounds"]) == 2
    assert set(data["meaning"]) == {"prefill", "decode", "cache", "PPL", "KL", "top-1", "recall"}


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_has_a_row_for_every_method(result, width):
    console = Console(width=width, record=True, file=io.StringIO())
    table.show(result, console)
    text = console.export_text()
    for m in result.measurements:
        row = next(line for line in text.splitlines() if line.split()[:1] == [m.method])
        for figure in (f"{m.prefill.median:.2f}", f"{m.perplexity:.2f}", f"{m.divergence:.3f}", f"{m.recall.found}/10"):
            assert figure in row
    for word in ("recall", "Wilson", "seed 5", "1 torch thread,", "300 tokens"):
        assert word in text
    assert "…" not in text


class Outside(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.found, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "br", "link", "img", "path", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "circle"):
            assert self.open.pop() == tag


def test_the_report_is_whole_and_needs_nothing_else(result):
    text = render(result)
    page = Outside()
    page.feed(text)
    assert page.open == []
    assert page.found == []
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import|https?:", text)
    assert page.tags.count("svg") == 4
    for m in result.measurements:
        assert text.count(f">{m.method}<") >= 3
    assert "nan" not in text.lower().replace("finance", "")


def test_names_in_the_report_are_escaped(result):
    import dataclasses

    odd = dataclasses.replace(result, setup=dataclasses.replace(result.setup, document="<script>alert(1)</script>"))
    assert "<script>" not in render(odd)
