"""What makes each linear attention what it is: identities worked out by hand, dense forms, other implementations."""

import math
import sys

import pytest
import torch
from torch.nn.functional import normalize, softmax

import foveal
from foveal import attention
from test_oracles import first, fla

close = torch.testing.assert_close


def draw(*shape, seed=0, size=1.0, dtype=torch.float64):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(T=24, K=6, V=4, H=2, size=1.0):
    return draw(1, H, T, K, seed=1, size=size), draw(1, H, T, K, seed=2, size=size), draw(1, H, T, V, seed=3)


def weights(q, k, mechanism, **call):
    """The map of a mechanism, [B, H, T, S]."""
    return attention(q, k, k, mechanism, return_weights=True, **call).weights


def spread(rows):
    """Entropy of rows of non-negative weights."""
    return -(rows * rows.clamp(min=1e-300).log()).sum(-1)


def split_anywhere(mechanism, q, k, v, **inputs):
    """The outputs of two calls in a row, for every place of the cut."""
    for cut in range(q.shape[2] + 1):
        head = attention(
            q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], mechanism, output_final_state=True, layout="bhtd", **inputs
        )
        tail = attention(
            q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], mechanism, initial_state=head.state, layout="bhtd", **inputs
        )
        yield torch.cat((head.output, tail), 2)


# Focused


def focused(x, power):
    y = x.clamp(min=0)
    return y.norm(dim=-1, keepdim=True) * normalize(y**power, dim=-1)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_focused_keeps_lengths_and_weighs_by_focused_features(power):
    q, k = draw(40, 6, seed=1).abs(), draw(40, 6, seed=2).abs()
    spec = foveal.Focused(power=power)
    start = math.log(math.e - 1)  # softplus of it is 1
    mapped = spec.focus(q[None, None], torch.full((1, 6), start, dtype=q.dtype))[0, 0]
    close(mapped.norm(dim=-1), q.norm(dim=-1))
    close(mapped, focused(q, power))
    want = focused(q, power) @ focused(k, power).mT
    got = weights(q[None, None], k[None, None], spec, causal=False)[0, 0]
    close(got, want / want.sum(-1, keepdim=True))


def test_focus_brings_like_directions_together_and_unlike_ones_apart():
    like, unlike = torch.tensor([[3.0, 1.0, 1.0], [2.0, 1.0, 0.5]]), torch.tensor([[3.0, 1.0, 1.0], [1.0, 2.0, 0.5]])
    cosines = []
    for power in (1.0, 3.0, 6.0):
        sharp = [normalize(foveal.Focused(power=power).focus(x[None, None], torch.zeros(1, 3))[0, 0], dim=-1)
                 for x in (like, unlike)]  # fmt: skip
        cosines.append([float(x[0] @ x[1]) for x in sharp])
    assert cosines[0][0] < cosines[1][0] < cosines[2][0]
    assert cosines[0][1] > cosines[1][1] > cosines[2][1]


def test_focused_ignores_the_length_of_queries():
    q, k, v = qkv()
    close(attention(5 * q, k, v, "focused"), attention(q, k, v, "focused"))


def test_focused_is_finite_where_powers_underflow():
    q, k, v = (x.float() for x in qkv(size=1e-6))
    spec = foveal.Focused(power=12.0)
    close(attention(q, k, v, spec), attention(q * 1e6, k * 1e6, v, spec), rtol=1e-4, atol=1e-5)


# InLine and MALA


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mechanism", ["inline", "mala"])
def test_rows_that_are_not_divided_still_sum_to_one(mechanism, causal):
    q, k, v = qkv()
    rows = weights(q, k, mechanism, causal=causal)
    close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    assert rows.min() < 0 or mechanism == "mala"
    same = attention(q, k, v[:, :, :1].expand_as(v), mechanism, causal=causal)
    close(same, v[:, :, :1].expand_as(v))


