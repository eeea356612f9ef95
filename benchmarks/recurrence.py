"""The recurrence kernels against the machine's own matrix rate, our torch forms and the best eager peers.

    python benchmarks/recurrence.py [--length 16384] [--repeats 5] [--only scalar,gated_delta] [--skip-long]

Every ratio comes from one interleaved run, and peers compute the same thing: outputs are compared before anything is
timed.  Rates count a chunk's products with triangles as half.  "of bmm" is the share of torch's rate on as many
64 x 64 x 64 products.  Peers need ``pip install fla-core einops transformers``; those that are missing are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveal import native
from foveal.engines.recurrence import Terms, eager
from foveal.engines.recurrence import native as engine

H, D, CHUNK = 8, 64, 64
Call = Callable[[], Any]
# goal of each bar: forward and forward + backward against the best eager form, from the design notes
GOALS = {"scalar": (4, 8), "channel": (3, 6), "gated_delta": (3, 6), "kda": (3, 6)}
PRODUCTS = {"scalar": 3.0, "channel": 3.0, "gated_delta": 5.0, "kda": 5.0}  # of 64 x 64 x 64 a chunk, forward


def _fla() -> pathlib.Path | None:
    found = importlib.util.find_spec("fla")
    if found is None or importlib.util.find_spec("einops") is None:
        return None
    return pathlib.Path(found.submodule_search_locations[0])  # type: ignore[index]


FLA = _fla()  # before `modeling` hides the package


def letters(kind: str, T: int) -> Terms:
    """What the engine gets: K = V = 64, keys of norm 1, slow decays."""
    torch.manual_seed(0)
    r, v = torch.randn(1, H, T, D), torch.randn(1, H, T, D)
    w = normalize(torch.randn(1, H, T, D), dim=-1)
    beta = torch.rand(1, H, T, 1)
    decay = -0.1 * torch.rand(1, H, T, D if kind in ("channel", "kda") else 1)
    write = beta * w
    return Terms(r, write, v, decay, (write, w) if kind in ("gated_delta", "kda") else None)


def ours(kernel: Any, terms: Terms) -> Call:
    return lambda: kernel(terms, D**-0.5, None, "chunked")[0]


def fla(name: str) -> Any:
    """A reference file of flash-linear-attention, or None."""
    if FLA is None:
        return None
    path = FLA / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{name}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def modeling(name: str) -> Any:
    """A modelling file of transformers with its own torch fallbacks, or None."""
    sys.modules["fla"] = None  # type: ignore[assignment]  # else it would call GPU kernels
    try:
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        return None


def peers(kind: str, terms: Terms) -> dict[str, Call]:
    """Eager chunked implementations by others of the same recurrence, in their layout [B, T, H, K]."""
    r, v = (x.transpose(1, 2) for x in (terms.read, terms.value))
    decay = terms.log_decay.transpose(1, 2)  # type: ignore[union-attr]
    write = terms.write.transpose(1, 2)
    k = beta = None
    if terms.erase is not None:
        k = terms.erase[1].transpose(1, 2)
        beta = (write * k).sum(-1)
    found: dict[str, Call] = {}

    def add(name: str, call: Callable[[], Any]) -> None:
        def output() -> Tensor:
            result = call()
            return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

        found[name] = output

    if kind == "scalar":
        if (module := fla("simple_gla")) is not None:
            add("fla naive chunk", lambda: module.naive_chunk_simple_gla(r, write, v, decay[..., 0], scale=D**-0.5))
        if (mamba := modeling("mamba2")) is not None and hasattr(mamba, "mamba2_chunk_scan"):
            # its decay is dt A and its write dt B: dt carries the decay, A is -1, and B takes dt out again
            dt = -decay[..., 0]
            A, b, c = -torch.ones(H), write / dt[..., None], r * D**-0.5
            add("transformers", lambda: mamba.mamba2_chunk_scan(v, dt, A, b, c, CHUNK))
    if kind == "gated_delta":
        if (module := fla("gated_delta_rule")) is not None:
            add("fla naive chunk", lambda: module.naive_chunk_gated_delta_rule(r, k, v, decay[..., 0], beta))
        if (qwen := modeling("qwen3_next")) is not None:
            add("transformers", lambda: qwen.torch_chunk_gated_delta_rule(r, k, v, decay[..., 0], beta))
    if kind == "kda":
        if (module := fla("kda")) is not None:
            add("fla naive chunk", lambda: module.naive_chunk_kda(r, k, v, decay, beta))
        if (kimi := modeling("kimi_linear")) is not None and hasattr(kimi, "chunk_kimi_delta_attention"):
            add("transformers", lambda: kimi.chunk_kimi_delta_attention(r, k, v, decay, beta))
    return found


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns so that a change of the machine's clock meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def trained(make: Callable[[Terms], Call], kind: str, T: int) -> Call:
    """Forward and backward with fresh leaves; gradients of everything."""
    terms = letters(kind, T)

    def step() -> None:
        leaf = terms.map(lambda x: x.detach().requires_grad_())
        output = make(leaf)()
        output.backward(torch.ones_like(output))

    return step


def speed(kinds: list[str], T: int, repeats: int) -> None:
    small = torch.randn(H * T // CHUNK, D, D)
    product = 2 * H * T // CHUNK * D**3
    big = torch.randn(2048, 2048)
    print(f"{'':13}{'form':18}{'forward':>10}{'x ours':>8}{'f + b':>10}{'x ours':>8}{'of bmm':>8}{'of mm':>7}")
    for kind in kinds:
        terms = letters(kind, T)
        forward = {"native": ours(engine.kernel, terms), "torch": ours(eager.kernel, terms), **peers(kind, terms)}
        want = forward["native"]()
        for name, call in list(forward.items()):
            error = float((call() - want).abs().max() / want.abs().max())
            if not error < 1e-3:
                print(f"{kind:13}{name:18}computes something else (relative difference {error:.1e}): left out")
                del forward[name]
        forward |= {"bmm": lambda: torch.bmm(small, small), "mm": lambda: big @ big}
        with torch.no_grad():
            f = interleaved(forward, repeats)
        names = [name for name in forward if name not in ("bmm", "mm")]
        names, slow = affordable(names, kind, T)
        both = {name: trained(functools.partial(_form, name, kind), kind, T) for name in names}
        b = interleaved(both, max(repeats // 2, 2))
        rate = PRODUCTS[kind] * product / f["native"]
        for name in slow:
            print(
                f"{kind:13}{name:18}{f[name] * 1e3:8.1f}ms{f[name] / f['native']:8.1f}   (backward left out: too slow)"
            )
        for name in names:
            line = f"{kind:13}{name:18}{f[name] * 1e3:8.1f}ms{f[name] / f['native']:8.1f}"
            line += f"{b[name] * 1e3:8.1f}ms{b[name] / b['native']:8.1f}"
            if name == "native":
                line += f"{rate * f['bmm'] / product:8.0%}{rate * f['mm'] / (2 * 2048**3):7.0%}"
            print(line, flush=True)
        best_f = min(f[n] for n in (*names, *slow) if n != "native") / f["native"]
        best_b = min((b[n] for n in names if n != "native"), default=float("nan")) / b["native"]
        goal_f, goal_b = GOALS[kind]
        print(f"{kind:13}bars: forward {best_f:.1f}x (goal {goal_f}x), forward + backward {best_b:.1f}x ({goal_b}x)")


def affordable(names: list[str], kind: str, T: int, most: float = 35.0) -> tuple[list[str], list[str]]:
    """Forms whose forward and backward will take less than ``most`` seconds, by an eighth of the tokens, and the rest.

    Some eager forms are quadratic in the number of chunks: slices of a tensor each give a whole gradient.
    """
    fast, slow = [], []
    for name in names:
        start = time.perf_counter()
        trained(functools.partial(_form, name, kind), kind, T // 8)()
        (fast if 8 * (time.perf_counter() - start) < most else slow).append(name)
    return fast, slow


def _form(name: str, kind: str, terms: Terms) -> Call:
    if name in ("native", "torch"):
        return ours(engine.kernel if name == "native" else eager.kernel, terms)
    return peers(kind, terms)[name]


def growth(repeats: int) -> None:
    """Four times the tokens in how many times the time."""
    print("\ntime(64k) / time(16k), forward and forward + backward (goal <= 4.3)")
    for kind in GOALS:
        with torch.no_grad():
            f = interleaved({str(T): ours(engine.kernel, letters(kind, T)) for T in (2**14, 2**16)}, repeats)
        b = interleaved({str(T): trained(lambda t: ours(engine.kernel, t), kind, T) for T in (2**14, 2**16)}, 2)
        print(f"{kind:13}{f['65536'] / f['16384']:6.2f}{b['65536'] / b['16384']:6.2f}", flush=True)


def _copies(B: int, heads: int, x: Tensor) -> Tensor:
    return x[:, :1].expand(B, heads, 1, -1).contiguous()


def steps(repeats: int) -> None:
    """One more token, the state handed from call to call."""
    print("\none decode step, us (goal: 5x at B=1, H=8)")
    print(f"{'':13}{'B x H':>8}{'native':>9}{'torch':>9}{'x':>6}")
    for kind in GOALS:
        for B, heads in ((1, 8), (16, 8), (16, 32)):
            terms = letters(kind, 1).map(functools.partial(_copies, B, heads))
            calls: dict[str, Call] = {}
            for name, kernel in (("native", engine.kernel), ("torch", eager.kernel)):
                state = [kernel(terms, 1.0, None, None)[1]]

                def many(kernel: Any = kernel, state: list[Any] = state, terms: Terms = terms) -> None:
                    for _ in range(50):
                        state[0] = kernel(terms, 1.0, state[0], None)[1]

                calls[name] = many
            with torch.no_grad():
                t = {name: s / 50 * 1e6 for name, s in interleaved(calls, repeats).items()}
            size = f"{B} x {heads}"
            print(f"{kind:13}{size:>8}{t['native']:9.1f}{t['torch']:9.1f}{t['torch'] / t['native']:6.1f}", flush=True)


def halves(T: int, repeats: int) -> None:
    """The same letters stored in bf16: what reading half of the bytes saves or costs."""
    print("\nbf16 storage, time / fp32 time (goal <= 1.3)")
    for kind in GOALS:
        terms = letters(kind, T)
        small = terms.map(lambda x: x.bfloat16() if x.shape[-1] > 1 else x)
        with torch.no_grad():
            t = interleaved({"fp32": ours(engine.kernel, terms), "bf16": ours(engine.kernel, small)}, repeats)
        print(f"{kind:13}{t['bf16'] / t['fp32']:6.2f}")


def memory() -> None:
    """Most memory beyond inputs and gates of a 64k-token forward and backward, in a process of its own."""
    script = f"""
