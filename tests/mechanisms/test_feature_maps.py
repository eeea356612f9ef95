"""What makes each feature map what it is: identities worked out by hand, softmax, and independent implementations."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm

import foveal
from foveal import attention
from foveal.mechanisms.linear.based import power, taylor
from foveal.mechanisms.linear.hedgehog import Hedgehog, distillation_loss
from foveal.mechanisms.linear.linear_log_normal import moment_matching
from foveal.mechanisms.linear.performer import gaussian
from test_oracles import first, fla

close = torch.testing.assert_close


def draw(*shape, seed=0, size=1.0, dtype=torch.float64):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(T=24, K=6, V=4, H=2, size=1.0):
    return draw(1, H, T, K, seed=1, size=size), draw(1, H, T, K, seed=2, size=size), draw(1, H, T, V, seed=3)


def weights(q, k, mechanism, **call):
    """The map of a mechanism, [B, H, T, S]."""
    return attention(q, k, k, mechanism, return_weights=True, **call).weights


def normalised(scores, causal=True):
    scores = scores.tril() if causal else scores
    return scores / scores.sum(-1, keepdim=True)


# Performer


@pytest.mark.parametrize("orthogonal", [True, False])
def test_positive_features_estimate_the_exponential_without_bias(orthogonal):
    x, y = draw(4, seed=4, size=0.3), draw(4, seed=5, size=0.3)
    estimates = []
    for seed in range(2000):
        W = gaussian(8, 4, seed, orthogonal)
        estimates.append(((W @ (x + y)) - (x @ x + y @ y) / 2).exp().mean())
    estimates = torch.stack(estimates)
    error = estimates.std() / 2000**0.5
    assert abs(estimates.mean() - (x @ y).exp()) < 3 * error
    assert error < 0.02 * (x @ y).exp()


def performer_error(features, orthogonal, seeds, scale=0.05):
    q, k, v = qkv(T=16, K=8)
    want = attention(q, k, v, scale=scale)
    found = [
        attention(q, k, v, foveal.Performer(features=features, seed=seed, orthogonal=orthogonal), scale=scale)
        for seed in range(seeds)
    ]
    return (torch.stack(found) - want).square().mean().sqrt().item()


def test_performer_s_error_falls_as_the_root_of_the_features():
    few, many = performer_error(64, False, 40), performer_error(1024, False, 40)
    assert few / many == pytest.approx(4.0, rel=0.1)
    assert performer_error(16384, True, 2) < 0.002


def test_orthogonal_features_beat_independent_ones():
    assert performer_error(16, True, 400, 0.2) < 0.97 * performer_error(16, False, 400, 0.2)


def test_orthogonal_rows_are_orthogonal_and_as_long_as_gaussian_ones():
    W = gaussian(20, 6, 0, True)
    for block in W.split(6):
        gram = block @ block.T
        close(gram, gram.diagonal().diag(), atol=1e-12, rtol=0)
    lengths = torch.stack([gaussian(6, 6, seed, True).square().sum(-1) for seed in range(500)])
    assert lengths.mean().item() == pytest.approx(6.0, abs=0.2)  # chi-square with 6 degrees of freedom
    assert lengths.var().item() == pytest.approx(12.0, abs=1.5)


@pytest.mark.parametrize(
    ("mechanism", "size"),
    [(foveal.Performer(features=32), 12.0), ("linear_log_normal", 120.0), ("hedgehog", 120.0), ("kernelized", 12.0)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_stabilisers_leave_the_result_alone(mechanism, size, causal):
    """Features far beyond the range of fp32, growing along the sequence, against float64, which still holds them."""
    q, k, v = qkv(T=70)
    k = k * torch.linspace(0.01, 1.0, 70, dtype=k.dtype)[:, None] * size
    want = attention(q, k, v, mechanism, causal=causal)
    got = attention(q.float(), k.float(), v.float(), mechanism, causal=causal)
    assert got.isfinite().all()
    close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_a_peak_far_in_the_future_and_a_growing_one_stream():
    q, k, v = (x.float() for x in qkv(T=9))
    k[:, :, 7] += 150.0  # exp of it is beyond fp32
    whole = attention(q, k, v, "linear_log_normal")
    head = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], "linear_log_normal", output_final_state=True)
    tail = attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], "linear_log_normal", initial_state=head.state)
    close(torch.cat((head.output, tail), 2), whole)
    close(whole[:, :, 7], v[:, :, 7])  # the giant takes all
    assert not torch.allclose(whole[:, :, 6], v[:, :, 6], atol=0.1)


def test_relu_kernel_of_the_performer_by_hand():
    q, k, _ = qkv()
    W = gaussian(5, 6, 7, False)
    phi_q, phi_k = ((6**-0.25 * x @ W.T).clamp(min=0) + 1e-3 for x in (q, k))
    got = weights(q, k, foveal.Performer(features=5, seed=7, orthogonal=False, kernel="relu"))
    close(got, normalised(phi_q @ phi_k.mT))


def test_performer_matches_performer_pytorch():
    package = pytest.importorskip("performer_pytorch", reason="performer_pytorch is not installed")
    q, k, v = (x.float() for x in qkv(size=0.3))
    theirs = package.FastAttention(dim_heads=6, nb_features=24, causal=False)
    theirs.projection_matrix.copy_(gaussian(24, 6, 0, True))
    got = attention(q, k, v, foveal.Performer(features=24), causal=False)
    close(got, theirs(q, k, v), rtol=1e-3, atol=1e-3)  # they add 1e-4 to every feature, after the stabiliser


# cosFormer


def test_cosformer_fades_as_a_cosine_and_turns_negative_beyond_its_length():
    ones = torch.ones(1, 1, 8, 1, dtype=torch.float64)
    last = weights(ones, ones, foveal.CosFormer(length=4))[0, 0, -1].flip(0)  # by distance 0, 1, 2, ...
    want = torch.tensor([math.cos(math.pi / 2 * d / 4) for d in range(8)], dtype=torch.float64)
    close(last, want / want.sum())
    near = weights(ones, ones, foveal.CosFormer(length=8))[0, 0, -1].flip(0)
    assert (near > 0).all()
    assert (near.diff() < 0).all()


def test_cosformer_between_all_pairs_is_symmetric_in_distance():
    ones = torch.ones(1, 1, 5, 1, dtype=torch.float64)
    middle = weights(ones, ones, foveal.CosFormer(length=5), causal=False)[0, 0, 2]
    close(middle, middle.flip(0))
    assert middle.argmax() == 2


def test_cosformer_with_an_endless_length_is_relu_linear_attention():
    q, k, v = qkv()
    want = attention(q, k, v, foveal.Linear(feature_map="relu"))
    close(attention(q, k, v, foveal.CosFormer(length=10**9)), want, rtol=1e-6, atol=1e-6)


def test_cosformer_returns_zero_with_zero_gradients_where_nothing_overlaps():
    q, k, v = -torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    q.requires_grad_()
    out = attention(q, k, v, "cosformer")
    out.sum().backward()
    assert (out == 0).all()
    assert (q.grad == 0).all()


# TransNormer


@pytest.mark.parametrize("causal", [True, False])
def test_transnormer_is_linear_attention_with_its_length_removed(causal):
    q, k, v = qkv()
    plain = attention(q, k, v, foveal.Linear(normalize=False), causal=causal)
    got = attention(q, k, v, foveal.TransNormer(eps=1e-12), causal=causal)
    close(got, plain / plain.square().mean(-1, keepdim=True).sqrt())
    close(attention(q, k, 7 * v, foveal.TransNormer(eps=1e-12), causal=causal), got)
    gain = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2, dtype=torch.float64)
    close(attention(q, k, v, foveal.TransNormer(eps=1e-12), causal=causal, gain=gain), got * gain[:, None])


def test_transnormer_s_elu_may_weigh_negatively():
    q, k, v = -torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    assert attention(q, k, v, foveal.TransNormer(feature_map="elu")).item() == pytest.approx(-1, abs=1e-4)
    assert attention(q, k, v, foveal.TransNormer(feature_map="elu+1")).item() == pytest.approx(1, abs=1e-4)


# Linear log-normal


def test_log_normal_weights_without_exponents_are_a_mean():
    q, k, v = qkv()
    zero = torch.zeros(2, dtype=torch.float64)
    want = v.cumsum(2) / torch.arange(1, 25)[:, None]
    close(attention(q, k, v, "linear_log_normal", alpha=zero, beta=zero), want)


def test_log_normal_weights_ignore_a_common_shift_of_the_keys():
    q, k, v = qkv()
    close(attention(q, k + 3, v, "linear_log_normal"), attention(q, k, v, "linear_log_normal"))


@pytest.mark.parametrize(("K", "size_q", "size_k"), [(64, 1.0, 1.0), (32, 1.3, 0.8), (16, 0.5, 0.6), (64, 1.6, 1.5)])
def test_moment_matching_gives_the_log_weights_the_variance_of_softmax(K, size_q, size_k):
    q, k = draw(2000, K, seed=8, size=size_q), draw(2000, K, seed=9, size=size_k)
    alpha, beta = moment_matching(q, k)
    softmax = (q @ k.T * K**-0.5).var()
    ours = torch.log((alpha * q).exp() @ (beta * k).exp().T).var()
    assert (ours / softmax).item() == pytest.approx(1.0, abs=0.1)
    close(alpha * size_q, beta * size_k, rtol=0.05, atol=0)


def test_moment_matching_fits_each_head_and_the_start_is_its_fit():
    q, k = draw(3, 4000, 64, seed=10), draw(3, 4000, 64, seed=11)
    alpha, beta = moment_matching(q, torch.stack((k[0], k[1], 2 * k[2])))
    assert alpha.shape == beta.shape == (3,)
    assert alpha[0].item() == pytest.approx(2.1, abs=0.05)
    assert beta[1].item() == pytest.approx(2.1, abs=0.05)
    assert alpha[2] > 1.2 * alpha[0]


# Feed-forward kernel


def test_feedforward_kernel_by_hand():
    x = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    spec = foveal.FeedforwardKernel()
    weight, bias, gate = (torch.tensor(n, dtype=torch.float64) for n in ([[[2.0]]], [[-1.0]], [[[math.log(3)]]]))
    # x = 0: softplus(-1 * 1/2); x = 1: softplus((2 - 1) * 3/4)
    phi = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.75))]
    got = weights(x, x, spec, weight=weight, bias=bias, gate_weight=gate)[0, 0, 1]
    close(got, torch.tensor(phi, dtype=torch.float64) / sum(phi))
    phi = [math.log1p(math.exp(-1)), math.log1p(math.exp(1))]
    close(weights(x, x, spec, weight=weight, bias=bias)[0, 0, 1], torch.tensor(phi, dtype=torch.float64) / sum(phi))


def test_feedforward_kernel_weighs_positively_and_sums_to_one():
    q, k, _ = qkv()
    extra = {"weight": draw(2, 6, 9), "bias": draw(2, 9), "gate_weight": draw(2, 6, 9, seed=1)}
    got = weights(q, k, foveal.FeedforwardKernel(features=9), causal=False, **extra)
    assert (got > 0).all()
    close(got.sum(-1), torch.ones_like(got[..., 0]))


# Kernelized transformer


def mixture(K=3):
    mean = torch.tensor([[[0.3, -0.2, 0.1], [-0.4, 0.5, 0.0]]], dtype=torch.float64)
    deviation = torch.tensor([[[0.8, 0.5, 1.1], [0.3, 0.9, 0.6]]], dtype=torch.float64)
    return mean[..., :K].requires_grad_(), deviation[..., :K].requires_grad_()


@pytest.mark.parametrize("feature_map", ["prf", "rks"])
def test_learned_frequencies_estimate_the_kernel_of_their_mixture(feature_map):
    q, k, v = qkv(T=6, K=3, H=1, size=0.35)
    mean, deviation = mixture()
    spec = foveal.Kernelized(features=200_000, feature_map=feature_map)
    got = attention(q, k, v, spec, scale=1.0, causal=False, mean=mean, deviation=deviation)
    x, y = q[0, 0][:, None], k[0, 0][None]
    kernel = 0.0
    for mu, sigma in zip(mean[0], deviation[0], strict=True):
        if feature_map == "prf":  # the moment generating function of a Gaussian
            norms = (x**2).sum(-1) / 2 + (y**2).sum(-1) / 2
            kernel = kernel + ((x + y) @ mu + (sigma * (x + y)).square().sum(-1) / 2 - norms).exp()
        else:  # the real part of its characteristic function
            kernel = kernel + ((x - y) @ mu).cos() * (-(sigma * (x - y)).square().sum(-1) / 2).exp()
    want = normalised(kernel, causal=False) @ v[0, 0]
    close(got[0, 0], want, rtol=0, atol=0.01)
    for gradient in torch.autograd.grad(got.square().sum(), (mean, deviation)):
        assert (gradient.abs() > 1e-6).all()


# Hedgehog


def identity(H=2, K=6):
    eye, zero = torch.eye(K, dtype=torch.float64).expand(H, K, K), torch.zeros(H, K, dtype=torch.float64)
    named = {"query_weight": eye, "query_bias": zero, "key_weight": eye, "key_bias": zero}
    return {name: x.clone() for name, x in named.items()}


def test_hedgehog_starts_as_a_sum_of_hyperbolic_cosines():
    q, k, _ = qkv()
    kernel = 2 * (q[..., :, None, :] + k[..., None, :, :]).cosh().sum(-1)
    close(weights(q, k, "hedgehog"), normalised(kernel))
    # the bounded map divides every key by its own sum of features, and queries by theirs, which cancels
    close(weights(q, k, Hedgehog("softmax")), normalised(kernel / (2 * k.cosh().sum(-1))[..., None, :]))


@pytest.mark.parametrize("feature_map", ["exp", "softmax"])
@pytest.mark.parametrize("causal", [True, False])
def test_distillation_loss_is_the_cross_entropy_of_the_maps(feature_map, causal):
    q, k, _ = qkv()
    maps = {name: x + draw(*x.shape, size=0.2) for name, x in identity().items()}
    spec = Hedgehog(feature_map)
    teacher, student = weights(q, k, "softmax", causal=causal), weights(q, k, spec, causal=causal, **maps)
    entropy = -torch.special.xlogy(teacher, student.where(teacher > 0, 1.0)).sum(-1).mean()
    close(distillation_loss(spec, q, k, causal=causal, **maps), entropy)


def entropy(p):
    return -torch.special.xlogy(p, p).sum(-1).mean()


def divergence(p, q):
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q.where(p > 0, 1.0))).sum(-1).mean()


@pytest.mark.parametrize("feature_map", ["exp", "softmax"])
def test_distilled_maps_are_nearer_to_softmax_than_elu(feature_map):
    q, k, _ = qkv(T=32, size=2.0)
    spec, maps = Hedgehog(feature_map), {name: x.requires_grad_() for name, x in identity().items()}
    optimiser = torch.optim.Adam(maps.values(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        losses.append(distillation_loss(spec, q, k, **maps))
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    teacher, elu = weights(q, k, "softmax"), weights(q, k, "linear")
    learned = weights(q, k, spec, **maps).detach()
    assert divergence(teacher, learned) < 0.6 * divergence(teacher, elu)
    assert abs(entropy(learned) - entropy(teacher)) < 0.6 * abs(entropy(elu) - entropy(teacher))


# Polynomials of the score: Based, Fastmax, ReBased, softmax as a recurrent network


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_monomials_multiply_to_the_power_of_the_product(order):
    x, y = draw(7, 5), draw(9, 5, seed=1)
    close(power(x, order) @ power(y, order).T, (x @ y.T) ** order / math.factorial(order))
    assert power(x, order).shape[-1] == math.comb(5 + order - 1, order)
    assert taylor(x, order).shape[-1] == math.comb(5 + order, order)
    assert taylor(draw(1, 16), 2).shape[-1] == 153  # the size the Based catalogue gives for K = 16


def test_based_is_softmax_up_to_the_third_power():
    q, k, v = qkv()

    def error(scale):
        return (attention(q, k, v, "based", scale=scale) - attention(q, k, v, scale=scale)).abs().max()

    assert (error(0.02) / error(0.01)).item() == pytest.approx(8, rel=0.1)
    close(attention(1e-9 * q, k, v, "based"), v.cumsum(2) / torch.arange(1, 25)[:, None])
    close(weights(-q, k, "based", causal=False), weights(q, k, "based", causal=False, scale=-(6**-0.5)))


@pytest.mark.parametrize("reference", ["naive_parallel_based", "naive_chunk_based"])
def test_based_matches_fla(reference):
    q, k, v = (x.float() for x in qkv(T=64))
    options = {"chunk_size": 16} if "chunk" in reference else {}
    want = first(getattr(fla("based"), reference)(q, k, v, **options))
    close(attention(q, k, v, "based"), want, rtol=1e-4, atol=1e-5)


def test_rebased_matches_fla_after_its_affine_norm():
    q, k, v = (x.float() for x in qkv(T=64))
    gains = {name: draw(2, 6, seed=seed, dtype=torch.float32) for seed, name in enumerate(foveal.ReBased.inputs)}
    moved_q = layer_norm(q, (6,)) * gains["query_gain"][:, None] + gains["query_bias"][:, None]
    moved_k = layer_norm(k, (6,)) * gains["key_gain"][:, None] + gains["key_bias"][:, None]
    want = fla("rebased").naive_parallel_rebased(moved_q, moved_k, v)
    close(attention(q, k, v, "rebased", **gains), want, rtol=1e-3, atol=1e-4)  # they add 1e-6 to the denominator


def test_rebased_can_ignore_a_key_entirely():
    q = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], dtype=torch.float64)[None, None]
    k = torch.tensor([[0.0, 1.0, -1.0], [3.0, 1.0, 0.0]], dtype=torch.float64)[None, None]
    only_first = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    got = weights(q, k, "rebased", key_gain=only_first)  # the first key is average in the only channel that counts
    close(got[0, 0], torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64))


def test_fastmax_ignores_offsets_and_lengths():
    q, k, v = qkv()
    want = attention(q, k, v, "fastmax")
    close(attention(1000 * q + 3, 700 * k - 5, v, "fastmax"), want, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(want, attention(q, k, v, "based"), atol=1e-2)


@pytest.mark.parametrize("causal", [True, False])
def test_fastmax_is_a_polynomial_of_standardised_tokens(causal):
    q, k, _ = qkv(size=1000.0)  # large, so that the epsilon in the variance is nothing
    u = (q - q.mean(-1, keepdim=True)) / q.std(-1, correction=0, keepdim=True)
    u = u @ ((k - k.mean(-1, keepdim=True)) / k.std(-1, correction=0, keepdim=True)).mT
    got = weights(q, k, foveal.Fastmax(order=2), causal=causal)
    close(got, normalised(1 + u / 6**0.5 + u**2 / 12, causal))
    assert (got.tril() + torch.ones_like(got).triu(1) > 0).all()
    got = weights(q, k, foveal.Fastmax(order=1), causal=causal, scale=1 / 6)
    close(got, normalised(1 + u / 6, causal), rtol=1e-6, atol=1e-8)
    assert (got >= -1e-12).all()  # the product divided by K is a correlation


def test_softmax_rnn_converges_to_softmax_within_the_bound_of_its_order():
    q, k, _ = qkv(T=12, K=4, size=0.4)
    u = (q @ k.mT / 2).tril()
    eye = torch.eye(12, dtype=torch.float64).expand(1, 2, 12, 12)  # as values it returns the map
    softmax, errors = weights(q, k, "softmax"), []
    for order in range(4):
        sums = attention(q, k, eye, foveal.SoftmaxRNN(order=order, normalizer="none"))
        bound = u.abs() ** (order + 1) * u.abs().exp() / math.factorial(order + 1)
        assert ((sums - u.exp().tril()).abs() <= bound.tril() + 1e-12).all(), f"order {order}"
        errors.append((attention(q, k, eye, foveal.SoftmaxRNN(order=order)) - softmax).abs().max().item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 8 * errors[3] > 0


def test_softmax_rnn_s_first_order_is_linear_attention():
    q, k, v = qkv()
    zero, one = (attention(q, k, v, foveal.SoftmaxRNN(order=n, normalizer="none")) for n in (0, 1))
    close(zero, v.cumsum(2))
    close(one - zero, attention(q, k, v, foveal.Linear(feature_map="identity", normalize=False)))


def test_softmax_rnn_s_norm_keeps_the_direction():
    q, k, v = qkv()
    plain, normed = (attention(q, k, v, foveal.SoftmaxRNN(order=3, normalizer=n)) for n in ("none", "norm"))
    close(normed, plain / plain.norm(dim=-1, keepdim=True))
    close(attention(q, k, 5 * v, foveal.SoftmaxRNN(order=3, normalizer="norm")), normed)
