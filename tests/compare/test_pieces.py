"""The deterministic pieces of a comparison, against values worked out by hand."""

import copy
import math

import pytest
import torch

from foveal import hf
from foveal.compare import charts, document, results
from foveal.compare.measure import advance, answers, kl_divergence
from foveal.compare.methods import Method, candidates, parse
from foveal.compare.results import Measurement, Sample, Share, amount, quartiles, short
from foveal.compare.runner import _order, entries
from tests.compare.tiny import TEXT, tokenizer
from tests.hf.tiny import make


def test_facts_are_put_where_they_were_asked_to_be():
    context, places = document.hide(range(10, 20), [[1, 2], [3]], [0.2, 0.75], breaks=lambda token: False)
    # 0.2 of ten tokens is after two of them; 0.75 rounds to 8 (half to even)
    assert context == [10, 11, 1, 2, 12, 13, 14, 15, 16, 17, 3, 18, 19]
    assert places == [2, 10]


def test_a_fact_waits_for_the_next_line_break():
    context, places = document.hide(range(10, 20), [[1], [2]], [0.1, 0.2], breaks=lambda token: token == 14)
    assert context == [10, 11, 12, 13, 14, 1, 2, 15, 16, 17, 18, 19]
    assert places == [5, 6]


def test_excerpts_have_the_length_asked_for_and_contain_their_facts():
    tok = tokenizer()
    found = document.excerpts(TEXT, tok, length=300, continuation=9, rounds=2, seed=3)
    for excerpt in found:
        assert len(excerpt.context) == 300
        assert len(excerpt.continuation) == 9
        text = tok.decode(excerpt.context)
        after = tok.decode(excerpt.continuation)
        assert [q.depth for q in excerpt.questions] == list(document.DEPTHS)
        plain = text
        for question in excerpt.questions:
            person = tok.decode(question.prompt).removeprefix("\n\nAs stated above, the secret number of ")[:-3]
            code = tok.decode(question.answer).strip()
            number = f"the secret number of {person}"
            sentence = f"\n\nRemember this: {number} is {code}. {code} is {number}.\n\n"
            assert len(tok.encode(text[: text.index(sentence)])) == question.place
            plain = plain.replace(sentence, "")
        assert plain + after in TEXT
    assert found[0] != found[1]
    assert found == document.excerpts(TEXT, tok, length=300, continuation=9, rounds=2, seed=3)
    assert found != document.excerpts(TEXT, tok, length=300, continuation=9, rounds=2, seed=4)


def test_questions_and_answers_join_as_running_text_does():
    fact = document.Fact("Ada", "12345")

    def merges(text):  # a tokenizer that merges a trailing "is" with a following space
        return [ord(c) for c in text.replace("is ", "\x01").replace("is", "\x02")]

    prompt, answer = document.ask(fact, merges)
    assert [*prompt, *answer] == merges(fact.question + " 12345")
    assert prompt == tuple(merges(fact.question)[:-1])


def test_wilson_interval():
    # z = 1.959964, n = 15, p = 0.8: middle (0.8 + 0.128049) / 1.256097, half sqrt(0.010667 + 0.004268) z / 1.256097
    low, high = Share(12, 15).interval
    assert low == pytest.approx(0.5481, abs=1e-4)
    assert high == pytest.approx(0.9295, abs=1e-4)
    assert Share(0, 4).interval[0] == 0.0
    # p = 0: the upper end is z^2 / (n + z^2) = 3.841459 / 7.841459
    assert Share(0, 4).interval[1] == pytest.approx(3.841459 / 7.841459, abs=1e-6)
    assert Share(0, 0).interval == (0.0, 1.0)
    assert str(Share(12, 15)) == "12/15 [55-93%]"


def test_kl_divergence():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    # 0.5 ln 2 + 0.5 ln (2 / 3)
    want = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl_divergence(p.log(), q.log() + 7.0).tolist() == pytest.approx([want, 0.0], abs=1e-7)
    never = torch.tensor([[0.0, -torch.inf]])
    assert kl_divergence(never, torch.tensor([[0.0, 0.0]])).tolist() == pytest.approx([math.log(2)])


def test_figures_of_a_measurement():
    one = Sample(2.0, (0.1, 0.2), 100, 50, (), (1.0, 3.0), (0.0, 0.5), (True, False), (0.1, 0.9), (True, False))
    two = Sample(4.0, (0.3, 0.4), 120, 40, (), (2.0, 2.0), (0.1, 0.2), (True, True), (0.1, 0.9), (True, True))
    m = Measurement("x", samples=(one, two))
    assert m.prefill == results.Spread(3.0, 2.0, 4.0)
    assert m.decode.median == pytest.approx(1 / 0.25)
    assert m.decode.low == pytest.approx(1 / 0.325)
    assert m.decode.high == pytest.approx(1 / 0.175)
    assert (m.peak_bytes, m.held_bytes) == (120, 50)
    assert m.perplexity == pytest.approx(math.exp(2.0))
    assert m.divergence == pytest.approx(0.2)
    assert m.agreement == Share(3, 4)
    assert m.recall == Share(3, 4)
    assert [m.recall_at(depth) for depth in (0.1, 0.9)] == [Share(2, 2), Share(1, 2)]


def test_quartiles_and_amounts():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert [amount(n) for n in (0, 1023, 1536, 10 * 2**20, 1000 * 2**20, 3 * 2**30)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "10 MiB", "1000 MiB", "3 GiB",
    ]  # fmt: skip


