"""Every convention of the call, with expected values that were worked out by hand."""

import math

import pytest
import torch

import foveal
from foveal import KeyValueState, RecurrentState, attention


def uniform(T, S=None, H=1, G=1, V=1):
    """Queries of 0, so that every visible key weighs the same, and values 1, 2, 3, ... that show which were seen."""
    S = T if S is None else S
    q, k = torch.zeros(1, H, T, 2), torch.randn(1, G, S, 2, generator=torch.Generator().manual_seed(0))
    v = torch.arange(1.0, S + 1)[None, None, :, None].expand(1, G, S, V)
    return q, k, v


def means(out):
    return [round(x, 4) for x in out.flatten().tolist()]


def test_causal_is_the_default_and_counts_from_the_end():
    q, k, v = uniform(3)
    assert means(attention(q, k, v)) == [1.0, 1.5, 2.0]
    q, k, v = uniform(2, 5)  # the last query sees 1..5, the one before 1..4
    assert means(attention(q, k, v)) == [2.5, 3.0]
    assert means(attention(q, k, v, causal="top-left")) == [1.0, 1.5]
    assert means(attention(q, k, v, causal=False)) == [3.0, 3.0]


def test_more_queries_than_keys_see_nothing_at_first():
    q, k, v = uniform(5, 3)
    result = attention(q, k, v, return_lse=True)
    assert means(result.output) == [0.0, 0.0, 1.0, 1.5, 2.0]
    assert result.lse.flatten().tolist()[:2] == [-math.inf, -math.inf]
    assert means(result.lse[..., 2:].exp()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("window", "last"),
    [(1, 6.0), (3, 5.0), (6, 3.5), (100, 3.5), ((0, 0), 6.0), ((2, 0), 5.0), ((5, 9), 3.5)],
)
def test_window_keeps_the_query_s_own_key(window, last):
    q, k, v = uniform(6)
    assert means(attention(q, k, v, foveal.Softmax(window=window)))[-1] == last


def test_window_without_causality_is_symmetric():
    q, k, v = uniform(5)
    # an int 2 keeps one key on each side beside the own one; a pair says each side
    assert means(attention(q, k, v, foveal.Softmax(window=2), causal=False)) == [1.5, 2.0, 3.0, 4.0, 4.5]
    assert means(attention(q, k, v, foveal.Softmax(window=(0, 2)), causal=False)) == [2.0, 3.0, 4.0, 4.5, 5.0]


def test_sinks_stay_visible_outside_the_window():
    q, k, v = uniform(6)
    # the last query sees 1 and 5, 6
    assert means(attention(q, k, v, foveal.Softmax(window=2, sinks=1)))[-1] == 4.0
    assert means(attention(q, k, v, foveal.SlidingWindow(window=2, sinks=1)))[-1] == 4.0


def test_scale_is_one_over_the_root_of_the_key_width():
    q, k = torch.tensor([[[[2.0, 0, 0, 0]]]]), torch.tensor([[[[0.0, 0, 0, 0], [3, 0, 0, 0]]]])
    v = torch.tensor([[[[0.0], [1.0]]]])
    for scale, factor in ((None, 0.5), (1.0, 1.0), (0, 0.0)):  # K = 4
        expected = 1 / (1 + math.exp(-6 * factor))
        assert attention(q, k, v, scale=scale).item() == pytest.approx(expected)
    # the recurrences use the same one: o = scale (q k) v
    one = torch.ones(1, 1, 1, 4)
    identity = foveal.Linear(feature_map="identity", normalize=False)
    assert attention(one, one, one, identity)[0, 0, 0, 0].item() == pytest.approx(4 / 2)
    assert attention(one, one, one, identity, scale=1.0)[0, 0, 0, 0].item() == pytest.approx(4)


def test_bool_mask_keeps_where_true():
    q, k, v = uniform(3)
    padding = torch.tensor([[True, False, True]])
    assert means(attention(q, k, v, mask=padding)) == [1.0, 0.0, 2.0]  # token 2 does not exist
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0]]).bool()
    assert means(attention(q, k, v, mask=mask[None, None])) == [1.0, 2.0, 1.0]
    assert means(attention(q, k, v, mask=mask[None, None], causal=False)) == [2.0, 2.5, 1.0]


def test_float_mask_is_added():
    q, k, v = uniform(2)
    mask = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    assert means(attention(q, k, v, mask=mask[None, None])) == [1.0, 1.25]  # weights 3/4 and 1/4
    row = torch.tensor([[0.0, -math.inf]])
    assert means(attention(q, k, v, mask=row)) == [1.0, 1.0]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert means(attention(q, k, v, mask=mask[None, None].to(dtype))) == pytest.approx([1.0, 1.25], abs=2e-3)


