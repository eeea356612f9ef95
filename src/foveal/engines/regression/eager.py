"""The torch forms of local regression: a direct solve for every query, and conjugate gradients tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foveal.call import Call, Result
from foveal.engines.recurrence.program import ratio
from foveal.engines.softmax.eager import (
    TILE,
    Keys,
    cut,
    final_state,
    grouped,
    needed,
    skip_hidden,
    softmax,
    visibility,
    with_state,
)
from foveal.precision import upcast

if TYPE_CHECKING:
    from foveal.engines.regression import LocalRegression


def conjugate_gradients(apply: Callable[[Tensor], Tensor], target: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Solve apply(x) = target row by row, where ``apply`` is symmetric and positive definite on the last axis."""
    size = target.abs().amax(-1, keepdim=True)  # squares of small numbers would underflow
    x, r = torch.zeros_like(target), ratio(target, size)
    d, left = r, r.square().sum(-1, keepdim=True)
    enough = tolerance**2 * left
    for _ in range(iterations):
        done = left <= enough  # going on would divide rounding errors by each other
        if not torch.compiler.is_compiling() and bool(done.all()):
            break
        moved = apply(d)
        step = ratio(left, (d * moved).sum(-1, keepdim=True)).masked_fill(done, 0.0)
        x, r = x + step * d, r - step * moved
        now = r.square().sum(-1, keepdim=True)
        d, left = torch.where(done, d, r + ratio(now, left) * d), now
    return x * size


def spread(x: Tensor, weight: Tensor, k: Tensor, mean: Tensor, ridge: Tensor) -> Tensor:
    """(Cov(k, k) + ridge) x for every query, x [B, H, T, K], under weights [B, H, T, S]: no K x K matrix is formed."""
    along = grouped(x, k.mT) - (x * mean).sum(-1, keepdim=True)
    return grouped(weight * along, k) + ridge * x


class Solve(torch.autograd.Function):
    """(Cov(k, k) + ridge)^-1 target; the solution is differentiated, not the iterations, as often as asked."""

    @staticmethod
    def forward(
        ctx: Any, limits: tuple[int, float], target: Tensor, weight: Tensor, k: Tensor, mean: Tensor, ridge: Tensor
    ) -> Tensor:
        """Iterate, and keep the solution alone."""
        x = conjugate_gradients(lambda x: spread(x, weight, k, mean, ridge), target, *limits)
        ctx.limits = limits
        ctx.save_for_backward(weight, k, mean, ridge, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Solve once more, for the matrix is symmetric, and follow its parts."""
        weight, k, mean, ridge, x = ctx.saved_tensors
        y = solve(ctx.limits, grad, weight, k, mean, ridge)
        along, across = grouped(x, k.mT) - (x * mean).sum(-1, keepdim=True), grouped(y, k.mT)
        passed = weight * across
        d_k = collected(weight * along, y, k) + collected(passed, x, k)
        d_mean = passed.sum(-1, keepdim=True) * x
        return None, y, -along * across, -d_k, d_mean, -(y * x).sum_to_size(ridge.shape)


def solve(limits: tuple[int, float], target: Tensor, *matrix: Tensor) -> Tensor:
    """The solution, differentiable; the compiler traces first derivatives only."""
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return conjugate_gradients(lambda x: spread(x, *matrix), target, *limits)
    x: Tensor = Solve.apply(limits, target, *matrix)  # type: ignore[no-untyped-call]
    return x


def collected(weight: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Sum over queries and the heads of a group: weight [B, H, T, S], x [B, H, T, K] -> [B, G, S, K]."""
    B, G = like.shape[:2]
    return weight.reshape(B, G, -1, weight.shape[-1]).mT @ x.reshape(B, G, -1, x.shape[-1])


def iterated(spec: LocalRegression, offset: Tensor, *matrix: Tensor) -> Tensor:
    """(Cov(k, k) + ridge)^-1 offset by conjugate gradients."""
    return solve(spec.solver(offset.shape[-1], torch.finfo(offset.dtype).eps), offset, *matrix)


def direct(spec: LocalRegression, offset: Tensor, weight: Tensor, k: Tensor, mean: Tensor, ridge: Tensor) -> Tensor:
    """The same by a K x K matrix for every query."""
    pairs = grouped(weight, (k[..., :, None] * k[..., None, :]).flatten(-2)).view(*offset.shape, -1)
    matrix = pairs - mean[..., :, None] * mean[..., None, :] + torch.diag_embed(ridge.expand_as(offset))
    solution: Tensor = torch.linalg.solve(matrix, offset[..., None])
    return solution[..., 0]


def attend(spec: LocalRegression, call: Call, q: Tensor, keys: Keys, inputs: dict[str, Tensor]) -> Tensor:
    """Output of a tile, every score in memory at once."""
    visible = visibility(spec, call, keys.at, inputs)
    for mask in (None if keys.padding is None else keys.padding[:, None, None], keys.mask):
        visible = visible if mask is None else visible & mask
    scores = grouped(q * call.scale, keys.k.mT)
    weight, _ = softmax(scores if keys.bias is None else scores + keys.bias, visible)
    mean = grouped(weight, keys.k)
    solver = direct if call.form == "parallel" else iterated
    slope = solver(spec, q - mean, weight, keys.k, mean, spec.ridge(**inputs))
    ahead = grouped(slope, keys.k.mT) - (slope * mean).sum(-1, keepdim=True)
    return grouped(weight * (1 + ahead), keys.v)


def run(spec: LocalRegression, call: Call) -> Result:
    """All queries at once with direct solves, or tile by tile with conjugate gradients; fp32 for half precision."""
    call = skip_hidden(with_state(call))
    state = final_state(spec, call) if call.want_state else None
    wide = call.replace(q=upcast(call.q), k=upcast(call.k), v=upcast(call.v))
    if call.bias is not None:
        wide = wide.replace(bias=call.bias.to(wide.q.dtype))
    inputs = {name: x.to(wide.q.dtype) for name, x in call.inputs.items()}
    at, T, outputs = wide.positions(), call.q.shape[2], []
    tile = max(T, 1) if call.form == "parallel" else TILE
    for start in range(0, max(T, 1), tile):
        queries = slice(start, min(start + tile, T))
        q, keys = wide.q[:, :, queries], cut(wide, at, queries, needed(spec, wide, at, queries))
        if torch.is_grad_enabled() and tile < T:  # keeping every tile's weights for backward would need O(T S) memory
            outputs.append(checkpoint(attend, spec, wide, q, keys, inputs, use_reentrant=False))
        else:
            outputs.append(attend(spec, wide, q, keys, inputs))
    return Result(torch.cat(outputs, 2), state)
