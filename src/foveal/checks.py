"""Every check of user input: shapes, devices, dtypes and ranges against what a mechanism declares.

Names of axes: B batch, H query heads, G key/value heads, T queries, S keys, K key width, V value width.
"""

from __future__ import annotations

import math
import numbers
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foveal.spec import Mechanism

AXES = {"q": "B H T K", "k": "B G S K", "v": "B G S V"}
LAYOUTS = ("bhtd", "bthd")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layout(value: str | None, q: object, mechanism: Mechanism) -> bool:
    """Whether tensors come as [B, T, H, K]; warns when no layout was given and the axes look swapped."""
    if value is not None and value not in LAYOUTS:
        raise mechanism.fail("layout", repr(value), "'bhtd' or 'bthd'")
    if value is None and isinstance(q, Tensor) and q.dim() == 4 and 1 < q.shape[2] < q.shape[1]:
        warnings.warn(
            f"{mechanism.name}: q has shape {tuple(q.shape)}, read as [B, H, T, K] with fewer tokens (T={q.shape[2]}) "
            f"than heads (H={q.shape[1]}); pass layout='bthd' if it is [B, T, H, K], or layout='bhtd' to confirm",
            UserWarning,
            stacklevel=3,
        )
    return value == "bthd"


def inputs_by_name(mechanism: Mechanism, given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The extra tensors that were given, without those that are None.

    Raises:
        TypeError: if a required one is missing or one is unknown.
    """
    present = {name: x for name, x in given.items() if x is not None}
    missing = [name for name, declared in mechanism.inputs.items() if not declared.optional and name not in present]
    surplus = sorted(present.keys() - mechanism.inputs.keys())
    if missing:
        what = "; ".join(f"{name} [{mechanism.inputs[name].shape}], {mechanism.inputs[name].doc}" for name in missing)
        raise TypeError(f"{mechanism.name}: missing {what}")
    if surplus:
        own = ", ".join(mechanism.settings()) or "none"
        raise TypeError(
            f"{mechanism.name}: unexpected {', '.join(surplus)}, expected inputs among "
            f"{sorted(mechanism.inputs) or 'none'}; settings ({own}) belong to the mechanism: "
            f"{type(mechanism).__name__}(...)"
        )
    return present


def shapes(mechanism: Mechanism, tensors: dict[str, Tensor], *, causal: bool = True) -> dict[str, int]:
    """Compare every tensor with its declared axes; return the sizes of the named axes.

    Raises:
        TypeError: if something is no tensor of the declared kind of numbers, or q, k and v differ in dtype.
        ValueError: if an axis is missing or its size contradicts another tensor, or devices differ.
    """
    declared = AXES | {name: item.shape for name, item in mechanism.inputs.items()}
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    q = tensors["q"]
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{mechanism.name}: {name} is {type(x).__name__}, expected a tensor")
        if name in mechanism.inputs and mechanism.inputs[name].whole:
            if x.dtype != torch.int64:
                raise TypeError(f"{mechanism.name}: {name} has {x.dtype}, expected torch.int64")
        elif x.dtype not in FLOATS:
            raise TypeError(f"{mechanism.name}: {name} has {x.dtype}, expected floating point")
        axes, shape = declared[name].split(), tuple(x.shape)
        if len(axes) != len(shape):
            raise mechanism.fail(name, f"shape {shape}", f"[{', '.join(axes)}]")
        for axis, size in zip(axes, shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise mechanism.fail(
                    name, f"{axis}={size}", f"{axis}={sizes[axis]} as in {owner[axis]} ([{', '.join(axes)}])"
                )
            owner.setdefault(axis, name)
        if name == "v":
            sizes |= mechanism.widths(sizes["K"])
            owner |= dict.fromkeys(mechanism.widths(sizes["K"]), "the settings")
        if x.device != q.device:
            raise mechanism.fail(name, f"device {x.device}", f"{q.device} as q")
        if name in "kv" and x.dtype != q.dtype:
            raise TypeError(f"{mechanism.name}: {name} has {x.dtype}, expected {q.dtype} as q")
    for axis in ("H", "G", "K", "V"):
        if sizes[axis] < 1:
            raise mechanism.fail(owner[axis], f"{axis}=0", f"{axis} >= 1")
    if sizes["H"] % sizes["G"]:
        raise mechanism.fail("q", f"H={sizes['H']} heads", f"a multiple of the G={sizes['G']} heads of k and v")
    if mechanism.self_attention and causal and sizes["T"] != sizes["S"]:
        raise mechanism.fail("k", f"S={sizes['S']}", f"S={sizes['T']} as q: a recurrence reads and writes together")
    if mechanism.carried and sizes["T"] != sizes["S"]:
        what = ", ".join(mechanism.carried)
        raise mechanism.fail("k", f"S={sizes['S']}", f"S={sizes['T']} as q: {what} is given once for both")
    return sizes


def ranges(mechanism: Mechanism, inputs: dict[str, Tensor]) -> None:
    """Refuse gates outside their legal range.  On accelerators this would wait for the device, so only CPUs check.

    Raises:
        ValueError: if a value is out of range; NaN passes, since it may stand behind a mask.
    """
    if torch.compiler.is_compiling():
        return
    for name, x in inputs.items():
        low, high = mechanism.inputs[name].legal
        if x.device.type != "cpu" or x.numel() == 0 or (low, high) == (float("-inf"), float("inf")):
            continue
        least, most = (float(y) for y in x.detach().double().nan_to_num(nan=min(max(0.0, low), high)).aminmax())
        if least < low or most > high:
            bad = least if least < low else most
            raise mechanism.fail(
                name, f"the value {bad:.4g}", f"{low:g} <= {name} <= {high:g} ({mechanism.inputs[name].doc})"
            )


def scale(value: float | None, key_width: int, mechanism: Mechanism) -> float:
    """The factor of the scores: K ** -0.5 unless given."""
    if value is None:
        return 1.0 / math.sqrt(key_width)
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise mechanism.fail("scale", repr(value), "a finite number, or None for K ** -0.5")
    return float(value)


def causal(value: bool | str | None, mechanism: Mechanism) -> tuple[bool, bool]:
    """Whether the call is causal, and whether positions are aligned top-left."""
    if value is None:
        return mechanism.causal_modes[0], False
    if value == "top-left":
        value, top_left = True, True
    else:
        top_left = False
    if not isinstance(value, bool):
        raise mechanism.fail("causal", repr(value), "True, False or 'top-left'")
    if value not in mechanism.causal_modes:
        raise mechanism.fail("causal", value, f"{mechanism.causal_modes[0]}: it has no other form")
    return value, top_left


def masks(
    mask: Tensor | None, sizes: dict[str, int], device: torch.device, mechanism: Mechanism
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sort a mask into padding [B, S], a boolean mask [.., T, S] and an additive bias [.., T, S].

    Raises:
        TypeError: for integer masks, whose meaning (index, 0/1, additive) is anyone's guess.
        ValueError: for shapes that do not broadcast, or masks that the engine has no use for.
    """
    if mask is None:
        return None, None, None
    if not isinstance(mask, Tensor):
        raise TypeError(f"{mechanism.name}: mask is {type(mask).__name__}, expected a tensor")
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise TypeError(
            f"{mechanism.name}: mask has {mask.dtype}, expected bool (True = keep) or a float that is added; "
            "for a mask of 0 and 1 pass mask.bool()"
        )
    if mask.device != device:
        raise mechanism.fail("mask", f"device {mask.device}", f"{device} as q")
    B, H, T, S = (sizes[axis] for axis in "BHTS")
    shape = tuple(mask.shape)
    if mask.dim() == 2:
        if shape not in ((B, S), (1, S)):
            hint = "; for one mask [T, S] for all heads pass mask[None, None]" if shape == (T, S) else ""
            raise mechanism.fail("mask", f"shape {shape}", f"[B, S] = {(B, S)}{hint}")
        if mask.dtype == torch.bool:
            return mask.expand(B, S), None, None
        mask = mask[:, None, None]
    full = (B, H, T, S)
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) != 4 or any(have not in (1, want) for have, want in zip(padded, full, strict=True)):
        raise mechanism.fail("mask", f"shape {shape}", f"[B, S] = {(B, S)} or one that broadcasts to {full}")
    if mechanism.self_attention:
        raise mechanism.fail("mask", f"shape {shape} and {mask.dtype}", f"a bool mask [B, S] = {(B, S)}")
    mask = mask.reshape(padded)
    return (None, mask, None) if mask.dtype == torch.bool else (None, None, mask)
