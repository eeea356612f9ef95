"""What a mechanism hands to the engine, and the run of one call: one recurrence or several in a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foveal.call import Call, Result
from foveal.precision import upcast
from foveal.state import ChainedState, RecurrentState, State

if TYPE_CHECKING:
    from foveal.engines.recurrence import Recurrence


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a mechanism hands to the engine.

    Args:
        read: r [B, H, T, K]; the engine applies ``scale``.
        write: p [B, H, T, K].
        value: v [B, H, T, V].
        log_decay: natural log of D, <= 0; [B, H, T, 1] for one decay per head, [B, H, T, K] for one per channel.
        erase: the pair (u, w), each [B, H, T, K].  Where u is ``write`` itself, as in the delta rule, say so by
            passing the same tensor: half of the work falls away.
        skip: added to the output, broadcastable to [B, H, T, V]; it is not scaled.
        normalize: divide the output by r_t' n_t, where n_t is the state that values of 1 would have left.
    """

    read: Tensor
    write: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    skip: Tensor | None = None
    normalize: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Terms:
        """A function applied to every tensor with a full T axis; ``skip`` does not enter the state and is left."""
        write, erase = change(self.write), None
        if self.erase is not None:
            u, w = self.erase
            erase = (write if u is self.write else change(u), change(w))
        return dataclasses.replace(
            self,
            read=change(self.read),
            write=write,
            value=change(self.value),
            log_decay=None if self.log_decay is None else change(self.log_decay),
            erase=erase,
        )


# (terms, factor of what is read, state or None, form or None) -> output, final state
Kernel = Callable[[Terms, float, RecurrentState | None, str | None], tuple[Tensor, RecurrentState]]


class Recur:
    """The recurrences of one call: each use runs the next one and takes and leaves its part of the state.

    Args:
        spec: the mechanism, for its errors.
        call: the call, its padding already blanked.
        kernel: what computes one recurrence.
    """

    def __init__(self, spec: Recurrence, call: Call, kernel: Kernel) -> None:
        self.spec, self.call, self.kernel = spec, call, kernel
        self.scale, self.causal = call.scale, call.causal
        parts = call.state.parts if isinstance(call.state, ChainedState) else (call.state,)
        self.before: list[State] = [] if call.state is None else list(parts)  # type: ignore[arg-type]
        self.after: list[State] = []

    def __call__(self, terms: Terms, scale: float | None = None) -> Tensor:
        """Run one recurrence; ``scale`` replaces the call's own factor of what is read."""
        scale = self.scale if scale is None else scale
        shape = (*terms.write.shape[:2], terms.write.shape[-1], terms.value.shape[-1])
        state = self.taken(shape, terms.normalize)
        terms = self.frozen(terms)
        if terms.read.shape[0] == 0 or terms.write.shape[2] == 0:
            output = terms.read.sum(-1, keepdim=True) * terms.write.sum() * terms.value.sum((0, 1, 2)) * scale
            final = empty(terms, shape) if state is None else state
        elif not self.causal:
            output, final = everything(terms, scale)
        else:
            output, final = self.kernel(terms, scale, state, self.call.form)
        self.after.append(final)
        return output if terms.skip is None else output + terms.skip

    def taken(self, shape: tuple[int, ...], normalize: bool) -> RecurrentState | None:
        """The state that an earlier call left for the next recurrence.

        Raises:
            ValueError: if it has another shape, or a normaliser too many or too few.
        """
        if self.call.state is None:
            return None
        state = self.before[len(self.after)] if len(self.after) < len(self.before) else None
        if not isinstance(state, RecurrentState):
            raise self.spec.fail("initial_state", f"{len(self.before)} parts", "a state of the same mechanism")
        if tuple(state.matrix.shape) != shape:
            raise self.spec.fail("initial_state", f"matrix {tuple(state.matrix.shape)}", f"[B, H, K, V] = {shape}")
        if normalize != (state.normalizer is not None):
            has, want = ("no normalizer", "one") if normalize else ("a normalizer", "none")
            raise self.spec.fail("initial_state", has, f"{want}, as states of this mechanism have")
        return state

    def frozen(self, terms: Terms) -> Terms:
        """The terms with hidden tokens taken out: they neither read, write, erase nor decay."""
        if self.call.padding is None:
            return terms
        real = self.call.padding[:, None, :, None]
        still = terms.map(lambda x: x.where(real, 0) if x.shape[2] == real.shape[2] else x)
        return still if self.causal else dataclasses.replace(still, read=terms.read)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Places of queries and keys in their sequences, from 1, [B, H, T, 1] and [B, H, S, 1]; padding takes none.

        The count goes on from call to call as a part of the state.
        """
        q, k = self.call.q, self.call.k
        real = torch.ones(*k.shape[:1], k.shape[2], dtype=torch.bool, device=k.device)
        real = real if self.call.padding is None else self.call.padding
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        count = real.cumsum(1)[:, None, :, None].expand(-1, q.shape[1], -1, -1).to(dtype)
        before = self.taken((*q.shape[:2], 1, 1), False)
        count = count if before is None else count + before.matrix.to(dtype)
        nothing = count.new_zeros(*q.shape[:2], 1, 1) if before is None else before.matrix
        self.after.append(RecurrentState(count[:, :, -1:] if k.shape[2] else nothing))
        if q.shape[2] == k.shape[2]:
            return count, count
        asks = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=dtype)[:, None]
        return asks.expand(*q.shape[:2], -1, 1), count

    def running_max(self, x: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """m_t = max(m_{t-1} + log_decay_t, x_t, 0) and m_{t-1}, [B, H, T, 1] each; m goes on from call to call.

        For scales that cancel: it has no gradient, padding leaves it, and float64 keeps its steps exact.
        """
        before = self.taken((*x.shape[:2], 1, 1), False)
        x, fallen = x.detach().double().clamp(min=0), log_decay.detach().double().clamp(min=-1e6)
        if self.call.padding is not None:
            real = self.call.padding[:, None, :, None]
            x, fallen = x.where(real, 0), fallen.where(real, 0)
        fallen = fallen.cumsum(2)
        start = x.new_zeros(*x.shape[:2], 1, 1) if before is None else before.matrix.detach().double()
        peak = torch.cat((start, x - fallen), 2).cummax(2).values
        m = torch.cat((start, peak[:, :, 1:] + fallen), 2)
        self.after.append(RecurrentState(m[:, :, -1:]))
        return m[:, :, 1:], m[:, :, :-1]

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Half of the factor each for q and k, so that q . k is the scaled score; for maps that bend it."""
        half = abs(self.scale) ** 0.5
        return q * (half if self.scale >= 0 else -half), k * half

    def state(self) -> State:
        """What this call leaves for the next one."""
        return self.after[0] if len(self.after) == 1 else ChainedState(tuple(self.after))


