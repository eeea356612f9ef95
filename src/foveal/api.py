"""The one call: name a mechanism, pass q, k and v, get the output."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveal import checks, packing, registry
from foveal.call import Call, Result
from foveal.spec import Mechanism, Spec
from foveal.state import State


class Attention(NamedTuple):
    """What :func:`attention` returns when extras are asked for; those that were not are None.

    With ``layout="bthd"`` the axes H and T of output, lse and weights change places.

    Args:
        output: [B, H, T, V] in q's dtype.
        state: hand it to the next call as ``initial_state``.
        lse: log of the sum of exp(score) over visible keys, [B, H, T]; -inf for a row that sees nothing.
        weights: the map W with output = W V, [B, H, T, S].
    """

    output: Tensor
    state: State | None = None
    lse: Tensor | None = None
    weights: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Route:
    """A backend that could serve a call: its name, whether it will, and in one sentence why not."""

    backend: str
    chosen: bool
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.backend}: {'runs' if self.chosen else self.why_not or 'could run, another comes first'}"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: str | Mechanism | type[Mechanism] = "softmax",
    *,
    causal: bool | str | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    layout: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    return_lse: bool = False,
    return_weights: bool = False,
    form: str | None = None,
    backend: str | None = None,
    **inputs: Tensor | None,
) -> Any:
    """Attend with any mechanism.

    Args:
        q: [B, H, T, K].
        k: [B, G, S, K]; key head of query head h is ``h // (H // G)``.
        v: [B, G, S, V].
        mechanism: a key such as ``"gated_delta_rule"``, or a mechanism with settings such as ``MoBA(top_k=8)``.
        causal: True aligns the last query with the last key (bottom-right); ``"top-left"`` the first with the first,
            as torch's ``is_causal``; False sees everything; None is the mechanism's default, True wherever it exists.
        mask: bool [B, S], True = keep: a hidden token does not exist (it takes no position, ages no state, and its
            query returns 0 in causal attention); or, for softmax mechanisms, bool (True = keep) or float (added to
            the scores) that broadcasts to [B, H, T, S].
        scale: factor of the scores; None is K ** -0.5 for every mechanism, 1.0 switches it off.
        layout: ``"bhtd"`` (default) or ``"bthd"`` for q, k, v, the extra inputs and all that is
            returned but states; no copy is made.
        cu_seqlens: int32 or int64 [N + 1], boundaries of N packed sequences (B = 1) from 0 to T; empty ones allowed.
        cu_seqlens_k: the same for keys, where they differ from the queries'.
        initial_state: state of an earlier call with ``output_final_state``; with packing, one row per sequence.
        output_final_state: also return the state after the last token.
        return_lse: also return the log-sum-exp of the scores, for merging partial results.
        return_weights: also return the effective map W [B, H, T, S] with output = W V; costs O(T S) memory.  Refused
            where there is no such map, because the mechanism normalises its output.
        form: one of the mechanism's forms (``"parallel"``, ``"chunked"``, ``"recurrent"``); None chooses.
        backend: name of a backend, which then never falls back; None chooses (see :func:`explain`).
        **inputs: the mechanism's own tensors, such as ``log_decay`` and ``beta``.

    Returns:
        The output [B, H, T, V] in q's dtype, or an :class:`Attention` tuple when an extra is asked for.

    Raises:
        TypeError: for a missing or unknown input, an integer mask, or a wrong type or dtype.
        ValueError: for shapes, settings or values that do not fit; the message names the argument, what it was and
            what was expected.
    """
    spec = registry.resolve(mechanism)
    swapped = checks.layout(layout, q, spec)
    tensors = {"q": q, "k": k, "v": v} | checks.inputs_by_name(spec, inputs)
    if swapped:
        tensors = {
            name: _swap(x, ("B", "H") if name in AXES_QKV else spec.inputs[name].axes) for name, x in tensors.items()
        }
    call = _call(spec, tensors, causal=causal, mask=mask, scale=scale, form=form, backend=backend)
    call = call.replace(state=initial_state, want_state=output_final_state, want_lse=return_lse)
    marks = _marks(spec, call, cu_seqlens, cu_seqlens_k)
    _check_state(spec, call, None if marks is None else len(marks[0]) - 1)
    result = _run(spec, call, marks)
    weights = _weights(spec, call, marks) if return_weights else None
    output, lse = result.output.to(q.dtype), result.lse
    if swapped:
        output, lse, weights = (
            output.transpose(1, 2),
            *(None if x is None else x.transpose(1, 2) for x in (lse, weights)),
        )
    if output_final_state or return_lse or return_weights:
        return Attention(output, result.state, lse, weights)
    return output


AXES_QKV = checks.AXES


def _swap(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    both = isinstance(x, Tensor) and x.dim() > 2 and ("H" in axes or "G" in axes) and axes[0] == "B"
    return x.transpose(1, 2) if both and (len(axes) == 2 or "T" in axes) else x


def _call(
    spec: Mechanism,
    tensors: dict[str, Tensor],
    *,
    causal: bool | str | None,
    mask: Tensor | None,
    scale: float | None,
    form: str | None,
    backend: str | None,
) -> Call:
    """Check everything that needs no boundaries and sort it into a call."""
    is_causal, top_left = checks.causal(causal, spec)
    sizes = checks.shapes(spec, tensors, causal=is_causal)
    if form is not None and form not in spec.forms:
        raise spec.fail("form", repr(form), f"one of {list(spec.forms)}")
    padding, visible, bias = checks.masks(mask, sizes, tensors["q"].device, spec)
    q, k, v = (tensors.pop(name) for name in AXES_QKV)
    checks.ranges(spec, tensors)
    return Call(
        q=q,
        k=k,
        v=v,
        scale=checks.scale(scale, sizes["K"], spec),
        causal=is_causal,
        top_left=top_left and sizes["T"] != sizes["S"],
        padding=padding,
        mask=visible,
        bias=bias,
        inputs=spec.completed(tensors, sizes, q),
        form=form,
        backend=backend,
    )


def _check_state(spec: Mechanism, call: Call, sequences: int | None) -> None:
    state = call.state
    if state is None:
        return
    if not isinstance(state, State):
        raise TypeError(f"{spec.name}: initial_state is {type(state).__name__}, expected a state of an earlier call")
    if call.mask is not None or call.bias is not None or call.top_left:
        raise spec.fail(
            "initial_state", "a mask beyond padding beside it", "at most a bool mask [B, T] of the new tokens"
        )
    spec.check_state(state, call, call.q.shape[0] if sequences is None else sequences)


def _marks(
    spec: Mechanism, call: Call, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[list[int], list[int]] | None:
    """Boundaries of queries and of keys, or None for a plain batch."""
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise spec.fail("cu_seqlens_k", "boundaries for keys alone", "cu_seqlens for the queries too")
        return None
    if call.q.shape[0] != 1:
        raise spec.fail(
            "cu_seqlens", f"a batch of {call.q.shape[0]}", "B = 1: packed sequences lie one after the other"
        )
    if call.mask is not None or call.bias is not None:
        raise spec.fail("mask", "one value per query and key beside cu_seqlens", "a bool mask [1, S]")
    if call.top_left:
        raise spec.fail("causal", "'top-left' beside packed sequences of unequal lengths", "True")
    queries = packing.bounds(cu_seqlens, call.q.shape[2], "cu_seqlens", spec)
    if cu_seqlens_k is None:
        if call.k.shape[2] != call.q.shape[2]:
            raise spec.fail("k", f"S={call.k.shape[2]}", f"S={call.q.shape[2]} as q, or cu_seqlens_k")
        return queries, queries
    keys = packing.bounds(cu_seqlens_k, call.k.shape[2], "cu_seqlens_k", spec)
    if len(keys) != len(queries):
        raise spec.fail("cu_seqlens_k", f"{len(keys) - 1} sequences", f"{len(queries) - 1} as cu_seqlens")
    return queries, keys


def _run(spec: Mechanism, call: Call, marks: tuple[list[int], list[int]] | None) -> Result:
    return _run_batch(spec, call) if marks is None else packing.run(call, *marks, spec, lambda c: _run_batch(spec, c))


def _run_batch(spec: Mechanism, call: Call) -> Result:
    """Run one batch with every hidden token blanked, so that no NaN behind a mask reaches values or gradients."""
    if call.padding is None:
        return spec.run(call)
    T, S = call.q.shape[2], call.k.shape[2]
    padding, real = call.padding, call.padding[:, None, :, None]
    call = call.replace(k=call.k.where(real, 0), v=call.v.where(real, 0))
    if not call.causal or call.top_left:
        return spec.run(call)
    # queries in front of all keys have none beside them that could be hidden
    asks = padding[:, S - T :] if T <= S else torch.cat((padding.new_ones(len(padding), T - S), padding), 1)
    inputs = {name: x.where(_like(asks, spec.inputs[name].axes), 0) for name, x in call.inputs.items()}
    result = spec.run(call.replace(q=call.q.where(asks[:, None, :, None], 0), inputs=inputs))
    lse = None if result.lse is None else result.lse.where(asks[:, None], -torch.inf)
    return Result(result.output.where(asks[:, None, :, None], 0), result.state, lse)


def _like(asks: Tensor, axes: tuple[str, ...]) -> Tensor:
    """A [B, T] tensor shaped to broadcast against an input; inputs without a T axis have nothing to hide."""
    if "T" not in axes:
        return asks.new_ones(())
    shape = [asks.shape["BT".index(axis)] if axis in "BT" else 1 for axis in axes]
    return asks.reshape(shape)


def _weights(spec: Mechanism, call: Call, marks: tuple[list[int], list[int]] | None) -> Tensor:
    """The effective map: the mechanism is linear in its values, so the identity as values returns it."""
    if not spec.linear_in_values:
        raise spec.fail("return_weights", True, "False: its output is no linear map of the values")
    if call.state is not None:
        raise spec.fail("return_weights", "an initial_state beside it", "none: its keys have no column in the map")
    S = call.k.shape[2]
    eye = torch.eye(S, dtype=call.v.dtype, device=call.v.device).expand(*call.k.shape[:2], S, S)
    return _run(spec, call.replace(v=eye, want_state=False, want_lse=False), marks).output.to(call.q.dtype)


def explain(
    mechanism: str | Mechanism | type[Mechanism],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    form: str | None = None,
    return_lse: bool = False,
    output_final_state: bool = False,
    **inputs: Tensor | None,
) -> list[Route]:
    """Which backend would run this call of :func:`attention`, and why the others would not; nothing is computed.

    Raises:
        TypeError, ValueError: as :func:`attention`.
    """
    spec = registry.resolve(mechanism)
    tensors = {"q": q, "k": k, "v": v} | checks.inputs_by_name(spec, inputs)
    call = _call(spec, tensors, causal=causal, mask=mask, scale=scale, form=form, backend=None)
    backends = spec.backends(call.replace(want_lse=return_lse, want_state=output_final_state))
    able = [backend for backend in backends if backend.why_not is None]
    return [Route(backend.name, backend in able[:1], backend.why_not) for backend in backends]


def get(key: str) -> type[Any]:
    """The class of a mechanism or cache policy by its key or alias; settings are its arguments.

    Raises:
        ValueError: if there is none; the message names the nearest keys.
    """
    try:
        return registry.get(key)
    except ValueError as no_mechanism:
        try:
            return registry.get(key, kind="policy")
        except ValueError:
            raise no_mechanism from None


def find(text: str) -> list[type[Spec]]:
    """Every mechanism and policy that matches a key, alias, arXiv id, title word or author, best match first."""
    return registry.find(text)


def list_mechanisms() -> list[str]:
    """The keys of all mechanisms, sorted."""
    return registry.names("mechanism")


def list_policies() -> list[str]:
    """The keys of all cache policies, sorted."""
    return registry.names("policy")
