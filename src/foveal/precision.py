"""Half precision is for storage: every torch path computes in fp32, float64 stays float64."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """The tensor in the precision that engines compute in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
