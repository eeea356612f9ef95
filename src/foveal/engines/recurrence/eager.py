"""The torch forms of the recurrence: step by step, in chunks, and all at once.

No exponent above 0 is ever formed: decays enter as sums over the tokens between two positions.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foveal.engines.recurrence.program import Terms, with_columns
from foveal.state import RecurrentState

CHUNK = 64
BLOCK = 16  # rows whose decays are compared channel by channel
FLOOR = -1e6  # exp of it is 0 in float64, yet sums of it stay finite where -inf would give -inf - -inf


def kernel(terms: Terms, scale: float, state: RecurrentState | None, form: str | None) -> tuple[Tensor, RecurrentState]:
    """One recurrence in the form asked for, or the best one."""
    if terms.log_decay is not None:
        terms = dataclasses.replace(terms, log_decay=terms.log_decay.clamp(min=FLOOR))
    T = terms.read.shape[2]
    form = form or ("recurrent" if T == 1 else "chunked")

    def run(terms: Terms, start: Tensor) -> tuple[Tensor, Tensor]:
        return scan(terms, start) if form == "recurrent" else chunks(terms, start, T if form == "parallel" else CHUNK)

    return with_columns(run, terms, scale, state)


def scan(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other: T steps of K V work."""
    outputs = []
    read, write, value = terms.read.unbind(2), terms.write.unbind(2), terms.value.unbind(2)
    decay = None if terms.log_decay is None else terms.log_decay.exp().unbind(2)
    erase = None if terms.erase is None else tuple(x.unbind(2) for x in terms.erase)
    for t in range(len(read)):
        if decay is not None:
            state = decay[t][..., None] * state
        update = write[t][..., None] * value[t][..., None, :]
        if erase is not None:
            update = update - erase[0][t][..., None] * (erase[1][t][..., None, :] @ state)
        state = state + update
        outputs.append((read[t][..., None, :] @ state).squeeze(-2))
    return torch.stack(outputs, 2), state


def chunks(terms: Terms, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """All chunks at once up to the state that enters each; the loop over chunks is one small product."""
    T = terms.read.shape[2]
    size = min(size, T)
    rest = -T % size
    if rest:
        terms = terms.map(lambda x: torch.nn.functional.pad(x, (0, 0, 0, rest)))
    terms = terms.map(lambda x: x.reshape(*x.shape[:2], -1, size, x.shape[-1]))
    decay = Decay(terms.log_decay)
    read, write, value = terms.read, terms.write, terms.value
    outputs = decay.pairs(read, write, strict=False) @ value
    gain = decay.since_start(read)
    carried = decay.until_end(write).mT @ value
    keep = None
    if terms.erase is not None:
        u, w = terms.erase
        # e = what each token erases, linear in the state that enters the chunk: e = from_state S + from_values
        system = torch.cat((decay.since_start(w), decay.pairs(w, write, strict=True) @ value), -1)
        solved = torch.linalg.solve_triangular(decay.pairs(w, u, strict=True), system, upper=False, unitriangular=True)
        from_state, from_values = solved.split((w.shape[-1], value.shape[-1]), -1)
        read_erased, last_erased = decay.pairs(read, u, strict=False), decay.until_end(u).mT
        outputs = outputs - read_erased @ from_values
        gain = gain - read_erased @ from_state
        carried = carried - last_erased @ from_values
        keep = -(last_erased @ from_state)
    total = decay.total()
    entering = []
    kept = None if keep is None else keep.unbind(2)
    totals = None if total is None else total.unbind(2)
    for n, new in enumerate(carried.unbind(2)):
        entering.append(state)
        grown = new if kept is None else new + kept[n] @ state
        state = grown + (state if totals is None else totals[n] * state)
    outputs = outputs + gain @ torch.stack(entering, 2)
    return outputs.flatten(2, 3)[:, :, :T], state


class Decay:
    """Products of decays between positions of a chunk, [..., C, 1 or K], and what they do to vectors.

    Sums run in float64, where the difference of two sums of up to C decays keeps its digits even after a decay
    of -1e4; differences, whose exponentials matter only where they are small, are back in the vectors' precision.
    """

    def __init__(self, log_decay: Tensor | None) -> None:
        self.sums = None if log_decay is None else log_decay.double().cumsum(-2)
        self.dtype = None if log_decay is None else log_decay.dtype

    def total(self) -> Tensor | None:
        """Decay over the whole chunk, [..., 1 or K, 1]."""
        return None if self.sums is None else self.sums[..., -1, :, None].to(self.dtype).exp()

    def since_start(self, x: Tensor) -> Tensor:
        """Each row times the decay from the start of the chunk up to and including its token."""
        return x if self.sums is None else x * self.sums.to(x.dtype).exp()

    def until_end(self, x: Tensor) -> Tensor:
        """Each row times the decay after its token up to the end of the chunk."""
        return x if self.sums is None else x * (self.sums[..., -1:, :] - self.sums).to(x.dtype).exp()

    def pairs(self, left: Tensor, right: Tensor, *, strict: bool) -> Tensor:
        """A_ts = sum_k left_tk right_sk exp(sum of decays in (s, t]) for s <= t (s < t if strict), else 0."""
        C, offset = left.shape[-2], -1 if strict else 0
        if self.sums is None:
            return (left @ right.mT).tril(offset)
        past = torch.ones(C, C, dtype=torch.bool, device=left.device).tril(offset)
        if self.sums.shape[-1] == 1:
            between = self.sums - self.sums.mT
            return (left @ right.mT) * between.to(left.dtype).masked_fill(~past, -torch.inf).exp()
        rows = []
        for start in range(0, C, BLOCK):
            stop = min(start + BLOCK, C)
            here = self.sums[..., start:stop, :]
            between = (here[..., :, None, :] - here[..., None, :, :]).to(left.dtype)
            near = between.masked_fill(~past[start:stop, start:stop, None], -torch.inf).exp()
            own = (left[..., start:stop, None, :] * near * right[..., None, start:stop, :]).sum(-1)
            pieces = [own, own.new_zeros(*own.shape[:-1], C - stop)]
            if start:
                # both exponents are <= 0: the anchor stands between the two tokens
                anchor = self.sums[..., start - 1 : start, :]
                late = left[..., start:stop, :] * (here - anchor).to(left.dtype).exp()
                early = right[..., :start, :] * (anchor - self.sums[..., :start, :]).to(left.dtype).exp()
                pieces.insert(0, late @ early.mT)
            rows.append(torch.cat(pieces, -1))
        return torch.cat(rows, -2)
