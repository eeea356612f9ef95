"""The compiled attention kernel against the dense torch form in float64: values, log-sum-exp and every gradient."""

import dataclasses
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import foveal
from foveal import attention, native
from foveal.engines.block_sparse import BlockSparse, Choice
from foveal.mechanisms.classic.softmax import Softmax

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="foveal was installed without its compiled kernels")

# B, H, G, T, S, K, V: single tokens, block and tile borders off by one, groups, more keys, more queries, widths
SIZES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 3, 3, 7, 7, 3, 5),
    (1, 4, 2, 63, 64, 8, 8),
    (2, 2, 1, 65, 130, 24, 17),
    (1, 6, 2, 49, 200, 16, 16),
    (1, 2, 2, 30, 9, 5, 4),
    (1, 2, 1, 3, 300, 8, 8),
    (1, 1, 1, 1, 1000, 40, 24),
]
KINDS = {
    "causal": (Softmax(), {}),
    "full": (Softmax(), {"causal": False}),
    "top-left": (Softmax(), {"causal": "top-left"}),
    "window": (Softmax(window=9), {}),
    "two-sided window": (Softmax(window=(4, 7)), {"causal": False}),
    "window with sinks": (Softmax(window=6, sinks=3), {}),
    "soft cap": (Softmax(softcap=0.7), {}),
    "soft cap near 0": (Softmax(softcap=1e4), {"causal": False}),
    "alibi": (Softmax(alibi=True), {}),
    "alibi both ways": (Softmax(alibi=True), {"causal": False}),
    "all together": (Softmax(window=20, softcap=2.0, alibi=True), {}),
    "negative scale": (Softmax(), {"scale": -0.3}),
}


def draw(sizes):
    B, H, G, T, S, K, V = sizes
    return [torch.randn(shape) for shape in ((B, H, T, K), (B, G, S, K), (B, G, S, V))]


def differentiate(spec, x, options, backend, form=None):
    """Output, log-sum-exp where it is finite, and the gradients of everything in ``x``, by name."""
    x = {name: y.detach().clone().requires_grad_() for name, y in x.items()}
    letters = {name: y for name, y in x.items() if name not in "qkv"}
    found = attention(x["q"], x["k"], x["v"], spec, backend=backend, form=form, return_lse=True, **letters, **options)
    lse = found.lse.masked_fill(found.lse == -torch.inf, 0.0)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype) for y in (found.output, lse)]
    loss = (found.output * weights[0]).sum() + (lse * weights[1]).sum()
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True, materialize_grads=True)
    result = {"output": found.output, "lse": found.lse} | {f"gradient of {n}": g for n, g in zip(x, grads)}
    return {name: y.detach() for name, y in result.items()}


def agree(got, want, case, tolerance=2e-5):
    for name, exact in want.items():
        missing = exact == -torch.inf
        assert torch.equal(got[name] == -torch.inf, missing), f"{case}, {name}: rows that see nothing"
        error = (got[name].double() - exact).masked_fill(missing, 0.0).abs()
        size = max(1.0, float(exact.masked_fill(missing, 0.0).abs().max())) if exact.numel() else 1.0
        worst = float(error.max()) if error.numel() else 0.0
        assert worst <= tolerance * size, f"{case}, {name}: error {worst:.2e} of {size:.2e}"  # NaN fails too


def check(spec, x, options, case, tolerance=2e-5):
    wide = {
        name: y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y for name, y in options.items()
    }
    want = differentiate(spec, {name: y.double() for name, y in x.items()}, wide, "torch", "parallel")
    agree(differentiate(spec, x, options, "native"), want, case, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind):
    spec, options = KINDS[kind]
    for sizes in SIZES:
        if options.get("causal") == "top-left" and sizes[3] > sizes[4]:
            continue
        check(spec, dict(zip("qkv", draw(sizes), strict=True)), options, sizes)


