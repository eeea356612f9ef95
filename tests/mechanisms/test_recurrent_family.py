"""What makes each recurrence what it is: values worked out by hand, identities, and independent implementations."""

import importlib.util
import math
import pathlib

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

import foveal
from foveal import RecurrentState, attention
from foveal.call import Call
from foveal.engines.recurrence import Recur, eager
from foveal.engines.scan.eager import scan
from test_oracles import first, fla

close = torch.testing.assert_close
FORMS = ["parallel", "chunked", "recurrent"]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(T=24, K=6, V=4, H=2, dtype=torch.float64):
    return (
        draw(1, H, T, K, seed=1, dtype=dtype),
        draw(1, H, T, K, seed=2, dtype=dtype),
        draw(1, H, T, V, seed=3, dtype=dtype),
    )


def row(*numbers):
    """One head of one sequence with one channel, [1, 1, T, 1]."""
    return torch.tensor(numbers, dtype=torch.float64)[None, None, :, None]


def gate(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[None, None]


def flat(x):
    return [round(y, 6) for y in x.flatten().tolist()]


def weights(mechanism, q, k, **inputs):
    """The map of a mechanism, [B, H, T, S]."""
    return attention(q, k, k, mechanism, return_weights=True, **inputs).weights


# Oracles, in layout [B, T, H, K] unless they take the other

B, H, T, K, V = 2, 3, 64, 8, 6


@pytest.fixture
def given():
    q, k = draw(B, T, H, K, seed=1), normalize(draw(B, T, H, K, seed=2), dim=-1)
    return tuple(x.float() for x in (q, k, draw(B, T, H, V, seed=3)))


def gates(*shape, seed=4):
    return logsigmoid(draw(*shape, seed=seed)).float()


def agrees(got, want):
    close(got, want, rtol=1e-4, atol=1e-5)


def swap(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


def fla_file(folder, file):
    """A reference of flash-linear-attention that is not called naive.py."""
    fla("linear_attn")  # skips where the package is missing
    root = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"fla_{folder}_{file}", root / "ops" / folder / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kda_matches_fla(given):
    decay, beta = gates(B, T, H, K), gates(B, T, H, seed=5).exp()
    got = attention(*given, foveal.KDA(normalize_qk=False), layout="bthd", log_decay=decay, beta=beta)
    agrees(got, first(fla("kda").naive_recurrent_kda(*given, decay, beta)))
    agrees(got, first(fla("kda").naive_chunk_kda(*given, decay, beta)))


@pytest.mark.parametrize("gated", [True, False])
def test_delta_product_matches_fla(given, gated):
    q, n = given[0], 3
    keys, values = normalize(draw(B, T * n, H, K, seed=6), dim=-1).float(), draw(B, T * n, H, V, seed=7).float()
    beta, decay = 2 * gates(B, T * n, H, seed=5).exp(), gates(B, T, H) if gated else None
    naive = fla("gated_delta_product").naive_recurrent_gated_delta_product
    want = first(naive(q, keys, values, decay, beta, K**-0.5, num_householder=n))
    k, v, b = (x.unflatten(1, (T, n)) for x in (keys, values, beta))
    more = {"k_more": k[:, :, 1:].movedim(3, 1), "v_more": v[:, :, 1:].movedim(3, 1), "beta": b.movedim(3, 1)}
    gated = {} if decay is None else {"log_decay": decay.mT}
    spec = foveal.DeltaProduct(steps=n, normalize_qk=False)
    agrees(attention(*swap(q, k[:, :, 0], v[:, :, 0]), spec, **more, **gated).transpose(1, 2), want)


def test_comba_matches_fla_s_chunks(given):
    q, k, v = given
    decay, beta = gates(B, T, H), gates(B, T, H, seed=5).exp()
    b, d = gates(H, seed=6).exp(), draw(H, seed=7).float()
    want = first(fla("comba").naive_chunk_comba(q - d[:, None] * k, k, v, b[:, None] * k, decay, beta))
    inputs = {"log_decay": decay, "beta": beta, "feedback": b, "correction": d}
    agrees(attention(q, k, v, foveal.Comba(normalize_qk=False), layout="bthd", **inputs), want)


def test_rwkv6_matches_fla(given):
    q, k, v = swap(*given)
    decay, u = gates(B, H, T, K), draw(H, K, seed=5).float()
    got = attention(q, k, v, "rwkv6", log_decay=decay, bonus=u)
    agrees(got, first(fla_file("rwkv6", "recurrent_naive").naive_recurrent_rwkv6(q, k, v, decay, u)))
    got = attention(q, k, v, "rwkv6", scale=1.0, log_decay=decay, bonus=u)
    agrees(got, fla_file("rwkv6", "chunk_naive").naive_chunk_rwkv6(q, k, v, decay, u))


def test_rwkv7_matches_fla_s_diagonal_plus_low_rank(given):
    q, k, v = swap(*given)
    decay = -math.exp(-0.5) * gates(B, H, T, K).exp()
    removal, rate = draw(B, H, T, K, seed=5).float(), gates(B, H, T, K, seed=6).exp()
    unit = normalize(removal, dim=-1)
    got = attention(q, k, v, "rwkv7", log_decay=decay, removal=removal, rate=rate)
    naive = fla("generalized_delta_rule/dplr")
    agrees(got, first(naive.dplr_recurrence(q, k, v, -unit, rate * unit, decay)))
    agrees(got, first(naive.dplr_chunkwise(q, k, v, -unit, rate * unit, decay)))


def test_mesa_matches_fla_s_exact_solution(given):
    q, k, _ = given
    v = draw(B, T, H, K, seed=3).float()  # as wide as keys
    decay, beta, ridge = gates(B, T, H), gates(B, T, H, seed=5).exp(), 0.25 + draw(H, K, seed=6).abs().float()
    want = first(fla("mesa_net").naive_mesa_net_exact(q, k, v, decay, ridge, beta))
    inputs = {"log_decay": decay, "beta": beta, "ridge": ridge}
    agrees(attention(q, k, v, foveal.Mesa(normalize_qk=False), layout="bthd", scale=1.0, **inputs), want)


def test_gated_slot_matches_fla(given):
    decay = gates(B, T, H, 5)
    want, (keys, values) = fla("gsa").naive_recurrent_gsa(*given, 1 - decay.exp(), decay, output_final_state=True)
    got = attention(*given, foveal.GatedSlot(slots=5), layout="bthd", log_decay=decay, output_final_state=True)
    agrees(got.output, want)
    agrees(got.state.parts[0].matrix, keys)
    agrees(got.state.parts[1].matrix, values)


def test_hgrn_matches_fla():
    x, decay = draw(B, T, V, seed=1).float(), gates(B, T, V)
    want = first(fla("hgrn").naive_recurrent_hgrn((1 - decay.exp()) * x, decay))
    one = torch.ones(B, 1, T, 1)
    agrees(attention(one, one, x[:, None], "hgrn", log_decay=decay[:, None])[:, 0], want)


def test_hgrn2_matches_fla_s_gated_linear_attention(given):
    q, x, v = given
    f = 0.3 + 0.7 * x.sigmoid()
    want = first(fla("gla").naive_recurrent_gla(q, 1 - f, v, f.log()))
    agrees(attention(q, x, v, foveal.HGRN2(lower_bound=0.3), layout="bthd"), want)


@pytest.mark.parametrize("length", [64, 65, 127])
def test_log_linear_mamba2_matches_fla(length):
    q, k, v = (draw(B, length, H, size, seed=size).float() for size in (K, K + 1, V))
    k, dt, A = k[..., :K], gates(B, length, H).exp(), -draw(H).exp().float()
    level_weights = draw(B, length, H, 8, seed=5).abs().float()
    naive = fla("log_linear_attn").naive_log_linear_attn
    want = naive(q, dt[..., None] * k, v, dt * A, level_weights)
    inputs = {"dt": dt, "A": A, "level_weights": level_weights}
    agrees(attention(q, k, v, foveal.LogLinearMamba2(levels=8), layout="bthd", scale=1.0, **inputs), want)


def test_forgetting_matches_fla():
    q, k, v, decay = (
        draw(B, T, 4, K).float(),
        draw(B, T, 2, K).float(),
        draw(B, T, 2, K, seed=3).float(),
        gates(B, T, 4),
    )
    want = fla("forgetting_attn").naive_forgetting_attn(q, k, v, decay)
    agrees(attention(q, k, v, "forgetting", layout="bthd", log_decay=decay), want)


# Delta rules


def test_kda_forgets_channel_by_channel():
    eye = torch.eye(2, dtype=torch.float64)[None, None]
    v = torch.tensor([[3.0], [5.0]], dtype=torch.float64)[None, None]
    decay = torch.tensor([[0.0, 0.0], [math.log(0.5), math.log(0.1)]], dtype=torch.float64)[None, None]
    q = torch.ones(1, 1, 2, 2, dtype=torch.float64)
    got = attention(q, eye, v, foveal.KDA(normalize_qk=False), scale=1.0, log_decay=decay, beta=gate(1.0, 1.0))
    assert flat(got) == [3.0, 0.5 * 3 + 5]  # channel 1 held nothing yet when it forgot


def test_two_reflections_per_token_rotate_the_state():
    """Mirrors at an angle of 45 degrees turn by 90: the state goes around a square, as no single reflection could."""
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5**0.5, 0.5**0.5]).double()
    ones = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    beta = torch.full((1, 1, 6, 2), 2.0, dtype=torch.float64)
    beta[:, :, 0] = torch.tensor([1.0, 0.0])  # the first token only writes 1 at a
    v = torch.zeros_like(ones)
    v[:, :, 0] = 1
    inputs = {"k_more": (ones * b)[:, :, :, None], "v_more": torch.zeros_like(v)[:, :, :, None], "beta": beta}
    got = attention(ones * a, ones * a, v, foveal.DeltaProduct(steps=2), scale=1.0, **inputs)
    assert flat(got) == pytest.approx([1, 0, -1, 0, 1, 0], abs=1e-6)


