"""Faults that a reviewer found by attacking the core, each with the smallest call that showed it."""

import math

import pytest
import torch
from transformers import StaticCache

import foveal
from foveal import AttentionLayer, State, attention, hf
from tests.hf import tiny

close = torch.testing.assert_close
BACKENDS = (None, "torch")


def qkv(B=1, H=2, T=4, S=None, K=4):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, K, generator=g) for n in (T, S or T, S or T)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_aligned_at_the_top_sees_the_first_key_only(backend):
    q, k, v = qkv(T=1, S=4)
    close(attention(q, k, v, causal="top-left", layout="bhtd", backend=backend), v[:, :, :1])


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(scale):
    q, k, v = qkv()
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    close(attention(q, k, v, scale=scale), (scale * q @ k.mT).masked_fill(future, -math.inf).softmax(-1) @ v)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_scales_that_are_not_finite_are_refused(scale):
    with pytest.raises(ValueError, match=r"softmax: scale has .*expected a finite number"):
        attention(*qkv(), scale=scale)


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v = (x.requires_grad_() for x in qkv(T=6, S=4))
    z = torch.full((2,), -math.inf, requires_grad=True)
    out = attention(q, k, v, sink_logits=z, return_lse=True)
    close(out.output, attention(q, k, v))
    assert (out.lse[:, :, :2] == -math.inf).all()
    loss = out.output.sum() + out.lse[:, :, 2:].sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (q, k, v, z)))


def test_a_hidden_query_returns_zero_also_with_more_queries_than_keys():
    q, k, v = qkv(T=5, S=3)
    out = attention(q, k, v, mask=torch.tensor([[True, True, False]]))
    assert (out[:, :, [0, 1, 4]] == 0).all()
    close(out[:, :, 2:3], v[:, :, :1])


def test_packing_with_more_queries_than_keys_under_a_mask():
    q, k, v = qkv(T=5)
    q, k, v = torch.cat((q, q[:, :, :1]), 2), torch.cat((k, k[:, :, :1]), 2), torch.cat((v, v[:, :, :1]), 2)
    mask = torch.tensor([[True, False, True, True, True, True]])
    got = attention(q, k, v, cu_seqlens=torch.tensor([0, 3, 6]), cu_seqlens_k=torch.tensor([0, 2, 6]), mask=mask)
    close(got[:, :, :3], attention(q[:, :, :3], k[:, :, :2], v[:, :, :2], mask=mask[:, :2]))


def test_layer_states_are_handled_whole(tmp_path):
    layer = AttentionLayer(16, 2, "softmax", conv=4)
    with torch.no_grad():
        states = [layer(torch.randn(1, n, 16), output_final_state=True)[1] for n in (5, 3)]
        states[0].save(tmp_path / "state")
        again, token = State.load(tmp_path / "state"), torch.randn(1, 1, 16)
        close(layer(token, initial_state=again), layer(token, initial_state=states[0]))
        both = type(again).join(states)
        assert both.attention.k.shape[0] == 2
        rows = layer(token.expand(2, 1, 16), initial_state=both)
        close(rows[1:], layer(token, initial_state=states[1]))
    assert again.nbytes > again.attention.nbytes > 0
    wide = again.to(torch.float64)
    assert wide.attention.k.dtype == torch.float64
    assert wide.length.dtype == torch.long


def test_states_with_history_are_saved_and_failures_leave_no_file(tmp_path):
    q, k, v = (x.requires_grad_() for x in qkv())
    state = attention(q, k, v * v.mean(), output_final_state=True).state
    state.save(tmp_path / "state")
    close(State.load(tmp_path / "state").k, state.k.detach())


def test_changing_a_state_s_dtype_leaves_its_padding_alone():
    q, k, v = qkv()
    mask = torch.tensor([[False, True, True, True]])
    state = attention(q, k, v, mask=mask, output_final_state=True).state.to(torch.float64)
    token = [x[:, :, :1].double() for x in (q, k, v)]
    assert attention(*token, initial_state=state).isfinite().all()


