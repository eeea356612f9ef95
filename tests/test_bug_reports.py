"""Public bug reports that a library of this kind must get right; each test names the report it answers."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import foveal
from foveal import AttentionLayer, attention, native
from foveal.engines.block_sparse.eager import merge
from foveal.testing.mechanism import defined, draw

close = torch.testing.assert_close
# every form of the recurrence on every backend that this machine has
ROUTES = [{"form": form, "backend": "torch"} for form in ("parallel", "chunked", "recurrent")]
ROUTES += [{"form": form, "backend": "native"} for form in ("chunked", "recurrent") if native.LIBRARY is not None]
RECURRENT = ("linear", "retention", "gla", "delta_rule", "gated_delta_rule", "mamba2")
SOFTMAX = ("softmax", "sliding_window", "moba", "sparse_transformer")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-12)).item()


def with_grads(x, spec, **options):
    x = {n: y.clone().requires_grad_() for n, y in x.items()}
    out = attention(mechanism=spec, **x, **options)
    weight = randn(*out.shape, seed=9).to(out.dtype)
    return out, dict(zip(x, torch.autograd.grad((out * weight).sum(), list(x.values())), strict=True))


@pytest.mark.parametrize("decay", [0.0, -1e-4, -1.0, -3.0, -5.0, -20.0, -1e4])
@pytest.mark.parametrize("spec", [foveal.GLA(), foveal.GatedDeltaRule()], ids=lambda s: s.name)
def test_fla_77_649_strong_decay_is_finite_and_right_forward_and_backward(spec, decay):
    """1, 2: no exponent above 0 is ever formed."""
    x = draw(spec, {"B": 1, "H": 2, "G": 2, "T": 64, "K": 16, "V": 16})
    x["log_decay"] = torch.full_like(x["log_decay"], decay)
    want, want_grads = with_grads(x, spec, form="recurrent")
    for route in ROUTES:
        got, grads = with_grads({n: y.float() for n, y in x.items()}, spec, **route)
        assert relative(got, want) < 1e-4
        for name, grad in grads.items():
            assert grad.isfinite().all(), name
            assert (grad - want_grads[name]).norm() <= 1e-4 * want_grads[name].norm() + 1e-6, name


def test_fla_649_decays_of_every_size_side_by_side():
    """2: strong and weak decays in turn, per step and channel: a difference of two long sums would lose the weak."""
    x = draw(foveal.GLA(), {"B": 1, "H": 1, "G": 1, "T": 130, "K": 8, "V": 8})
    sizes = torch.tensor([0.0, -1e-4, -1.0, -5.0, -20.0, -1e4], dtype=torch.float64)
    pick = torch.randint(6, x["log_decay"].shape, generator=torch.Generator().manual_seed(1))
    x["log_decay"] = sizes[pick]
    want, want_grads = with_grads(x, foveal.GLA(), form="recurrent")
    for route in ROUTES:
        got, grads = with_grads({n: y.float() for n, y in x.items()}, foveal.GLA(), **route)
        assert relative(got, want) < 1e-5
        for name in "qkv":
            assert relative(grads[name], want_grads[name]) < 1e-5


def test_gates_of_zero_forget_everything():
    """1: log_decay = -inf is a legal gate: the state starts anew, without -inf - -inf."""
    x = {n: y.float() for n, y in draw(foveal.GLA(), {"B": 1, "H": 1, "G": 1, "T": 9, "K": 4, "V": 4}).items()}
    x["log_decay"][:, :, 5] = -math.inf
    for route in ROUTES:
        out, grads = with_grads(x, foveal.GLA(), **route)
        later = attention(mechanism="gla", **{n: y[:, :, 5:] for n, y in x.items()})
        close(out[:, :, 5:], later)
        assert all(g.isfinite().all() for g in grads.values())


def test_fla_99_partial_chunks_are_masked_before_exp():
    """3: T = 65 leaves a chunk with one token."""
    x = draw(foveal.GatedDeltaRule(), {"B": 1, "H": 1, "G": 1, "T": 65, "K": 8, "V": 8})
    x["log_decay"] = torch.full_like(x["log_decay"], -10.0)
    got, grads = with_grads({n: y.float() for n, y in x.items()}, foveal.GatedDeltaRule())
    assert relative(got, defined(foveal.GatedDeltaRule(), x)) < 1e-5
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("T", [1, 2, 3])
def test_fla_1140_short_convolution_shorter_than_its_width(T):
    """5: the tail of the convolution and its gradient equal one run over everything."""
    torch.manual_seed(0)
    layer = AttentionLayer(8, 2, "linear", conv=4).double()
    before, now = randn(1, 3, 8, dtype=torch.float64), randn(1, T, 8, seed=1, dtype=torch.float64)

    def run(split):
        x, y = before.clone().requires_grad_(), now.clone().requires_grad_()
        if split:
            _, state = layer(x, output_final_state=True)
            out, state = layer(y, initial_state=state, output_final_state=True)
        else:
            out, state = layer(torch.cat((x, y), 1), output_final_state=True)
            out = out[:, 3:]
        loss = out.square().sum() + state.tail.square().sum() + state.attention.matrix.square().sum()
        return out, state.tail, *torch.autograd.grad(loss, (x, y))

    for a, b in zip(run(split=True), run(split=False), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_fla_871_gradients_come_in_any_strides(name):
    """6: an expanded gradient, and one that is a slice of something larger."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 2, "H": 2, "G": 2, "T": 12, "K": 4, "V": 4})
    got = {n: y.clone().requires_grad_() for n, y in x.items()}
    want = {n: y.clone().requires_grad_() for n, y in x.items()}
    attention(mechanism=spec, **got).sum().backward()
    out = attention(mechanism=spec, **want)
    out.backward(torch.ones(2, 2, 12, 12, dtype=torch.float64)[..., 4:8])
    for n in x:
        if got[n].grad is not None:
            close(got[n].grad, want[n].grad)