def test_comba_erases_what_stood_before_the_decay():
    inputs = {"log_decay": gate(0.0, math.log(0.5)), "beta": gate(1.0, 0.5)}
    full = {"feedback": torch.ones(1).double(), "correction": torch.zeros(1).double()}
    got = attention(row(1, 1), row(1, 1), row(8, 2), "comba", **inputs, **full)
    assert flat(got) == [8.0, (0.5 - 0.5) * 8 + 0.5 * 2]
    gated = attention(row(1, 1), row(1, 1), row(8, 2), "gated_delta_rule", **inputs)
    assert flat(gated) == [8.0, 0.5 * (1 - 0.5) * 8 + 0.5 * 2]


def test_comba_reads_with_the_key_taken_off_the_query():
    inputs = {"log_decay": gate(0.0), "beta": gate(1.0), "feedback": torch.ones(1).double()}
    got = attention(row(1), row(1), row(8), "comba", correction=torch.tensor([0.25]).double(), **inputs)
    assert flat(got) == [6.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["comba", "rwkv7"])
def test_a_total_decay_before_the_erasure_stays_finite_in_fp32(name, form):
    q, k, v = (x.float() for x in qkv(T=40))
    shape = (1, 2, 40) if name == "comba" else (1, 2, 40, 6)
    log_decay = -0.1 * draw(*shape, seed=5).abs().float()
    log_decay[:, :, 7::9] = -1e4
    inputs = {"log_decay": log_decay}
    if name == "comba":
        inputs["beta"] = draw(1, 2, 40, seed=6).sigmoid().float()
    else:
        inputs |= {"removal": draw(*shape, seed=6).float(), "rate": draw(*shape, seed=7).sigmoid().float()}
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    got = attention(q, k, v, name, form=form, **inputs)
    spec = foveal.get(name)()
    wide = {n: x.detach().double() for n, x in inputs.items()} | (
        {"feedback": torch.tensor([0.5, 0.5]).double(), "correction": torch.ones(2).double()} if name == "comba" else {}
    )
    for h in range(2):
        own = {n: x[0, h] if x.dim() > 1 else x[h] for n, x in wide.items()}
        want = spec.definition(*(x[0, h].double() for x in (q, k, v)), scale=6**-0.5, **own)
        close(got[0, h].double(), want, rtol=1e-4, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), list(inputs.values())))


