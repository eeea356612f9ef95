"""torch's counter of operations learns about foveal's own ops when it runs.

Registering formulas the usual way would import ``torch.utils.flop_counter``, which loads Triton where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_formulas: dict[Any, Callable[..., int]] = {}


def count(op: Any, formula: Callable[..., int]) -> None:
    """Give an op its formula: operations from the op's own arguments, products and sums counted apart."""
    _formulas[op] = formula


def counted() -> bool:
    """Whether something watches the ops of this moment; counters among it get the formulas."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if known is not None:
            known.update(_formulas)
    return True
