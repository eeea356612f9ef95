"""Training improves, repeats, stops, survives an interrupt, and writes what it found."""

import dataclasses
import json
import math

import pytest
import torch

import foveal
from foveal.train import MQAR, Config, Decoder, Recipe, Run, model, results, run, runner, train

TASK = MQAR(pairs=2, length=8, vocab=10)
CONFIG = Config(dim=16, heads=1, head_dim=16, layers=1, conv=3)
RECIPE = Recipe(steps=60, batch=16, lr=1e-2, every=20, held_out=64, target=2.0)


def replaced(**changes):
    return dataclasses.replace(RECIPE, **changes)


def timeless(outcome):
    return dataclasses.replace(outcome, checks=tuple(dataclasses.replace(c, seconds=0.0) for c in outcome.checks))


def test_training_improves():
    outcome = train(TASK, "delta_rule", CONFIG, replaced(steps=120))
    assert outcome.checks[-1].loss < 0.5 * outcome.checks[0].loss
    assert outcome.tested > TASK.chance + 0.1


def test_the_same_seed_gives_the_same_bits():
    torch.manual_seed(5)
    first = train(TASK, "delta_rule", CONFIG, replaced(steps=40))
    state = torch.get_rng_state()
    again = train(TASK, "delta_rule", CONFIG, replaced(steps=40))
    assert timeless(first) == timeless(again)
    assert timeless(train(TASK, "delta_rule", CONFIG, replaced(steps=40, seed=1))) != timeless(first)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"


def test_the_target_ends_the_training():
    outcome = train(TASK, "softmax", CONFIG, replaced(target=0.0, steps=1000))
    assert outcome.steps == 20


def test_the_last_step_is_checked():
    assert train(TASK, "softmax", CONFIG, replaced(steps=25)).steps == 25