def test_rwkv7_with_one_key_for_erasing_and_writing_is_comba():
    q, k, v = qkv()
    beta, decay = draw(1, 2, 24, seed=5).sigmoid(), 0.6 * logsigmoid(draw(1, 2, 24, seed=6))
    unit = normalize(k, dim=-1)
    full = {"feedback": torch.ones(2).double(), "correction": torch.zeros(2).double()}
    want = attention(normalize(q, dim=-1), k, v, "comba", beta=beta, log_decay=decay, **full)
    wide = {"rate": beta[..., None].expand_as(k), "log_decay": decay[..., None].expand_as(k)}
    got = attention(normalize(q, dim=-1), beta[..., None] * unit, v, "rwkv7", removal=k, **wide)
    close(got, want)


def test_rwkv6_reads_before_the_current_token_enters():
    decay = gate(math.log(0.1), math.log(0.5), math.log(0.25))[..., None]
    call = {"q": row(1, 1, 1), "k": row(1, 1, 1), "v": row(8, 2, 5), "log_decay": decay}
    # S_1 = 8, S_2 = 0.5 * 8 + 2: the decay of a token acts after it was asked
    past = [0.0, 8.0, 6.0]
    assert flat(attention(mechanism="rwkv6", bonus=torch.zeros(1, 1).double(), **call)) == past
    with_bonus = [old + 3 * new for old, new in zip(past, [8, 2, 5], strict=True)]
    assert flat(attention(mechanism="rwkv6", bonus=torch.full((1, 1), 3.0).double(), **call)) == with_bonus