def test_integer_masks_are_refused():
    q, k, v = uniform(2)
    with pytest.raises(TypeError, match=r"softmax: mask has torch.int64, expected bool"):
        attention(q, k, v, mask=torch.ones(1, 2, dtype=torch.long))


def test_mask_of_another_shape_is_refused_with_a_hint():
    q, k, v = uniform(3)
    with pytest.raises(
        ValueError, match=r"mask has shape \(3, 3\), expected \[B, S\] = \(1, 3\); for one mask \[T, S\]"
    ):
        attention(q, k, v, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"linear: mask has shape \(1, 1, 3, 3\).*expected a bool mask \[B, S\]"):
        attention(q, k, v, "linear", mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_row_that_sees_nothing_is_zero_with_zero_gradient():
    q, k, v = (x.clone().requires_grad_() for x in uniform(3))
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]]).bool()[None, None]
    for form in (None, "parallel", "chunked"):
        result = attention(q, k, v, mask=mask, form=form, return_lse=form is not None)
        out = result if form is None else result.output
        assert means(out) == [1.0, 0.0, 2.0]
        grads = torch.autograd.grad(out[:, :, 1].sum(), (q, k, v))
        assert all((g == 0).all() for g in grads)
    assert result.lse[0, 0, 1] == -math.inf


def test_groups_lie_side_by_side():
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 1, 2)
    v = torch.tensor([10.0, 20.0])[None, :, None, None]
    assert means(attention(q, k, v)) == [10.0, 10.0, 20.0, 20.0]
    assert means(attention(q, k, v, "linear")) == [10.0, 10.0, 20.0, 20.0]


def test_gradient_of_a_shared_key_is_the_sum_over_its_group():
    q, k, v = torch.randn(1, 6, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    v.requires_grad_()
    attention(q, k, v).sum().backward()
    wide = v.detach().repeat_interleave(3, 1).requires_grad_()
    attention(q, k.repeat_interleave(3, 1), wide).sum().backward()
    torch.testing.assert_close(v.grad, wide.grad.unflatten(1, (2, 3)).sum(2))


def test_layout_bthd_transposes_everything_and_copies_nothing():
    T, H = 7, 2
    q, k, v = (torch.randn(1, T, H, 4) for _ in range(3))
    decay = -torch.rand(1, T, H)
    got = attention(q, k, v, "gated_delta_rule", layout="bthd", log_decay=decay, beta=torch.rand(1, T, H))
    assert got.shape == (1, T, H, 4)
    result = attention(q, k, v, layout="bthd", return_lse=True, return_weights=True)
    assert result.lse.shape == (1, T, H)
    assert result.weights.shape == (1, T, H, T)


def test_swapped_axes_are_warned_about():
    q = torch.randn(1, 8, 3, 4)  # 8 heads and 3 tokens, or the other way round?
    with pytest.warns(UserWarning, match=r"fewer tokens \(T=3\) than heads \(H=8\); pass layout='bthd'"):
        attention(q, q, q)
    attention(q, q, q, layout="bhtd")
    attention(q[:, :, :1], q, q)  # a decode step is no swapped layout
    with pytest.raises(ValueError, match="layout has 'tbhd', expected 'bhtd' or 'bthd'"):
        attention(q, q, q, layout="tbhd")


def test_packing_has_a_wall_between_sequences():
    q, k, v = uniform(5)
    cu = torch.tensor([0, 2, 2, 5])
    assert means(attention(q, k, v, cu_seqlens=cu)) == [1.0, 1.5, 3.0, 3.5, 4.0]
    flat = torch.zeros_like(k)  # elu(0) + 1 = 1: the mean of what was seen
    assert means(attention(q, flat, v, "linear", cu_seqlens=cu.int())) == [1.0, 1.5, 3.0, 3.5, 4.0]
    q, k, v = uniform(3, 5)  # two queries on keys 1, 2 and one on keys 3, 4, 5
    got = attention(q, k, v, cu_seqlens=torch.tensor([0, 2, 3]), cu_seqlens_k=torch.tensor([0, 2, 5]))
    assert means(got) == [1.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 3], "ends 0 and 3, expected 0 and the number of tokens, 5"),
        ([1, 5], "ends 1 and 5"),
        ([0, 4, 2, 5], "boundaries that decrease"),
        ([5], "expected .N . 1. boundaries"),
    ],
)
def test_bad_boundaries_are_named(cu, message):
    q, k, v = uniform(5)
    with pytest.raises(ValueError, match=f"cu_seqlens has .*{message}"):
        attention(q, k, v, cu_seqlens=torch.tensor(cu))