def test_the_best_checks_weights_are_tested(monkeypatch):
    """Checks say 0.3, 0.9, 0.5: the test must see the weights of the second."""
    seen, scores = [], iter([0.3, 0.9, 0.5, 0.77])

    def scripted(network, task, count, generator):
        seen.append({name: value.clone() for name, value in network.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(runner, "accuracy", scripted)
    outcome = train(TASK, "softmax", CONFIG, RECIPE)
    assert outcome.tested == outcome.accuracy == 0.77
    assert outcome.best.step == 40
    assert all(torch.equal(seen[3][name], seen[1][name]) for name in seen[1])
    assert any(not torch.equal(seen[3][name], seen[2][name]) for name in seen[1])


def test_streams_never_share_a_seed():
    seeds = [replaced(seed=seed).generator(s).initial_seed() for seed in range(4) for s in range(3)]
    assert len(set(seeds)) == 12


def test_rate_by_hand():
    recipe = Recipe(steps=12, warmup=1 / 6)
    assert [recipe.rate(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert recipe.rate(7) == pytest.approx(0.5)  # halfway from 2 to 12
    assert recipe.rate(12) == pytest.approx(0.0)


def interrupting(at):
    def on_step(step, loss, best):
        if step == at:
            raise KeyboardInterrupt

    return on_step


def test_an_interrupt_leaves_the_best_check():
    outcome = train(TASK, "softmax", CONFIG, RECIPE, interrupting(45))
    assert outcome.interrupted
    assert [check.step for check in outcome.checks] == [20, 40]
    assert outcome.tested is None
    assert outcome.accuracy == max(check.accuracy for check in outcome.checks)


def test_an_interrupt_ends_the_run_and_keeps_what_is_finished():
    def on_progress(at):
        if at.number == 1:
            raise KeyboardInterrupt

    result = run(TASK, ["softmax", "delta_rule", "linear"], CONFIG, replaced(steps=20), on_progress)
    assert [outcome.mechanism for outcome in result.outcomes] == ["softmax", "delta_rule"]
    assert result.interrupted
    assert result.outcomes[0].tested is not None
    assert result.outcomes[1].accuracy is None
    assert result.remarks == ["delta_rule was interrupted; it had not been checked yet."]
    assert Run.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_loss_that_is_no_number_is_a_problem_not_a_result(monkeypatch):
    real, steps = runner._loss, iter(range(100))
    monkeypatch.setattr(runner, "_loss", lambda *args: real(*args) * (math.nan if next(steps) == 24 else 1.0))
    outcome = train(TASK, "softmax", CONFIG, RECIPE)
    assert outcome.problem == "the loss is nan at step 25; try a smaller lr"
    assert outcome.steps == 20
    assert outcome.tested is None


def test_json_round_trip(tmp_path):
    specs = [foveal.get("softmax")(window=(5, 0)), "linear"]
    result = run(TASK, specs, CONFIG, replaced(steps=20))
    file = tmp_path / "out.json"
    results.write(result, file)
    assert Run.from_dict(json.loads(file.read_text())) == result
    assert [outcome.label for outcome in result.outcomes] == ["softmax window=(5, 0)", "linear"]
    assert result.setup["task"] == {"pairs": 2, "length": 8, "vocab": 10}
    with pytest.raises(FileExistsError):
        results.write(result, file)
    with pytest.raises(ValueError, match="format: has 2, expected 1"):
        Run.from_dict({"format": 2})


def test_state_and_parameters_by_hand():
    outcome = train(TASK, "linear", CONFIG, replaced(steps=1))
    assert outcome.state == 16 * 16 + 16  # the sums of phi(k) v and of phi(k)
    assert train(TASK, "softmax", CONFIG, replaced(steps=1)).state == 8 * (16 + 16)
    attention = 3 * 16 * 16 + 16 * 16 + 48 * 3 + 48  # q, k, v; out; convolution with bias
    mlp = 16 * 32 + 32 + 32 * 16 + 16
    norms, words = 3 * 2 * 16, 10 * 16
    assert outcome.parameters == attention + mlp + norms + words * (1 if CONFIG.tied else 2)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "gated_delta_rule", "gla", "mamba2", "sliding_window"])
def test_the_decoder_does_not_see_the_future(mechanism):
    torch.manual_seed(0)
    network = Decoder(10, CONFIG, foveal.get(mechanism)())
    tokens = torch.randint(10, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 10
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    where = torch.zeros(2, 8, dtype=torch.bool)
    where[1, 3] = True
    torch.testing.assert_close(network(tokens, where), before[1, 3:4])


def test_gates_start_near_their_bound():
    """Distances of a gate that is fed zeros: the midpoints, in logarithm, of 4 parts of [0.001, 0.1]."""
    layer = foveal.AttentionLayer(16, 4, "gated_delta_rule")
    model.remember(layer)
    expected = torch.tensor([10 ** (-3 + 2 * (i + 0.5) / 4) for i in range(4)])
    torch.testing.assert_close(torch.nn.functional.softplus(layer.gates["log_decay"].bias), expected)
    before = foveal.AttentionLayer(16, 4, "delta_rule")
    bias = before.gates["beta"].bias.clone()
    model.remember(before)
    assert torch.equal(bias, before.gates["beta"].bias), "a gate between two bounds is left alone"


@pytest.mark.parametrize("mechanism", ["softmax", "delta_rule", "retention"])
def test_attention_starts_equally_loud(mechanism):
    torch.manual_seed(0)
    network = Decoder(64, Config(layers=2), foveal.get(mechanism)())
    x = network.embedding(torch.randint(64, (16, 64)))
    for block in network.blocks:
        added = block.attention(block.attention_norm(x))
        assert 0.8 * model.HEARD < added.std() < 1.25 * model.HEARD
        x = block(x)


def test_every_causal_mechanism_can_be_trained_on():
    for name in foveal.list_mechanisms():
        if True in foveal.get(name).causal_modes:
            outcome = train(TASK, name, CONFIG, replaced(steps=1))
            assert outcome.tested is not None, name
            assert outcome.state > 0, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(dim=0), "dim: has 0, expected an int >= 1"),
        (lambda: Config(head_dim=5, rope=1e4), "head_dim: has 5, expected an even number"),
        (lambda: Config(conv=-1), "conv: has -1, expected an int >= 0"),
        (lambda: Recipe(steps=0), "steps: has 0, expected an int >= 1"),
        (lambda: Recipe(lr=math.nan), "lr: has nan, expected a finite number > 0"),
        (lambda: Recipe(warmup=2), "warmup: has 2, expected a number >= 0 and <= 1"),
        (lambda: Recipe(target=-1), "target: has -1, expected a number >= 0"),
        (lambda: Recipe(seed=-1), "seed: has -1, expected an int >= 0"),
        (lambda: run(TASK, []), "mechanism: none is named, expected at least one"),
        (lambda: run(TASK, ["linear", "linear_attention"]), "mechanism: has 'linear' twice"),
        (lambda: run(TASK, ["nothing_like_it"]), "mechanism: unknown name 'nothing_like_it'"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_the_delta_rule_recalls_what_linear_attention_blurs():
    """Eight pairs in a state 16 wide: linear attention gets the same batches and twice the steps."""
    task = MQAR(pairs=8, length=24, vocab=32)
    config, recipe = Config(dim=32, head_dim=16, layers=1), Recipe(steps=400, target=0.99)
    delta, linear = run(task, ["delta_rule", "linear"], config, recipe).outcomes
    assert delta.accuracy > 0.97
    assert linear.accuracy < 0.88
    assert linear.state >= delta.state
