"""The recurrence as Triton kernels: chunks for training and prompts, one fused kernel for decode steps.

Every decay that enters is the exponential of a *sum* of log decays, never of a difference of sums: the terms of a sum
have one sign, so no exponent is above 0 and no digit is lost when -1e4 stands beside -1e-4.  Halving a chunk again and
again parts any two tokens s < t exactly once; there the sum between them is cut into a late part, up to t, and an early
part, after s, and each halving is one masked matrix product.  The same halvings invert the triangular system.  The
gradient of a decay is summed over the pairs that it stands between; r dr - p dp would cancel where decays are strong.

Kernels work on [B H, T, width]; arithmetic is fp32 whatever the storage.  One loop over chunks serves both directions
of time, because the state's gradient obeys the state's recurrence with reading and writing exchanged.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped, import-not-found"
# (kernels have no annotations that mypy understands; triton and torch.cuda.device_of are not typed)

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foveal.engines.recurrence.program import Terms, with_columns

if TYPE_CHECKING:
    from foveal.call import Call
    from foveal.state import RecurrentState

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CHUNK = 64
WIDEST = 512  # the decode kernel holds a whole column of the state in registers
TILE = 32  # columns of a tile; wider ones spill registers (ptxas for sm_80 and sm_90)
WHOLE = 64  # states up to this many rows stay in registers from chunk to chunk
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)


def jit(kernel: Any) -> Any:
    """``triton.jit``, or without triton the function itself, which nobody will call."""
    return kernel if triton is None else triton.jit(kernel)


def available() -> str | None:
    """Why these kernels cannot run on this machine; None if they can."""
    if triton is None:
        return "triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no GPU"
    return None


def why_not(call: Call) -> str | None:
    """Why a call cannot run here, in one sentence; None if it can."""
    tensors = (call.q, call.k, call.v)
    if any(x.dtype not in (torch.float32, torch.float16, torch.bfloat16) for x in tensors):
        return "the Triton kernels compute in fp32, and this call is in float64"
    if not INTERPRETED and any(not x.is_cuda for x in tensors):
        return "the Triton kernels run on GPUs, not on cpu"
    if call.form == "parallel":
        return "the Triton kernels have the chunked and the recurrent form"
    return None


def kernel(terms: Terms, scale: float, state: RecurrentState | None, form: str | None) -> tuple[Tensor, RecurrentState]:
    """One recurrence in the form asked for, or the best one.

    Raises:
        ValueError: if keys or values are too wide to be held in registers.
    """
    width = max(terms.write.shape[-1], terms.value.shape[-1] + terms.normalize)
    if width > WIDEST:
        raise ValueError(f"backend: is 'triton', which takes states of width up to {WIDEST}, not {width}; use 'torch'")
    steps = form == "recurrent" or (form is None and terms.read.shape[2] == 1)
    return with_columns(step if steps else chunks, terms, scale, state)


def chunks(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What ``eager.chunks`` computes, output [B, H, T, V] and final state [B, H, K, V], both fp32; differentiable."""
    u, w = terms.erase or (None, None)
    if u is terms.write:
        u = None  # the delta rule: what is erased and what is written solve one system
    return _Chunks.apply(terms.read, terms.write, terms.value, terms.log_decay, u, w, state)  # type: ignore[no-any-return]