def test_boundaries_of_another_type_are_refused():
    q, k, v = uniform(5)
    for cu in (torch.tensor([0.0, 5.0]), [0, 5]):
        with pytest.raises(TypeError, match=r"cu_seqlens is .*expected an int32 or int64 tensor"):
            attention(q, k, v, cu_seqlens=cu)


def test_a_state_has_one_row_per_sequence():
    q, k, v = uniform(5)
    out = attention(q, k, v, "linear", cu_seqlens=torch.tensor([0, 2, 2, 5]), output_final_state=True)
    assert isinstance(out.state, RecurrentState)
    assert out.state.matrix.shape == (3, 1, 2, 1)
    assert (out.state.matrix[1] == 0).all()  # the empty sequence has seen nothing
    out = attention(q, k, v, cu_seqlens=torch.tensor([0, 2, 2, 5]), output_final_state=True)
    assert isinstance(out.state, KeyValueState)
    assert out.state.padding.sum(1).tolist() == [2, 0, 3]


def test_state_is_fp32_for_half_precision_and_in_key_value_orientation():
    x = torch.randn(2, 3, 4, 5).bfloat16()
    v = torch.randn(2, 3, 4, 7).bfloat16()
    out = attention(x, x, v, "retention", output_final_state=True)
    assert out.output.dtype == torch.bfloat16
    assert out.state.matrix.dtype == torch.float32
    assert out.state.matrix.shape == (2, 3, 5, 7)


def test_a_state_of_another_shape_or_engine_is_refused():
    q = torch.randn(2, 3, 4, 5)
    recurrent = attention(q, q, q, "retention", output_final_state=True).state
    cache = attention(q, q, q, output_final_state=True).state
    with pytest.raises(ValueError, match="retention: initial_state has KeyValueState, expected RecurrentState"):
        attention(q, q, q, "retention", initial_state=cache)
    with pytest.raises(ValueError, match="softmax: initial_state has RecurrentState, expected KeyValueState"):
        attention(q, q, q, initial_state=recurrent)
    with pytest.raises(ValueError, match=r"initial_state has matrix \(2, 3, 5, 5\), expected .* \(1, 3\) first"):
        attention(q[:1], q[:1], q[:1], "retention", initial_state=recurrent)
    with pytest.raises(ValueError, match="linear: initial_state has no normalizer"):
        attention(q, q, q, "linear", initial_state=recurrent)


def test_windowed_states_forget_what_nobody_sees():
    q = torch.randn(1, 2, 50, 4)
    state = attention(q, q, q, foveal.SlidingWindow(window=8), output_final_state=True).state
    assert state.k.shape[2] == 7
    assert state.nbytes == 2 * 2 * 7 * 4 * 4  # keys and values, heads, tokens, width, bytes: no view of the rest
    state = attention(q, q, q, foveal.SlidingWindow(window=8, sinks=3), output_final_state=True).state
    assert state.k.shape[2] == 10
    assert torch.equal(state.k[:, :, :3], q[:, :, :3])


def test_decay_is_a_natural_logarithm_and_acts_before_the_write():
    one = torch.ones(1, 1, 2, 1)
    decay = torch.tensor([0.0, math.log(0.25)])[None, None, :, None]
    # S = 1, then 0.25 * 1 + 1
    assert means(attention(one, one, one, "gla", log_decay=decay)) == [1.0, 1.25]


def test_delta_rule_overwrites():
    k = torch.tensor([[[[1.0, 0], [1, 0], [0, 1]]]])
    v = torch.tensor([[[[5.0], [7.0], [9.0]]]])
    q = torch.tensor([[[[1.0, 0], [1, 0], [1, 0]]]])
    one = torch.ones(1, 1, 3)
    assert means(attention(q, k, v, "delta_rule", scale=1.0, beta=one)) == [5.0, 7.0, 7.0]
    assert means(attention(q, k, v, "delta_rule", scale=1.0, beta=one / 2)) == [2.5, 4.75, 4.75]
    # forgetting half before each write: 5, then 7 whatever was there, then 3.5
    half = one * math.log(0.5)
    assert means(attention(q, k, v, "gated_delta_rule", scale=1.0, beta=one, log_decay=half)) == [5.0, 7.0, 3.5]


