"""Paths of the engines that the laws' small random cases do not reach."""

import itertools
import math

import pytest
import torch

import foveal
from foveal import attention

close = torch.testing.assert_close


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_sdpa_aligns_the_last_query_with_the_last_key():
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 4, 1)
    v = torch.arange(4.0).view(1, 1, 4, 1)
    assert [route.backend for route in foveal.explain("softmax", q, k, v) if route.chosen] == ["sdpa"]
    # equal scores give means: of the values 0, 1, 2 and of all four
    assert attention(q, k, v, "softmax").flatten().tolist() == [1.0, 1.5]


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_log_sum_exp_counts_the_sink(form):
    q = k = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    sink = torch.tensor([math.log(2.0)], dtype=torch.float64)
    got = attention(q, k, torch.ones_like(k), "softmax", form=form, sink_logits=sink, return_lse=True)
    # t + 1 scores of 0 and a sink of weight 2
    close(got.lse.flatten(), torch.tensor([3.0, 4.0, 5.0], dtype=torch.float64).log())
    close(got.output.flatten(), torch.tensor([1 / 3, 2 / 4, 3 / 5], dtype=torch.float64))


def test_a_block_may_have_more_readers_than_a_tile_has_rows():
    q, k, v = (draw(1, 2, 300, 4) for _ in "qkv")
    everything = foveal.MoBA(block_size=8, top_k=38)
    close(attention(q, k, v, everything, form="chunked"), attention(q, k, v, "softmax"))


@pytest.mark.parametrize("name", ["softmax", "sliding_window", "moba", "linear", "retention"])
def test_packed_sequences_of_mixed_lengths_keep_their_order_and_their_mask(name):
    q, v = draw(1, 2, 41, 4), draw(1, 2, 41, 3)
    ends = [0, 3, 23, 24, 41]  # lengths 3, 20, 1 and 17: like lengths do not stand side by side
    mask = torch.rand(1, 41, generator=torch.Generator().manual_seed(0)) > 0.3
    got = attention(q, q, v, name, mask=mask, cu_seqlens=torch.tensor(ends))
    for a, b in itertools.pairwise(ends):
        own = (x[:, :, a:b] for x in (q, q, v))
        close(got[:, :, a:b], attention(*own, name, mask=mask[:, a:b], layout="bhtd"))


def test_erasure_carries_over_several_chunks_under_slow_decay():
    q, k, v = (draw(1, 2, 200, 4) for _ in "qkv")
    gates = {"log_decay": -0.02 * draw(1, 2, 200).abs(), "beta": draw(1, 2, 200).sigmoid()}
    once = attention(q, k, v, "gated_delta_rule", form="recurrent", output_final_state=True, **gates)
    chunks = attention(q, k, v, "gated_delta_rule", form="chunked", output_final_state=True, **gates)
    close(chunks.output, once.output)
    close(chunks.state.matrix, once.state.matrix)