@pytest.mark.parametrize("causal", [True, False])
def test_inline_is_injective_where_division_is_not(causal):
    q, k, v = qkv()
    q, k = q.abs(), k.abs()
    divided = foveal.Linear(feature_map="relu")
    close(attention(2 * q, k, v, divided, causal=causal), attention(q, k, v, divided, causal=causal))
    once, twice = (attention(x, k, v, "inline", causal=causal) for x in (q, 2 * q))
    assert ((once - twice).abs().amax(-1)[:, :, 1:] > 1e-4).all()


def test_inline_by_hand():
    q, k = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([[1.0, 1.0], [3.0, -2.0]], dtype=torch.float64)
    # scores 3 and -1, times scale / N = 0.25: 0.75, -0.25, mean 0.25; plus 1/2
    rows = weights(q[None, None], k[None, None], "inline", scale=0.5, causal=False)
    close(rows[0, 0], torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    zero = attention(0 * q[None, None], k[None, None], k[None, None], "inline", causal=False)
    close(zero[0, 0, 0], torch.tensor([2.0, -0.5], dtype=torch.float64))  # the mean


def test_mala_by_hand():
    q, k = torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    # features (1, 2) and (2, 1), (1, 1): scores 4 and 3, times 0.5 / 2: 1 and 3/4, Z = 7/4
    # beta = 1 + 4/7 = 11/7, gamma = 7/8: 11/7 - 7/8 = 39/56 and 33/28 - 7/8 = 17/56
    rows = weights(q[None, None], k[None, None], "mala", scale=0.5, causal=False)
    close(rows[0, 0], torch.tensor([[39 / 56, 17 / 56]], dtype=torch.float64))


@pytest.mark.parametrize("causal", [True, False])
def test_mala_is_linear_attention_plus_centred_scores(causal):
    q, k, v = qkv()
    rest = attention(q, k, v, "mala", causal=causal) - attention(q, k, v, "linear", causal=causal)
    centred = attention(q, k, v, foveal.InLine(feature_map="elu"), causal=causal)
    seen = torch.ones(24, 24, dtype=v.dtype)
    seen = seen.tril() if causal else seen
    close(rest, centred - seen / seen.sum(-1, keepdim=True) @ v)


def test_a_scale_of_zero_leaves_the_mean_and_linear_attention():
    q, k, v = qkv()
    mean = v.cumsum(2) / torch.arange(1, 25, dtype=v.dtype)[:, None]
    close(attention(q, k, v, "inline", scale=0.0), mean)
    close(attention(q, k, v, "mala", scale=0.0), attention(q, k, v, "linear"))


@pytest.mark.parametrize("direction", ["sign", "tanh"])
def test_longer_queries_sharpen_the_rows_of_mala_and_nala_only(direction):
    q, k = draw(1, 1, 50, 6, seed=1).abs(), draw(1, 1, 50, 6, seed=2).abs()
    axes = torch.eye(6, dtype=q.dtype)[None, None]
    entropies = [
        spread(weights(size * q, axes, foveal.NaLa(direction=direction), causal=False)) for size in (0.1, 0.3, 1.0)
    ]
    assert (entropies[0] > entropies[1]).all()
    assert (entropies[1] > entropies[2]).all()
    ratios = []
    for size in (1.0, 2.0, 4.0):  # weights are beta s - gamma, so that their spread over the mean grows
        ratios.append(weights(size * q, k, "mala", causal=False).std(-1) * 50)
    assert (ratios[0] < ratios[1]).all()
    assert (ratios[1] < ratios[2]).all()
    for flat in (foveal.Linear(feature_map="relu"), foveal.Focused()):
        close(weights(4 * q, k, flat, causal=False), weights(q, k, flat, causal=False))


# NaLa


@pytest.mark.parametrize("causal", [True, False])
def test_nala_by_sign_is_a_split_into_positive_and_negative_parts(causal):
    q, k, v = qkv()
    length = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + torch.tanh(length))
    read = torch.cat([(sign * q / length).clamp(min=0) ** power for sign in (1, -1)], -1)
    write = torch.cat([(sign * k).clamp(min=0) ** 3 for sign in (1, -1)], -1)
    want = read @ write.mT
    want = want.tril() if causal else want
    total = want.sum(-1, keepdim=True)
    close(attention(q, k, v, "nala", causal=causal), want / total.where(total > 0, 1) @ v)