def test_fla_875_gradient_flows_through_the_normaliser():
    """7: dk of the normalised form equals that of the dense quadratic form."""
    q, k, v = (randn(1, 1, 64, 4, seed=s, dtype=torch.float64).abs() + 0.1 for s in range(3))
    k.requires_grad_()
    weight = (q @ k.mT).tril()
    want = torch.autograd.grad((weight / weight.sum(-1, keepdim=True) @ v).square().sum(), k)[0]
    for route in ROUTES[:3]:
        out = attention(q, k, v, foveal.Linear(feature_map="identity"), **route)
        close(torch.autograd.grad(out.square().sum(), k)[0], want)


@pytest.mark.parametrize("name", RECURRENT)
def test_fla_102_initial_state_gets_its_gradient_also_in_half_precision(name):
    """8: with and without an initial state; a loss on the final state only."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 1, "H": 2, "G": 2, "T": 20, "K": 4, "V": 4})
    state = attention(mechanism=spec, output_final_state=True, **x).state
    grads = {}
    for dtype in (torch.float64, torch.bfloat16):
        start = state.map(lambda y: y.detach().float().to(torch.float32 if y.dim() else y.dtype).requires_grad_())
        if dtype == torch.float64:
            start = state.map(lambda y: y.detach().clone().requires_grad_())
        rounded = {n: y.bfloat16().to(dtype) for n, y in x.items()}
        final = attention(mechanism=spec, initial_state=start, output_final_state=True, **rounded).state
        grads[dtype] = torch.autograd.grad(final.matrix.sum(), start.matrix)[0]
    assert relative(grads[torch.bfloat16], grads[torch.float64]) < 1e-3


@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_fla_837_boundaries_with_a_batch_are_refused(name):
    """9."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 2, "H": 2, "G": 2, "T": 6, "K": 4, "V": 4})
    with pytest.raises(ValueError, match=f"{name}: cu_seqlens has a batch of 2, expected B = 1"):
        attention(mechanism=spec, cu_seqlens=torch.tensor([0, 3, 6]), **x)


