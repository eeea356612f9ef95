"""What a mechanism or a policy is: a card, its settings, its extra tensors and one float64 definition."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foveal import registry
from foveal.call import Backend, Call, Result, choose

if TYPE_CHECKING:
    from foveal.state import State


@dataclasses.dataclass(frozen=True)
class Paper:
    """Where a method comes from.

    Args:
        arxiv: arXiv identifier, ``"2412.06464"``; empty for a paper that is not on arXiv.
        title: title as printed.
        authors: first authors, ``"Yang, Kautz, Hatamizadeh"`` or ``"Lu et al."``.
        year: year of the first version.
        url: address of a paper that is not on arXiv.

    Raises:
        ValueError: if there is neither a well-formed arXiv identifier nor an address.
    """

    arxiv: str
    title: str
    authors: str
    year: int
    url: str = ""

    def __post_init__(self) -> None:
        if not (self.url or re.fullmatch(r"\d{4}\.\d{4,5}", self.arxiv)):
            raise ValueError(f"paper: arxiv is {self.arxiv!r}, expected an identifier such as '2412.06464' or a url")

    @property
    def link(self) -> str:
        """Address of the paper."""
        return self.url or f"https://arxiv.org/abs/{self.arxiv}"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Leading-order work per query head, as expressions in T, K, V and the mechanism's settings.

    Args:
        train: multiply-adds for a sequence of T tokens.
        decode: multiply-adds for one more token after T.
        state: numbers kept for decoding after T tokens.
    """

    train: str
    decode: str
    state: str

    def evaluate(self, expression: str, sizes: dict[str, Any]) -> float:
        """The value of one of the three expressions at the given sizes and settings."""
        allowed = {"min": min, "max": max, "__builtins__": {}}
        return float(eval(getattr(self, expression), allowed, sizes))