# Mesa


def test_mesa_is_the_weighted_ridge_regression_of_values_on_keys():
    q, k, v = qkv(T=12, K=4, V=3, H=1)
    decay, beta = logsigmoid(draw(1, 1, 12, seed=5)), draw(1, 1, 12, seed=6).sigmoid()
    ridge = torch.tensor([[0.3, 0.5, 1.0, 2.0]]).double()
    spec = foveal.Mesa(normalize_qk=False)
    got = attention(q, k, v, spec, scale=1.0, log_decay=decay, beta=beta, ridge=ridge)
    for t in (0, 2, 11):
        weight = beta[0, 0, : t + 1] * (decay[0, 0].cumsum(0)[t] - decay[0, 0].cumsum(0)[: t + 1]).exp()
        root = weight.sqrt()[:, None]
        left = torch.cat((root * k[0, 0, : t + 1], ridge[0].sqrt().diag()))
        right = torch.cat((root * v[0, 0, : t + 1], torch.zeros(4, 3).double()))
        close(got[0, 0, t], q[0, 0, t] @ torch.linalg.lstsq(left, right).solution)


def test_mesa_learns_a_linear_map_from_as_many_pairs_as_channels():
    q, k, _ = qkv(T=12, K=4, H=1)
    W = draw(4, 3, seed=8)
    still = {"log_decay": torch.zeros(1, 1, 12).double(), "beta": torch.ones(1, 1, 12).double()}
    got = attention(q, k, k @ W, foveal.Mesa(normalize_qk=False), scale=1.0, ridge=torch.full((1, 4), 2e-4), **still)
    close(got[:, :, -1], q[:, :, -1] @ W, rtol=1e-3, atol=1e-3)


# Slots and gates


def test_a_slot_for_each_token_is_softmax_attention():
    q, k, v = qkv(T=9)
    taken = torch.eye(9, dtype=torch.bool)
    log_decay = torch.zeros(1, 2, 9, 9).double().masked_fill(taken, -1e3)  # token t fills slot t and no other
    got = attention(q, k, v, foveal.GatedSlot(slots=9), log_decay=log_decay)
    close(got[:, :, -1], attention(q, k, v)[:, :, -1])  # before, the empty slots take part with a score of 0