@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_fla_838_boundaries_win_over_a_mask_of_ones(name):
    """10."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 1, "H": 2, "G": 2, "T": 6, "K": 4, "V": 4})
    cu = torch.tensor([0, 3, 6])
    got = attention(mechanism=spec, cu_seqlens=cu, mask=torch.ones(1, 6, dtype=torch.bool), **x)
    close(got, attention(mechanism=spec, cu_seqlens=cu, **x))
    assert not torch.allclose(got, attention(mechanism=spec, **x))


@pytest.mark.parametrize("pads", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [*RECURRENT, "softmax", "sliding_window"])
def test_fla_1272_padding_freezes_state_and_convolution(name, pads):
    """11: pads between and behind real tokens, with NaN in them, change nothing that follows."""
    torch.manual_seed(0)
    layer = AttentionLayer(8, 2, name, conv=4, rope=100.0).double()
    x, later = randn(1, 2, 8, dtype=torch.float64), randn(1, 3, 8, seed=1, dtype=torch.float64)
    junk = torch.full((1, pads, 8), 1e3, dtype=torch.float64)
    padded = torch.cat((x[:, :1], junk, x[:, 1:], junk), 1)
    mask = torch.tensor([[True] + [False] * pads + [True] + [False] * pads])
    _, want = layer(x, output_final_state=True)
    out, got = layer(padded, mask=mask, output_final_state=True)
    close(out[mask], layer(x)[0])
    close(got.tail, want.tail)
    if name in RECURRENT:
        close(got.attention.matrix, want.attention.matrix)
    a, b = (layer(later, initial_state=s) for s in (got, want))
    close(a, b)


def test_transformers_46851_packed_rows_do_not_leak_through_recurrence_or_convolution():
    """13: two documents and an empty one between them, through the whole layer."""
    for name in RECURRENT:
        torch.manual_seed(0)
        layer = AttentionLayer(8, 2, name, conv=4, rope=100.0).double()
        x = randn(1, 9, 8, dtype=torch.float64)
        got = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]))
        close(got, torch.cat((layer(x[:, :4]), layer(x[:, 4:])), 1), rtol=1e-6, atol=1e-6)


def test_flash_1537_empty_sequences_on_either_side():
    """14: keys without queries get gradient 0; queries without keys give 0; an all-empty batch has its shape."""
    q, k = randn(1, 1, 3, 4).requires_grad_(), randn(1, 1, 8, 4, seed=1).requires_grad_()
    v = randn(1, 1, 8, 4, seed=2).requires_grad_()
    cu_q, cu_k = torch.tensor([0, 0, 3, 3]), torch.tensor([0, 2, 5, 8])
    out = attention(q, k, v, cu_seqlens=cu_q, cu_seqlens_k=cu_k)
    close(out, attention(q, k[:, :, 2:5], v[:, :, 2:5]))
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    for grad in (dk, dv):
        assert (grad[:, :, :2] == 0).all()
        assert (grad[:, :, 5:] == 0).all()
    out = attention(q, k, v, cu_seqlens=torch.tensor([0, 2, 3]), cu_seqlens_k=torch.tensor([0, 0, 8]))
    assert (out[:, :, :2] == 0).all()
    none = torch.zeros(1, 2, 0, 4)
    for name in ("softmax", "linear", "moba"):
        assert attention(none, none, none, name, cu_seqlens=torch.tensor([0, 0, 0])).shape == (1, 2, 0, 4)


def test_flash_1537_empty_sequences_pass_their_state_on():
    """14."""
    x = draw(foveal.GLA(), {"B": 1, "H": 2, "G": 2, "T": 5, "K": 4, "V": 3})
    start = foveal.RecurrentState(randn(3, 2, 4, 3, dtype=torch.float64))
    cu = torch.tensor([0, 2, 2, 5])
    out = attention(mechanism="gla", cu_seqlens=cu, initial_state=start, output_final_state=True, **x)
    close(out.state.matrix[1], start.matrix[1])


@pytest.mark.parametrize("form", [None, "parallel", "chunked"])
def test_flash_443_more_queries_than_keys(form):
    """15: the first rows see nothing: output 0, lse -inf, gradient 0, no NaN."""
    q, k, v = (randn(1, 2, n, 4, seed=n).requires_grad_() for n in (5, 3, 3))
    out = attention(q, k, v, form=form, return_lse=True)
    assert (out.output[:, :, :2] == 0).all()
    assert (out.lse[:, :, :2] == -math.inf).all()
    grads = torch.autograd.grad(out.output.sum() + out.lse[:, :, 2:].sum(), (q, k, v))
    assert (grads[0][:, :, :2] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_flash_282_one_step_equals_the_last_row():
    """16: bottom-right, unlike torch's is_causal."""
    q, k, v = randn(1, 2, 7, 4), randn(1, 2, 7, 4, seed=1), randn(1, 2, 7, 4, seed=2)
    for name in SOFTMAX:
        close(attention(q[:, :, -1:], k, v, name), attention(q, k, v, name)[:, :, -1:])
    top = scaled_dot_product_attention(q[:, :, :2], k, v, is_causal=True)
    close(attention(q[:, :, :2], k, v, causal="top-left"), top)