def test_retention_forgets_by_head():
    one = torch.ones(1, 2, 2, 1)
    # gamma = 1 - 2^-5 and 1 - 2^-6
    assert means(attention(one, one, one, "retention")) == [1.0, 1.9688, 1.0, 1.9844]


def test_mamba2_steps_and_skips():
    one = torch.ones(1, 1, 2, 1)
    dt, A, D = torch.tensor([[[1.0, 2.0]]]), torch.tensor([-0.5]), torch.tensor([10.0])
    # S = 1; then exp(-1) * 1 + 2; plus D v
    assert means(attention(one, one, one, "mamba2", dt=dt, A=A)) == [1.0, 2.3679]
    assert means(attention(one, one, one, "mamba2", dt=dt, A=A, D=D)) == [11.0, 12.3679]


def test_moba_reads_its_own_block_and_the_best_past_one():
    k = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [-1, 0], [-1, 0]])[None, None]
    v = torch.tensor([1.0, 2, 4, 8, 16, 32])[None, None, :, None]
    q = torch.zeros(1, 1, 6, 2)
    q[0, 0, 5] = torch.tensor([0.0, 1e-6])  # likes block 1 best, by so little that weights stay equal
    out = attention(q, k, v, foveal.MoBA(block_size=2, top_k=2))
    assert out[0, 0, 5].item() == pytest.approx((4 + 8 + 16 + 32) / 4, rel=1e-4)
    out = attention(q, k, v, foveal.MoBA(block_size=2, top_k=1))
    assert means(out) == [1.0, 1.5, 4.0, 6.0, 16.0, 24.0]


def test_sparse_transformer_patterns():
    q, k, v = uniform(8)
    strided = means(attention(q, k, v, foveal.SparseTransformer(stride=3, block_size=2)))
    assert strided[7] == pytest.approx((5 + 6 + 7 + 8 + 2) / 5)  # neighbours 4..7, and 7 - 3, 7 - 6 (from 0)
    fixed = means(attention(q, k, v, foveal.SparseTransformer(pattern="fixed", stride=3, summary=1, block_size=2)))
    assert fixed[7] == pytest.approx((7 + 8 + 3 + 6) / 4)  # own run 6, 7; ends of runs at 2 and 5


def test_alibi_slopes_follow_the_published_rule():
    from foveal.mechanisms.classic.softmax import alibi_slopes

    assert alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_sink_logit_takes_its_share():
    q, k, v = uniform(2)
    out = attention(q, k, v, sink_logits=torch.tensor([math.log(2.0)]), return_lse=True)
    assert means(out.output) == [1 / 3 * 1.0] * 0 + [round(1 / 3, 4), 0.75]  # 1 / (1 + 2), (1 + 2) / (2 + 2)
    assert means(out.lse.exp()) == [3.0, 4.0]


def test_soft_cap_bounds_the_score():
    q, k = torch.full((1, 1, 1, 1), 100.0), torch.tensor([[[[0.0], [1.0]]]])
    v = torch.tensor([[[[0.0], [1.0]]]])
    got = attention(q, k, v, foveal.Softmax(softcap=2.0)).item()
    assert got == pytest.approx(1 / (1 + math.exp(-2.0)))  # tanh(50) = 1


def test_weights_of_a_recurrence_are_its_effective_map():
    one = torch.ones(1, 1, 3, 1)
    decay = torch.full((1, 1, 3, 1), math.log(0.5))
    weights = attention(one, one, one, "gla", log_decay=decay, return_weights=True).weights
    assert weights[0, 0].tolist() == [[1, 0, 0], [0.5, 1, 0], [0.25, 0.5, 1]]


def test_empty_inputs_pass_through():
    for mechanism in ("softmax", "linear", foveal.MoBA(), foveal.Softmax(softcap=1.0)):
        q = torch.randn(2, 2, 0, 4)
        assert attention(q, q, q, mechanism).shape == (2, 2, 0, 4)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    for mechanism in ("softmax", foveal.MoBA(), foveal.Softmax(softcap=1.0)):
        assert (attention(q, k, k, mechanism) == 0).all()
    q = torch.randn(0, 2, 3, 4)
    for mechanism in ("softmax", "linear", foveal.MoBA()):
        assert attention(q, q, q, mechanism).shape == (0, 2, 3, 4)


