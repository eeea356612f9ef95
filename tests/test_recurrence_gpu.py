"""The Triton kernels of the recurrence: values and gradients under the interpreter, code for GPUs from the compiler.

Triton reads TRITON_INTERPRET when a kernel is defined, so the cases run in a process of their own; to see them one by
one: ``TRITON_INTERPRET=1 pytest tests/test_recurrence_gpu.py``.
"""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import foveal
from foveal.call import Call
from foveal.engines.recurrence import Terms, eager, gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_every_case_under_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="needs triton without its interpreter")

DECAYS = (0.0, -1e-4, -1.0, -5.0, -20.0, -1e4)
KINDS = [(decay, erase) for decay in ("none", "head", "channel") for erase in ("none", "shared", "general")]
SIZES = [(1, 1, 3, True), (7, 8, 5, False), (64, 16, 16, True), (130, 1, 3, False)]


def python(*args, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    kept.update(OMP_NUM_THREADS="1", **environment)
    run = subprocess.run([sys.executable, *args], env=kept, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def make(decay, erase, T, K, V, B=1, H=1, decays=DECAYS):
    """Terms with keys of norm 0.8, so that nothing grows, and decays drawn from a set; a state to start from."""
    r, p, u, w = (0.8 * torch.nn.functional.normalize(torch.randn(B, H, T, K), dim=-1) for _ in range(4))
    width = {"none": 0, "head": 1, "channel": K}[decay]
    a = torch.tensor(decays)[torch.randint(len(decays), (B, H, T, width))] if width else None
    pair = {"none": None, "shared": (p, p + 0.2 * w), "general": (u, w)}[erase]
    return Terms(r, p, torch.randn(B, H, T, V), a, pair), torch.randn(B, H, K, V)


def differentiate(function, terms, state, dtype=None, loss=None):
    """Output, final state and the gradient of every input, in the given precision or as stored."""
    leaves = {}

    def leaf(x):
        if id(x) not in leaves:  # a tensor that is both erased and written stays one tensor
            leaves[id(x)] = x.detach().to(dtype or x.dtype).requires_grad_()
        return leaves[id(x)]

    terms, state = terms.map(leaf), leaf(state)
    output, final = function(terms, state)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (output, final)]
    total = (output * weights[0]).sum() + (final * weights[1]).sum() if loss is None else loss(output, final)
    grads = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
    return [output.detach(), final.detach(), *grads]


def agree(got, want, limit=1e-4):
    assert len(got) == len(want)
    for n, (x, y) in enumerate(zip(got, want)):
        assert torch.isfinite(x).all(), n
        assert (x.double() - y.double()).abs().max() <= limit * y.double().abs().max(), n


def check(terms, state, **options):
    got = differentiate(gpu.chunks, terms, state, **options)
    assert all(x.dtype == torch.float32 for x in got[:2])
    agree(got, differentiate(eager.scan, terms, state, torch.float64, **options))


@pytest.mark.slow
@compiled
def test_every_case_under_the_interpreter():
    python("-m", "pytest", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")


@interpreted
@pytest.mark.parametrize(
    ("decay", "erase", "T", "K", "V", "start"),
    [(*kind, 65, 8, 5, True) for kind in KINDS]
    + [(*kind, *SIZES[(n + 2) % 4]) for n, kind in enumerate(KINDS)]
    + [("channel", "general", *size) for size in SIZES[:2]],
)
def test_values_and_gradients(decay, erase, T, K, V, start):
    terms, state = make(decay, erase, T, K, V, H=2 if T < 64 else 1)
    check(terms, state if start else torch.zeros_like(state))


@interpreted
@pytest.mark.parametrize(
    ("decay", "erase", "T", "K", "V"),
    [("channel", "shared", 66, 70, 3), ("none", "general", 65, 64, 64), ("head", "none", 66, 70, 40)],
)
def test_widths_of_several_tiles(decay, erase, T, K, V):
    check(*make(decay, erase, T, K, V))  # states of more than 64 rows go through memory


@interpreted
@pytest.mark.parametrize(
    ("decay", "erase", "T", "strength"),
    [("channel", "shared", 66, strength) for strength in (*DECAYS, "beside")]
    + [("head", "general", 20, strength) for strength in (-20.0, "beside")],
)
def test_decays_of_every_strength(decay, erase, T, strength):
    terms, state = make(decay, erase, T, 4, 3, decays=(-1e4, -1e-4) if strength == "beside" else (strength,))
    check(terms, state)


@interpreted
@pytest.mark.parametrize(
    "loss",
    [lambda o, s: o.sum(), lambda o, s: s.sum(), lambda o, s: o[:, :, -1].square().sum(), lambda o, s: (o * o).mean()],
    ids=["expanded", "state", "last", "mean"],
)
def test_losses(loss):
    terms, state = make("channel", "shared", 10, 8, 5, decays=(-0.1, -1.0))
    check(terms, state, loss=loss)


@interpreted
@pytest.mark.parametrize(("dtype", "erase"), [(torch.float16, "general"), (torch.bfloat16, "shared")])
def test_half_precision_is_storage_only(dtype, erase):
    terms, state = make("channel", erase, 20, 8, 5, decays=(-0.1, -1.0))
    half = {}
    terms = terms.map(lambda x: half.setdefault(id(x), x.to(dtype)))
    got = differentiate(gpu.chunks, terms, state)
    want = differentiate(eager.scan, terms, state, torch.float64)
    agree(got[:2], want[:2])
    assert [x.dtype for x in got[2:]] == [dtype] * (len(got) - 3) + [torch.float32]
    agree(got[2:], want[2:], 2 * torch.finfo(dtype).eps)


@interpreted
def test_strides_and_broadcasts():
    terms, state = make("head", "shared", 5, 8, 5, B=2, H=2, decays=(-0.1, -1.0))
    want = gpu.chunks(terms, state)
    moved = terms.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    agree(gpu.chunks(moved, state.mT.contiguous().mT), want, 0)
    steady = dataclasses.replace(moved, log_decay=torch.tensor([-0.1, -2.0])[:, None, None].expand(2, 2, 5, 1))
    agree(gpu.chunks(steady, state), eager.scan(steady.map(torch.Tensor.double), state.double()))


@interpreted
@pytest.mark.parametrize(("decay", "erase"), KINDS)
def test_step_is_scan(decay, erase):
    terms, state = make(decay, erase, 3, 20, 5, B=2, H=2)
    want = eager.scan(terms.map(torch.Tensor.double), state.double())
    agree(gpu.step(terms, state), want, 1e-6)
    one = [gpu.step(terms.map(lambda x: x[:, :, :1]), state)]
    one.append(gpu.step(terms.map(lambda x: x[:, :, 1:]), one[0][1]))
    agree((torch.cat([o for o, _ in one], 2), one[1][1]), want, 1e-6)


@interpreted
def test_step_with_gradients():
    terms, state = make("channel", "general", 2, 8, 5)
    agree(differentiate(gpu.step, terms, state), differentiate(eager.scan, terms, state, torch.float64))


@interpreted
def test_what_cannot_run_is_named():
    assert gpu.available() is None
    q = torch.zeros(1, 1, 2, 8)
    call = Call(q, q, q, 1.0)
    assert gpu.why_not(call) is None
    assert "float64" in gpu.why_not(Call(q.double(), q.double(), q.double(), 1.0))
    assert "chunked" in gpu.why_not(call.replace(form="parallel"))
    with pytest.raises(ValueError, match="512, not 513"):
        gpu.kernel(Terms(q, q, torch.zeros(1, 1, 2, 513)), 1.0, None, None)


@interpreted
def test_attention_runs_on_the_kernels():
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in "qkv")
    for form in (None, "recurrent"):
        got = foveal.attention(q, k, v, "linear", backend="triton", form=form)
        torch.testing.assert_close(got, foveal.attention(q, k, v, "linear", backend="torch"))


@compiled
def test_no_triton_is_no_error():
    python(
        "-c",
        "import sys; sys.modules['triton'] = None; from foveal.engines.recurrence import gpu; "
        "assert gpu.available() == 'triton is not installed'",
    )


@pytest.mark.slow
@compiled
def test_kernels_compile_for_gpus(tmp_path):
    """The compiler refuses more than the interpreter does; 99 KiB is the shared memory of the smallest such GPUs."""
    python("-W", "ignore", __file__, TRITON_CACHE_DIR=str(tmp_path))


class Recorded:
    """A kernel that notes how it is launched, once, and does nothing."""

    launches = {}

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **switches: self.launches.setdefault(self.kernel.__name__, (self.kernel, args, switches))


def build():
    """Compile every kernel for sm_80 as a call with everything on would launch it."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    for name in ("_pairs", "_invert", "_edge", "_carry", "_mixed", "_step", "_pairs_back", "_edge_back", "_total_back"):
        setattr(gpu, name, Recorded(getattr(gpu, name)))
    terms, state = make("channel", "general", 130, 128, 128)
    terms = terms.map(torch.Tensor.bfloat16)
    gpu.step(terms, state)
    differentiate(gpu.chunks, terms, state)
    assert len(Recorded.launches) == 9
    for name, (kernel, args, switches) in Recorded.launches.items():
        values = dict(zip(kernel.arg_names, args)) | switches
        constants = {n: x for n, x in values.items() if n in kernel.arg_names and (n in switches or x is None)}
        signature = {
            n: "constexpr" if n in constants else types[values[n].dtype] if torch.is_tensor(values[n]) else "i32"
            for n in kernel.arg_names
        }
        options = {n: x for n, x in switches.items() if n not in constants}
        source = triton.compiler.ASTSource(kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        assert made.asm["cubin"], name
        assert made.metadata.shared <= 99 * 1024, (name, made.metadata.shared)


if __name__ == "__main__":
    build()