def run(spec: Recurrence, kernel: Kernel, call: Call) -> Result:
    """Compute a call in fp32 (float64 for float64), whatever the inputs' precision."""
    k, v = (x.repeat_interleave(call.group, 1) if call.group > 1 else x for x in (call.k, call.v))
    q, k, v = upcast(call.q), upcast(k), upcast(v)
    recur = Recur(spec, call, kernel)
    output = spec.compute(recur, q, k, v, **{name: x.to(q.dtype) for name, x in call.inputs.items()})
    return Result(output, recur.state() if call.want_state else None)


def with_columns(
    recurrence: Callable[[Terms, Tensor], tuple[Tensor, Tensor]],
    terms: Terms,
    scale: float,
    state: RecurrentState | None,
) -> tuple[Tensor, RecurrentState]:
    """A recurrence that knows neither scale nor normaliser: the latter becomes one more value column."""
    if state is None:
        state = empty(terms, (*terms.write.shape[:2], terms.write.shape[-1], terms.value.shape[-1]))
    terms = dataclasses.replace(terms, read=terms.read * scale)
    start = state.matrix.to(terms.value.dtype)
    if not terms.normalize:
        output, last = recurrence(terms, start)
        return output, RecurrentState(last)
    assert state.normalizer is not None
    ones = torch.ones_like(terms.value[..., :1])
    start = torch.cat((start, state.normalizer.to(start.dtype)[..., None]), -1)
    output, last = recurrence(dataclasses.replace(terms, value=torch.cat((terms.value, ones), -1)), start)
    return ratio(output[..., :-1], output[..., -1:]), RecurrentState(last[..., :-1], last[..., -1])


def everything(terms: Terms, scale: float) -> tuple[Tensor, RecurrentState]:
    """Every query reads what all keys wrote: two products, no order, no decay."""
    assert terms.log_decay is None, "a decay needs an order"
    assert terms.erase is None, "an erasure needs an order"
    matrix = terms.write.mT @ terms.value
    output = terms.read @ matrix
    if not terms.normalize:
        return output * scale, RecurrentState(matrix)
    normalizer = terms.write.sum(2)
    return ratio(output, terms.read @ normalizer[..., None]), RecurrentState(matrix, normalizer)


def empty(terms: Terms, shape: tuple[int, ...]) -> RecurrentState:
    """The state before the first token."""
    matrix = terms.value.new_zeros(shape)
    return RecurrentState(matrix, matrix.new_zeros(shape[:3]) if terms.normalize else None)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their quotient, 0 with gradient 0 where the denominator is 0: nothing was written yet."""
    nothing = denominator == 0
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