def test_states_of_other_normalisation_are_refused():
    q, k, v = qkv()
    state = attention(q, k, v, "linear", output_final_state=True).state
    with pytest.raises(ValueError, match="linear: initial_state has a normalizer"):
        attention(q, k, v, foveal.Linear(normalize=False), initial_state=state)


@pytest.mark.parametrize("name", ["softmax", "sliding_window", "moba", "sparse_transformer", "linear", "retention"])
def test_empty_batches_and_rows_that_see_nothing_keep_their_gradients(name):
    none = torch.randn(0, 2, 4, 4, requires_grad=True)
    out = attention(none, none, none, name, mask=torch.ones(0, 4).bool(), output_final_state=True)
    assert out.output.shape == (0, 2, 4, 4)
    q, k, v = (x.requires_grad_() for x in qkv())
    attention(q, k, v, name, mask=torch.zeros(1, 4).bool()).sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))
    for x in (q, k, v):
        x.grad = None
    attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], name).sum().backward()
    assert all((x.grad == 0).all() for x in (q, k, v))


def test_boundaries_are_checked_before_the_state():
    q, k, v = qkv()
    state = attention(q, k, v, output_final_state=True).state
    with pytest.raises(TypeError, match="cu_seqlens is int, expected an int32 or int64 tensor"):
        attention(q, k, v, cu_seqlens=5, initial_state=state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(2, 6).bool()}, ValueError, r"mask: has torch.bool and shape \(2, 6\)"),
        ({"mask": torch.ones(2, 5)}, ValueError, "mask: has torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens: has a batch of 2"),
        ({"initial_state": 3}, TypeError, "initial_state: is int, expected a LayerState"),
    ],
)
def test_layer_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        AttentionLayer(16, 2, conv=4)(torch.randn(2, 5, 16), **options)


def test_layer_takes_one_mask_for_all_rows_and_empty_inputs():
    layer = AttentionLayer(16, 2, conv=4)
    x, mask = torch.randn(2, 5, 16), torch.tensor([[False, True, True, True, True]])
    close(layer(x, mask=mask), layer(x, mask=mask.expand(2, 5)))
    assert layer(x[:, :0]).shape == (2, 0, 16)
    assert layer(x[:0]).shape == (0, 5, 16)
    for options in ({"conv": -1}, {"heads": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: has"):
            AttentionLayer(**({"dim": 16, "heads": 2} | options))


def test_preallocated_caches_are_refused():
    model, ids = tiny.make("llama"), tiny.prompt(B=1)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad(), hf.use(model, attention="softmax"), pytest.raises(ValueError, match="preallocated"):
        model(ids, use_cache=True, **tiny.past(cache))


def test_quest_with_the_whole_budget_reads_everything():
    model, inputs = tiny.make("llama"), tiny.prompt(B=1)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = model.generate(**inputs, **options)
    for budget in (1.0, 48):
        with hf.use(model, cache=foveal.get("quest")(budget=budget, page=16)):
            assert torch.equal(model.generate(**inputs, **options), want)


@pytest.mark.parametrize("ratio", ["x", True, -0.1])
def test_ratios_of_another_kind_are_named(ratio):
    with (
        pytest.raises(ValueError, match=r"compression_ratio: has .*expected a share removed"),
        hf.use(tiny.make("llama"), cache="knorm", compression_ratio=ratio),
    ):
        pass


def test_a_mask_per_head_over_no_keys():
    q, k = torch.randn(1, 4, 2, 3), torch.randn(1, 2, 0, 3)
    bias = torch.zeros(1, 4, 2, 0)
    assert (attention(q, k, k, mask=bias, layout="bhtd") == 0).all()
    assert (attention(q, k, k, mask=bias > 0, layout="bhtd") == 0).all()
