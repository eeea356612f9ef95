"""Memory of a cache is counted by storage."""

import torch

from foveal.hf.cache import storage


def test_a_view_holds_all_of_its_memory():
    x = torch.zeros(10, 4)
    assert storage([x[:1]]) == 10 * 4 * 4
    assert storage([x[:1], x[5:], None]) == 10 * 4 * 4
    assert storage([x[:1], x[5:].clone()]) == 10 * 4 * 4 + 5 * 4 * 4
