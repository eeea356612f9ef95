"""The compiled recurrence kernels against step-by-step float64: values, states and every gradient."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

import foveal
from foveal import RecurrentState, attention, native
from foveal.engines.recurrence import Terms, eager
from foveal.engines.recurrence import native as engine

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="foveal was installed without its compiled kernels")

DECAYS = (0.0, -1e-4, -1.0, -5.0, -20.0, -1e4)
KINDS = list(itertools.product(("none", "head", "channel"), ("none", "written", "other")))
SIZES = [(1, 1, 1), (7, 3, 5), (16, 8, 16), (63, 5, 1), (65, 16, 9), (130, 17, 24), (200, 8, 8)]


def make(decay, erase, T, K, V, *, decays=DECAYS, normalized=False, B=2, H=3):
    """Letters whose state neither grows nor dies, by name; decays are drawn from a set, per token and channel."""
    x = {"read": torch.randn(B, H, T, K), "write": torch.randn(B, H, T, K), "value": torch.randn(B, H, T, V)}
    x["state"] = torch.randn(B, H, K, V)
    if normalized:
        x = {name: tensor.abs() + 0.1 if name != "value" else tensor for name, tensor in x.items()}
        x["normalizer"] = torch.rand(B, H, K) + 1
    if decay != "none":
        width = 1 if decay == "head" else K
        x["log_decay"] = torch.tensor(decays)[torch.randint(len(decays), (B, H, T, width))]
    if erase != "none":
        x["w"] = normalize(torch.randn(B, H, T, K), dim=-1)
        x["write"] = x["w"] * torch.rand(B, H, T, 1)
        if erase == "other":
            x["u"] = (x["w"] + 0.1 * torch.randn(B, H, T, K)) * 0.7 * torch.rand(B, H, T, 1)
    return x


def run(kernel, x, form, scale=0.3):
    """The output and everything that the final state holds."""
    erase = (x.get("u", x["write"]), x["w"]) if "w" in x else None
    terms = Terms(x["read"], x["write"], x["value"], x.get("log_decay"), erase, normalize="normalizer" in x)
    state = RecurrentState(x["state"], x.get("normalizer")) if "state" in x else None
    output, final = kernel(terms, scale, state, form)
    return [output, *final.tensors()]


def differentiate(kernel, x, form, loss=None):
    """What :func:`run` gives, and the gradient of every letter, by name."""
    x = {name: tensor.detach().clone().requires_grad_() for name, tensor in x.items()}
    outputs = run(kernel, x, form)
    if loss is None:
        g = torch.Generator().manual_seed(1)
        total = sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)).sum() for y in outputs)
    else:
        total = loss(outputs)
    grads = torch.autograd.grad(total, list(x.values()), allow_unused=True, materialize_grads=True)
    names = ["output", "final state", "final normalizer"][: len(outputs)]
    return dict(zip(names, (y.detach() for y in outputs))) | {f"gradient of {n}": g for n, g in zip(x, grads)}


def agree(got, want, case, tolerance=1e-4):
    """Largest error relative to the largest value of the same thing."""
    assert got.keys() == want.keys()
    for name, exact in want.items():
        scale = max(float(exact.abs().max()), 1e-3) if exact.numel() else 1.0
        error = float((got[name].double() - exact).abs().max()) if exact.numel() else 0.0
        assert error <= tolerance * scale, f"{case}, {name}: error {error:.2e} of {scale:.2e}"  # NaN fails too


def double(x):
    return {name: tensor.double() for name, tensor in x.items()}


@pytest.mark.parametrize(("decay", "erase"), KINDS)
@pytest.mark.parametrize("started", [False, True])
def test_values_states_and_gradients(decay, erase, started):
    for T, K, V in SIZES:
        x = make(decay, erase, T, K, V)
        if not started:
            del x["state"]
        want = differentiate(eager.kernel, double(x), "recurrent")
        for form in (None, "chunked", "recurrent"):
            agree(differentiate(engine.kernel, x, form), want, f"{form} form, T, K, V = {T, K, V}")
            with torch.no_grad():  # no gradients: other code saves nothing, or takes the steps one by one
                plain = dict(zip(want, run(engine.kernel, x, form)))
            agree(plain, {name: want[name] for name in plain}, f"{form} form without gradients, {T, K, V}")


@pytest.mark.parametrize(("decay", "erase"), [(d, "none") for d in ("none", "head", "channel")] + [("head", "other")])
def test_normalizer(decay, erase):
    for T, K, V in SIZES:
        x = make(decay, erase, T, K, V, normalized=True, decays=(0.0, -0.1, -1e4))
        if erase != "none":  # a weight that stays away from 0
            x["u"], x["write"] = 0.1 * x["u"], x["write"].abs() + 0.1
        want = differentiate(eager.kernel, double(x), "recurrent")
        for form in ("chunked", "recurrent"):
            agree(differentiate(engine.kernel, x, form), want, f"{form} form, {T, K, V}")
            with torch.no_grad():
                plain = dict(zip(want, run(engine.kernel, x, form)))
            agree(plain, {name: want[name] for name in plain}, f"{form} form without gradients, {T, K, V}")


def test_nothing_written_yet_reads_zero():
    x = {name: torch.zeros(1, 1, 3, 2) for name in ("read", "write", "value")}
    x |= {"state": torch.zeros(1, 1, 2, 2), "normalizer": torch.zeros(1, 1, 2)}
    found = differentiate(engine.kernel, x, "chunked", loss=lambda y: y[0].sum())
    assert all((y == 0).all() for y in found.values())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", ["head", "channel"])
@pytest.mark.parametrize("erase", ["none", "written"])
def test_every_strength_of_decay(decay, kind, erase):
    x = make(kind, erase, 150, 16, 8, decays=(decay,))
    agree(differentiate(engine.kernel, x, "chunked"), differentiate(eager.kernel, double(x), "recurrent"), "")


def test_what_is_forgotten_leaves_no_trace():
    for width in (1, 2):
        x = {name: torch.ones(1, 1, 3, 2) for name in ("read", "write", "value")}
        x |= {"state": torch.full((1, 1, 2, 2), 1e30), "log_decay": torch.full((1, 1, 3, width), -1e4)}
        for form in ("chunked", "recurrent"):
            assert (run(engine.kernel, x, form, scale=1.0)[0] == 2).all()  # r'p v of the token itself


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_a_million_steps_neither_drift_nor_grow(name):
    """Decoding goes on from its own state: after a million tokens it is where float64 chunks are."""
    spec, pieces, T = foveal.get(name)(), 100, 10_000
    state = exact = None
    for n in range(pieces):
        g = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(1, 1, T, 4, generator=g) for _ in "qkv")
        gates = {"beta": torch.rand(1, 1, T, generator=g)}
        gates["log_decay"] = -1e-3 * torch.rand(1, 1, T, *((4,) if name == "kda" else ()), generator=g)
        options = {"mechanism": spec, "output_final_state": True}
        with torch.no_grad():
            got = attention(q, k, v, form="recurrent", initial_state=state, **options, **gates)
            doubled = {name: gate.double() for name, gate in gates.items()}
            want = attention(q.double(), k.double(), v.double(), initial_state=exact, **options, **doubled)
        state, exact = got.state, want.state
        assert state.nbytes == 4 * 4 * 4
    torch.testing.assert_close(got.output.double(), want.output, rtol=1e-4, atol=1e-5)


def test_slow_decay_over_many_chunks_does_not_drift():
    """A decay close to 1 has few digits of its own in fp32; over thousands of tokens its error must not add up."""
    for kind in ("head", "channel"):
        x = make(kind, "none", 8192, 4, 4, decays=(-1e-4,), B=1, H=1)
        want = dict(zip(("output", "state"), run(eager.kernel, double(x), "chunked")))
        agree(dict(zip(want, run(engine.kernel, x, "chunked"))), want, kind, tolerance=2e-5)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (80, 96), (512, 3), (3, 512), (257, 130)])
def test_wide_heads(K, V):
    x = make("channel", "other", 70, K, V, decays=(-0.05, -1.0), B=1, H=1)
    agree(differentiate(engine.kernel, x, "chunked"), differentiate(eager.kernel, double(x), "recurrent"), "")


@pytest.mark.parametrize("isa", ["v4", "v3", "base"])
def test_every_instruction_set_that_runs_here(isa):
    before = native.isa()
    if native.LIBRARY.foveal_use_isa(isa.encode()):
        assert native.isa() == before
        pytest.skip(f"this processor or this build has no {isa}")
    try:
        for decay, erase in KINDS:
            x = make(decay, erase, 70, 5, 9)
            want = differentiate(eager.kernel, double(x), "recurrent")
            agree(differentiate(engine.kernel, x, "chunked"), want, f"{decay}, {erase}")
            agree(dict(zip(want, run(engine.kernel, x, "recurrent"))), dict(itertools.islice(want.items(), 2)), "steps")
    finally:
        native.LIBRARY.foveal_use_isa(before.encode())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_storage(dtype):
    """Letters in half precision, arithmetic in fp32: exactly what the same numbers give in fp32."""
    x = make("channel", "other", 70, 9, 5, decays=(-0.05, -1.0))
    stored = {name: y if name in ("state", "log_decay") else y.to(dtype) for name, y in x.items()}
    want = differentiate(engine.kernel, {name: y.float() for name, y in stored.items()}, "chunked")
    got = differentiate(engine.kernel, stored, "chunked")
    for name, exact in want.items():
        # gradients are rounded once, to the letters' own precision
        torch.testing.assert_close(got[name], exact.to(got[name].dtype), rtol=0, atol=0)


def test_half_precision_keeps_infinities_nan_and_subnormals():
    for dtype in (torch.bfloat16, torch.float16):
        odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 6e-8, -3e-5, 65504.0], dtype=dtype)
        x = {"read": torch.ones(1, 1, 1, 1), "write": torch.ones(1, 1, 1, 1), "value": odd.view(1, 1, 1, 6)}
        output = run(engine.kernel, x, "chunked", scale=1.0)[0]
        torch.testing.assert_close(output.flatten(), odd.float(), rtol=0, atol=0, equal_nan=True)


def test_any_strides():
    """Transposed, sliced, expanded and reversed-axes views equal contiguous tensors, for letters and for gradients."""
    x = make("channel", "other", 70, 6, 6)
    views = {
        "read": x["read"].transpose(1, 2).contiguous().transpose(1, 2),
        "write": torch.stack((x["write"], torch.full_like(x["write"], torch.nan)), -1)[..., 0],
        "value": x["value"].mT.contiguous().mT,
        "w": torch.cat((x["w"], torch.full_like(x["w"], torch.nan)), -1)[..., :6],
        "u": x["u"][:, :1].expand(-1, 3, -1, -1),
        "log_decay": x["log_decay"][:, :, :1].expand(-1, -1, 70, -1),
    }
    plain = x | {name: y.contiguous() for name, y in views.items()}
    for form in ("chunked", "recurrent"):
        with torch.no_grad():
            got, want = run(engine.kernel, x | views, form), run(engine.kernel, plain, form)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    summed = differentiate(engine.kernel, plain, "chunked", loss=lambda y: y[0].sum())  # strides of the gradient are 0
    ones = differentiate(engine.kernel, plain, "chunked", loss=lambda y: (y[0] * torch.ones_like(y[0])).sum())
    agree(summed, double(ones), "expanded gradient", tolerance=0)


def test_a_loss_on_the_final_state_alone():
    x = make("head", "written", 70, 6, 5, decays=(-0.05,))
    got = differentiate(engine.kernel, x, "chunked", loss=lambda y: y[1].square().sum())
    agree(got, differentiate(eager.kernel, double(x), "recurrent", loss=lambda y: y[1].square().sum()), "")


def test_threads_do_not_change_a_bit():
    x = make("channel", "written", 130, 8, 8, B=2, H=5)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(differentiate(engine.kernel, x, "chunked"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        agree(other, double(found[0]), "threads", tolerance=0)


@pytest.mark.parametrize(("decay", "erase"), KINDS)
@pytest.mark.parametrize("normalized", [False, True])
def test_more_threads_than_heads_share_columns(decay, erase, normalized):
    """Columns of one head on several threads: the same bits, in chunks, in what they save, and in steps."""
    before = torch.get_num_threads()
    for T, K, V in ((70, 5, 100), (4, 260, 130)):  # the second has enough work for steps to be shared
        x, found = make(decay, erase, T, K, V, normalized=normalized, decays=(-0.1,), B=1, H=1), []
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(differentiate(engine.kernel, x, "chunked"))
                with torch.no_grad():
                    found[-1] |= {f"{n} in steps": y for n, y in enumerate(run(engine.kernel, x, "recurrent"))}
        finally:
            torch.set_num_threads(before)
        for other in found[1:]:
            agree(other, double(found[0]), (T, K, V), tolerance=0)


@pytest.mark.parametrize(("decay", "erase"), KINDS)
def test_the_op_meets_torch_s_own_checks(decay, erase):
    x = make(decay, erase, 20, 4, 3, decays=(-0.1,))
    letters = [x.get(n) for n in ("read", "write", "value", "log_decay", "u", "w", "state")]
    letters = [y if y is None else y.requires_grad_() for y in letters]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    arguments = (*letters, None, 0.5, False, False, True)
    found = torch.library.opcheck(torch.ops.foveal.recurrence.default, arguments, test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_graph_and_eager_call_agree():
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in "qkv")
    gates = {"beta": torch.rand(1, 2, 70), "log_decay": -torch.rand(1, 2, 70)}
    spec = foveal.GatedDeltaRule()  # a key may import its module, which no graph can hold
    fused = torch.compile(lambda q: attention(q, k, v, spec, **gates), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fused(q), attention(q, k, v, "gated_delta_rule", **gates))


def test_a_second_derivative_is_refused():
    q = torch.randn(1, 1, 5, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(q, q, q, "linear").sum(), q)
    assert not grad.requires_grad
    with pytest.raises(RuntimeError, match="no second derivatives, expected backend='torch'"):
        torch.autograd.grad(attention(q, q, q, "linear").sum(), q, create_graph=True)


def test_the_counter_of_operations_knows_the_op():
    q = torch.randn(1, 2, 128, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = attention(q, q, q, foveal.Linear(normalize=False))
    # per token and head: 2 K V products with the state, C (K + V) / 2 within the chunk, two operations each
    assert forward.get_total_flops() == 2 * 2 * 128 * (2 * 8 * 8 + 64 * 16 / 2)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert backward.get_total_flops() > forward.get_total_flops()


def test_who_runs_and_why_not():
    q = torch.randn(1, 1, 8, 4)
    chosen = {route.backend: route for route in foveal.explain("linear", q, q, q)}
    assert chosen["native"].chosen
    why = {r.backend: r.why_not for r in foveal.explain("linear", q.double(), q.double(), q.double())}
    assert why["native"] == "the compiled kernels compute in fp32, not in float64"
    with pytest.raises(ValueError, match=r"'native', which cannot run here: .* the chunked and the recurrent form"):
        attention(q, q, q, "linear", form="parallel", backend="native")
    close = torch.testing.assert_close
    close(attention(q, q, q, "linear", backend="native"), attention(q, q, q, "linear", backend="torch"))


def test_without_the_library_torch_takes_over():
    code = """
import torch, foveal, foveal.native as native
native.LIBRARY = None
q = torch.randn(1, 1, 8, 4)
routes = {r.backend: r for r in foveal.explain("linear", q, q, q)}
assert routes["torch"].chosen and "C++17 compiler" in routes["native"].why_not, routes
foveal.attention(q, q, q, "linear")
print(native.isa())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"


def test_no_room_is_an_error(monkeypatch):
    x = make("none", "none", 3, 2, 2)
    monkeypatch.setattr(native, "LIBRARY", type("Full", (), {"foveal_recurrence": staticmethod(lambda *_: 1)}))
    with pytest.raises(MemoryError, match="recurrence kernel"):
        run(engine.kernel, x, "chunked")