@pytest.mark.parametrize(("direction", "opposite"), [("sign", 0.0), ("tanh", None)])
def test_nala_inhibits_channels_of_opposite_sign(direction, opposite):
    q = torch.tensor([[[[1.0, 0.5]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 0.5], [-1.0, 0.5], [-1.0, -0.5]]]], dtype=torch.float64)
    rows = weights(q, k, foveal.NaLa(direction=direction), causal=False)[0, 0, 0]
    assert rows[0] > rows[1] > rows[2]
    assert rows[2] >= 0
    if opposite is not None:
        assert rows[2] == opposite


def test_nala_gives_finite_gradients_for_zeros():
    q, k, v = (x.float() for x in qkv())
    q[:, :, 3], k[:, :, 5] = 0, 0
    q[:, :, 7, 2], k[:, :, 9, 1] = 0, 0
    for spec in (foveal.NaLa(power=0.5), foveal.NaLa(direction="tanh"), foveal.Focused(power=0.5)):
        x = [y.clone().requires_grad_() for y in (q, k, v)]
        grads = torch.autograd.grad(attention(*x, spec).sum(), x)
        assert all(g.isfinite().all() for g in grads), spec


# Cottention


@pytest.mark.parametrize("count", ["key", "query"])
@pytest.mark.parametrize("causal", [True, False])
def test_cottention_is_the_cosine_over_a_power_of_the_count(count, causal):
    q, k, v = qkv()
    m = torch.tensor([0.3, -1.2], dtype=v.dtype)
    power = m.sigmoid()[:, None, None]
    t = torch.arange(1, 25, dtype=v.dtype)
    cosine = torch.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    counted = t[:, None] if count == "query" else t
    want = cosine.tril() / counted**power if causal else cosine / 24**power
    spec = foveal.Cottention(count=count)
    rows = weights(q, k, spec, exponent=m, causal=causal)
    close(rows, want)
    assert rows.abs().max() <= 1
    assert rows.min() < 0
    close(attention(3 * q, 0.1 * k, v, spec, exponent=m, causal=causal, scale=7.0), want @ v)


@pytest.mark.parametrize("causal", [True, False])
def test_cottention_does_not_count_padding(causal):
    q, k, v = qkv(T=10)
    mask = torch.tensor([[False] * 3 + [True] * 5 + [False] * 2])
    got = attention(q, k, v, "cottention", mask=mask, causal=causal)[:, :, 3:8]
    close(got, attention(q[:, :, 3:8], k[:, :, 3:8], v[:, :, 3:8], "cottention", causal=causal))


# Latte