@pytest.mark.parametrize("kind", ["causal", "full", "window with sinks", "alibi"])
def test_masks_and_padding(kind):
    """Left and right padding, holes, masks per head and per row, rows and sequences that see nothing."""
    spec, options = KINDS[kind]
    for sizes in [(2, 4, 2, 65, 65, 8, 5), (3, 2, 1, 20, 70, 4, 4), (2, 1, 1, 1, 130, 8, 8)]:
        B, H, _, T, S, _, _ = sizes
        x = dict(zip("qkv", draw(sizes), strict=True))
        left, holes = torch.arange(S) >= torch.tensor([[0], [S // 3], [S]])[:B], torch.rand(B, S) > 0.4
        for padding in (left, left.flip(1), holes):
            check(spec, x, options | {"mask": padding}, (sizes, "padding"))
        for shape in ((B, H, T, S), (1, 1, T, S), (B, 1, 1, S)):
            check(spec, x, options | {"mask": torch.rand(shape) > 0.6}, (sizes, shape))


def test_sink_logits_and_biases():
    for sizes in SIZES:
        B, H, _, T, S, _, _ = sizes
        x = dict(zip("qkv", draw(sizes), strict=True))
        check(Softmax(), x | {"sink_logits": torch.randn(H)}, {}, (sizes, "sinks"))
        for shape in ((B, H, T, S), (1, H, T, S), (B, 1, 1, S)):
            bias = torch.randn(shape)
            bias[..., ::3] = -torch.inf
            check(Softmax(), x, {"mask": bias}, (sizes, shape))


def test_the_gradient_of_a_bias_per_key():
    for shape in ((2, 4, 1, 70), (1, 4, 1, 70), (2, 1, 1, 70)):
        x = dict(zip("qkv", draw((2, 4, 2, 33, 70, 8, 8)), strict=True)) | {"mask": torch.randn(shape)}
        check(Softmax(), x, {}, shape)


@pytest.mark.parametrize(("K", "V"), [(1, 2), (80, 96), (512, 3), (3, 512), (257, 600)])
def test_wide_heads(K, V):
    check(Softmax(), dict(zip("qkv", draw((1, 2, 1, 70, 90, K, V)), strict=True)), {"scale": K**-0.5}, (K, V))


@dataclasses.dataclass(frozen=True)
class Blocks(BlockSparse):
    """Blocks and single keys drawn at random, now and then none at all."""

    block_size: int = 8
    rows: int = 1
    part: float = 0.4
    columns: int = 0
    orders: int = 1

    @property
    def query_size(self):
        return self.rows

    def layouts(self, length):
        places = torch.arange(length)
        scattered = [places[n :: self.orders] for n in range(self.orders)]
        return [torch.cat(scattered)] if self.orders > 1 else [places]

    @property
    def in_order(self):
        return self.orders == 1

    def select(self, queries, keys):
        B, H, M = queries.q.shape[:3]
        g = torch.Generator().manual_seed(0)
        blocks = torch.rand(B, H, M, keys.k.shape[2], generator=g) < self.part
        blocks[:, :, ::5] = False
        if not self.columns:
            return blocks
        S = int(keys.position.max()) + 1
        picked = torch.rand(B, H, S, generator=g).topk(min(self.columns, S)).indices
        return Choice(blocks, torch.where(torch.rand(picked.shape, generator=g) < 0.2, -1, picked))


@pytest.mark.parametrize("rows", [1, 16, 50])
@pytest.mark.parametrize("block_size", [1, 5, 8, 64, 100])
def test_chosen_blocks(rows, block_size):
    for sizes in [
        (2, 4, 2, 130, 130, 8, 5),
        (1, 2, 1, 33, 300, 16, 16),
        (1, 4, 4, 1, 200, 8, 8),
        (1, 1, 1, 1, 1, 2, 2),
    ]:
        x = dict(zip("qkv", draw(sizes), strict=True))
        for columns, orders in itertools.product((0, 7), (1, 3)):
            if columns and orders > 1:
                continue  # single keys are counted by blocks of the plain order
            spec = Blocks(block_size, rows, columns=columns, orders=orders)
            check(spec, x, {}, (sizes, columns, orders))
    padding = torch.arange(130) >= torch.tensor([[0], [37]])
    x = dict(zip("qkv", draw((2, 4, 2, 130, 130, 8, 5)), strict=True))
    check(Blocks(block_size, rows, columns=5), x, {"mask": padding}, "padding")
    check(Blocks(block_size, rows), x, {"mask": torch.rand(2, 1, 130, 130) > 0.3}, "a mask beside the blocks")


def test_scores_of_any_size():
    """Large scores do not overflow, equal ones share evenly, and one far above the others takes all."""
    for factor in (1e-20, 1.0, 30.0, 1e4):
        q, k, v = draw((1, 1, 1, 70, 70, 8, 8))
        check(Softmax(), {"q": factor * q, "k": k, "v": v}, {}, factor, tolerance=1e-4)
    zero = torch.zeros(1, 1, 5, 2)
    v = torch.arange(5.0).view(1, 1, 5, 1)
    assert attention(zero, zero, v, backend="native").flatten().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    one = torch.tensor([0.0, 0.0, 200.0, 0.0, 0.0]).view(1, 1, 5, 1)
    got = attention(torch.ones(1, 1, 5, 1), one, v, causal=False, scale=1.0, backend="native")
    assert got.flatten().tolist() == [2.0] * 5


def test_nan_behind_a_mask_reaches_nothing_and_nan_in_sight_shows():
    q, k, v = draw((1, 2, 1, 70, 70, 8, 8))
    hidden = torch.ones(1, 70, dtype=torch.bool)
    hidden[:, 40] = False
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, 40] = dirty_v[:, :, 40] = torch.nan
    clean = differentiate(Softmax(), {"q": q, "k": k, "v": v}, {"mask": hidden}, "native")
    dirty = differentiate(Softmax(), {"q": q, "k": dirty_k, "v": dirty_v}, {"mask": hidden}, "native")
    agree(dirty, {name: y.double() for name, y in clean.items()}, "hidden", tolerance=0)
    unseen = attention(q, dirty_k, v, backend="native").isnan()
    assert unseen[:, :, 40:].all()
    assert not unseen[:, :, :40].any()
    assert attention(q, k, dirty_v, backend="native")[:, :, 40:].isnan().all()


@pytest.mark.parametrize("isa", ["v4", "v3", "base"])
def test_every_instruction_set_that_runs_here(isa):
    before = native.isa()
    if native.LIBRARY.foveal_use_isa(isa.encode()):
        assert native.isa() == before
        pytest.skip(f"this processor or this build has no {isa}")
    try:
        for spec, options in KINDS.values():
            check(spec, dict(zip("qkv", draw((1, 4, 2, 65, 65, 9, 5)), strict=True)), options, spec)
        check(Blocks(5, 16, columns=4), dict(zip("qkv", draw((1, 4, 2, 65, 65, 9, 5)), strict=True)), {}, "blocks")
    finally:
        native.LIBRARY.foveal_use_isa(before.encode())


def test_threads_do_not_change_a_bit():
    before = torch.get_num_threads()
    cases = [
        (Softmax(), (2, 4, 2, 300, 300, 8, 8)),
        (Softmax(), (1, 1, 1, 2, 3000, 8, 8)),
        (Softmax(window=20, alibi=True), (1, 2, 2, 200, 200, 8, 8)),
        (Blocks(8, 16), (1, 2, 1, 200, 200, 8, 8)),
    ]
    for spec, sizes in cases:
        x, found = dict(zip("qkv", draw(sizes), strict=True)), []
        try:
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                found.append(differentiate(spec, x, {}, "native"))
        finally:
            torch.set_num_threads(before)
        for other in found[1:]:
            assert all(torch.equal(other[name], found[0][name]) for name in other), (spec, sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_storage(dtype):
    """Half precision is loaded and stored; between lies fp32, so that outputs differ by one rounding alone."""
    x = dict(zip("qkv", (y.to(dtype) for y in draw((1, 4, 2, 70, 70, 9, 5))), strict=True))
    for spec in (Softmax(), Softmax(softcap=1.0, alibi=True, window=20), Blocks(8, 16)):
        got = differentiate(spec, x, {}, "native")
        want = differentiate(spec, {name: y.float() for name, y in x.items()}, {}, "native")
        assert torch.equal(got["output"], want["output"].to(dtype))
        assert torch.equal(got["lse"], want["lse"])
        # delta = do'o is formed from the rounded output
        agree({n: got[n] for n in got if "grad" in n}, {n: want[n].double() for n in got if "grad" in n}, spec, 2e-2)


def test_any_strides():
    q, k, v = draw((2, 4, 2, 70, 70, 8, 8))
    views = {
        "q": q.transpose(1, 2).contiguous().transpose(1, 2),
        "k": torch.stack((k, torch.full_like(k, torch.nan)), -1)[..., 0],
        "v": torch.cat((torch.full_like(v, torch.nan), v), 2)[:, :, 70:],
    }
    want = differentiate(Softmax(), {"q": q, "k": k, "v": v}, {}, "native")
    with torch.no_grad():
        assert torch.equal(attention(*views.values(), backend="native"), want["output"])
    mask = torch.rand(2, 4, 70, 70) > 0.5
    turned = mask.mT.contiguous().mT
    bias = torch.randn(2, 4, 70, 70)
    for one, other in (
        (mask, turned),
        (bias, bias.mT.contiguous().mT),
        (mask[:, :1].expand(-1, 4, -1, -1), mask[:, :1]),
    ):
        assert torch.equal(
            attention(q, k, v, mask=one, backend="native"), attention(q, k, v, mask=other, backend="native")
        )
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    summed = torch.autograd.grad(attention(*x, backend="native").sum(), x)  # a gradient whose strides are 0
    ones = torch.autograd.grad((attention(*x, backend="native") * torch.ones_like(v[:, :1])).sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))


def test_nothing_to_do():
    for B, T, S in [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)]:
        check(Softmax(), dict(zip("qkv", draw((B, 2, 1, T, S, 4, 4)), strict=True)), {}, (B, T, S))


def test_a_loss_on_the_log_sum_exp_alone():
    q, k, v = (y.requires_grad_() for y in draw((1, 2, 1, 40, 40, 8, 8)))
    got = torch.autograd.grad(attention(q, k, v, return_lse=True, backend="native").lse.square().sum(), (q, k))
    want = torch.autograd.grad(attention(q, k, v, return_lse=True, backend="torch").lse.square().sum(), (q, k))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_op_meets_torch_s_own_checks():
    q, k, v = (y.requires_grad_() for y in draw((1, 2, 1, 20, 20, 4, 3)))
    place = torch.arange(20, dtype=torch.int32)[None, None]
    low, top = torch.zeros_like(place), torch.zeros_like(place)
    chosen = torch.rand(1, 2, 1, 3) > 0.5
    tables = (torch.zeros_like(place), low, place, top, place, None, None, chosen, None, None, None, None)
    numbers = (3, 8, 1, False, 0.5, 0.0)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    found = torch.library.opcheck(torch.ops.foveal.attention.default, (q, k, v, *tables, *numbers), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_graph_and_eager_call_agree():
    q, k, v = draw((1, 2, 1, 300, 300, 8, 8))
    fused = torch.compile(lambda q: attention(q, k, v, Softmax(window=20)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fused(q), attention(q, k, v, Softmax(window=20), backend="native"))


def test_a_second_derivative_is_refused():
    q = torch.randn(1, 1, 5, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivatives, expected backend='torch'"):
        torch.autograd.grad(attention(q, q, q, backend="native").sum(), q, create_graph=True)


def test_the_counter_of_operations_knows_the_op():
    """Whole blocks of 64 keys that a row may read: 1 + 2 + 3 blocks for each 64 rows of 192."""
    q = torch.randn(1, 2, 192, 8, requires_grad=True)
    pairs = 2 * 64 * 64 * (1 + 2 + 3)
    with FlopCounterMode(display=False) as forward:
        output = attention(q, q, q, backend="native")
    assert forward.get_total_flops() == 2 * pairs * (8 + 8)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert backward.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 8)
    with FlopCounterMode(
        display=False
    ) as chosen:  # every block of 8, or 16 of the 24: what a list leaves out is no work
        attention(q, q, q, Blocks(8, 64, part=0.0), backend="native")
    assert chosen.get_total_flops() == 0


def test_who_runs_and_why_not():
    q = torch.randn(1, 1, 8, 4)
    large = torch.randn(1, 8, 512, 8)
    assert [r.backend for r in foveal.explain("softmax", large, large, large) if r.chosen] == ["native"]
    why = {r.backend: r.why_not for r in foveal.explain("softmax", q.double(), q.double(), q.double())}
    assert why["native"] == "the compiled kernels compute in fp32, not in float64"
    with pytest.raises(ValueError, match=r"'native', which cannot run here: the compiled kernel has the chunked form"):
        attention(q, q, q, form="parallel", backend="native")
    bias = torch.randn(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(ValueError, match="gradient of a bias per key only"):
        attention(q, q, q, mask=bias, backend="native")


def test_no_room_is_an_error(monkeypatch):
    q = torch.randn(1, 1, 3, 2)
    monkeypatch.setattr(native, "LIBRARY", type("Full", (), {"foveal_attention": staticmethod(lambda *_: 1)}))
    with pytest.raises(MemoryError, match="attention kernel"):
        attention(q, q, q, backend="native")


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux' memory counters")
def test_memory_does_not_grow_with_the_square_of_the_length():
    """Forward and backward of 16k tokens: gradients and output, a few copies of the keys' gradients, and no map."""
    script = """
import re
import torch, foveal
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2 ** 10
q, k, v = (torch.randn(1, 1, 16384, 32, requires_grad=True) for _ in "qkv")
foveal.attention(*(x[:, :, :256] for x in (q, k, v)), backend="native").sum().backward()
open("/proc/self/clear_refs", "w").write("5")
before = most()
foveal.attention(q, k, v, backend="native").sum().backward()
print(most() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    mebibytes = float(re.findall(r"[\d.]+", done.stdout)[-1])  # a tensor has 2, the map 1024
    assert mebibytes < 64