import re, sys
import torch, foveal
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 2 ** 20
T = 2 ** 16
q, k, v = (torch.randn(1, {H}, T, {D}, requires_grad=True) for _ in "qkv")
gates = dict(log_decay=(-0.1 * torch.rand(1, {H}, T)).requires_grad_(), beta=torch.rand(1, {H}, T).requires_grad_())
small = [x[:, :, :128].detach().requires_grad_() for x in (q, k, v)]
few = {{n: x[:, :, :128].detach().requires_grad_() for n, x in gates.items()}}
foveal.attention(*small, "gated_delta_rule", **few).sum().backward()
open("/proc/self/clear_refs", "w").write("5")
before = most()
foveal.attention(q, k, v, "gated_delta_rule", **gates).sum().backward()
print(most() - before)
"""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        return
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    extra = float(done.stdout)
    print(f"\ngated_delta_rule, 64k tokens, forward + backward: {extra:.2f} GiB beyond q, k, v and gates, with their")
    print(f"gradients and the output (goal < 2); one tensor of q's size has {H * 2**16 * D * 4 / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(GOALS), help="kinds, separated by commas")
    parser.add_argument("--skip-long", action="store_true", help="leave out what takes 64k tokens")
    options = parser.parse_args()
    if native.LIBRARY is None:
        sys.exit("this installation has no compiled kernels")
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads,"
    )
    print(f"kernels for {native.isa()}; B=1, H={H}, T={options.length}, K=V={D}, fp32, medians of {options.repeats}\n")
    speed(options.only.split(","), options.length, options.repeats)
    steps(options.repeats)
    halves(options.length, options.repeats)
    if not options.skip_long:
        growth(options.repeats)
        memory()
    print(f"\nmost memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