def latte(q, k, v, causal):
    past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    past = past.tril() if causal else past
    p_of_token = k.mT[..., None, :].expand(-1, -1, -1, q.shape[2], -1).masked_fill(~past, -torch.inf).softmax(-1)
    return torch.einsum("bhtl,bhlts,bhsv->bhtv", softmax(q, -1), p_of_token, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_latte_is_a_mixture_of_softmaxes_even_for_huge_keys(causal, form):
    q, k, v = qkv(T=70)
    for size in (1.0, 80.0):
        for x in (size * k, 80 * k.sign(), k - 80, k + 80):
            close(attention(q, x, v, "latte", causal=causal, form=form), latte(q, x, v, causal))
    steps = torch.linspace(-80, 80, 70, dtype=k.dtype)[:, None].expand(2, 70, 6)[None]
    for x in (steps, -steps):
        got = attention(q.float(), x.float(), v.float(), "latte", causal=causal, form=form)
        close(got.double(), latte(q, x, v, causal), rtol=1e-4, atol=1e-4)


def test_latte_has_finite_gradients_for_huge_keys():
    q, k, v = qkv(T=20)
    for x in (80 * k.sign(), 1000 * k):
        k32 = x.float().requires_grad_()
        (got,) = torch.autograd.grad(attention(q.float(), k32, v.float(), "latte").sum(), k32)
        k64 = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(latte(q, k64, v, True).sum(), k64)
        close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_latte_rows_are_probabilities_and_one_latent_is_a_mean(causal):
    q, k, v = qkv()
    rows = weights(q, k, "latte", causal=causal)
    assert rows.min() >= 0
    close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    one = attention(q[..., :1], k[..., :1], v, "latte", causal=False)
    close(one, (softmax(k[..., :1], 2) * v).sum(2, keepdim=True).expand_as(one))
    close(attention(q, k, v, "latte")[:, :, -1], attention(q, k, v, "latte", causal=False)[:, :, -1])


def test_latte_streams_when_the_largest_key_comes_late():
    q, k, v = qkv(T=9)
    k = k + 40 * torch.arange(9, dtype=k.dtype)[:, None]
    for got in split_anywhere("latte", q, k, v):
        close(got, latte(q, k, v, True))


# ReGLA


def gates(seed=5):
    return torch.nn.functional.logsigmoid(draw(1, 2, 24, 6, seed=seed) + 2), draw(1, 2, 24, 6, seed=seed + 1).sigmoid()


def test_regla_with_r_of_a_half_is_gla_over_its_features():
    q, k, v = qkv()
    log_g, _ = gates()
    phi_q, phi_k = ((x - x.amax(-1, keepdim=True)).exp() for x in (q, k))
    want = attention(phi_q, phi_k, v, "gla", log_decay=log_g)
    want = want / (want.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(attention(q, k, v, "regla", log_gate=log_g, refine=torch.full_like(log_g, 0.5)), want)


def test_regla_refines_between_its_two_ends_and_where_plain_gates_are_flat():
    from foveal.mechanisms.linear.regla import refined

    log_g, r = gates()
    g = log_g.exp()
    F = refined(log_g, r).exp()
    close(F, (1 - r) * g**2 + r * (1 - (1 - g) ** 2))
    assert (F - g**2 > -1e-12).all()
    assert (1 - (1 - g) ** 2 - F > -1e-12).all()
    near = torch.tensor(-1e-9, dtype=torch.float32)  # g = 1 - 1e-9 cannot be told from 1 in fp32, its logarithm can
    close(refined(near, torch.tensor(0.0)), 2 * near)
    logit = torch.tensor(math.log(99), requires_grad=True)
    slopes = [torch.autograd.grad(refined(logit.sigmoid().log(), torch.tensor(r)).exp(), logit)[0] for r in (0.0, 0.5)]
    assert slopes[0] > 1.9 * slopes[1]
    close(slopes[1], torch.tensor(0.99 * 0.01), rtol=1e-4, atol=1e-6)


def test_regla_is_finite_for_huge_inputs():
    q, k, v = qkv()
    log_g, r = gates()
    assert attention(1e4 * q.float(), 1e4 * k.float(), v.float(), "regla", log_gate=log_g, refine=r).isfinite().all()


# Higher order


def products(q, k):
    return (q @ k.mT / q.shape[-1] ** 0.5).tril()


def test_higher_orders_are_their_dense_products():
    q, k, v = qkv(T=17)
    W = products(q, k)
    close(attention(q, k, v, "hla"), (W @ W.mT).tril() @ v)
    close(attention(q, k, v, "ahla"), W @ (W @ v))
    close(attention(q, k, v, "hla3"), (W @ W.mT).tril() @ (W @ v))
    linear = foveal.Linear(feature_map="identity", normalize=False)
    close(attention(q, k, v, "ahla"), attention(q, k, attention(q, k, v, linear), linear))


def test_higher_orders_normalised():
    q, k, v = qkv(T=17)
    q, k = q.abs(), k.abs()
    W = products(q, k)
    dense = {"HLA": (W @ W.mT).tril(), "AHLA": W @ W, "HLA3": (W @ W.mT).tril() @ W}
    for name, weight in dense.items():
        spec = getattr(foveal, name)(normalize=True)
        want = weight / weight.sum(-1, keepdim=True) @ v
        for got in (attention(q, k, v, spec), attention(q, k, v, spec, scale=3.0), *split_anywhere(spec, q, k, v)):
            close(got, want)


def test_higher_orders_decay_by_pairs_and_triples():
    q, k, v = qkv(T=7, H=1)
    gamma, W = 0.8, products(q, k)[0, 0]
    pairs, triples, chain = (torch.zeros(7, 7, dtype=v.dtype) for _ in range(3))
    for t in range(7):
        for j in range(t + 1):
            for i in range(t + 1):
                if i <= j:
                    pairs[t, j] += gamma ** (2 * t - i - j) * W[t, i] * W[j, i]
                if i >= j:
                    chain[t, j] += gamma ** (t - j) * W[t, i] * W[i, j]
                for u in range(max(i, j), t + 1):
                    triples[t, j] += gamma ** (3 * t - u - i - j) * W[t, i] * W[u, i] * W[u, j]
    for name, want in (("HLA", pairs), ("AHLA", chain), ("HLA3", triples)):
        close(attention(q, k, v, getattr(foveal, name)(gamma=gamma))[0, 0], want @ v[0, 0])


@pytest.mark.parametrize("mechanism", ["HLA", "AHLA", "HLA3"])
def test_higher_orders_can_be_split_anywhere(mechanism):
    q, k, v = qkv(T=13)
    spec = getattr(foveal, mechanism)(gamma=0.9)
    whole = attention(q, k, v, spec)
    for got in split_anywhere(spec, q, k, v):
        close(got, whole)


# Lightning


@pytest.mark.parametrize("rates", ["linear", "geometric"])
def test_lightning_is_a_fixed_scalar_decay(rates):
    q, k, v = qkv(H=4)
    share = [2.0, 4.0, 6.0, 8.0] if rates == "linear" else [0.25, 0.0625, 0.015625, 0.00390625]
    log_decay = -0.5 * torch.tensor(share, dtype=v.dtype)
    apart = torch.arange(24)[:, None] - torch.arange(24)
    want = (q @ k.mT * (log_decay[:, None, None] * apart.clamp(min=0)).exp()).tril() @ v
    spec = foveal.Lightning(strength=0.5, rates=rates)
    close(attention(q, k, v, spec, scale=1.0), want)
    ones = torch.ones(1, 4, 24, dtype=v.dtype)
    close(attention(q, k, v, spec), attention(q, k, v, "mamba2", dt=ones, A=log_decay))
    full = torch.full((1, 4, 24, 6), 0.0, dtype=v.dtype) + log_decay[:, None, None]
    close(attention(q, k, v, spec), attention(q, k, v, "gla", log_decay=full))


def test_lightning_matches_fla():
    q, k, v = (x.float().transpose(1, 2) for x in qkv(T=64, H=4))
    spec = foveal.Lightning(strength=0.3)
    g = (-0.3 * 2 * torch.arange(1, 5.0)).expand(1, 64, 4)
    module = fla("simple_gla")
    got = attention(q, k, v, spec, layout="bthd")
    for reference in (module.naive_recurrent_simple_gla, module.naive_parallel_simple_gla):
        close(got, first(reference(q, k, v, g)), rtol=1e-4, atol=1e-5)


def test_lightning_matches_minimax(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    configuration = pytest.importorskip("transformers.models.minimax.configuration_minimax")
    config = configuration.MiniMaxConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=4, head_dim=6, num_hidden_layers=5, block_size=7
    )
    torch.manual_seed(0)
    layer = modeling.MiniMaxLightningAttention(config, layer_idx=2)
    hidden = draw(2, 20, 24, dtype=torch.float32)
    seen = {}
    layer.norm.register_forward_hook(lambda module, args, output: seen.update(attended=args[0]))
    layer(hidden, position_embeddings=None, attention_mask=None)
    q, k, v = torch.nn.functional.silu(layer.qkv_proj(hidden)).reshape(2, 20, 4, 18).split(6, -1)
    spec = foveal.Lightning(strength=1 - 2 / (4 + 1e-5) + 1e-5, rates="geometric")
    got = attention(q, k, v, spec, layout="bthd", scale=1.0)
    close(got.flatten(2), seen["attended"], rtol=1e-4, atol=1e-5)