def test_transformers_39408_window_of_eight_at_query_twenty():
    """17: exactly keys 13..20; a pair (7, 0) is the same; (S - 1, 0) is causal."""
    q, k = torch.zeros(1, 1, 21, 2), torch.zeros(1, 1, 21, 2)
    v = torch.eye(21)[None, None]
    for window in (8, (7, 0)):
        seen = attention(q, k, v, foveal.Softmax(window=window))[0, 0, 20].nonzero().flatten()
        assert seen.tolist() == list(range(13, 21))
    close(attention(q, k, v, foveal.Softmax(window=(20, 0))), attention(q, k, v))


def test_pytorch_103963_fully_masked_rows():
    """18: bool and -inf rows give 0 with gradient 0; a row of finfo.min is an even mean, never NaN."""
    low = torch.finfo(torch.float32).min
    for row, want in ((False, "zero"), (-math.inf, "zero"), (low, "mean")):
        q, k, v = (randn(1, 1, 4, 3, seed=s).requires_grad_() for s in range(3))
        mask = torch.ones(4, 4, dtype=torch.bool) if row is False else torch.zeros(4, 4)
        mask[2] = row
        for form in (None, "parallel", "chunked"):
            out = attention(q, k, v, mask=mask[None, None], causal=False, form=form)
            close(out[0, 0, 2], torch.zeros(3) if want == "zero" else v[0, 0].mean(0))
            grads = torch.autograd.grad(out[0, 0, 2].sum(), (q, k, v))
            assert all(g.isfinite().all() for g in grads)
            assert want == "mean" or all((g == 0).all() for g in grads)


@pytest.mark.parametrize("form", [None, "chunked"])
def test_pytorch_127055_rows_whose_first_tiles_are_masked(form):
    """19: a band of width 10 over 600 tokens."""
    q, k, v = (randn(1, 2, 600, 8, seed=s) for s in range(3))
    i = torch.arange(600)
    band = ((i[:, None] - i).abs() < 10)[None, None]
    want = ((q @ k.mT / 8**0.5).masked_fill(~band, -math.inf)).softmax(-1) @ v
    close(attention(q, k, v, mask=band, causal=False, form=form), want)
    close(attention(q, k, v, foveal.Softmax(window=10), causal=False), want)


@pytest.mark.parametrize("form", [None, "parallel", "chunked"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_pytorch_101967_nan_behind_a_mask_reaches_nothing(name, form):
    """20: neither values nor gradients; by padding and by a mask [T, S]."""
    q, k, v = (randn(1, 2, 9, 4, seed=s, dtype=torch.float64) for s in range(3))
    for bad in (math.nan, math.inf):
        kk, vv = k.clone(), v.clone()
        kk[:, :, 8], vv[:, :, 8] = bad, bad
        padding = torch.tensor([[True] * 8 + [False]])
        square = padding[:, None, None].expand(1, 1, 9, 9)
        for mask in (padding, square):
            for_grad = [y.clone().requires_grad_() for y in (q, kk, vv)]
            out = attention(*for_grad, name, mask=mask, form=form)[:, :, :8]
            close(out, attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], name, form=form))
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), for_grad))


