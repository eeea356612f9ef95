"""Mechanisms that estimate softmax or better it: by codes for the keys, by regression around the query, by samples."""

import math

import pytest
import torch

import foveal
from foveal import attention
from foveal.mechanisms.linear.transformer_vq import commitment_loss
from foveal.mechanisms.sparse.kde import planes, uniform
from foveal.mechanisms.sparse.sea import estimation_loss
from test_oracles import fla

close = torch.testing.assert_close


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(T=24, K=6, V=4, H=2):
    return draw(1, H, T, K, seed=1), draw(1, H, T, K, seed=2), draw(1, H, T, V, seed=3)


# Transformer-VQ


@pytest.mark.parametrize("causal", [True, False])
def test_codes_that_are_the_keys_give_softmax(causal):
    q, k, v = qkv(T=12)
    vq = foveal.TransformerVQ(codes=12)
    close(attention(q, k, v, vq, codebook=k[0], causal=causal), attention(q, k, v, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
def test_few_codes_are_softmax_on_quantised_keys(causal):
    q, k, v = qkv(T=150)  # over two chunk borders; every code is used many times, so counts matter
    codebook = draw(2, 5, 6, seed=4)
    nearest = torch.cdist(k[0], codebook).argmin(-1)
    quantised = torch.stack([codebook[h][nearest[h]] for h in range(2)])[None]
    got = attention(q, k, v, foveal.TransformerVQ(codes=5), codebook=codebook, causal=causal)
    close(got, attention(q, quantised, v, causal=causal))


def test_a_code_counts_as_often_as_it_was_used():
    k = torch.tensor([0.1, -0.1, 0.9])[None, None, :, None]  # two keys fall to code 0, one to code 1
    q, v = torch.full_like(k, math.log(6.0)), torch.tensor([1.0, 2.0, 5.0])[None, None, :, None]
    codebook = torch.tensor([[[0.0], [1.0]]])
    got = attention(q, k, v, foveal.TransformerVQ(codes=2), codebook=codebook, scale=1.0)
    close(got.flatten(), torch.tensor([1.0, 1.5, (1 + 2 + 6 * 5) / 8]))


def test_codes_that_never_occurred_do_not_drown_the_others():
    """The best code is unused and its score beats those of the used ones by more than fp32 can hold."""
    q, k, v = (
        torch.full((1, 1, 4, 1), 1000.0),
        torch.tensor([0.0, 0.1, 0.0, 0.1])[None, None, :, None],
        draw(1, 1, 4, 2),
    )
    v, vq = v.float(), foveal.TransformerVQ(codes=3)
    codebook = torch.tensor([[[0.0], [0.1], [5.0]]])
    close(attention(q, k, v, vq, codebook=codebook), attention(q, k, v))
    head = attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], vq, codebook=codebook, output_final_state=True)
    tail = attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], vq, codebook=codebook, initial_state=head.state)
    close(tail, attention(q, k, v)[:, :, 2:])


@pytest.mark.parametrize("causal", [True, False])
def test_straight_through_gives_keys_the_gradient_of_quantised_keys(causal):
    q, k, v = (x.requires_grad_() for x in qkv(T=20))
    codebook, weight = draw(2, 5, 6, seed=4).requires_grad_(), draw(1, 2, 20, 4, seed=5)
    plain, through = (foveal.TransformerVQ(codes=5, straight_through=on) for on in (False, True))
    nearest = torch.cdist(k[0], codebook).argmin(-1).detach()
    quantised = torch.stack([codebook[h][nearest[h]] for h in range(2)])[None]
    want = attention(q, quantised, v, causal=causal)
    got = attention(q, k, v, through, codebook=codebook, causal=causal)
    close(got, want)
    wanted = torch.autograd.grad((want * weight).sum(), (q, quantised, v, codebook))
    found = torch.autograd.grad((got * weight).sum(), (q, k, v, codebook))
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    assert found[1].abs().min() > 0 or causal
    still = attention(q, k, v, plain, codebook=codebook, causal=causal)
    assert torch.autograd.grad(still.sum(), k, allow_unused=True)[0] is None