def test_short_numbers():
    assert [short(x) for x in (0.004, 2.156, 9.994, 9.996, 17.25, 99.94, 99.96, 1826.4)] == [
        "0.00", "2.16", "9.99", "10.0", "17.2", "99.9", "100", "1826",
    ]  # fmt: skip


def test_budgets():
    assert entries(0.25, 1536) == 384
    assert entries(1.0, 100) == 100
    assert entries(100, 100) == 100
    for wrong in (0, 101, -1, 0.0, 1.5, 0.001, True):
        with pytest.raises(ValueError, match="budget: has"):
            entries(wrong, 100)


def test_every_method_gets_the_same_reach():
    full, window, snapkv, moba = parse(["sliding_window", "snapkv", "MoBA"], 192)
    assert full == Method("full")
    assert window.attention.window == 192
    assert snapkv.policy.budget == 192
    assert (moba.attention.block_size, moba.attention.top_k) == (64, 3)
    both = parse(["sliding_window+h2o"], 64)[1]
    assert (both.name, both.attention.window, both.policy.budget) == ("sliding_window+h2o", 64, 64)


def test_names_that_are_no_methods():
    assert {"full", "snapkv", "moba", "softmax"} <= set(candidates())
    assert not {"mamba2", "linear"} & set(candidates())
    cases = {
        "snapvk": "methods: unknown method 'snapvk'; did you mean snapkv",
        "mamba2": "attention: mamba2 needs dt",
        "linear": "keeps a state instead of keys",
        "h2o+snapkv": "methods: 'h2o' is a policy, expected mechanism\\+policy",
        "moba+moba": "methods: 'moba' is a mechanism, expected mechanism\\+policy",
        "": "methods: has an empty name",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            parse(["full", name], 64)
    with pytest.raises(ValueError, match="methods: has 'h2o' twice"):
        parse(["h2o", "h2o"], 64)
    with pytest.raises(ValueError, match="snapkv: budget has 8"):
        parse(["snapkv"], 8)


def test_methods_that_a_short_text_makes_equal_are_said_to_be():
    names = ["full", "sliding_window", "h2o", "moba", "moba+h2o", "softmax"]
    idle = {m.name: m.idle(64) for m in parse(names, 64)}
    assert idle["full"] is None
    assert idle["softmax"] is None
    assert idle["h2o"] == "input too short: h2o covers 64 tokens, the context has 64"
    assert "moba covers 64 tokens" in idle["moba"]
    assert "h2o covers" in idle["moba+h2o"]
    assert not any(m.idle(129) for m in parse(names, 64))


def test_the_order_rotates_behind_full_attention():
    methods = [Method(name) for name in "fabc"]
    assert ["".join(m.name for m in _order(methods, n)) for n in range(4)] == ["fabc", "fbca", "fcab", "fabc"]
    assert _order(methods[:1], 2) == methods[:1]


@pytest.mark.parametrize("name", ["full", "streaming_llm", "quest", "h2o"])
def test_an_answer_is_found_exactly_if_greedy_decoding_gives_it(name):
    model = make("llama")
    ids = torch.randint(2, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    prompts = torch.randint(2, 90, (3, 4), generator=torch.Generator().manual_seed(2))
    method = parse([name], 24)[-1]
    with torch.inference_mode(), method.on(model) as new_cache:
        cache = new_cache()
        advance(model, ids, cache)
        questions = []
        for n, prompt in enumerate([prompts[0], prompts[1], prompts[2, :3]]):  # one of another length
            fork, answer = copy.deepcopy(cache), []
            for token in prompt:
                logits = advance(model, token[None, None], fork)
            for _ in range(3):
                answer.append(int(logits.argmax()))
                logits = advance(model, torch.tensor([[answer[-1]]]), fork)
            if n == 1:
                answer[2] = (answer[2] + 1) % 90
            questions.append(document.Question(0.5, 0, tuple(prompt.tolist()), tuple(answer)))
        assert answers(model, cache, tuple(questions), lambda *_: None) == (True, False, True)


def test_forks_leave_the_cache_alone():
    model = make("llama")
    ids = torch.randint(2, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), hf.use(model, cache="tova", budget=16) as session:
        cache = session.new_cache()
        advance(model, ids, cache)
        before = [layer.keys.clone() for layer in cache.layers]
        question = document.Question(0.5, 0, (5, 6, 7), (8, 9))
        answers(model, cache, (question, question), lambda *_: None)
        assert all(torch.equal(a, layer.keys) for a, layer in zip(before, cache.layers, strict=True))


def test_ticks_are_round_and_cover_the_data():
    assert charts.ticks(0, 70.0) == [0, 20, 40, 60, 80]
    assert charts.ticks(0, 1.0) == [0, 0.5, 1.0]
    assert charts.ticks(0, 0.0) == [0, 0.5]  # an axis has a step even if all values are 0
    assert charts.ticks(0, 0.0031)[-1] == pytest.approx(0.004)


def test_decades_surround_the_values():
    assert charts.decades(0.003, 0.5) == pytest.approx([0.001, 0.01, 0.1, 1])
    assert charts.decades(0.0, 0.1) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    assert charts.decades(0.01, 0.01) == pytest.approx([0.01, 0.1])
    assert charts.decades(0.0, 0.0) == pytest.approx([1e-5, 1e-4])


def test_points_at_one_place_stand_side_by_side():
    assert charts.dodge([10, 40, 10, 10], 5) == [5, 40, 10, 15]


def test_names_beside_a_chart_do_not_overlap():
    assert charts.spread([10, 11, 40], 15, 0, 100) == [10, 25, 40]
    assert charts.spread([99, 98], 15, 0, 100) == [100, 85]
