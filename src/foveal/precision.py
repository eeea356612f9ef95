"""Half precision is for storage: every torch path computes in fp32, float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def upcast(x: Tensor) -> Tensor:
    """The tensor in the precision that engines compute in."""
    return x.float() if x.dtype in HALF else x


def upcast_on_cpu(x: Tensor) -> Tensor:
    """The same for kernels that accumulate in fp32 by themselves, where only CPUs lack fast half-precision products."""
    return upcast(x) if x.device.type == "cpu" else x