def test_straight_through_streams_and_its_formula_has_the_same_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(T=11, H=1))
    spec, codebook = foveal.TransformerVQ(codes=3, straight_through=True), draw(1, 3, 6, seed=4)
    head = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], spec, codebook=codebook, output_final_state=True)
    tail = attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], spec, codebook=codebook, initial_state=head.state)
    got = torch.cat((head.output, tail), 2)[0, 0]
    visible = torch.ones(11, 11, dtype=torch.bool).tril()
    want = spec.definition(q[0, 0], k[0, 0], v[0, 0], scale=6**-0.5, visible=visible, codebook=codebook[0])
    close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), (q, k, v)),
        torch.autograd.grad(want.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(mine, theirs)


def test_commitment_pulls_keys_to_their_codes():
    k = torch.tensor([0.25, 2.0])[None, None, :, None].requires_grad_()
    codebook = torch.tensor([[[0.0], [1.0]]], requires_grad=True)
    loss = commitment_loss(k, codebook)
    close(loss, torch.tensor((0.25**2 + 1.0) / 2))
    loss.backward()
    close(k.grad.flatten(), torch.tensor([0.25, 1.0]))
    assert codebook.grad is None


# Local linear attention


def regressed(q, k, v, ridge, weight):
    """The prediction at q [K] of ridge regression with a free intercept, by least squares on scaled rows."""
    n, K = k.shape
    root = (weight / weight.sum()).sqrt()[:, None]
    rows = torch.cat(
        (root * torch.cat((torch.ones(n, 1, dtype=k.dtype), k), 1), torch.eye(K + 1, dtype=k.dtype)[1:] * ridge**0.5)
    )
    fit = torch.linalg.lstsq(rows, torch.cat((root * v, v.new_zeros(K, v.shape[1]))), driver="gelsd").solution
    return fit[0] + q @ fit[1:]


FORMS = ["parallel", "chunked"]


def penalty(value, H=2):
    return torch.full((H,), value, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_line_through_two_points_by_hand(form):
    # equal weights: mean 1/2, variance of the keys and covariance 1/4, so the slope is (1/4) / (1/4 + ridge)
    k, q = torch.tensor([0.0, 1.0])[None, None, :, None], torch.full((1, 1, 2, 1), 3.0)
    for ridge, want in ((0.25, 0.5 + 0.5 * 2.5), (2.25, 0.5 + 0.1 * 2.5), (1e-6, 3.0)):
        got = attention(q, k, k, "local_linear", scale=0.0, causal=False, form=form, ridge=torch.tensor([ridge]))
        close(got.flatten(), torch.full((2,), want), rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_local_linear_is_weighted_ridge_regression(form):
    q, k, v = qkv(T=14)
    got = attention(q, k, v, "local_linear", form=form, ridge=penalty(0.3))
    for h in range(2):
        for t in range(14):
            weight = (k[0, h, : t + 1] @ q[0, h, t] / 6**0.5).exp()
            close(got[0, h, t], regressed(q[0, h, t], k[0, h, : t + 1], v[0, h, : t + 1], 0.3, weight))


@pytest.mark.parametrize("form", FORMS)
def test_a_very_wide_kernel_is_ordinary_regression(form):
    q, k, v = qkv(T=30)
    got = attention(q, k, v, "local_linear", causal=False, scale=1e-12, form=form, ridge=penalty(1e-6))
    for h in range(2):
        design = torch.cat((torch.ones(30, 1, dtype=k.dtype), k[0, h]), 1)
        fit = torch.linalg.lstsq(design, v[0, h]).solution
        close(got[0, h], fit[0] + q[0, h] @ fit[1:], rtol=1e-5, atol=1e-5)  # the ridge, not the solver, is seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_large_ridge_is_softmax(form, causal):
    q, k, v = qkv()
    got = attention(q, k, v, "local_linear", form=form, causal=causal, ridge=penalty(1e12))
    close(got, attention(q, k, v, causal=causal))


@pytest.mark.parametrize("form", FORMS)
def test_affine_values_are_reproduced_where_the_query_stands(form):
    q, k, _ = qkv(T=40)
    A, c = draw(6, 3, seed=7), draw(3, seed=8)
    got = attention(q, k, k @ A + c, "local_linear", form=form, ridge=penalty(1e-6))[:, :, 15:]
    error = (got - (q @ A + c)[:, :, 15:]).abs().max()
    assert error < 1e-3
    tenth = attention(q, k, k @ A + c, "local_linear", form=form, ridge=penalty(1e-5))[:, :, 15:]
    assert (tenth - (q @ A + c)[:, :, 15:]).abs().max() / error == pytest.approx(10, rel=0.01)  # the ridge is all of it
    assert (attention(q, k, k @ A + c)[:, :, 15:] - (q @ A + c)[:, :, 15:]).abs().max() > 1


def test_weights_sum_to_one_and_extrapolate():
    q, k, v = qkv()
    for spec in (foveal.LocalLinear(), foveal.LocalLinear(iterations=1), foveal.LocalLinear(tolerance=0.5)):
        weights = attention(q, k, v, spec, return_weights=True, ridge=penalty(0.1)).weights
        close(weights.sum(-1), torch.ones(1, 2, 24, dtype=torch.float64))
        assert weights.min() < 0


def test_conjugate_gradients_equal_direct_solves_over_tiles():
    """Longer than a tile of queries, so backward computes tiles again; grouped heads, padding, a ridge per head."""
    x = [draw(2, 4, 300, 6, seed=1), draw(2, 2, 300, 6, seed=2), draw(2, 2, 300, 3, seed=3)]
    x = [y.requires_grad_() for y in (*x, torch.tensor([0.05, 0.5, 2.0, 9.0], dtype=torch.float64))]
    mask, found = torch.arange(300).expand(2, 300) >= torch.tensor([[0], [37]]), {}
    for form in FORMS:
        out = attention(*x[:3], "local_linear", mask=mask, form=form, ridge=x[3])
        found[form] = (out, *torch.autograd.grad(out.square().sum(), x))
    for direct, iterated in zip(*found.values(), strict=True):
        close(iterated, direct)


def test_more_iterations_come_closer_and_k_of_them_arrive():
    q, k, v = qkv(T=40)
    exact = attention(q, k, v, "local_linear", form="parallel", ridge=penalty(0.1))
    errors = []
    for n in range(1, 7):
        got = attention(q, k, v, foveal.LocalLinear(iterations=n), form="chunked", ridge=penalty(0.1))
        errors.append((got - exact).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[5] < 1e-10 < errors[4]  # K = 6
    loose = attention(q, k, v, foveal.LocalLinear(tolerance=0.3), form="chunked", ridge=penalty(0.1))
    assert errors[5] < (loose - exact).norm() < errors[2]


def test_rows_that_converged_stay_where_they_are():
    """The first rows are solved in one step, the last need many; fp32 rounding must not carry the first away."""
    for seed in (41, 57, 120, 151, 275):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 128, 64, generator=generator) for _ in range(3))
        got, want = (attention(q, k, v, "local_linear", form=f, ridge=torch.full((2,), 1e-3)) for f in FORMS)
        assert (got - want).norm() < 0.01 * want.norm()


def test_tiny_gradients_survive():
    """Their squares are below fp32."""
    x = [y.float().requires_grad_() for y in qkv()]
    out = attention(*x, "local_linear", ridge=penalty(1.0).float())
    small = torch.autograd.grad((out * 1e-25).sum(), x, retain_graph=True)
    for tiny, plain in zip(small, torch.autograd.grad(out.sum(), x), strict=True):
        close(tiny * 1e25, plain)


def test_local_linear_refuses_what_it_cannot_give():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"local_linear: no backend.*log-sum-exp"):
        attention(q, k, v, "local_linear", return_lse=True)
    with pytest.raises(ValueError, match=r"tolerance has 1\.0"):
        foveal.LocalLinear(tolerance=1.0)
    with pytest.raises(ValueError, match="iterations has 0"):
        foveal.LocalLinear(iterations=0)


@pytest.mark.parametrize("form", FORMS)
def test_local_linear_can_be_differentiated_twice(form):
    x = (draw(1, 4, 7, 3, seed=1), draw(1, 2, 7, 3, seed=2), draw(1, 2, 7, 2, seed=3), penalty(0.4, 4))

    def run(q, k, v, ridge):
        return attention(q, k, v, "local_linear", form=form, ridge=ridge)

    assert torch.autograd.gradgradcheck(run, tuple(y.requires_grad_() for y in x))


def test_local_linear_reads_as_fla_s_parallax_with_the_solved_slope():
    """Parallax takes as an input what the regression solves for, with the opposite sign."""
    q, k, v = qkv(T=20, V=6)
    r = torch.zeros_like(q)
    for h in range(2):
        for t in range(20):
            keys = k[0, h, : t + 1]
            p = (keys @ q[0, h, t] / 6**0.5).softmax(0)
            mean = p @ keys
            matrix = (keys - mean).T @ (p[:, None] * (keys - mean)) + 0.5 * torch.eye(6, dtype=k.dtype)
            r[0, h, t] = -torch.linalg.solve(matrix, q[0, h, t] - mean)
    want = fla("parallax").naive_parallax(*(x.transpose(1, 2).float() for x in (q, r, k, v))).transpose(1, 2)
    close(attention(q, k, v, "local_linear", ridge=penalty(0.5)).float(), want, rtol=1e-4, atol=1e-5)


# Kernel density


def shares(q, k, spec, **call):
    """The map of a mechanism, [B, H, T, S]."""
    return attention(q, k, k, spec, return_weights=True, **call).weights


@pytest.mark.parametrize("causal", [True, False])
def test_samples_of_everything_are_softmax(causal):
    q, k, v = qkv(T=40)
    close(attention(q, k, v, foveal.KDE(samples=40), causal=causal), attention(q, k, v, causal=causal))


def test_buckets_that_hold_everything_are_softmax():
    """One sample of a key that is read already adds nothing."""
    q, k, v = qkv(T=40)
    q, k = q.abs(), k.abs()
    q[..., 0], k[..., 0] = 50.0, 50.0  # so far from the origin that a plane has all on one side
    spec = foveal.KDE(samples=1, candidates=40, tables=3, bits=1, seed=2)
    assert all(abs(normal[0, 0]) > 0.5 for normal in planes(2, 3, 1, 6))
    close(attention(q, k, v, spec, scale=0.01), attention(q, k, v, scale=0.01))


def test_weighted_sums_are_unbiased_whatever_is_heavy():
    """The mean over seeds of the sums, read off a key of known weight, equals the sums over all keys.

    The last key is the query itself, so it is heavy in every table: its share of the output is exp(s) / y(1).
    """
    T, seeds = 30, 400
    q, k = draw(1, 1, T, 4, seed=1), 0.5 * draw(1, 1, T, 4, seed=2)
    k[:, :, -1] = q[:, :, -1]
    score = (k[0, 0] @ q[0, 0, -1] / 2).exp()
    for settings in ({"candidates": 1, "bits": 8}, {"candidates": 6, "bits": 1}, {"candidates": 3, "bits": 3}):
        found = []
        for seed in range(seeds):
            share = shares(q, k, foveal.KDE(samples=5, tables=2, seed=seed, **settings))[0, 0, -1]
            found.append(share / share[-1] * score[-1])
        found = torch.stack(found)
        error = found.std(0) / seeds**0.5
        assert ((found.mean(0) - score).abs() <= 4 * error + 1e-12).all()
        total = found.sum(-1)
        assert abs(total.mean() - score.sum()) < 3 * total.std() / seeds**0.5
        assert total.std() > 0.01  # it is an estimate


def test_error_falls_with_samples_and_with_heavy_keys():
    q, k, v = draw(1, 1, 400, 8, seed=1), draw(1, 1, 400, 8, seed=2), draw(1, 1, 400, 3, seed=3)
    want = attention(q, k, v, causal=False)

    def error(**settings):
        found = [attention(q, k, v, foveal.KDE(seed=seed, **settings), causal=False) for seed in range(12)]
        return (torch.stack(found) - want).square().mean().sqrt().item()

    few = error(samples=20, candidates=1, tables=1, bits=12)
    assert few / error(samples=80, candidates=1, tables=1, bits=12) > 1.8  # the root of the samples, at least
    assert error(samples=20, candidates=40, tables=4, bits=3) < 0.75 * few


def test_a_query_reads_the_latest_keys_of_its_bucket():
    """One plane splits keys of both signs; the last query sees two of its own side, and a sample stands for all."""
    sign = planes(0, 1, 1, 1).sign().item()
    k = sign * torch.tensor([1.0, -1, 1, -1, 1, -1, 1], dtype=torch.float64)[None, None, :, None]
    share = shares(k, k, foveal.KDE(samples=1, candidates=2, tables=1, bits=1), scale=0.0)[0, 0, -1]
    close(share[4], share[6])
    others = (share / share[-1])[[0, 1, 2, 3, 5]]
    # the sample of 7 keys; this seed's is none of the two that are read
    close(others.sort().values, torch.tensor([0.0, 0.0, 0.0, 0.0, 7.0], dtype=torch.float64))


def test_draws_are_uniform_and_independent():
    n, i = torch.arange(1, 2001)[:, None], torch.arange(8)
    u = torch.stack([uniform(seed, n, i) for seed in range(3)])
    assert u.mean().item() == pytest.approx(0.5, abs=0.005)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.002)
    for axis in (0, 1, 2):
        a, b = u.narrow(axis, 0, u.shape[axis] - 1), u.narrow(axis, 1, u.shape[axis] - 1)
        assert torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].abs() < 0.02