def step(terms: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """What ``eager.scan`` computes, one token after another in one kernel; with gradients it is :func:`chunks`."""
    letters = [terms.read, terms.write, terms.value, terms.log_decay, *(terms.erase or (None, None)), state]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in letters):
        return chunks(terms, state)
    r, p, v, a, u, w, first = map(_rows, letters)
    (BH, T, K), V = r.shape, v.shape[-1]
    output, last = torch.empty_like(v, dtype=torch.float32), torch.empty_like(first, dtype=torch.float32)
    BK = _padded(K, WIDEST)
    BV = _padded(V, max(16, 4096 // BK))  # 32 registers of state per thread, up to K = 256
    with torch.cuda.device_of(v):
        switches = {"DECAY": _kind(a), "ERASE": w is not None, "BK": BK, "BV": BV}
        _step[BH, -(-V // BV)](r, p, v, a, u, w, first, output, last, T, K, V, **switches)
    return output.view(terms.value.shape), last.view(state.shape)


def _rows(x: Any) -> Any:
    """[B, H, ., .] as contiguous [B H, ., .]."""
    return None if x is None else x.flatten(0, 1).contiguous()


def _zeros(x: Any) -> Any:
    return None if x is None else torch.zeros_like(x, dtype=torch.float32)


def _padded(width: int, most: int) -> int:
    """The power of two, 16 to ``most``, of a tile that holds a width or a part of it."""
    return min(most, max(16, 1 << (width - 1).bit_length()))


def _kind(log_decay: Tensor | None) -> int:
    return 0 if log_decay is None else 1 if log_decay.shape[-1] == 1 else 2


class _Plan:
    """Sizes and switches of one call, and its kernels as functions of tensors."""

    def __init__(self, r: Tensor, v: Tensor, a: Tensor | None, erase: int) -> None:
        (self.BH, self.T, self.K), self.V, self.erase = r.shape, v.shape[-1], erase
        self.C = _padded(self.T, CHUNK)
        self.N = -(-self.T // self.C)
        self.decay = _kind(a)
        self.device = v.device
        self.grid = (self.BH, self.N)
        self.narrow = {"C": self.C, "BK": _padded(self.K, TILE)}
        self.tiles = {**self.narrow, "BV": _padded(self.V, TILE)}
        # three tf32 products are as good as one in fp32, and only NVIDIA's tensor cores know them
        precision = "ieee" if torch.version.hip else "tf32x3"
        # loads ahead of their use (stages) would take the registers that hold split operands
        self.precision = {"PRECISION": precision, "num_stages": 1}
        self.levels = {"LEVELS": int(math.log2(self.C))}

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def pairs(self, x: Tensor, y: Tensor, a: Tensor | None, *, strict: bool) -> Tensor:
        """A_ts = sum_k x_tk y_sk times the decay over (s, t], for s < t, and s = t unless strict."""
        out = self.empty(*self.grid, self.C, self.C)
        switches = {"DECAY": self.decay, "STRICT": strict, **self.narrow, **self.levels, **self.precision}
        _pairs[self.grid](x, y, a, out, self.T, self.K, **switches)
        return out

    def invert(self, pairs: Tensor) -> Tensor:
        """(1 + pairs)^-1 of strictly lower triangular pairs."""
        out = torch.empty_like(pairs)
        _invert[self.grid](pairs, out, C=self.C, **self.levels, **self.precision)
        return out

    def edge(self, x: Tensor, a: Tensor | None, total: Tensor | None, *, end: bool) -> Tensor:
        """Rows times the decay since the start of their chunk, or until its end (which also leaves the total)."""
        if a is None:
            return x
        out = torch.empty_like(x, dtype=torch.float32)
        switches = {"DECAY": self.decay, "END": end, **self.narrow, **self.precision}
        _edge[self.grid](x, a, out, total, self.T, self.K, **switches)
        return out

    def carry(
        self,
        states: Tensor,
        total: Tensor | None,
        plain: Tensor,
        inner: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        mix: Tensor | None,
        solve: Tensor | None,
        *,
        back: bool,
    ) -> Tensor:
        """Fill the states between chunks from the outermost one, and return the solutions of every chunk's system."""
        solved = inner if self.erase == 0 else torch.empty_like(inner, dtype=torch.float32)
        whole = self.erase == 0 or self.K <= WHOLE
        BK, BV = _padded(self.K, WHOLE), self.tiles["BV"]
        grid = (self.BH, -(-self.V // BV), 1 if self.erase else -(-self.K // BK))
        switches = {"DECAY": self.decay, "ERASE": self.erase, "BACK": back, "WHOLE": whole}
        tiles = {"C": self.C, "BK": BK, "BV": BV}
        tensors = (states, total, plain, inner, left, right, mix, solve, solved)
        _carry[grid](*tensors, self.N, self.T, self.K, self.V, **switches, **tiles, **self.precision)
        return solved

    def mixed(
        self,
        left: Tensor,
        states: Tensor,
        near: Tensor,
        inner: Tensor,
        other: Tensor | None,
        erased: Tensor | None,
        *,
        back: bool,
    ) -> Tensor:
        """Left @ states + near @ inner - other @ erased for every chunk; ``back`` transposes the triangles."""
        out = self.empty(self.BH, self.T, self.V)
        grid = (self.BH, self.N, -(-self.V // self.tiles["BV"]))
        switches = {"BACK": back, "TWO": other is not None, **self.tiles, **self.precision}
        _mixed[grid](left, states, near, inner, other, erased, out, self.N, self.T, self.K, self.V, **switches)
        return out

    def pairs_back(
        self,
        slope: tuple[Tensor, Tensor],
        letters: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        a: Tensor | None,
        pairs: Tensor,
        da: Tensor | None,
        *,
        strict: bool,
        sign: int = 1,
    ) -> None:
        """Add to ``grads`` and ``da`` for pairs whose gradient is sign slope[0] slope[1]'."""
        switches = {"DECAY": self.decay, "STRICT": strict, "SIGN": sign, **self.tiles, **self.levels, **self.precision}
        _pairs_back[self.grid](*slope, *letters, *grads, a, pairs, da, self.T, self.K, self.V, **switches)

    def edge_back(
        self,
        slope: tuple[Tensor, Tensor],
        x: Tensor,
        dx: Tensor,
        a: Tensor | None,
        da: Tensor | None,
        *,
        end: bool,
        sign: int = 1,
    ) -> None:
        """Add to ``dx`` and ``da`` for rows whose gradient is sign slope[0] states'."""
        switches = {"DECAY": self.decay, "END": end, "SIGN": sign, **self.tiles, **self.precision}
        _edge_back[self.grid](*slope, x, dx, a, da, self.N, self.T, self.K, self.V, **switches)

    def total_back(self, states: Tensor, slopes: Tensor, total: Tensor, da: Tensor) -> None:
        """Add to ``da`` what the decay of the states over whole chunks contributes."""
        switches = {"DECAY": self.decay, **self.tiles}
        _total_back[self.grid](states, slopes, total, da, self.N, self.T, self.K, self.V, **switches)


class _Chunks(torch.autograd.Function):
    """The chunked form.  ``u`` is None where it is the tensor that is written (the delta rule)."""

    @staticmethod
    def forward(
        ctx: Any,
        read: Tensor,
        write: Tensor,
        value: Tensor,
        log_decay: Tensor | None,
        u: Tensor | None,
        w: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The output and the final state."""
        letters = (read, write, value, log_decay, u, w, state)
        r, p, v, a, u, w, first = map(_rows, letters)
        with torch.cuda.device_of(v):
            plan = _Plan(r, v, a, 0 if w is None else 1 if u is None else 2)
            total = None if a is None else plan.empty(*plan.grid, a.shape[-1])
            r_, p_ = plan.edge(r, a, None, end=False), plan.edge(p, a, total, end=True)
            w_ = None if w is None else plan.edge(w, a, None, end=False)
            u_ = None if u is None else plan.edge(u, a, total, end=True)
            rp = plan.pairs(r, p, a, strict=False)
            ru = None if u is None else plan.pairs(r, u, a, strict=False)
            wp = None if w is None else plan.pairs(w, p, a, strict=True)
            wu = wp if w is None or u is None else plan.pairs(w, u, a, strict=True)
            solve = None if wu is None else plan.invert(wu)
            states = plan.empty(plan.BH, plan.N + 1, plan.K, plan.V)
            states[:, 0] = first
            x = plan.carry(states, total, p_, v, w_, p_ if u_ is None else u_, wp, solve, back=False)
            output = plan.mixed(r_, states, rp, v if plan.erase == 2 else x, ru, x, back=False)
        ctx.save_for_backward(r, p, v, a, u, w, total, r_, p_, u_, w_, rp, ru, wp, wu, solve, states, x)
        ctx.plan = plan
        ctx.kinds = [None if x is None else (x.dtype, x.shape) for x in letters]
        return output.view(value.shape), states[:, -1].clone().view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output: Tensor, state: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of every input."""
        r, p, v, a, u, w, total, r_, p_, u_, w_, rp, ru, wp, wu, solve, states, x = ctx.saved_tensors
        plan: _Plan = ctx.plan
        do = _rows(output)
        with torch.cuda.device_of(v):
            slopes = plan.empty(*states.shape)  # gradients of the states between chunks
            slopes[:, -1] = _rows(state)
            near, last = (rp, p_) if u is None else (ru, u_)
            h = plan.carry(slopes, total, r_, do, last, w_, near, solve, back=True)
            dv = h if plan.erase == 1 else plan.mixed(p_, slopes, rp, do, wp, h, back=True)
            dr, dp, da, du, dw = map(_zeros, (r, p, a, u, w))
            y = v if plan.erase == 2 else x
            plan.pairs_back((do, y), (r, p), (dr, dp), a, rp, da, strict=False)
            plan.edge_back((do, states), r, dr, a, da, end=False)
            plan.edge_back((y, slopes), p, dp, a, da, end=True)
            if w is not None:
                plan.pairs_back((h, y), (w, p), (dw, dp), a, wp, da, strict=True, sign=-1)
                plan.edge_back((h, states), w, dw, a, da, end=False, sign=-1)
            if u is not None:
                plan.pairs_back((do, x), (r, u), (dr, du), a, ru, da, strict=False, sign=-1)
                plan.pairs_back((h, x), (w, u), (dw, du), a, wu, da, strict=True)
                plan.edge_back((x, slopes), u, du, a, da, end=True, sign=-1)
            if a is not None:
                plan.total_back(states, slopes, total, da)
        grads = (dr, dp, dv, da, du, dw, slopes[:, 0].clone())
        return tuple(None if kind is None else g.to(kind[0]).view(kind[1]) for g, kind in zip(grads, ctx.kinds))


@jit
def _tile(base, rows, columns, height, width):
    """Rows x columns of a row-major matrix in fp32, 0 outside of it."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _put(base, rows, columns, height, width, tile):
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    tl.store(base + rows[:, None] * width + columns[None, :], tile, mask=inside)


@jit
def _add(base, rows, columns, height, width, tile):
    """Add to a tile that no other program touches; launches follow each other, so sums are deterministic."""
    _put(base, rows, columns, height, width, _tile(base, rows, columns, height, width) + tile)


@jit
def _square(base, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.load(base + (column * C + row if TRANSPOSED else row * C + column))


@jit
def _parted(level, C: tl.constexpr):
    """Pairs s < t in the two halves of one segment of 2 << level tokens: each pair at exactly one level."""
    row, column = tl.arange(0, C)[:, None] >> level, tl.arange(0, C)[None, :] >> level
    return (row - column == 1) & (row % 2 == 1)


@jit
def _sums(a, level, C: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of rows of a [C, BK] within segments of 1 << level tokens: from the start to t, and after s to the end."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    same = (row >> level) == (column >> level)
    late = tl.dot(tl.where(same & (column <= row), 1.0, 0.0), a, input_precision=PRECISION)
    early = tl.dot(tl.where(same & (column > row), 1.0, 0.0), a, input_precision=PRECISION)
    return late, early


@jit
def _sums_back(late, early, level, C: tl.constexpr, PRECISION: tl.constexpr):
    """The adjoint of ``_sums``."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    same = (row >> level) == (column >> level)
    a = tl.dot(tl.where(same & (column >= row), 1.0, 0.0), late, input_precision=PRECISION)
    return a + tl.dot(tl.where(same & (column < row), 1.0, 0.0), early, input_precision=PRECISION)


@jit
def _between(a, C: tl.constexpr, LEVELS: tl.constexpr):
    """Decay over (s, t] for s <= t from one log decay a [C] per token, 0 elsewhere."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    factor = tl.where(row == column, 1.0, 0.0)
    for level in range(LEVELS):
        same = (row >> level) == (column >> level)
        late = tl.sum(tl.where(same & (column <= row), a[None, :], 0.0), 1)
        early = tl.sum(tl.where(same & (row > column), a[:, None], 0.0), 0)
        factor += tl.where(_parted(level, C), tl.exp(late[:, None] + early[None, :]), 0.0)
    return factor


@jit
def _pairs(
    x, y, a, out, T, K,
    DECAY: tl.constexpr, STRICT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    row, column = rows[:, None], rows[None, :]
    total = tl.zeros((C, C), tl.float32)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        left = _tile(x + start * K, rows, columns, height, K)
        right = _tile(y + start * K, rows, columns, height, K)
        if DECAY == 2:
            decay = _tile(a + start * K, rows, columns, height, K)
            if not STRICT:
                total += tl.where(row == column, tl.sum(left * right, 1)[:, None], 0.0)
            for level in range(LEVELS):
                late, early = _sums(decay, level, C, PRECISION)
                product = tl.dot(left * tl.exp(late), tl.trans(right * tl.exp(early)), input_precision=PRECISION)
                total += tl.where(_parted(level, C), product, 0.0)
        else:
            total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
    if DECAY == 1:
        total *= _between(tl.load(a + start + rows, mask=rows < height, other=0.0).to(tl.float32), C, LEVELS)
    total = tl.where((row > column) if STRICT else (row >= column), total, 0.0)
    tl.store(out + (head * chunks + chunk) * C * C + row * C + column, total)


@jit
def _invert(pairs, out, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Forward substitution by halves: the inverse of [[X, 0], [A, Y]] holds -Y^-1 A X^-1."""
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * C * C
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    A = _square(pairs + at, C, False)
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in range(LEVELS):
        half = tl.dot(tl.where(_parted(level, C), A, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, half, input_precision=PRECISION)
    tl.store(out + at + row * C + column, inverse)


@jit
def _edge(
    x, a, out, total, T, K,
    DECAY: tl.constexpr, END: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    row, column = rows[:, None], rows[None, :]
    mask = (column > row) if END else (column <= row)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        if DECAY == 1:
            decay = tl.load(a + start + rows, mask=rows < height, other=0.0).to(tl.float32)
            sums = tl.sum(tl.where(mask, decay[None, :], 0.0), 1)[:, None]
            if END:
                tl.store(total + head * chunks + chunk, tl.exp(tl.sum(decay, 0)))
        else:
            decay = _tile(a + start * K, rows, columns, height, K)
            sums = tl.dot(tl.where(mask, 1.0, 0.0), decay, input_precision=PRECISION)
            if END:
                tl.store(total + (head * chunks + chunk) * K + columns, tl.exp(tl.sum(decay, 0)), mask=columns < K)
        tile = _tile(x + start * K, rows, columns, height, K)
        _put(out + start * K, rows, columns, height, K, tile * tl.exp(sums))


@jit
def _advance(
    S, erased, inner, total, plain, right, rows, columns, start, height, K, at,
    DECAY: tl.constexpr, ERASE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D S + plain' inner - right' erased, for some rows of the state."""
    if DECAY == 1:
        S *= tl.load(total + at)
    elif DECAY == 2:
        S *= tl.load(total + at * K + columns, mask=columns < K, other=0.0)[:, None]
    if ERASE != 0:
        S -= tl.dot(tl.trans(_tile(right + start * K, rows, columns, height, K)), erased, input_precision=PRECISION)
    if ERASE != 1 or BACK:
        S += tl.dot(tl.trans(_tile(plain + start * K, rows, columns, height, K)), inner, input_precision=PRECISION)
    return S


@jit
def _carry(
    states, total, plain, inner, left, right, mix, solve, solved, N, T, K, V,
    DECAY: tl.constexpr, ERASE: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The loop over chunks, for some columns of the state; backwards it carries the state's gradient.

    Forwards the solved rows are e, or v - e for the delta rule; backwards they are the system's adjoint.
    """
    head = tl.program_id(0).to(tl.int64)
    values = tl.program_id(1) * BV + tl.arange(0, BV)
    first = tl.program_id(2) * BK + tl.arange(0, BK)
    rows = tl.arange(0, C)
    slot = head * (N + 1)
    S = tl.zeros((BK, BV), tl.float32)
    if WHOLE:
        S = _tile(states + (slot + (N if BACK else 0)) * K * V, first, values, K, V)
    for n in range(N):
        chunk = N - 1 - n if BACK else n
        at, start, height = head * N + chunk, head * T + chunk * C, T - chunk * C
        own = _tile(inner + start * V, rows, values, height, V)
        source = states + (slot + chunk + (1 if BACK else 0)) * K * V
        target = states + (slot + chunk + (0 if BACK else 1)) * K * V
        x = own
        if ERASE != 0:
            if WHOLE:
                system = tl.dot(_tile(left + start * K, rows, first, height, K), S, input_precision=PRECISION)
            else:
                system = tl.zeros((C, BV), tl.float32)
                tl.debug_barrier()  # what other threads stored in the last round
                for k in range(0, K, BK):
                    part = _tile(left + start * K, rows, k + first, height, K)
                    system += tl.dot(part, _tile(source, k + first, values, K, V), input_precision=PRECISION)
            if ERASE == 1 and not BACK:
                system = own - system
            else:
                system += tl.dot(_square(mix + at * C * C, C, BACK), own, input_precision=PRECISION)
            x = tl.dot(_square(solve + at * C * C, C, BACK), system, input_precision=PRECISION)
            _put(solved + start * V, rows, values, height, V, x)
            if ERASE == 1 and not BACK:
                x = -x
        if WHOLE:
            S = _advance(
                S, x, own, total, plain, right, rows, first, start, height, K, at,
                DECAY, ERASE, BACK, PRECISION,
            )  # fmt: skip
            _put(target, first, values, K, V, S)
        else:
            for k in range(0, K, BK):
                part = _advance(
                    _tile(source, k + first, values, K, V), x, own, total, plain, right,
                    rows, k + first, start, height, K, at, DECAY, ERASE, BACK, PRECISION,
                )  # fmt: skip
                _put(target, k + first, values, K, V, part)


@jit
def _mixed(
    left, states, near, inner, other, erased, out, N, T, K, V,
    BACK: tl.constexpr, TWO: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    at = (head * N + chunk) * C * C
    values = tl.program_id(2) * BV + tl.arange(0, BV)
    state = states + (head * (N + 1) + chunk + (1 if BACK else 0)) * K * V
    tile = _tile(inner + start * V, rows, values, height, V)
    total = tl.dot(_square(near + at, C, BACK), tile, input_precision=PRECISION)
    if TWO:
        tile = _tile(erased + start * V, rows, values, height, V)
        total -= tl.dot(_square(other + at, C, BACK), tile, input_precision=PRECISION)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        part = _tile(left + start * K, rows, columns, height, K)
        total += tl.dot(part, _tile(state, columns, values, K, V), input_precision=PRECISION)
    _put(out + start * V, rows, values, height, V, total)


@jit
def _pairs_back(
    slope, other, x, y, dx, dy, a, pairs, da, T, K, V,
    DECAY: tl.constexpr, STRICT: tl.constexpr, SIGN: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    row, column = rows[:, None], rows[None, :]
    G = tl.zeros((C, C), tl.float32)
    for v in range(0, V, BV):
        columns = v + tl.arange(0, BV)
        part = _tile(slope + start * V, rows, columns, height, V)
        G += tl.dot(part, tl.trans(_tile(other + start * V, rows, columns, height, V)), input_precision=PRECISION)
    G = tl.where((row > column) if STRICT else (row >= column), SIGN * G, 0.0)
    if DECAY == 1:
        # a decay stands between all pairs s < j <= t
        near = G * _square(pairs + (head * chunks + chunk) * C * C, C, False)
        before = tl.dot(near, tl.where(row < column, 1.0, 0.0), input_precision=PRECISION)
        between = tl.sum(tl.where(row >= column, before, 0.0), 0)
        inside = rows < height
        tl.store(da + start + rows, tl.load(da + start + rows, mask=inside, other=0.0) + between, mask=inside)
        G *= _between(tl.load(a + start + rows, mask=inside, other=0.0).to(tl.float32), C, LEVELS)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        left = _tile(x + start * K, rows, columns, height, K)
        right = _tile(y + start * K, rows, columns, height, K)
        if DECAY == 2:
            own = tl.sum(tl.where(row == column, G, 0.0), 1)[:, None]
            decay = _tile(a + start * K, rows, columns, height, K)
            left_slope, right_slope, decay_slope = own * right, own * left, tl.zeros((C, BK), tl.float32)
            for level in range(LEVELS):
                late, early = _sums(decay, level, C, PRECISION)
                late, early = tl.exp(late), tl.exp(early)
                parted = tl.where(_parted(level, C), G, 0.0)
                late_slope = late * tl.dot(parted, right * early, input_precision=PRECISION)
                early_slope = early * tl.dot(tl.trans(parted), left * late, input_precision=PRECISION)
                left_slope += late_slope
                right_slope += early_slope
                decay_slope += _sums_back(left * late_slope, right * early_slope, level, C, PRECISION)
            _add(da + start * K, rows, columns, height, K, decay_slope)
        else:
            left_slope = tl.dot(G, right, input_precision=PRECISION)
            right_slope = tl.dot(tl.trans(G), left, input_precision=PRECISION)
        _add(dx + start * K, rows, columns, height, K, left_slope)
        _add(dy + start * K, rows, columns, height, K, right_slope)


@jit
def _edge_back(
    slope, states, x, dx, a, da, N, T, K, V,
    DECAY: tl.constexpr, END: tl.constexpr, SIGN: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    row, column = rows[:, None], rows[None, :]
    state = states + (head * (N + 1) + chunk + (1 if END else 0)) * K * V
    mask = (column > row) if END else (column <= row)
    inside = rows < height
    within = tl.zeros((C,), tl.float32)
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        grad = tl.zeros((C, BK), tl.float32)
        for v in range(0, V, BV):
            values = v + tl.arange(0, BV)
            part = _tile(slope + start * V, rows, values, height, V)
            grad += tl.dot(part, tl.trans(_tile(state, columns, values, K, V)), input_precision=PRECISION)
        grad *= SIGN
        if DECAY == 1:
            decay = tl.load(a + start + rows, mask=inside, other=0.0).to(tl.float32)
            grad *= tl.exp(tl.sum(tl.where(mask, decay[None, :], 0.0), 1))[:, None]
            within += tl.sum(grad * _tile(x + start * K, rows, columns, height, K), 1)
        elif DECAY == 2:
            decay = _tile(a + start * K, rows, columns, height, K)
            ones = tl.where(mask, 1.0, 0.0)
            grad *= tl.exp(tl.dot(ones, decay, input_precision=PRECISION))
            product = grad * _tile(x + start * K, rows, columns, height, K)
            _add(da + start * K, rows, columns, height, K, tl.dot(tl.trans(ones), product, input_precision=PRECISION))
        _add(dx + start * K, rows, columns, height, K, grad)
    if DECAY == 1:
        within = tl.sum(tl.where(mask, within[:, None], 0.0), 0)
        tl.store(da + start + rows, tl.load(da + start + rows, mask=inside, other=0.0) + within, mask=inside)


@jit
def _total_back(
    states, slopes, total, da, N, T, K, V,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, rows, height = head * T + chunk * C, tl.arange(0, C), T - chunk * C
    entering = states + (head * (N + 1) + chunk) * K * V
    leaving = slopes + (head * (N + 1) + chunk + 1) * K * V
    inside = rows < height
    all_keys = 0.0
    for k in range(0, K, BK):
        columns = k + tl.arange(0, BK)
        kept = tl.zeros((BK,), tl.float32)
        for v in range(0, V, BV):
            values = v + tl.arange(0, BV)
            kept += tl.sum(_tile(entering, columns, values, K, V) * _tile(leaving, columns, values, K, V), 1)
        if DECAY == 2:
            kept *= tl.load(total + (head * N + chunk) * K + columns, mask=columns < K, other=0.0)
            _add(da + start * K, rows, columns, height, K, kept[None, :])
        else:
            all_keys += tl.sum(kept, 0)
    if DECAY == 1:
        old = tl.load(da + start + rows, mask=inside, other=0.0)
        tl.store(da + start + rows, old + all_keys * tl.load(total + head * N + chunk), mask=inside)


@jit
def _step(
    r, p, v, a, u, w, first, out, last, T, K, V,
    DECAY: tl.constexpr, ERASE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token after another, the state in registers."""
    head = tl.program_id(0).to(tl.int64)
    keys, values = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    inside = keys < K
    S = _tile(first + head * K * V, keys, values, K, V)
    for t in range(T):
        at = head * T + t
        if DECAY == 1:
            S *= tl.exp(tl.load(a + at).to(tl.float32))
        elif DECAY == 2:
            S *= tl.exp(tl.load(a + at * K + keys, mask=inside, other=0.0).to(tl.float32))[:, None]
        new = tl.load(v + at * V + values, mask=values < V, other=0.0).to(tl.float32)
        update = tl.load(p + at * K + keys, mask=inside, other=0.0).to(tl.float32)[:, None] * new[None, :]
        if ERASE:
            erased = tl.sum(tl.load(w + at * K + keys, mask=inside, other=0.0).to(tl.float32)[:, None] * S, 0)
            update -= tl.load(u + at * K + keys, mask=inside, other=0.0).to(tl.float32)[:, None] * erased[None, :]
        S += update
        read = tl.load(r + at * K + keys, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at * V + values, tl.sum(read[:, None] * S, 0), mask=values < V)
    _put(last + head * K * V, keys, values, K, V, S)
