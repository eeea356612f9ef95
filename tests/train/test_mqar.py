"""The task asks for what was bound, later and once; guessing scores what it says."""

import pytest
import torch

from foveal.train import IGNORED, MQAR, Task, get, names


def drawn(size=64, seed=0, **settings):
    task = MQAR(**settings)
    return task, *task.batch(size, torch.Generator().manual_seed(seed))


def test_the_smallest_sequence_by_hand():
    """One pair, three tokens, two keys' worth of vocabulary: key 1, value 2 or 3, and the key again."""
    _, tokens, targets = drawn(pairs=1, length=3, vocab=4)
    assert (tokens[:, 0] == 1).all()
    assert set(tokens[:, 1].tolist()) == {2, 3}
    assert (tokens[:, 2] == 1).all()
    assert (targets[:, :2] == IGNORED).all()
    assert (targets[:, 2] == tokens[:, 1]).all()


@pytest.mark.parametrize("settings", [{}, {"pairs": 5, "length": 40, "vocab": 33}, {"pairs": 4, "length": 12}])
def test_targets_are_the_bound_values(settings):
    task, tokens, targets = drawn(**settings)
    for line, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = [(line[i], line[i + 1]) for i in range(0, 2 * task.pairs, 2)]
        bound = dict(pairs)
        assert len(bound) == len(set(bound.values())) == task.pairs, "keys and values are different"
        assert all(1 <= key < task.vocab // 2 <= value < task.vocab for key, value in pairs)
        asked = []
        for place, (token, target) in enumerate(zip(line, wanted, strict=True)):
            if place < 2 * task.pairs:
                assert target == IGNORED, "no question before all pairs were read"
            elif target == IGNORED:
                assert token == 0
            else:
                assert target == bound[token]
                asked.append(token)
        assert sorted(asked) == sorted(bound), "every key is asked for once"


def test_questions_stand_near_the_pairs_as_the_power_law_says():
    """With one question, its place is gap g with chance g^-0.99 / sum."""
    _, _, targets = drawn(size=20000, pairs=1, length=12)
    gap = torch.arange(1, 11, dtype=torch.float64)
    expected = gap**-0.99 / (gap**-0.99).sum()
    found = (targets[:, 2:] != IGNORED).double().mean(0)
    assert (found - expected).abs().max() < 0.012  # more than three standard errors


def test_chance_is_guessing_among_the_values_read():
    task, tokens, targets = drawn(size=4000, pairs=4, length=16)
    guess = tokens[:, 1]  # always the first value
    judged = targets != IGNORED
    assert task.chance == 0.25
    assert (targets == guess[:, None])[judged].double().mean().item() == 0.25  # exactly one of four is right


def test_the_same_seed_draws_the_same_and_another_does_not():
    first, again, other = (drawn(seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first == other).all(1).any()


def test_tasks_are_found_by_name():
    assert names() == ["mqar"]
    assert get("mqar") is MQAR
    assert issubclass(MQAR, Task)
    with pytest.raises(ValueError, match="task: unknown name 'copy', expected one of mqar"):
        get("copy")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": 0}, "pairs: has 0, expected an int >= 1"),
        ({"pairs": True}, "pairs: has True, expected an int >= 1"),
        ({"pairs": 8, "length": 23}, "length: has 23, expected an int >= 24, three tokens for each of 8 pairs"),
        ({"pairs": 8, "vocab": 17}, "vocab: has 17, expected an int >= 18, a blank, keys and values for 8 pairs"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**settings)
