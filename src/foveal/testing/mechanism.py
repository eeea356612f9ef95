"""The laws of attention mechanisms: one function per law, each a comparison with the definition."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import foveal
from foveal import registry
from foveal.engines.softmax import SoftmaxAttention
from foveal.spec import Mechanism, Spec
from foveal.state import State

Law = Callable[[Mechanism], None]
Sizes = dict[str, int]
Tensors = dict[str, Any]  # tensors by argument name, to be passed on as keywords

SHAPES: list[Sizes] = [
    {"B": 2, "H": 4, "G": 2, "T": 37, "K": 8, "V": 5},
    {"B": 1, "H": 2, "G": 1, "T": 130, "K": 4, "V": 4},  # over two chunk borders into a third chunk
    {"B": 1, "H": 3, "G": 3, "T": 64, "K": 3, "V": 1},
    {"B": 2, "H": 1, "G": 1, "T": 1, "K": 1, "V": 2},
]
CROSS: list[Sizes] = [  # fewer queries than keys, and more
    {"B": 2, "H": 2, "G": 1, "T": 9, "S": 23, "K": 4, "V": 4},
    {"B": 1, "H": 2, "G": 2, "T": 7, "S": 3, "K": 4, "V": 3},
    {"B": 1, "H": 2, "G": 1, "T": 6, "S": 11, "K": 4, "V": 4},  # even: without the optional inputs
    {"B": 1, "H": 2, "G": 2, "T": 8, "S": 5, "K": 4, "V": 4},
]
close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def draw(
    spec: Mechanism, sizes: Sizes, dtype: torch.dtype = torch.float64, seed: int = 0, *, slow: bool = False
) -> Tensors:
    """Random tensors of the declared shapes and ranges; ``slow`` brings gates near the end of theirs that keeps."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"S": sizes["T"]} | sizes | spec.widths(sizes["K"])
    x = {n: torch.randn([sizes[a] for a in axes.split()], generator=g, dtype=torch.float64)
         for n, axes in foveal.checks.AXES.items()}  # fmt: skip
    x |= {name: item.sample(sizes, g) for name, item in spec.inputs.items()}
    if slow:  # a memory that outlives a chunk
        x |= {name: 0.02 * x[name] for name, item in spec.inputs.items() if (item.low, item.high) == (-torch.inf, 0.0)}
    return cast(x, dtype)


def cast(x: Tensors, dtype: torch.dtype) -> Tensors:
    """Every tensor in a dtype; whole numbers stay."""
    return {name: y.to(dtype) if y.is_floating_point() else y for name, y in x.items()}


def tracked(x: Tensors) -> Tensors:
    """Every tensor as a leaf that collects gradients; whole numbers have none."""
    return {name: y.clone().requires_grad_(y.is_floating_point()) for name, y in x.items()}


def axes_of(spec: Mechanism, name: str) -> tuple[str, ...]:
    """The declared axes of an argument."""
    return tuple(foveal.checks.AXES[name].split()) if name in foveal.checks.AXES else spec.inputs[name].axes


def of_head(spec: Mechanism, row: Tensors, h: int) -> Tensors:
    """What one head sees of a row [H, ...]: its own part of every tensor that has heads."""
    return {n: y[h] if "H" in axes_of(spec, n) or n in ("k", "v") else y for n, y in row.items()}


def note(case: str) -> Callable[[str], str]:
    """A message for assert_close: what was compared, then what differs."""
    return lambda message: f"{case}: {message}"


