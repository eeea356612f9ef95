"""How fast the engines' torch forms are against torch's own kernels: ratios from one interleaved run.

    python benchmarks/engines.py [--length 4096] [--repeats 5]

Rates count the multiply-adds of the mechanism's own card, times two.  The limit is the rate of a large fp32 matrix
product in the same run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

import foveal


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns so that a change of the machine's clock meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    H, T, D = 8, options.length, 64
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"B=1, H={H}, T={T}, K=V={D}, fp32, median of {options.repeats}, forward without gradients\n")
    q, k, v = (torch.randn(1, H, T, D) for _ in range(3))
    gate, gates, beta = logsigmoid(torch.randn(1, H, T)), logsigmoid(torch.randn(1, H, T, D)), torch.rand(1, H, T)
    big = torch.randn(2048, 2048)
    specs: dict[str, tuple[foveal.Mechanism, dict[str, torch.Tensor]]] = {
        "softmax": (foveal.Softmax(), {}),
        "softmax alibi": (foveal.Softmax(alibi=True), {}),
        "sliding_window 512": (foveal.SlidingWindow(window=512), {}),
        "moba 64x8": (foveal.MoBA(), {}),
        "sparse_transformer": (foveal.SparseTransformer(), {}),
        "linear": (foveal.Linear(), {}),
        "retention": (foveal.Retention(), {}),
        "gla": (foveal.GLA(), {"log_decay": gates}),
        "delta_rule": (foveal.DeltaRule(), {"beta": beta}),
        "gated_delta_rule": (foveal.GatedDeltaRule(), {"beta": beta, "log_decay": gate}),
    }
    calls: dict[str, Callable[[], object]] = {
        "matrix product": lambda: big @ big,
        "sdpa causal": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    for name, (spec, inputs) in specs.items():
        calls[name] = lambda spec=spec, inputs=inputs: foveal.attention(q, k, v, spec, **inputs)
    with torch.no_grad():
        seconds = {name: statistics.median(s) for name, s in interleaved(calls, options.repeats).items()}
    limit = 2 * 2048**3 / seconds["matrix product"]
    print(f"{'':20} {'ms':>9} {'x sdpa causal':>14} {'GFLOP/s':>9} {'of the limit':>13}")
    print(f"{'matrix product':20} {seconds['matrix product'] * 1e3:9.1f} {'':>14} {limit / 1e9:9.0f} {'100%':>13}")
    sdpa = seconds["sdpa causal"]
    print(f"{'sdpa causal':20} {sdpa * 1e3:9.1f} {1:14.2f} {2 * H * T * T * D / sdpa / 1e9:9.0f}", end="")
    print(f" {2 * H * T * T * D / sdpa / limit:13.0%}")
    for name, (spec, _) in specs.items():
        work = 2 * H * spec.cost.evaluate("train", spec.variables() | {"T": T, "K": D, "V": D})
        rate = work / seconds[name]
        print(
            f"{name:20} {seconds[name] * 1e3:9.1f} {seconds[name] / sdpa:14.2f} {rate / 1e9:9.0f} {rate / limit:13.0%}"
        )


if __name__ == "__main__":
    main()
