"""The rules of choice, on rows that can be worked out by hand."""

import pytest
import torch

from foveal.engines.block_sparse import rules

INF = float("inf")


def chosen(x):
    return x.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("count", "forced", "want"),
    [(2, None, [1, 3]), (9, None, [0, 1, 3]), (2, [0], [0, 1]), (1, [0, 3], [0, 3]), (1, [2], [2])],
)
def test_top_takes_the_best_and_counts_the_forced(count, forced, want):
    scores = torch.tensor([1.0, 5.0, -INF, 2.0])
    mask = None if forced is None else torch.isin(torch.arange(4), torch.tensor(forced))
    assert chosen(rules.top(scores, count, mask)) == want


@pytest.mark.parametrize(
    ("share", "crossing", "least", "forced", "want"),
    [
        (0.7, True, 1, None, [0, 2]),  # 0.5, then 0.3 reaches 0.7
        (0.7, False, 1, None, [0]),
        (0.4, False, 1, None, [0]),  # even the largest is beyond, but one is taken
        (0.4, False, 2, None, [0, 2]),
        (1.0, True, 1, None, [0, 2, 3]),  # what weighs nothing is never needed
        (0.6, True, 1, [3], [0, 3]),  # 0.2 is there already, 0.5 completes it
        (0.1, True, 1, [1], [0, 1]),  # what is forced may weigh nothing
    ],
)
def test_mass_takes_the_fewest_that_hold_the_share(share, crossing, least, forced, want):
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    mask = None if forced is None else torch.isin(torch.arange(4), torch.tensor(forced))
    assert chosen(rules.mass(weights, share, crossing=crossing, least=least, forced=mask)) == want


def test_rules_work_row_by_row():
    g = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 2, 7, generator=g)
    share = torch.rand(3, 2, 1, generator=g)
    whole = rules.mass(weights, share), rules.top(weights, 3)
    for b in range(3):
        for h in range(2):
            assert torch.equal(whole[0][b, h], rules.mass(weights[b, h], float(share[b, h])))
            assert torch.equal(whole[1][b, h], rules.top(weights[b, h], 3))
