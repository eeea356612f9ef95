"""The compiled kernels for CPUs: where the library is, whether it can run, and a call with plain numbers.

The library links to nothing but the C library.  torch's own threads are handed to it, so that
``torch.set_num_threads`` holds and no second thread pool competes.
"""

from __future__ import annotations

import ctypes
import pathlib
import struct
import sysconfig

import torch
from torch import Tensor

NAMES = ("libfoveal.so", "libfoveal.dylib")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DENSE = -1  # the kind of a tensor whose strides follow from its shape


def _found() -> ctypes.CDLL | None:
    """The compiled library, or None if this installation has none that loads."""
    here = pathlib.Path(__file__).parent
    folders = [here, pathlib.Path(sysconfig.get_path("platlib")) / "foveal" / "native"]
    for path in (folder / name for folder in folders for name in NAMES):
        if path.is_file():
            try:
                return _opened(path)
            except (OSError, AttributeError):  # built for another machine, or by an older version
                continue
    return None


def _opened(path: pathlib.Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.foveal_recurrence.argtypes = [ctypes.c_char_p, ctypes.c_double, ctypes.c_int64, ctypes.c_int64]
    lib.foveal_attention.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    lib.foveal_set_parallel.argtypes = [ctypes.c_void_p]
    lib.foveal_set_parallel.restype = None
    lib.foveal_isa.restype = ctypes.c_char_p
    lib.foveal_use_isa.argtypes = [ctypes.c_char_p]
    lib.foveal_set_parallel(_parallel_for())
    return lib


def _parallel_for() -> int | None:
    """Address of torch's parallel loop (torch >= 2.10); without it the kernels run on one thread."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = pathlib.Path(torch.__file__).parent / "lib" / name
        if path.is_file():
            try:
                return ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, ctypes.c_void_p).value
            except (OSError, AttributeError):
                return None
    return None


LIBRARY = _found()


def why_not(*tensors: Tensor) -> str | None:
    """Why the kernels cannot run on such tensors, in one sentence, or None if they can."""
    for x in tensors:
        if x.device.type != "cpu":
            return f"the compiled kernels run on CPUs, not on {x.device.type}"
        if x.dtype not in KINDS:
            return f"the compiled kernels compute in fp32, not in {str(x.dtype).removeprefix('torch.')}"
    if LIBRARY is None:
        return "this installation has no compiled kernels: reinstall foveal with a C++17 compiler at hand"
    return None


def isa() -> str:
    """The instruction set that the kernels of this process use, ``"none"`` without kernels."""
    return "none" if LIBRARY is None else str(LIBRARY.foveal_isa().decode())


def view(x: Tensor | None) -> tuple[int, ...]:
    """A [B, H, T, width] tensor as the kernels take it: address and kind, and four strides unless it is plain fp32."""
    if x is None:
        return 0, DENSE
    if x.dtype is torch.float32 and x.is_contiguous():
        return x.data_ptr(), DENSE
    return x.data_ptr(), KINDS[x.dtype], *x.stride()


def address(x: Tensor | None) -> int:
    """Where a contiguous fp32 tensor lies, 0 for none."""
    return 0 if x is None or x.numel() == 0 else x.data_ptr()


def recurrence(words: list[int], scale: float, what: int) -> None:
    """Run the recurrence kernel on a flat list of numbers.

    Raises:
        MemoryError: if there is no room for its working memory.
    """
    assert LIBRARY is not None
    flat = struct.pack(f"{len(words)}q", *words)
    failed = LIBRARY.foveal_recurrence(flat, scale, what, torch.get_num_threads())
    if failed:
        raise MemoryError("foveal: no memory for the working space of the recurrence kernel")


def attention(words: list[int], scale: float, cap: float, what: int) -> None:
    """Run the attention kernel on a flat list of numbers.

    Raises:
        MemoryError: if there is no room for its working memory.
    """
    assert LIBRARY is not None
    flat, reals = struct.pack(f"{len(words)}q", *words), struct.pack("2d", scale, cap)
    failed = LIBRARY.foveal_attention(flat, reals, what, torch.get_num_threads())
    if failed:
        raise MemoryError("foveal: no memory for the working space of the attention kernel")