@pytest.mark.parametrize("T", [1, 7, 63, 65, 127, 129, 257, 1025])
def test_pytorch_153799_lengths_off_the_tile_with_every_modifier(T):
    """21: score function and mask function together, forward and backward."""
    spec = foveal.Softmax(window=50, softcap=3.0, alibi=True)
    x = [randn(1, 2, T, 4, seed=s).requires_grad_() for s in range(3)]
    i = torch.arange(T)
    gap = i[:, None] - i
    slope = torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    score = 3 * (x[0] @ x[1].mT / 2 / 3).tanh() - slope * gap.abs()
    want = score.masked_fill((gap < 0) | (gap >= 50), -math.inf).softmax(-1) @ x[2]
    got = attention(*x, spec, layout="bhtd")
    close(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
        close(a, b)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_nsa_27_groups_are_side_by_side_and_value_width_is_its_own(name, groups):
    """22: kv head = h // (H / G); D_v != D_qk; gradients of k and v are sums over the group."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 1, "H": 6, "G": groups, "T": 11, "K": 16, "V": 24})
    wide = {n: y.repeat_interleave(6 // groups, 1) if n in "kv" else y for n, y in x.items()}
    got, grads = with_grads(x, spec)
    want, wide_grads = with_grads(wide, spec)
    close(got, want)
    for n in "kv":
        close(grads[n], wide_grads[n].unflatten(1, (groups, -1)).sum(2))


def test_fast_transformers_32_half_precision_sums_do_not_overflow():
    """23: 4096 features of 8 sum to more than 65504; a zero key under the 2-norm stays finite."""
    ones = torch.full((1, 1, 4096, 8), 8.0)
    v = randn(1, 1, 4096, 4)
    for dtype in (torch.float16, torch.bfloat16):
        got = attention(ones.to(dtype), ones.to(dtype), v.to(dtype), "linear")
        want = attention(ones, ones, v.to(dtype).float(), "linear")
        close(got.float(), want, rtol=1e-2, atol=1e-2)
    zero = torch.zeros(1, 1, 3, 4, dtype=torch.float16).requires_grad_()
    out = attention(zero, zero, zero, "delta_rule", beta=torch.ones(1, 1, 3))
    assert torch.autograd.grad(out.sum(), zero)[0].isfinite().all()


@pytest.mark.parametrize("H", [5, 6, 12, 40])
def test_alibi_bias_at_decode_and_for_any_number_of_heads(H):
    """24: one step after the other equals the whole."""
    q, k, v = (randn(1, H, 45, 4, seed=s) for s in range(3))
    spec = foveal.Softmax(alibi=True)
    want, state = attention(q, k, v, spec), None
    for t in range(45):
        one = (y[:, :, t : t + 1] for y in (q, k, v))
        out = attention(*one, spec, initial_state=state, output_final_state=True)
        state = out.state
        close(out.output, want[:, :, t : t + 1])


@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_flash_414_results_repeat_to_the_bit(name):
    """25: the same call twice, gradients included."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 1, "H": 2, "G": 2, "T": 150, "K": 8, "V": 8}, torch.float32)
    (a, da), (b, db) = with_grads(x, spec), with_grads(x, spec)
    assert torch.equal(a, b)
    assert all(torch.equal(da[n], db[n]) for n in x)


def test_natten_347_many_tiny_sequences_and_huge_strides():
    """26: more sequences than a 16-bit grid; offsets beyond 32 bits on small storage."""
    n = 70_000
    q, k, v = (randn(1, 1, n, 2, seed=s) for s in range(3))
    cu = torch.arange(n + 1)
    close(attention(q, k, v, cu_seqlens=cu), v)
    out = attention(q, k, v, "linear", cu_seqlens=cu)
    close(out, v)
    strided = torch.zeros(1, 1).expand(3, 1).as_strided((1, 1, 3, 1), (1 << 40, 1 << 36, 0, 1))
    close(attention(strided, strided, strided + 1), torch.ones(1, 1, 3, 1))


def test_ring_30_merging_partial_softmaxes_far_apart():
    """27: log-sum-exps of 0 and 200, and of -inf, merge without overflow."""
    output = torch.tensor([[1.0], [3.0], [5.0]])
    lse = torch.tensor([0.0, 200.0, -math.inf])
    merged, total = merge(output, lse, torch.zeros(3, dtype=torch.long), (1, 1, 2))
    close(merged.flatten(), torch.tensor([3.0, 0.0]))
    close(total.flatten(), torch.tensor([200.0, -math.inf]))


def test_fla_351_state_orientation_is_checked():
    """30: [K, V], so that a transposed state is a shape error where K != V."""
    x = draw(foveal.GLA(), {"B": 1, "H": 1, "G": 1, "T": 3, "K": 4, "V": 5})
    with pytest.raises(ValueError, match=r"initial_state has matrix \(1, 1, 5, 4\)"):
        attention(mechanism="gla", initial_state=foveal.RecurrentState(torch.zeros(1, 1, 5, 4)), **x)


@pytest.mark.parametrize("D", [1, 3, 80, 96, 512])
def test_onnxruntime_28195_any_head_width_in_fp16(D):
    """31: |q| around 30 at D = 512 overflows fp16 scores unless they are fp32."""
    q, k, v = ((30 * randn(1, 1, 20, D, seed=s)).half() for s in range(3))
    want = attention(q.double(), k.double(), v.double())
    for form in (None, "chunked"):
        got = attention(q, k, v, form=form)
        assert got.isfinite().all()
        assert relative(got, want) < 2e-3


def test_pytorch_110213_masks_of_every_kind_agree():
    """32: bool, additive fp32/fp16/bf16; [B, S], [B, 1, T, S], [H, T, S]; integers are refused by rule."""
    q, k, v = (randn(2, 3, 5, 4, seed=s) for s in range(3))
    keep = torch.tensor([[True, True, False, True, True]] * 2)
    want = attention(q, k, v, causal=False, mask=keep)
    additive = torch.zeros(2, 5).masked_fill(~keep, -math.inf)
    for mask in (keep[:, None, None], keep[:, None, None].expand(2, 1, 5, 5), keep[:1].expand(3, 5, 5).contiguous()):
        close(attention(q, k, v, causal=False, mask=mask), want)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        close(attention(q, k, v, causal=False, mask=additive.to(dtype)), want)
        close(attention(q.half(), k.half(), v.half(), causal=False, mask=additive.to(dtype)).float(), want,
              rtol=1e-2, atol=1e-2)  # fmt: skip
    for dtype in (torch.int32, torch.uint8):
        with pytest.raises(TypeError, match="mask has torch"):
            attention(q, k, v, mask=keep.to(dtype))


@pytest.mark.parametrize("name", [*RECURRENT, *SOFTMAX])
def test_pytorch_187506_any_strides(name):
    """33: a transposed innermost axis, expanded heads, sliced heads."""
    spec = foveal.get(name)()
    x = draw(spec, {"B": 1, "H": 2, "G": 2, "T": 10, "K": 4, "V": 4})
    want = attention(mechanism=spec, **x)
    turned = {n: y.transpose(-1, -2).contiguous().transpose(-1, -2) if n in "qkv" else y for n, y in x.items()}
    close(attention(mechanism=spec, **turned), want)
    sliced = {n: torch.cat((y, y), 1)[:, :2] if n in "qkv" else y for n, y in x.items()}
    close(attention(mechanism=spec, **sliced), want)
    one = {n: y[:, :1].expand(1, 2, *y.shape[2:]) if n in "qkv" else y for n, y in x.items()}
    same = {n: y.contiguous() for n, y in one.items()}
    close(attention(mechanism=spec, **one), attention(mechanism=spec, **same))


def test_lengths_and_widths_in_every_combination():
    """21, 31: odd lengths and widths in one sweep over the engines."""
    for (T, K, V), name in itertools.product([(2, 1, 3), (3, 3, 1), (65, 5, 2)], ["softmax", "moba", "gla", "linear"]):
        spec = foveal.get(name)()
        x = draw(spec, {"B": 1, "H": 1, "G": 1, "T": T, "K": K, "V": V})
        close(attention(mechanism=spec, **x), defined(spec, x), rtol=1e-8, atol=1e-9)


def test_gates_out_of_range_are_named():
    """30: a gate as 1 - a, or a positive log, is refused instead of growing without bound."""
    x = draw(foveal.GatedDeltaRule(), {"B": 1, "H": 1, "G": 1, "T": 3, "K": 4, "V": 5})
    with pytest.raises(
        ValueError, match=r"gated_delta_rule: log_decay has the value 0.5, expected -inf <= log_decay <= 0"
    ):
        attention(mechanism="gated_delta_rule", **(x | {"log_decay": torch.full_like(x["log_decay"], 0.5)}))
    x["log_decay"] = logsigmoid(x["log_decay"])
    attention(mechanism="gated_delta_rule", **x)