def test_one_slot_is_a_running_mean_whatever_is_asked():
    q, k, v = qkv()
    log_decay = logsigmoid(draw(1, 2, 24, 1, seed=5))
    want = attention(q, k, v, "hgrn", log_decay=log_decay.expand_as(v))
    close(attention(q, k, v, foveal.GatedSlot(slots=1), log_decay=log_decay), want)


def test_hgrn_by_hand():
    v, f = row(8, 2, 4), gate(0.5, 0.75, 0.0)[..., None]
    assert flat(attention(v, v, v, "hgrn", log_decay=f.log())) == [4.0, 0.75 * 4 + 0.25 * 2, 4.0]


def test_hgrn2_by_hand():
    x = torch.tensor([0.0, math.log(3)]).double()[None, None, :, None]  # gates 1/2 and 3/4
    got = attention(row(1, 2), x, row(8, 2), "hgrn2")
    assert flat(got) == [4.0, 2 * (0.75 * 4 + 0.25 * 2)]
    got = attention(row(1, 2), x, row(8, 2), foveal.HGRN2(lower_bound=0.5))  # 3/4 and 7/8
    assert flat(got) == [2.0, 2 * (0.875 * 2 + 0.125 * 2)]


@pytest.mark.parametrize("lower_bound", [0.0, 0.5])
def test_hgrn2_has_finite_gradients_at_shut_gates(lower_bound):
    q, v = (x.float() for x in qkv()[::2])
    k = torch.full_like(q, -1000.0).requires_grad_()
    out = attention(q, k, v, foveal.HGRN2(lower_bound=lower_bound))
    assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()
    if lower_bound == 0:  # everything but the token itself is forgotten
        close(out, 6**-0.5 * q.sum(-1, keepdim=True) * v)


@pytest.mark.parametrize("bound", [-0.1, 1, 1.5, "x", True])
def test_hgrn2_s_bound_is_below_1(bound):
    with pytest.raises(ValueError, match=r"hgrn2: lower_bound has .*, expected a number from 0"):
        foveal.HGRN2(lower_bound=bound)


# The scan engine


def looped(log_decay, write, start):
    h, rows = start[:, :, 0], []
    for t in range(write.shape[2]):
        h = log_decay[:, :, t].exp() * h + write[:, :, t]
        rows.append(h)
    return torch.stack(rows, 2)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 131])
def test_scan_is_the_loop_in_chunks_of_any_size(size):
    x = [-draw(2, 3, 131, 4, seed=1).abs(), draw(2, 3, 131, 4, seed=2), draw(2, 3, 1, 4, seed=3)]
    x = [y.requires_grad_() for y in x]
    got, want = scan(*x, size), looped(*x)
    close(got, want)
    weight = draw(2, 3, 131, 4, seed=4)
    for mine, other in zip(*(torch.autograd.grad((y * weight).sum(), x) for y in (got, want)), strict=True):
        close(mine, other)


def test_scan_can_be_differentiated_twice():
    x = [-draw(1, 1, 5, 2, seed=1).abs(), draw(1, 1, 5, 2, seed=2), draw(1, 1, 1, 2, seed=3)]
    assert torch.autograd.gradgradcheck(lambda *y: scan(*y, 4), [y.requires_grad_() for y in x])


def test_scan_is_a_well_behaved_operator():
    x = [-draw(1, 2, 9, 2, seed=1).abs(), draw(1, 2, 9, 2, seed=2), draw(1, 2, 1, 2, seed=3)]
    torch.library.opcheck(scan, (*(y.requires_grad_() for y in x), 4))


@pytest.mark.parametrize("form", FORMS)
def test_scan_takes_gates_that_forget_everything(form):
    q, _, v = (x.float() for x in qkv(T=200))
    log_decay = -0.01 * draw(1, 2, 200, 4, seed=5).abs().float()
    log_decay[:, :, 70] = -torch.inf
    log_decay[:, :, 90] = -1e4
    log_decay = log_decay.requires_grad_()
    got = attention(q, q, v, "hgrn", form=form, log_decay=log_decay)
    want = looped(log_decay.double(), -torch.expm1(log_decay.double()) * v.double(), torch.zeros(1, 2, 1, 4).double())
    close(got.double(), want, rtol=1e-5, atol=1e-6)
    close(got[:, :, 70], v[:, :, 70])
    assert torch.autograd.grad(got.sum(), log_decay)[0].isfinite().all()