def test_settings_of_kde_are_checked():
    for wrong in ({"samples": 0}, {"bits": 33}, {"bits": 1.5}, {"seed": -1}, {"tables": True}):
        with pytest.raises(ValueError, match=f"kde: {next(iter(wrong))} has"):
            foveal.KDE(**wrong)


# SEA


def estimates(T, columns, H=2, confidence=1.0):
    sure = torch.full((1, H, T), confidence, dtype=torch.float64)
    return {"estimate": draw(1, H, T, columns, seed=9), "confidence": sure}


def test_sea_reads_the_keys_of_the_best_columns_by_hand():
    # 8 keys in 3 columns: {0, 1}, {2, 3, 4}, {5, 6, 7}; the order is 2, 0, 1 and the budget 4
    q, k = torch.zeros(1, 1, 8, 2), draw(1, 1, 8, 2, dtype=torch.float32)
    estimate = torch.tensor([0.0, -1.0, 2.0]).expand(1, 1, 8, 3)
    for p, want in ((1.0, [0.25, 0, 0, 0, 0, 0.25, 0.25, 0.25]), (0.0, [0.125] * 8)):
        sure = torch.full((1, 1, 8), p)
        spec = foveal.SEA(top_k=4, columns=3)
        got = attention(q, k, k, spec, return_weights=True, estimate=estimate, confidence=sure).weights[0, 0, -1]
        got[0], got[1] = got[:2].sum(), 0  # one of the two keys of column 0
        want = [want[0] + want[1], 0, *want[2:]]
        close(got, torch.tensor(want))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("columns", [1, 5, 40])