@dataclasses.dataclass(frozen=True)
class Input:
    """One extra tensor of a mechanism: its axes, its legal range and what it means.

    Args:
        shape: axes by name, ``"B H T"``; see :mod:`foveal.checks` for the names.
        low, high: usual range; it tells ``AttentionLayer`` which activation produces the tensor.
        doc: one line.
        optional: whether the mechanism works without it.
        accepted: legal range, where it is wider than the usual one.
        start: value of a trainable parameter before training: a number, ``"eye"`` for the identity on the last two
            axes, or ``"normal"`` for independent normal numbers of variance 1 / (last axis), always the same ones.
            Who calls without the parameter gets this value.
        whole: a tensor of whole numbers, int64, from low to high, such as the document of each token.  Whoever calls
            gives it; nothing is learned about it.

    An input with a T axis is a gate that ``AttentionLayer`` computes from the hidden state; one without
    is a parameter that the layer owns.
    """

    shape: str
    low: float = float("-inf")
    high: float = float("inf")
    doc: str = ""
    optional: bool = False
    accepted: tuple[float, float] | None = None
    start: float | str | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        assert self.start is None or (self.optional and "T" not in self.axes), "a start belongs to a parameter"

    @property
    def legal(self) -> tuple[float, float]:
        """The range that is checked."""
        return self.accepted or (self.low, self.high)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes in order."""
        return tuple(self.shape.split())

    def activation(self, x: Tensor) -> Tensor:
        """A smooth map from all real numbers onto the legal range."""
        softplus = torch.nn.functional.softplus
        if self.low > float("-inf") and self.high < float("inf"):
            return self.low + (self.high - self.low) * x.sigmoid()
        if self.high < float("inf"):
            return self.high - softplus(x)
        if self.low > float("-inf"):
            return self.low + softplus(x)
        return x

    def unbounded(self, x: Tensor) -> Tensor:
        """What :meth:`activation` maps onto given legal values; those at an end are taken from just inside."""

        def inverse_softplus(y: Tensor) -> Tensor:
            return y + torch.log(-torch.expm1(-y))

        margin = 1e-3
        if self.low > float("-inf") and self.high < float("inf"):
            return ((x - self.low) / (self.high - self.low)).clamp(margin, 1 - margin).logit()
        if self.high < float("inf"):
            return inverse_softplus((self.high - x).clamp(min=margin))
        if self.low > float("-inf"):
            return inverse_softplus((x - self.low).clamp(min=margin))
        return x

    def sample(self, sizes: dict[str, int], generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
        """A random tensor of the declared shape inside the legal range."""
        shape = [sizes[axis] for axis in self.axes]
        if self.whole:
            return torch.randint(int(self.low), int(self.high) + 1, shape, generator=generator)
        return self.activation(torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    def initial(self, sizes: dict[str, int]) -> Tensor:
        """The parameter before training, fp32."""
        shape = [sizes[axis] for axis in self.axes]
        if self.start == "eye":
            return torch.eye(*shape[-2:]).expand(shape).clone()
        if self.start == "normal":
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            return drawn / math.sqrt(shape[-1])
        assert isinstance(self.start, float | int)
        return torch.full(shape, float(self.start))


class Spec:
    """What mechanisms and policies share: a key, a card and a place in the registry.

    Subclasses are frozen dataclasses; their fields are the settings. Defining one with ``name=`` registers it.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[Paper]
    kind: ClassVar[str] = ""
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:  # without a name it is an engine's base class
            cls.name = name
            registry.register(cls)

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default value."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    def variables(self) -> dict[str, Any]:
        """The names that cost expressions may use: the settings of this spec, and what its engine adds."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def require_int(self, name: str, least: int = 1) -> None:
        """Refuse a setting that is no whole number of at least ``least``; for use in ``__post_init__``."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
            raise self.fail(name, repr(value), f"an int >= {least}")

    def require_number(self, name: str, low: float, high: float, expected: str) -> None:
        """Refuse a setting that is no number with low < number <= high."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low < float(value) <= high:
            raise self.fail(name, repr(value), expected)

    def require_choice(self, name: str, choices: Iterable[object]) -> None:
        """Refuse a setting that is none of the choices."""
        if getattr(self, name) not in choices:
            raise self.fail(name, repr(getattr(self, name)), f"one of {sorted(choices, key=str)}")

    def fail(self, argument: str, has: object, expected: object) -> ValueError:
        """The error for a bad argument, worded the same way everywhere."""
        return ValueError(f"{self.name or type(self).__name__}: {argument} has {has}, expected {expected}")


class Mechanism(Spec):
    """Base of every attention mechanism.

    An engine's base class implements :meth:`run`; a mechanism adds the engine's terms and :meth:`definition`.
    """

    kind: ClassVar[str] = "mechanism"
    cost: ClassVar[Cost]
    inputs: ClassVar[dict[str, Input]] = {}
    forms: ClassVar[tuple[str, ...]] = ()
    engine: ClassVar[str] = ""
    causal_modes: ClassVar[tuple[bool, ...]] = (True,)  # the first is the default
    self_attention: ClassVar[bool] = False  # True: as many queries as keys, as in every recurrence
    carried: ClassVar[tuple[str, ...]] = ()  # inputs [B, T] of whole numbers that keys keep, such as documents
    # False: what a query reads depends on the other queries of its call, so that a prompt in two calls may differ from
    # one; each call is still exactly what the definition says of its queries and of all keys so far
    streams: ClassVar[bool] = True
    per_head: ClassVar[bool] = True  # False: heads differ or mix, and `definition` sees [H, T, .]
    linear_in_values: ClassVar[bool] = True  # False: the output is no map of the values, as after a norm
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)  # settings that make a short sequence interesting
    limits: ClassVar[tuple[Limit, ...]] = ()

    def widths(self, key_width: int) -> dict[str, int]:
        """Sizes of the axes of ``inputs`` that are not among B, H, G, T, S, K, V, by name."""
        return {}

    def completed(self, inputs: dict[str, Tensor], sizes: dict[str, int], like: Tensor) -> dict[str, Tensor]:
        """The inputs with every trainable parameter that was not given at its value before training."""
        own = sizes | self.widths(sizes["K"])
        absent = {n: item for n, item in self.inputs.items() if n not in inputs and item.start is not None}
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return inputs | {n: item.initial(own).to(like.device, dtype) for n, item in absent.items()}

    def definition(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **extra: Any) -> Tensor:
        """The paper's formula for one head of one sequence, in float64, in the paper's order and letters.

        Shapes:
            q [T, K], k [S, K], v [S, V] -> [T, V].  ``scale`` is a float.  Softmax mechanisms, and those with a
            causal and a bidirectional form, also get ``visible`` [T, S], True where causality and the user's mask
            let a query see a key.  Extra inputs lose their batch and head axes.  With ``per_head = False`` every
            tensor keeps its head axis in front.

        Padding never appears here: a hidden token does not exist.  It alone judges; no engine may import it.
        """
        raise NotImplementedError

    def backends(self, call: Call) -> list[Backend]:
        """Who can run this call, best first, and why the others cannot; implemented once by each engine."""
        raise NotImplementedError

    def check_state(self, state: State, call: Call, rows: int) -> None:
        """Refuse a state that does not belong to this call of ``rows`` sequences; implemented by each engine."""
        raise NotImplementedError

    def run(self, call: Call) -> Result:
        """Compute a checked call on the backend asked for, or the best one."""
        return choose(self.backends(call), call, self.name).run(call)


@dataclasses.dataclass(frozen=True)
class Limit:
    """A declared special case: with these settings and inputs a mechanism equals another one.

    Args:
        settings: settings of the mechanism that reach the limit.
        equals: key of the other mechanism.
        other: its settings.
        inputs: makes the extra inputs of both from the drawn ones: ``f(x) -> (own, theirs)``.
        why: one line for the docs.
    """

    settings: dict[str, Any]
    equals: str
    other: dict[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]] | None = None
    why: str = ""