def test_a_scan_refuses_states_that_are_not_its_own():
    q, k, v = qkv()
    decay = logsigmoid(draw(1, 2, 24, 4))
    for wrong, message in [
        (RecurrentState(draw(1, 2, 6, 4)), r"hgrn: initial_state has matrix \(1, 2, 6, 4\), expected \[B, H, 1, V\]"),
        (RecurrentState(draw(1, 2, 1, 3)), r"hgrn: initial_state has matrix \(1, 2, 1, 3\), expected \(1, 2, 1, 4\)"),
        (foveal.KeyValueState(k, v), "hgrn: initial_state has KeyValueState, expected RecurrentState"),
    ]:
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, "hgrn", log_decay=decay, initial_state=wrong)
    with pytest.raises(ValueError, match="a scan has no log-sum-exp"):
        attention(q, k, v, "hgrn", log_decay=decay, return_lse=True)


# mLSTM


def parallel_mlstm(q, k, v, input_gate, log_decay):
    """The stabilised parallel form of the papers, with the maximum of each row, in float64."""
    q, k, v, i, lf = (x.double() for x in (q, k, v, input_gate, log_decay))
    F = lf.cumsum(-1)
    log_D = F[..., :, None] - F[..., None, :] + i[..., None, :]
    log_D = log_D.masked_fill(~torch.ones_like(log_D).tril().bool(), -torch.inf)
    m = log_D.amax(-1, keepdim=True)
    S = (q @ k.mT) * q.shape[-1] ** -0.5 * (log_D - m).exp()
    return (S @ v) / torch.maximum(S.sum(-1, keepdim=True).abs(), (-m).exp())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1.0, 50.0, 200.0])
def test_mlstm_is_stable_in_fp32_for_any_input_gate(size, form):
    q, k, v = qkv(T=150, dtype=torch.float32)
    i = size * (2 * torch.rand(1, 2, 150, generator=torch.Generator().manual_seed(6)) - 1)
    lf = logsigmoid(draw(1, 2, 150, seed=7)).float()
    inputs = [x.requires_grad_() for x in (q, k, v, i, lf)]
    got = attention(q, k, v, "mlstm", form=form, input_gate=i, log_decay=lf)
    want = parallel_mlstm(*inputs)
    # where n'q nearly cancels, rounding of the terms shows; rows are judged by their size otherwise
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.median() < 1e-6
    assert error.quantile(0.95) < 1e-4
    weight = draw(1, 2, 150, 4, seed=8)
    for mine, other in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (got, want)), strict=True):
        assert mine.isfinite().all()
        scale = other.abs().flatten().quantile(0.9)
        assert (mine - other).abs().median() < 1e-4 * scale


def test_mlstm_goes_on_token_by_token_in_fp32():
    q, k, v = qkv(T=60, dtype=torch.float32)
    i = 50 * (2 * torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(6)) - 1)
    lf = logsigmoid(draw(1, 2, 60, seed=7)).float()
    want, state, rows = attention(q, k, v, "mlstm", input_gate=i, log_decay=lf), None, []
    for t in range(60):
        piece = [x[:, :, t : t + 1] for x in (q, k, v, i, lf)]
        inputs = {"input_gate": piece[3], "log_decay": piece[4]}
        out = attention(*piece[:3], "mlstm", initial_state=state, output_final_state=True, **inputs)
        rows.append(out.output)
        state = out.state
    close(torch.cat(rows, 2), want, rtol=1e-4, atol=1e-5)


