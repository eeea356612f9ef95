"""The build route of the compiled kernels: size, call overhead, and how they live beside torch's threads.

python benchmarks/native.py
"""

from __future__ import annotations

import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch

from foveal import native
from foveal.engines.recurrence import Terms
from foveal.engines.recurrence import native as engine


def median(call: Callable[[], object], repeats: int = 7, inner: int = 1) -> float:
    """Microseconds of one call."""
    call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        found.append((time.perf_counter() - start) / inner * 1e6)
    return statistics.median(found)


def main() -> None:
    lib = native.LIBRARY
    if lib is None:
        raise SystemExit("this installation has no compiled kernels")
    path = pathlib.Path(lib._name)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, kernels for {native.isa()}")
    print(f"library: {path.stat().st_size / 1024:.0f} KiB")

    nothing = [0, 8, 1, 64, 64, 0, 0, 0] + [0] * 44  # a batch of 0
    print(f"an empty call, list to return: {median(lambda: native.recurrence(nothing, 1.0, 2), inner=2000):.1f} us")
    x = torch.randn(1, 8, 1, 64)
    one = Terms(x, x, x)
    with torch.no_grad():
        state = engine.kernel(one, 1.0, None, None)[1]
        step = median(lambda: engine.kernel(one, 1.0, state, None), inner=500)
        print(f"a decode step past the dispatcher, B=1, H=8, 64 x 64: {step:.1f} us")
        op = torch.ops.foveal.recurrence
        arguments = (x, x, x, None, None, None, state.matrix, None, 1.0, False, True, False)
        print(f"the same through the op: {median(lambda: op(*arguments), inner=500):.1f} us")

        y = torch.randn(1, 8, 4096, 64)
        terms, a = Terms(y, y, y), torch.randn(1024, 1024)
        threads = torch.get_num_threads()

        def kernel() -> object:
            return engine.kernel(terms, 1.0, None, "chunked")

        def both() -> None:
            kernel()
            a @ a

        together, apart = median(both), median(kernel) + median(lambda: a @ a)
        print(f"kernel and torch product in turns / each alone: {together / apart:.2f}")
        parallel = median(kernel)
        torch.set_num_threads(1)
        print(f"one thread / {threads} threads: {median(kernel) / parallel:.2f} (torch.set_num_threads is followed)")
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
