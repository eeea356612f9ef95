"""What policies keep, worked out by hand."""

import math

import pytest
import torch

import foveal
from foveal.engines.cache import PageSummary, attention_paid

NONE = torch.zeros(1, 1, 0, 1)


def kept(policy, scores, limit, real=None):
    """Slots that survive in each row of scores [B, S]; the engine's one head is taken off."""
    scores = torch.tensor(scores, dtype=torch.float32)[:, None]
    real = torch.ones(len(scores), scores.shape[2], dtype=torch.bool) if real is None else torch.tensor(real).bool()
    found = policy.keep(scores, real, torch.tensor(limit))
    return [row[0, own].tolist() for row, own in zip(found.index, found.real, strict=True)]


def keys(*values):
    """Keys of one row and one head from numbers or lists."""
    return torch.tensor([x if isinstance(x, list) else [x] for x in values], dtype=torch.float64)[None, None]


def scores(policy, k, queries=NONE, scale=1.0):
    real = torch.ones(len(k), k.shape[2], dtype=torch.bool)
    return policy.score(k, k, queries, real=real, scale=scale)[0].tolist()


def test_the_best_survive_in_order():
    assert kept(foveal.get("knorm")(budget=3), [[5, 1, 9, 2, 7]], [3]) == [[0, 2, 4]]


def test_rows_have_limits_of_their_own():
    assert kept(foveal.get("knorm")(budget=0.5), [[5, 1, 9, 2], [4, 3, 2, 1]], [1, 3]) == [[2], [0, 1, 2]]


def test_padding_is_never_kept_in_favour_of_a_token():
    real = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert kept(foveal.get("knorm")(budget=4), [[9, 9, 1, 2, 3]] * 2, [4, 4], real) == [[2, 3, 4], [0, 1, 3, 4]]


def test_the_sinks_and_the_newest_stay():
    policy = foveal.get("streaming_llm")(budget=5, sinks=2)
    assert kept(policy, [[0, 1, 2, 3, 4, 5, 6]], [5]) == [[0, 1, 4, 5, 6]]
    assert kept(policy, [[0, 1, 2, 3, 4, 5, 6]], [5], [[0, 1, 1, 1, 1, 1, 1]]) == [[1, 2, 4, 5, 6]]


def test_a_limit_below_what_is_protected_keeps_the_newest_first():
    window = foveal.get("snapkv")(budget=0.25, window=4)
    assert kept(window, [[9, 9, 0, 0, 0, 0, 0, 0]], [2]) == [[6, 7]]
    sinks = foveal.get("streaming_llm")(budget=0.25, sinks=4)
    assert kept(sinks, [[0, 1, 2, 3, 4, 5, 6, 7]], [2]) == [[0, 7]]


def test_equal_scores_keep_the_same_slots_whatever_the_batch():
    policy = foveal.get("knorm")(budget=2)
    flat = [0.0] * 300
    alone = kept(policy, [flat], [7])
    beside = kept(policy, [flat, list(range(300))], [7, 200])
    padded = kept(policy, [[9.0] * 50 + flat[50:], flat], [7, 7], [[0] * 50 + [1] * 250, [1] * 300])
    assert alone[0] == beside[0] == [slot - 50 for slot in padded[0]] == list(range(7))


def test_losing_one_entry_is_the_same_rule():
    """The short way of a decode step against the sort that rows of different limits need."""
    policy = foveal.get("knorm")(budget=4)
    assert kept(policy, [[5, 1, 9, 1, 7]], [4]) == [[0, 1, 2, 4]]
    assert kept(policy, [[5, 1, 9, 1, 7], [1, 2, 3, 4, 5]], [4, 2]) == [[0, 1, 2, 4], [3, 4]]


def test_a_share_of_the_budget_is_recent():
    by_count, by_share = (foveal.get("h2o")(budget=budget, recent=0.5) for budget in (4, 0.5))
    for policy in (by_count, by_share):  # 8 tokens: 4 survive, 2 of them are the newest
        assert kept(policy, [[9, 8, 7, 6, 5, 4, 0, 0]], [4]) == [[0, 1, 6, 7]]


def test_h2o_adds_up_what_queries_pay():
    # queries of zero pay 1, 1/2 and 1/3 to each key they see; a second call adds to the first
    policy, k = foveal.get("h2o")(budget=2), keys(3.0, -1.0, 2.0)
    assert scores(policy, k, torch.zeros(1, 1, 3, 1, dtype=torch.float64))[0] == pytest.approx([11 / 6, 5 / 6, 1 / 3])
    real = torch.ones(1, 3, dtype=torch.bool)
    step = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    more = policy.score(k, k, step, real=real, scale=1.0, past=torch.tensor([[[1.5, 0.5, 0.0]]]))
    assert more[0, 0].tolist() == pytest.approx([11 / 6, 5 / 6, 1 / 3])


def test_tova_has_one_choice_for_all_heads():
    # softmax of (0, log 3) is (1/4, 3/4) in one key head; the other sees equal keys
    k = torch.cat((keys(0.0, math.log(3)), keys(5.0, 5.0)), 1)
    got = scores(foveal.get("tova")(budget=1), k, torch.ones(1, 2, 1, 1, dtype=torch.float64))
    assert got == [pytest.approx([3 / 8, 5 / 8])] * 2


def test_knorm_prefers_small_keys():
    assert scores(foveal.get("knorm")(budget=1), keys([3.0, 4.0], [0.0, 1.0])) == [[-5.0, -1.0]]


def test_snapkv_spreads_attention_over_neighbours():
    # the one observing query pays 1/4 to each of four keys; its own column is left out; means over 3 pad with 0
    policy = foveal.get("snapkv")(budget=3, window=1, kernel=3)
    got = scores(policy, keys(1.0, 1.0, 1.0, 1.0), torch.ones(1, 1, 1, 1, dtype=torch.float64))
    assert got[0] == pytest.approx([1 / 6, 1 / 4, 1 / 6, 1 / 12])


def test_attention_is_paid_causally_and_in_tiles():
    k = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    real = torch.ones(1, 3, dtype=torch.bool)
    tiles = [tile[0, 0, 0] for tile in attention_paid(k, k, real=real, scale=1.0, tile=2)]
    assert [len(tile) for tile in tiles] == [2, 1]
    torch.testing.assert_close(torch.cat(tiles), torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3] * 3]).double())


def test_quest_reads_the_page_that_may_hold_the_best_key():
    # pages {1, -9}, {2, 3}, {0}: their bounds for q = -1 are 9, -2; the newest is always read
    k = keys(1.0, -9.0, 2.0, 3.0, 0.0)
    summary = PageSummary(2)
    summary.append(k, torch.arange(5)[None], torch.ones(1, 5, dtype=torch.bool))
    policy = foveal.get("quest")(budget=4, page=2)
    for q, pages in ((-1.0, [0, 2]), (1.0, [1, 2])):
        chosen = policy.select(torch.full((1, 1, 1), q).double(), summary.low, summary.high, count=2)
        assert chosen[0, 0].tolist() == pages


def test_pages_begin_with_the_first_token():
    """A call of padding only fills no page."""
    summary = PageSummary(2)
    summary.append(keys(7.0), torch.tensor([[-1]]), torch.tensor([[False]]))
    summary.append(keys(1.0, 2.0, 3.0), torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.bool))
    assert summary.high[0, 0, :, 0].tolist() == [2.0, 3.0]