def test_a_constant_on_all_input_gates_shows_only_at_the_floor():
    q, k, v = qkv()
    i, lf = draw(1, 2, 24, seed=6), logsigmoid(draw(1, 2, 24, seed=7))
    high = [attention(q, k, v, "mlstm", input_gate=i + c, log_decay=lf) for c in (40.0, 60.0)]
    close(high[0], high[1])  # far above the floor
    low = [attention(q, k, v, "mlstm", input_gate=i - c, log_decay=lf) for c in (20.0, 21.0)]
    close(low[0], low[1] * math.e)  # below it nothing is divided


def test_a_late_gate_outweighs_all_that_came_before():
    one = row(1, 1, 1)
    got = attention(one, one, row(8, 2, 5), "mlstm", input_gate=gate(1.0, 40.0, 41.0), log_decay=gate(0.0, 0.0, 0.0))
    assert flat(got) == pytest.approx([8.0, 2.0, (2 + 5 * math.e) / (1 + math.e)], abs=1e-6)


def test_mlstm_with_a_sigmoid_gate_is_decayed_linear_attention_on_scaled_values():
    q, k, v = qkv()
    i, lf = draw(1, 2, 24, seed=6), logsigmoid(draw(1, 2, 24, seed=7))
    got = attention(q, k, v, "mlstm_sigmoid", input_gate=i, log_decay=lf)
    close(got, attention(q, k, i.sigmoid()[..., None] * v, "gla", log_decay=lf[..., None].expand_as(k)))


def test_a_running_maximum_streams_past_padding():
    x, fallen = 3 * draw(2, 1, 20, 1, seed=1), logsigmoid(draw(2, 1, 20, 1, seed=2))
    padding = torch.rand(2, 20, generator=torch.Generator().manual_seed(3)) > 0.3
    want, m = torch.zeros(2, 20).double(), [0.0, 0.0]
    for b in range(2):
        for t in range(20):
            if padding[b, t]:
                m[b] = max(m[b] + fallen[b, 0, t, 0].item(), x[b, 0, t, 0].item(), 0.0)
            want[b, t] = m[b]
    state, found = None, []
    for span in (slice(0, 1), slice(1, 13), slice(13, 13), slice(13, 20)):
        z = x[:, :, span]
        call = Call(z, z, z, 1.0, padding=padding[:, span], state=state, want_state=True)
        recur = Recur(foveal.MLSTM(), call, eager.kernel)
        now, before = recur.running_max(z, fallen[:, :, span])
        assert before.shape == now.shape == z.shape
        start = torch.zeros(2, 1, 1, 1).double() if state is None else state.matrix
        close(torch.cat((start, now), 2)[:, :, :-1], before)
        found.append(now)
        state = recur.state()
    close(torch.cat(found, 2)[:, 0, :, 0], want)


# Levels


def level(t, j):
    return 0 if t == j else (t ^ j).bit_length()


@pytest.mark.parametrize("length", [1, 2, 65, 127])
@pytest.mark.parametrize("name", ["log_linear_mamba2", "log_linear_gated_delta"])
def test_levels_weigh_the_map_of_the_host(name, length):
    q, k, _ = qkv(T=length)
    inputs = {"dt": draw(1, 2, length, seed=5).exp(), "A": -draw(2, seed=6).exp()}
    if name == "log_linear_gated_delta":
        inputs = {"log_decay": logsigmoid(draw(1, 2, length, seed=5)), "beta": draw(1, 2, length, seed=6).sigmoid()}
    host = weights({"log_linear_mamba2": "mamba2"}.get(name, "gated_delta_rule"), q, k, **inputs)
    level_weights = draw(1, 2, length, 8, seed=7).abs()
    for levels in (8, 3, 2, 1):
        own = level_weights[..., :levels]
        place = torch.tensor([[min(level(t, j), levels - 1) for j in range(length)] for t in range(length)])
        want = host * own.gather(-1, place.expand(1, 2, length, length))
        got = weights(foveal.get(name)(levels=levels), q, k, level_weights=own, **inputs)
        close(got, want)


def test_buckets_cut_the_past_into_powers_of_two():
    for t in range(130):
        sizes = [sum(level(t, j) == n for j in range(t + 1)) for n in range(9)]
        assert sizes == [1, *(t & 2**n for n in range(8))]


