"""What a method name means: full attention, a cache policy, an attention mechanism, or one of each."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from foveal import registry
from foveal.engines.cache import Policy
from foveal.spec import Mechanism, Spec

REFERENCE = "full"
DEFAULT = (
    "full",
    "sliding_window",
    "streaming_llm",
    "h2o",
    "tova",
    "knorm",
    "snapkv",
    "quest",
    "moba",
)


@dataclasses.dataclass(frozen=True)
class Method:
    """One column of a comparison.

    Args:
        name: as it is printed, ``"full"``, ``"snapkv"`` or ``"moba+snapkv"``.
        attention: what full-attention layers compute, or None for the model's own softmax.
        policy: what the cache follows, or None for transformers' own cache.
    """

    name: str
    attention: Mechanism | None = None
    policy: Policy | None = None

    @property
    def settings(self) -> str:
        """Every setting in one line, ``"budget 384, window 32"``."""
        parts = [part for part in (self.attention, self.policy) if part is not None]
        chosen = [(key, getattr(part, key)) for part in parts for key in part.settings()]
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen if value is not None)

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[Any]:
        """Switch ``model`` to this method and yield a function that makes an empty cache for it."""
        from foveal import hf
        from foveal.hf.models import decoder_config

        def plain() -> Any:
            from transformers.cache_utils import DynamicCache

            return DynamicCache(config=decoder_config(model))

        if self.attention is None and self.policy is None:
            yield plain
            return
        with hf.use(model, attention=self.attention, cache=self.policy) as session:
            yield plain if self.policy is None else session.new_cache

    def idle(self, length: int) -> str | None:
        """Why this method does the same as full attention on ``length`` tokens, or None if it does not.

        A method with two parts idles if both do.
        """
        parts = [part for part in (self.attention, self.policy) if part is not None]
        reasons = [_idle(part, length) for part in parts]
        return "; ".join(reason for reason in reasons if reason) if reasons and all(reasons) else None


def _idle(part: Spec, length: int) -> str | None:
    reach = _reach({key: getattr(part, key) for key in part.settings()})
    if reach is None or reach < length:
        return None
    return f"input too short: {part.name} covers {reach} tokens, the context has {length}"


def _reach(settings: dict[str, Any]) -> int | None:
    """How many tokens a query can see under these settings; None if that is no number of tokens."""
    for name in ("budget", "window", "stride"):
        if isinstance(settings.get(name), int):
            return int(settings[name])
    if {"block_size", "top_k"} <= settings.keys():
        return int(settings["block_size"] * settings["top_k"])
    return None


def candidates() -> list[str]:
    """Every name that a model can be switched to."""
    from foveal.hf.switch import resolve_mechanism

    usable = []
    for key in registry.names("mechanism"):
        with contextlib.suppress(ValueError):
            resolve_mechanism(key)
            usable.append(key)
    return [REFERENCE, *registry.names("policy"), *usable]


def parse(names: Sequence[str], budget: int) -> list[Method]:
    """The methods behind names, full attention first: everything else is measured against it.

    Args:
        names: ``"full"``, a policy's key, a mechanism's key, or ``"mechanism+policy"``.
        budget: entries per key head for policies; mechanisms with a window or blocks get the same reach.

    Raises:
        ValueError: for an unknown name, with the nearest ones, a name given twice, or a budget out of a
            policy's range.
    """
    wanted = [name.strip().lower().replace("-", "_") for name in names]
    if not wanted or not all(wanted):
        raise ValueError(f"methods: has an empty name, expected some of {', '.join(candidates())}")
    methods = [Method(REFERENCE), *(_method(name, budget) for name in wanted if name != REFERENCE)]
    seen: set[str] = set()
    for method in methods:
        if method.name in seen:
            raise ValueError(f"methods: has {method.name!r} twice, expected every method once")
        seen.add(method.name)
    return methods


def _method(name: str, budget: int) -> Method:
    if "+" not in name:
        known = candidates()
        part = _part(name, known, budget)
        if isinstance(part, Policy):
            return Method(part.name, policy=part)
        return Method(part.name, attention=part)  # type: ignore[arg-type]
    first, _, second = name.partition("+")
    attention = _part(first, [key for key in candidates() if key in registry.names("mechanism")], budget)
    policy = _part(second, registry.names("policy"), budget)
    return Method(f"{attention.name}+{policy.name}", attention=attention, policy=policy)  # type: ignore[arg-type]


def _part(name: str, known: list[str], budget: int) -> Spec:
    """The ready policy or mechanism behind one key or alias."""
    for kind in registry.FOLDERS:
        for cls in registry.classes(kind):
            if name in (cls.name, *cls.aliases, cls.__name__.lower()):
                if cls.name in known:
                    return cls(**_fit(cls, budget))
                return _refuse(cls)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"expected some of {', '.join(known)}"
    raise ValueError(f"methods: unknown method {name!r}; {hint}")


def _refuse(cls: type[Spec]) -> Spec:
    """Say why a known name is no method here, in the words of the switch where it has some."""
    from foveal.hf.switch import resolve_mechanism

    if issubclass(cls, Mechanism):
        resolve_mechanism(cls.name)
    raise ValueError(f"methods: {cls.name!r} is a {cls.kind}, expected mechanism+policy")


def _fit(cls: type[Spec], budget: int) -> dict[str, int]:
    """The settings that give a policy or a mechanism a reach of about ``budget`` tokens."""
    settings = cls.settings()
    if "budget" in settings:
        return {"budget": budget}
    if isinstance(settings.get("window"), int):
        return {"window": budget}
    if {"block_size", "top_k"} <= settings.keys():
        return {"top_k": max(1, budget // settings["block_size"])}
    return {}