def paddings(B: int, S: int) -> dict[str, Tensor | None]:
    """No mask; random holes; padding in front as a tokenizer makes it; padding behind; a row of padding only."""
    slot = torch.arange(S).expand(B, S)
    holes = torch.rand(B, S, generator=torch.Generator().manual_seed(1)) > 0.4
    found: dict[str, Tensor | None] = {"full": None, "holes": holes, "left": slot >= S // 3, "right": slot < S - S // 3}
    if B > 1:
        found["empty row"] = torch.stack((slot[0] < 0, *(slot[1:] >= 0)))
    return found


def blank(spec: Mechanism, x: Tensors, padding: Tensor | None, causal: bool) -> Tensors:
    """NaN wherever the padding hides: what stands there must not matter (but every non-causal query asks)."""
    if padding is None:
        return x
    T, S = x["q"].shape[2], x["k"].shape[2]
    asks, out = padding[:, S - T :] if causal and T <= S else None, {}
    for name, tensor in x.items():
        real = padding if name in ("k", "v") else asks
        timed = name in ("q", "k", "v") or "T" in spec.inputs[name].axes
        if real is None or not timed:
            out[name] = tensor
        else:
            axes = axes_of(spec, name)
            shape = real[tuple(slice(None) if axis in "BTS" else None for axis in axes)]
            out[name] = tensor.masked_fill(
                ~shape, torch.nan if tensor.is_floating_point() else int(spec.inputs[name].high)
            )
    return out


def defined(
    spec: Mechanism,
    x: Tensors,
    *,
    padding: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The definition, lifted from one head of one sequence over batch, heads, groups and padding.

    Hidden tokens are cut out before the definition sees the sequence; their rows are 0.
    """
    q, k, v = x["q"], x["k"], x["v"]
    (B, H, T, K), S = q.shape, k.shape[2]
    scale = K**-0.5 if scale is None else scale
    k, v = (y.repeat_interleave(H // y.shape[1], 1) for y in (k, v))
    given = {n: y for n, y in x.items() if n in spec.inputs}
    sizes = {"B": B, "H": H, "T": T, "S": S, "K": K, "V": v.shape[-1], "G": x["k"].shape[1]}
    x = x | cast(spec.completed(given, sizes, q), q.dtype)
    out = []
    for b in range(B):
        keys = torch.arange(S) if padding is None else padding[b].nonzero().flatten()
        before = torch.arange(max(T - S, 0))
        asks = torch.cat((before, keys[keys >= S - T] - (S - T)))
        if len(asks) == 0 or len(keys) == 0:
            out.append(q.new_zeros(H, T, v.shape[-1]))  # nothing to see; the definition never meets an empty sequence
            continue
        row = {"q": q[b][:, asks], "k": k[b][:, keys], "v": v[b][:, keys]}
        for name, item in spec.inputs.items():
            if name in x:
                tensor = x[name][b] if item.axes[0] == "B" else x[name]
                time = item.axes.index("T") - (item.axes[0] == "B") if "T" in item.axes else None
                row[name] = tensor if time is None else tensor.index_select(time, asks)
        extra: dict[str, Any] = {"scale": scale}
        if isinstance(spec, SoftmaxAttention) or False in spec.causal_modes:
            t, s = torch.arange(len(asks)), torch.arange(len(keys))
            seen = s <= t[:, None] + len(keys) - len(asks) if causal else torch.ones(len(t), len(s), dtype=torch.bool)
            extra["visible"] = seen
        if mask is not None:
            own = mask.expand(B, H, T, S)[b][:, asks][:, :, keys] & extra["visible"]
            heads = [of_head(spec, row, h) | extra | {"visible": own[h]} for h in range(H)]
            if not spec.per_head:
                assert mask.shape[1] == 1, "one mask for all heads, where heads are defined together"
                result = spec.definition(**row, **(extra | {"visible": own[0]}))
            else:
                result = torch.stack([spec.definition(**head) for head in heads])
        elif spec.per_head:
            result = torch.stack([spec.definition(**of_head(spec, row, h), **extra) for h in range(H)])
        else:
            result = spec.definition(**row, **extra)
        full = result.new_zeros(H, T, v.shape[-1])
        out.append(full.index_copy(1, asks, result))
    return torch.stack(out)


def gradients(output: Tensor, weight: Tensor, x: Tensors) -> Tensors:
    """Gradient of a weighted sum of the output for every tensor; 0 where it has no part."""
    leaves = {name: y for name, y in x.items() if y.requires_grad}
    found = torch.autograd.grad(
        (output * weight).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True, retain_graph=False
    )
    return dict(zip(leaves, found, strict=True))


def compare(spec: Mechanism, sizes: Sizes, forms: list[str | None], case: str, **call: Any) -> None:
    """Values and all gradients of each form against the definition."""
    drawn = draw(spec, sizes, slow=sizes["T"] > 64)
    for name, item in spec.inputs.items():
        if item.optional and sizes["T"] % 2 == 0:
            drawn.pop(name)  # an optional input is there in some cases and not in others
    judged = tracked(drawn)
    mask, padding = call.get("mask"), call.get("padding")
    want = defined(spec, judged, padding=padding, mask=mask, causal=call.get("causal", True))
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=want.dtype)
    want_grads = gradients(want, weight, judged)
    for form in forms:
        x = tracked(blank(spec, drawn, padding, call.get("causal", True)))
        got = foveal.attention(
            mechanism=spec, form=form, causal=call.get("causal", True), mask=padding if mask is None else mask,
            layout="bhtd", **x,
        )  # fmt: skip
        where = f"{form or 'default'} form, {sizes}, {case}"
        hidden = None
        if padding is not None and not call.get("causal", True):  # non-causal queries at hidden places still ask
            hidden = ~padding[:, None, :, None]
            got = got.masked_fill(hidden, 0.0)
        close(got, want.detach(), msg=note(where))
        for name, grad in gradients(got, weight, x).items():
            close(grad, want_grads[name], msg=note(f"{where}, gradient of {name}"))


def forms_agree(spec: Mechanism) -> None:
    """Every form equals the definition in values and gradients: odd, grouped and tiny shapes, every kind of padding."""
    for sizes in SHAPES:
        for case, padding in paddings(sizes["B"], sizes["T"]).items():
            forms: list[str | None] = [None, *spec.forms] if case in ("full", "left") else [spec.forms[-1]]
            compare(spec, sizes, forms, case, padding=padding)
    if isinstance(spec, SoftmaxAttention) and not (spec.self_attention or spec.carried):
        for sizes in CROSS:
            for case, padding in paddings(sizes["B"], sizes["S"]).items():
                if padding is None or sizes["T"] <= sizes["S"]:
                    compare(spec, sizes, [None, *spec.forms], case, padding=padding)
        B, T = SHAPES[0]["B"], SHAPES[0]["T"]
        mask = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(3)) > 0.5
        mask[0, 0, 5] = False
        compare(spec, SHAPES[0], [None, *spec.forms], "boolean mask with an empty row", mask=mask)
    if False in spec.causal_modes:
        for case, padding in paddings(SHAPES[0]["B"], SHAPES[0]["T"]).items():
            compare(spec, SHAPES[0], [None, *spec.forms], f"{case}, not causal", padding=padding, causal=False)
        for sizes in CROSS if not spec.carried else ():
            compare(spec, sizes, [None], "not causal", causal=False)


def gradients_are_derivatives(spec: Mechanism) -> None:
    """Finite differences agree with every gradient, in every form."""
    drawn = draw(spec, {"B": 1, "H": 2, "G": 1, "T": 6, "K": 2, "V": 2})
    x = tracked(drawn)
    for form in spec.forms:

        def run(*tensors: Tensor, form: str = form) -> Any:
            again: Tensors = dict(zip(x, tensors, strict=True))
            return foveal.attention(mechanism=spec, form=form, **again)

        assert torch.autograd.gradcheck(run, tuple(x.values())), f"{form} form"


def piece(spec: Mechanism, x: Tensors, span: slice) -> Tensors:
    """Some tokens of every tensor that has a T axis."""
    cut: Tensors = {}
    for n, y in x.items():
        axes = axes_of(spec, n)
        time = next((place for place, axis in enumerate(axes) if axis in ("T", "S")), None)
        cut[n] = y if time is None else y[(slice(None),) * time + (span,)]
    return cut


def decoding_continues_the_prompt(spec: Mechanism) -> None:
    """The whole at once = any split into two calls = token by token, with left padding; states can be saved."""
    sizes = SHAPES[0]
    x, T = draw(spec, sizes), sizes["T"]
    padding = torch.arange(T).expand(sizes["B"], T) >= torch.tensor([[0], [5]])
    want = defined(spec, x, padding=padding)

    def wanted(start: int, stop: int) -> Tensor:
        if spec.streams:
            return want[:, :, start:stop]
        seen = piece(spec, x, slice(start, stop)) | {n: x[n][:, :, :stop] for n in "kv"}
        return defined(spec, seen, padding=padding[:, :stop])

    def call(span: slice, state: State | None) -> Any:
        return foveal.attention(
            mechanism=spec, mask=padding[:, span], initial_state=state, output_final_state=True, layout="bhtd",
            **piece(spec, x, span),
        )  # fmt: skip

    for cut in (0, 1, 4, 5, 6, 17, T - 1, T):
        head = call(slice(0, cut), None)
        tail = call(slice(cut, T), head.state)
        both = torch.cat((head.output, tail.output), 2)
        close(both, torch.cat((wanted(0, cut), wanted(cut, T)), 2), msg=note(f"cut after {cut} tokens"))
    state, swap = None, torch.tensor([1, 0])
    for t in range(T):
        out = call(slice(t, t + 1), state)
        state = out.state.detach()
        if t == T // 2:
            with tempfile.TemporaryDirectory() as folder:
                state.save(pathlib.Path(folder) / "state")
                state = State.load(pathlib.Path(folder) / "state").index_select(swap).index_select(swap)
        close(out.output, wanted(t, t + 1), msg=note(f"token {t}"))


def packed_equals_separate(spec: Mechanism) -> None:
    """Packed sequences, an empty one and a single token among them, equal each alone; so do states and gradients.

    Their lengths are mixed so that like ones do not lie side by side; a mask may hide tokens of any of them.
    """
    sizes, marks = {"B": 1, "H": 2, "G": 1, "T": 43, "K": 4, "V": 3}, [0, 20, 20, 25, 42, 43]
    cu, spans = torch.tensor(marks, dtype=torch.int32), list(itertools.pairwise(marks))
    x = tracked(draw(spec, sizes))
    weight = torch.randn(1, 2, 43, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for case in ("full", "holes"):
        mask = paddings(1, 43)[case]
        parts = [None if mask is None else mask[:, a:b] for a, b in spans]
        alone = [defined(spec, piece(spec, x, slice(a, b)), padding=p) for (a, b), p in zip(spans, parts, strict=True)]
        want = torch.cat(alone, 2)
        want_grads = gradients(want, weight, x)
        for form in (None, *spec.forms):
            got = foveal.attention(mechanism=spec, form=form, cu_seqlens=cu, mask=mask, output_final_state=True, **x)
            close(got.output, want, msg=note(f"{form or 'default'} form, {case}"))
            for name, grad in gradients(got.output, weight, x).items():
                close(grad, want_grads[name], msg=note(f"{form or 'default'} form, {case}, gradient of {name}"))
    state = foveal.attention(mechanism=spec, cu_seqlens=cu, output_final_state=True, **x).state.detach()
    again = foveal.attention(mechanism=spec, cu_seqlens=cu, initial_state=state, **x)
    for n, (a, b) in enumerate(spans):
        own = piece(spec, x, slice(a, b))
        twice = dict(own)
        for name, y in own.items():
            time = next((place for place, axis in enumerate(axes_of(spec, name)) if axis in ("T", "S")), None)
            twice[name] = y if time is None else torch.cat((y, y), time)
        if not spec.streams:
            twice |= own | {name: twice[name] for name in "kv"}
        continued = defined(spec, twice)[:, :, -(b - a) or b :]
        close(again[:, :, a:b], continued, msg=note(f"sequence {n} continued from its state"))


def cost_grows_as_declared(spec: Mechanism) -> None:
    """Counted, never timed: products at T and 4T against the card; numbers in the state against the card."""

    def counted(length: int) -> tuple[float, float, float, float]:
        sizes = {"B": 1, "H": 2, "G": 2, "T": length, "K": 8, "V": 8}
        x = draw(spec, sizes, torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            state = foveal.attention(mechanism=spec, output_final_state=True, **x).state
        kept = sum(y.numel() for y in state.tensors() if y.is_floating_point())
        train, state_size = (spec.cost.evaluate(e, sizes | spec.variables()) for e in ("train", "state"))
        return counter.get_total_flops(), train, kept / 2, state_size

    short, long = counted(1024), counted(4096)
    grown, declared = long[0] / short[0], long[1] / short[1]
    assert abs(grown / declared - 1) < 0.25, (
        f"counted x{grown:.2f} from T to 4T, {spec.cost.train!r} says x{declared:.2f}"
    )
    for _, _, kept, says in (short, long):
        assert kept == says, f"the state holds {kept} numbers, {spec.cost.state!r} says {says:.0f}"


def low_precision_is_fair(spec: Mechanism) -> None:
    """In fp32, bf16 and fp16 the error is at most twice that of the definition computed in that dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = draw(spec, SHAPES[0], dtype)
        exact = defined(spec, cast(x, torch.float64))
        plain = (defined(spec, x).double() - exact).norm()
        routes = [(form, None) for form in (None, *spec.forms)] + [(form, "torch") for form in spec.forms]
        for form, backend in routes:
            got = foveal.attention(mechanism=spec, form=form, backend=backend, **x)
            assert got.dtype == dtype, f"{dtype} in, {got.dtype} out"
            error = (got.double() - exact).norm()
            floor = 4 * torch.finfo(dtype).eps * exact.norm()
            where = f"{form} form on backend {backend} in {dtype}"
            assert error <= 2 * plain + floor, f"{where}: error {error:.2e}, plain {plain:.2e}"


def weights_are_the_map(spec: Mechanism) -> None:
    """The returned map times the values is the output; a causal map sees no future; rows of a softmax sum to 1."""
    x = draw(spec, SHAPES[0])
    for name in [n for n, item in spec.inputs.items() if item.optional]:
        x.pop(name)
    if not spec.linear_in_values:
        with expect(spec, "return_weights"):
            foveal.attention(mechanism=spec, return_weights=True, **x)
        return
    out = foveal.attention(mechanism=spec, return_weights=True, **x)
    values = x["v"].repeat_interleave(2, 1)
    close(out.weights @ values, out.output)
    assert (out.weights.triu(1) == 0).all(), "a query sees the future"
    if isinstance(spec, SoftmaxAttention):
        close(out.weights.sum(-1), torch.ones_like(out.weights[..., 0]))


def layouts_agree(spec: Mechanism) -> None:
    """[B, T, H, K] equals [B, H, T, K]; strided views, expanded heads and expanded gradients equal contiguous ones."""
    x = draw(spec, SHAPES[0] | {"G": 4})
    want = foveal.attention(mechanism=spec, **x)

    def swapped(name: str, y: Tensor) -> Tensor:
        axes = axes_of(spec, name)
        both = ("T" in axes or "S" in axes) and ("H" in axes or "G" in axes)
        return y.transpose(1, 2).contiguous() if both else y

    turned: Tensors = {n: swapped(n, y) for n, y in x.items()}
    got = foveal.attention(mechanism=spec, layout="bthd", **turned)
    close(got.transpose(1, 2), want)
    beside = {n: torch.full_like(y, torch.nan if y.is_floating_point() else 0) for n, y in x.items()}
    wide: Tensors = {
        n: torch.stack((y, beside[n]), -1)[..., 0].requires_grad_(y.is_floating_point()) for n, y in x.items()
    }
    got = foveal.attention(mechanism=spec, **wide)
    close(got, want)
    plain = tracked(x)
    ones = torch.ones_like(want)
    want_grads = gradients(foveal.attention(mechanism=spec, **plain), ones, plain)
    got.sum().backward()  # the incoming gradient is one number with strides 0
    for name, y in wide.items():
        if not y.requires_grad:
            continue
        close(y.grad if y.grad is not None else torch.zeros_like(y), want_grads[name], msg=note(name))


def limits_hold(spec: Mechanism) -> None:
    """Each declared special case equals the mechanism that it names."""
    for limit in type(spec).limits:
        here = dataclasses.replace(spec, **(type(spec).settings() | limit.settings))
        x = draw(here, SHAPES[0])
        own = {n: y for n, y in x.items() if n in here.inputs and not here.inputs[n].optional}
        made: tuple[Tensors, Tensors] = (own, {}) if limit.inputs is None else limit.inputs(own)
        mine, theirs = made
        base: Tensors = {n: x[n] for n in ("q", "k", "v")}
        other = registry.get(limit.equals)(**limit.other)
        got = foveal.attention(mechanism=here, **base, **mine)
        close(got, foveal.attention(mechanism=other, **base, **theirs), msg=note(limit.why))


def bad_input_is_named(spec: Mechanism) -> None:
    """A lost axis, a wrong batch, a wrong dtype, a missing or unknown tensor: an error that names what and why."""
    x = draw(spec, SHAPES[0])
    for name, y in x.items():
        other = y.long() if y.is_floating_point() else y.double()
        wrong: list[Any] = [y[0], torch.cat((y, y)), other, "text"]
        for bad in wrong:
            with expect(spec, name if isinstance(bad, str) or bad.dtype == other.dtype else r"\w+"):
                foveal.attention(mechanism=spec, **(x | {name: bad}))
        item = spec.inputs.get(name)
        if item is not None and not item.optional:
            with expect(spec, name):
                foveal.attention(mechanism=spec, **{n: z for n, z in x.items() if n != name})
        for bound in () if item is None else item.legal:
            assert item is not None
            if abs(bound) != float("inf"):
                past = 0.1 if y.is_floating_point() else 1
                beyond = torch.full_like(y, bound + (past if bound == item.legal[1] else -past))
                with expect(spec, name):
                    foveal.attention(mechanism=spec, **(x | {name: beyond}))
    for bad_argument in ({"nonsense": x["q"]}, {"form": "nonsense"}, {"layout": "nonsense"}, {"backend": "nonsense"}):
        with expect(spec, next(iter(bad_argument)) if "nonsense" not in bad_argument else "nonsense"):
            foveal.attention(mechanism=spec, **(x | bad_argument))


@contextlib.contextmanager
def expect(spec: Spec, argument: str) -> Iterator[None]:
    """An error that starts with the mechanism and names the argument and what was expected."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        named = re.match(rf"{spec.name}: .*\b{argument}", text, re.DOTALL)
        assert named, f"the error does not name {argument}: {text}"
        assert "expected" in text or "missing" in text, f"the error does not say what was expected: {text}"
    else:
        raise AssertionError(f"{spec.name}: a bad {argument} was accepted")


def documented(spec: Mechanism) -> None:
    """The docstring has a formula and every setting; every input, the paper and the costs are there."""
    doc = type(spec).__doc__ or ""
    assert ".. math::" in doc, "no formula"
    for field in dataclasses.fields(spec):
        assert re.search(rf"^\s+{field.name}: ", doc, re.MULTILINE), f"setting {field.name} is not described"
    for name, item in spec.inputs.items():
        assert item.doc, f"input {name} is not described"
    assert spec.paper.title, "no title of the paper"
    assert 1900 < spec.paper.year < 2100, "no year of the paper"
    for expression in ("train", "decode", "state"):
        assert spec.cost.evaluate(expression, spec.variables() | {"T": 512, "K": 8, "V": 8}) > 0, f"cost.{expression}"


def compiles(spec: Mechanism) -> None:
    """torch.compile traces the call as one graph, with the same values and gradients."""
    x = tracked(draw(spec, SHAPES[0]))
    form = "parallel" if spec.engine == "block_sparse" else None  # its work list has data-dependent lengths

    def call(**tensors: Any) -> Any:
        return foveal.attention(mechanism=spec, form=form, **tensors)

    torch._dynamo.reset()
    fused = torch.compile(call, fullgraph=True, backend="aot_eager")
    weight = torch.ones(2, 4, 37, 5, dtype=torch.float64)
    want, got = call(**x), fused(**x)
    close(got, want)
    theirs = gradients(want, weight, x)
    for name, grad in gradients(got, weight, x).items():
        close(grad, theirs[name], msg=note(f"gradient of {name}"))


LAWS: tuple[Law, ...] = (
    forms_agree,
    gradients_are_derivatives,
    decoding_continues_the_prompt,
    packed_equals_separate,
    cost_grows_as_declared,
    low_precision_is_fair,
    weights_are_the_map,
    layouts_agree,
    bad_input_is_named,
)
ONCE: tuple[Law, ...] = (limits_hold, documented, compiles)  # do not depend on the settings


def label(settings: dict[str, Any]) -> str:
    """Settings as they appear in a test id."""
    return ",".join(f"{name}={value}" for name, value in settings.items()).replace(" ", "")


def cases_of(cls: type[Mechanism]) -> Iterator[tuple[str, Law, Mechanism]]:
    """Every law of one mechanism, for each of its example settings."""
    for number, settings in enumerate(cls.examples):
        spec = cls(**settings)
        for law in (*LAWS, *ONCE) if number == 0 else LAWS:
            suffix = f"[{label(settings)}]" if settings else ""
            yield f"{cls.name}-{law.__name__}{suffix}", law, spec


def cases() -> Iterator[tuple[str, Law, Mechanism]]:
    """Every law of every mechanism in the registry."""
    for cls in registry.classes("mechanism"):
        assert issubclass(cls, Mechanism)
        yield from cases_of(cls)