def test_levels_that_nobody_asks_yet_are_kept_for_later():
    q, k, v = qkv(T=20)
    inputs = {"log_decay": logsigmoid(draw(1, 2, 20, seed=5)), "beta": draw(1, 2, 20, seed=6).sigmoid()}
    inputs["level_weights"] = draw(1, 2, 20, 7, seed=7).abs()
    spec = foveal.LogLinearGatedDelta(levels=7)
    want = attention(q, k, v, spec, **inputs)
    head = attention(
        *(x[:, :, :5] for x in (q, k, v)), spec, output_final_state=True, **{n: x[:, :, :5] for n, x in inputs.items()}
    )
    tail = attention(
        *(x[:, :, 5:] for x in (q, k, v)), spec, initial_state=head.state, **{n: x[:, :, 5:] for n, x in inputs.items()}
    )
    close(torch.cat((head.output, tail), 2), want)


# Forgetting attention


def test_a_constant_forget_gate_is_alibi():
    q, k, v = qkv(H=4)
    slopes = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(4)]).double()
    log_decay = -slopes[:, None].expand(1, 4, 24)
    close(attention(q, k, v, "forgetting", log_decay=log_decay), attention(q, k, v, foveal.Softmax(alibi=True)))


@pytest.mark.parametrize("shut", [-torch.inf, -1e5, -1e3])
def test_a_shut_forget_gate_starts_afresh(shut):
    q, k, v = qkv()
    log_decay = logsigmoid(draw(1, 2, 24, seed=5))
    log_decay[:, :, 10] = shut
    got = attention(q, k, v, "forgetting", log_decay=log_decay)
    late = attention(*(x[:, :, 10:] for x in (q, k, v)), "forgetting", log_decay=log_decay[:, :, 10:])
    close(got[:, :, 10:], late)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forgetting_keeps_its_digits_over_a_long_sum(dtype):
    q, k, v = (x.to(dtype) for x in qkv(T=800))
    log_decay = -draw(1, 2, 800, seed=5).abs().float()
    got = attention(q, k, v, "forgetting", log_decay=log_decay)
    want = attention(*(x.double() for x in (q, k, v)), "forgetting", log_decay=log_decay.double())
    exact = dtype == torch.float32
    close(got.double(), want, rtol=2e-4 if exact else 2**-7, atol=2e-4 if exact else 2**-8)


def test_log_sum_exp_counts_what_is_forgotten():
    q, k, v = draw(1, 2, 3, 4, seed=1), draw(1, 2, 5, 4, seed=2), draw(1, 2, 5, 3, seed=3)
    log_decay = logsigmoid(draw(1, 2, 3, seed=5))
    scores = 0.5 * q @ k.mT
    for t in range(3):
        for j in range(5):  # query t stands at key t + 2; keys 0 and 1 have no gates
            scores[:, :, t, j] += log_decay[:, :, max(j - 1, 0) : t + 1].sum(-1) if j <= t + 2 else -torch.inf
    got = attention(q, k, v, "forgetting", log_decay=log_decay, return_lse=True)
    close(got.lse, scores.logsumexp(-1))
    close(got.output, scores.softmax(-1) @ v)
    more = attention(
        draw(1, 2, 5, 4), k[:, :, :2], v[:, :, :2], "forgetting", log_decay=draw(1, 2, 5) * 0, return_lse=True
    )
    assert (more.lse[:, :, :3] == -torch.inf).all()


def test_forgetting_refuses_what_it_cannot_do():
    q, k, v = qkv()
    log_decay = logsigmoid(draw(1, 2, 24))
    with pytest.raises(ValueError, match="forgetting: causal has 'top-left'"):
        attention(q[:, :, :5], k, v, "forgetting", causal="top-left", log_decay=log_decay[:, :, :5])
    with pytest.raises(ValueError, match="forgetting: initial_state has KeyValueState"):
        attention(q, k, v, "forgetting", initial_state=foveal.KeyValueState(k, v), log_decay=log_decay)
    with pytest.raises(ValueError, match="round the sums of the gates"):
        attention(q, k, v, "forgetting", backend="sdpa", log_decay=log_decay)