def test_sea_reads_exactly_its_budget(columns, causal):
    q, k, _ = qkv(T=30)
    spec = foveal.SEA(top_k=7, columns=columns)
    read = attention(q, k, k, spec, return_weights=True, causal=causal, **estimates(30, columns)).weights
    n = torch.arange(1, 31) if causal else torch.full((30,), 30)
    assert ((read > 0).sum(-1) == n.clamp(max=7)).all()
    want = attention(q, k, k, return_weights=True, causal=causal).weights * (read > 0)
    close(read, want / want.sum(-1, keepdim=True))


@pytest.mark.parametrize("causal", [True, False])
def test_sea_between_softmax_and_the_mean(causal):
    q, k, v = qkv(T=30)
    mean = attention(0 * q, k, v, causal=causal)
    for p in (0.0, 0.3, 1.0):
        got = attention(q, k, v, foveal.SEA(top_k=30, columns=6), causal=causal, **estimates(30, 6, confidence=p))
        close(got, p * attention(q, k, v, causal=causal) + (1 - p) * mean)


def test_estimation_loss_is_least_at_the_teacher_s_map():
    """Row 4 of 4 columns has keys {0}, {1}, {2}, {3}; row 2 has them in columns 1 and 3."""
    weights = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.75, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])
    target = torch.tensor([[0.0, 0, 0, 1.0], [0, 0.25, 0, 0.75], [0, 0.2, 0.3, 0.5], [0.1, 0.2, 0.3, 0.4]])
    estimate = target.clamp(min=1e-30).log()[None, None].requires_grad_()
    loss = estimation_loss(estimate, weights[None, None])
    close(loss, -torch.xlogy(target, target).sum(-1).mean())
    (slope,) = torch.autograd.grad(loss, estimate)
    close(slope, torch.zeros_like(slope))
    assert estimation_loss(estimate + draw(1, 1, 4, 4), weights[None, None]) > loss


def test_a_trained_estimate_finds_the_teacher_s_keys():
    q, k, v = qkv(T=32, H=1)
    teacher = attention(3 * q, k, v, return_weights=True)
    estimate = torch.zeros(1, 1, 32, 16, dtype=torch.float64, requires_grad=True)
    sure = torch.ones(1, 1, 32, dtype=torch.float64)

    def error():
        got = attention(3 * q, k, v, foveal.SEA(top_k=6, columns=16), estimate=estimate, confidence=sure)
        return (got - teacher.output).norm() / teacher.output.norm()

    before = error()
    for _ in range(100):
        (slope,) = torch.autograd.grad(estimation_loss(estimate, teacher.weights), estimate)
        estimate = (estimate - 100 * slope).detach().requires_grad_()
    assert error() < 0.3 * before