def test_unknown_names_suggest_the_nearest():
    q, k, v = uniform(2)
    with pytest.raises(ValueError, match=r"mechanism: unknown name 'gated_delta_rul'; did you mean 'gated_delta_rule'"):
        attention(q, k, v, "gated_delta_rul")
    with pytest.raises(TypeError, match="mechanism: got int"):
        attention(q, k, v, 3)


def test_settings_passed_to_the_call_are_explained():
    q, k, v = uniform(2)
    with pytest.raises(
        TypeError, match=r"moba: unexpected top_k.*settings \(block_size, top_k\) belong to .*MoBA\(\.\.\.\)"
    ):
        attention(q, k, v, "moba", top_k=3)
    with pytest.raises(TypeError, match=r"gla: missing log_decay \[B H T K\], natural log"):
        attention(q, k, v, "gla")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: foveal.Softmax(window=0), "softmax: window has 0, expected an int >= 1"),
        (lambda: foveal.Softmax(window=True), "softmax: window has True"),
        (lambda: foveal.Softmax(window=2.5), "softmax: window has 2.5"),
        (lambda: foveal.Softmax(window=[3, 2]), r"softmax: window has \[3, 2\]"),
        (lambda: foveal.Softmax(window=(3,)), "softmax: window has (3,)"),
        (lambda: foveal.Softmax(window=(3, -1)), "softmax: window has (3, -1)"),
        (lambda: foveal.Softmax(sinks=1.5), "softmax: sinks has 1.5, expected an int >= 0"),
        (lambda: foveal.Softmax(softcap="a"), "softmax: softcap has 'a'"),
        (lambda: foveal.MoBA(top_k=2.5), "moba: top_k has 2.5"),
        (lambda: foveal.Softmax(softcap=0.0), "softmax: softcap has 0.0, expected a number above 0"),
        (lambda: foveal.MoBA(top_k=0), "moba: top_k has 0, expected an int >= 1"),
        (lambda: foveal.Retention(slowest=0), "retention: slowest has 0, expected a number above 0"),
        (lambda: foveal.SparseTransformer(pattern="x"), "sparse_transformer: pattern has 'x', expected one of"),
        (lambda: foveal.Linear(feature_map="x"), "linear: feature_map has 'x', expected one of"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_explicit_backends_never_fall_back():
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(
        ValueError, match="softmax: backend has 'sdpa', which cannot run here: it has no score functions"
    ):
        attention(q, q, q, foveal.Softmax(softcap=1.0), backend="sdpa")
    a, b = (attention(q, q, q, backend=name) for name in ("sdpa", "torch"))
    torch.testing.assert_close(a, b)


def test_a_call_that_nobody_can_run_says_why():
    q = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match=r"linear: no backend can run this call.*a recurrence has no log-sum-exp"):
        attention(q, q, q, "linear", return_lse=True)
    with pytest.raises(TypeError, match="mechanism: got the class Mechanism, expected a mechanism with a name"):
        attention(q, q, q, foveal.Mechanism)


def test_explain_says_who_runs_and_why_not():
    q = torch.randn(1, 1, 4, 2)
    routes = foveal.explain("softmax", q, q, q)
    assert [(r.backend, r.chosen) for r in routes] == [("sdpa", True), ("native", False), ("torch", False)]
    q = torch.randn(1, 4, 512, 2)  # more than a few scores
    assert [r.backend for r in foveal.explain("softmax", q, q, q)] == ["native", "sdpa", "torch"]
    routes = foveal.explain("sliding_window", q, q, q)
    assert not routes[1].chosen
    assert str(routes[1]) == "sdpa: it does not skip the keys that a window or a mask function hides"


def test_names_find_their_way():
    assert foveal.find("2412.06464") == [foveal.GatedDeltaRule]
    assert foveal.get("retnet") is foveal.Retention
    assert foveal.get("gated-delta-rule")().normalize_qk is True
    assert foveal.Mamba2 in foveal.find("Gu")
    assert foveal.find("no such thing at all") == []
    assert {"softmax", "moba", "gla"} <= set(foveal.list_mechanisms())
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        foveal.NoSuchThing  # noqa: B018


def test_states_save_without_overwriting(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    state = attention(q, q, q, "linear", output_final_state=True).state
    state.save(tmp_path / "state")
    again = foveal.State.load(tmp_path / "state")
    assert torch.equal(again.matrix, state.matrix)
    assert torch.equal(again.normalizer, state.normalizer)
    with pytest.raises(FileExistsError):
        state.save(tmp_path / "state")
    torch.save({"a": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no state of foveal"):
        foveal.State.load(tmp_path / "other")
