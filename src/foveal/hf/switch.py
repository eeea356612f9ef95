"""The context manager that switches a model's attention and cache through transformers' own interfaces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator
from numbers import Real
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache
from transformers.masking_utils import causal_mask_function, sdpa_mask

import foveal
from foveal import registry
from foveal.engines.cache import Eviction, Policy
from foveal.engines.softmax import SoftmaxAttention
from foveal.hf import models
from foveal.hf.cache import PolicyCache, PolicyLayer
from foveal.spec import Mechanism

_numbers = itertools.count()
PREFIX = "foveal_"


@dataclasses.dataclass
class Session:
    """A switched model.

    Args:
        model: the model, restored when the context ends.
        mechanism: what its full-attention layers compute.
        policy: what its cache follows, or None for transformers' own cache.
        kinds: what each decoder layer sees, ``"full_attention"`` or another.
        cache: the cache of the latest call, or None before the first.
    """

    model: Any
    mechanism: Mechanism
    policy: Policy | None
    kinds: list[str]
    cache: PolicyCache | None = None
    _current: PolicyLayer | None = None
    _open: bool = True

    def new_cache(self) -> PolicyCache:
        """An empty cache under the session's policy, to be passed to the model by hand.

        Raises:
            ValueError: if the session has no policy.
        """
        if self.policy is None:
            raise ValueError("cache: this session has no policy, expected hf.use(model, cache=...)")
        config = models.decoder_config(self.model)
        slots = isinstance(self.policy, Eviction) and self.policy.slots
        rotation = functools.partial(models.rotation, self.model) if slots else None
        if rotation is not None:
            rotation()  # an architecture whose keys cannot be moved is refused at once
        layers = [
            PolicyLayer(self.policy, n, rotation, self._notice) if type(layer) is DynamicLayer else layer
            for n, layer in enumerate(DynamicCache(config=config).layers)
        ]
        self.cache = PolicyCache(layers)
        return self.cache

    def _notice(self, layer: PolicyLayer) -> None:
        if not self._open:
            raise ValueError("cache: its hf.use context has ended, expected it open while the cache is used")
        self._current = layer

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """What transformers calls in each attention layer: [B, H, T, K] in, [B, T, H, V] out."""
        layer, self._current = self._current, None
        if dropout and module.training:
            raise ValueError("model: attention dropout is on, expected model.eval(); a switched model is for inference")
        scale = module.head_dim**-0.5 if scaling is None else scaling  # type: ignore[operator]
        square = attention_mask is not None and attention_mask.dim() == 4
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        own = sliding_window is not None or not causal or not self._is_full(module)
        if square and not own and self.mechanism != _softmax():
            raise ValueError(
                f"attention_mask: has 4 axes, expected [B, S]: {self.mechanism.name} decides what each query sees"
            )
        spec = _softmax(softcap) if own else self._mechanism(softcap)
        inputs = {} if s_aux is None else {"sink_logits": s_aux.to(query.dtype)}
        call: dict[str, Any] = {"scale": scale, "layout": "bhtd", **inputs}
        if layer is not None:
            output = self._attend_cached(layer, spec, query, key, value, attention_mask, call)
        elif square or not causal:
            output = foveal.attention(query, key, value, spec, causal=False, mask=attention_mask, **call)
        else:
            padding = None if attention_mask is None else attention_mask[:, -key.shape[2] :]
            output = foveal.attention(query, key, value, spec, mask=padding, **call)
        return output.transpose(1, 2).contiguous(), None

    def _is_full(self, module: nn.Module) -> bool:
        """Whether a layer sees everything before it, and not a window or a chunk of its own."""
        number = getattr(module, "layer_idx", None)
        return number is None or number >= len(self.kinds) or self.kinds[number] == "full_attention"

    def _mechanism(self, softcap: float | None) -> Mechanism:
        """The session's mechanism with the soft cap of the model."""
        if softcap is None:
            return self.mechanism
        if "softcap" not in self.mechanism.settings():
            raise models.UnsupportedModel(
                f"model: caps its scores at {softcap}, which {self.mechanism.name} has no term for"
            )
        return dataclasses.replace(self.mechanism, softcap=softcap)

    def _attend_cached(
        self,
        layer: PolicyLayer,
        spec: Mechanism,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        call: dict[str, Any],
    ) -> Any:
        if padding is not None and padding.dim() == 4:
            raise ValueError("attention_mask: has 4 axes, expected [B, S]: a cache policy must know which tokens exist")
        real = layer.admit(padding, query.shape[2])
        pages = layer.pages(query)
        if pages is None:
            mask = None if bool(real.all()) else real
            output = foveal.attention(query, key, value, spec, mask=mask, **call)
        else:
            slot, exists = pages
            k, v = layer.read(slot)
            group = query.shape[1] // key.shape[1]
            mask = None if exists is None else exists.repeat_interleave(group, 1)[:, :, None]
            # the pages take the place of what the mechanism would choose
            softmax = _softmax(getattr(spec, "softcap", None))
            output = foveal.attention(query, k, v, softmax, causal=False, mask=mask, **call)
        layer.settle(query, call["scale"])
        return output


def _softmax(softcap: float | None = None) -> Mechanism:
    return registry.get("softmax")(softcap=softcap)  # type: ignore[no-any-return]


def mask(
    *, attention_mask: Tensor | None = None, mask_function: Any = causal_mask_function, **sizes: Any
) -> Tensor | None:
    """What transformers calls to build a mask: padding [B, S] where the layer is plainly causal, else [B, 1, T, S]."""
    if mask_function is not causal_mask_function:
        sizes["allow_is_causal_skip"] = False
        return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, **sizes)  # type: ignore[no-any-return]
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def resolve_mechanism(attention: str | Mechanism | None) -> Mechanism:
    """A mechanism that a pretrained model can be switched to.

    Raises:
        ValueError: if it is unknown, or needs tensors that a pretrained model does not have.
    """
    spec = registry.resolve("softmax" if attention is None else attention)
    needs = [name for name, item in spec.inputs.items() if not item.optional]
    if needs:
        raise ValueError(
            f"attention: {spec.name} needs {', '.join(needs)}, which a pretrained softmax model does not compute, "
            "expected a mechanism without required inputs"
        )
    if not isinstance(spec, SoftmaxAttention):
        raise ValueError(
            f"attention: {spec.name} keeps a state instead of keys and has to be trained, expected a softmax mechanism"
        )
    return spec


def resolve_policy(
    cache: str | Policy | None, budget: int | float | None, compression_ratio: float | None
) -> Policy | None:
    """A policy with its budget.

    Raises:
        ValueError: if it is unknown, the budget is out of range, or given twice.
    """
    if cache is None:
        if budget is not None or compression_ratio is not None:
            raise ValueError("budget: given without a cache policy, expected cache='snapkv' or another")
        return None
    if budget is not None and compression_ratio is not None:
        raise ValueError("compression_ratio: given beside budget, expected one of the two")
    if compression_ratio is not None:
        number = isinstance(compression_ratio, Real) and not isinstance(compression_ratio, bool)
        if not number or not 0 <= compression_ratio < 1:
            raise ValueError(f"compression_ratio: has {compression_ratio!r}, expected a share removed in [0, 1)")
        budget = 1.0 - float(compression_ratio)
    if isinstance(cache, Policy):
        return cache if budget is None else dataclasses.replace(cache, budget=budget)
    cls = registry.get(cache, kind="policy")
    return cls() if budget is None else cls(budget=budget)  # type: ignore[no-any-return]


@contextlib.contextmanager
def use(
    model: PreTrainedModel,
    *,
    attention: str | Mechanism | None = None,
    cache: str | Policy | None = None,
    budget: int | float | None = None,
    compression_ratio: float | None = None,
) -> Iterator[Session]:
    """Switch a pretrained decoder model to a mechanism, a cache policy or both; it is restored when the context ends.

    ``generate`` (greedy, sampled, beams, batches with left padding) and hand-written loops work as before: a call
    with ``use_cache`` and no cache starts one under the policy, whose later use needs the context open.  Layers with
    a sliding window of their own keep it and their cache.

    Args:
        model: a decoder-only transformers model.
        attention: key or mechanism that full-attention layers compute; None leaves softmax.
        cache: key or policy; None leaves transformers' own cache.
        budget: entries kept per key/value head, or a share of the tokens seen; None is the policy's own.
        compression_ratio: share of the tokens removed, 1 - budget.

    Raises:
        TypeError: if the model is not from transformers.
        UnsupportedModel: if it cannot be switched, with the reason.
        ValueError: for unknown names, budgets out of range, or a model that is switched already.
    """
    models.check(model)
    mechanism, policy = resolve_mechanism(attention), resolve_policy(cache, budget, compression_ratio)
    if policy is not None and getattr(mechanism, "alibi", False):
        raise ValueError(f"attention: {mechanism.name} measures distances, which {policy.name} does not keep")
    session = Session(model, mechanism, policy, models.layer_types(model))
    if mechanism != _softmax() and "full_attention" not in session.kinds:
        raise models.UnsupportedModel(f"model: {type(model).__name__} has sliding layers only, none to switch")
    if policy is not None:
        models.check_cache(model)
        session.new_cache()  # reports at once what the policy needs and the model lacks
        session.cache = None
    # the decoder's only: a vision tower beside it attends in both directions
    configs = {id(m.config): m.config for m in model.get_decoder().modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    if any(str(name).startswith(PREFIX) for name in before.values()):
        raise ValueError("model: is switched already, expected one hf.use at a time")
    name = f"{PREFIX}{next(_numbers)}"
    AttentionInterface.register(name, session.attend)
    AttentionMaskInterface.register(name, mask)
    hook = model.register_forward_pre_hook(_cache_hook(session), with_kwargs=True)
    try:
        for config in configs.values():
            config._attn_implementation_internal = name
        yield session
    finally:
        session._open = False
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        hook.remove()
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _cache_hook(session: Session) -> Any:
    """Put a cache under the policy wherever the model would start one of its own; refuse preallocated ones.

    A preallocated cache hands out slots that hold no token yet, which only its own mask could tell apart.
    """
    parameters = inspect.signature(session.model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"

    def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = next((kwargs[n] for n in ("cache", "past_key_values") if kwargs.get(n) is not None), None)
        if isinstance(given, StaticCache):
            raise ValueError("cache: is preallocated (StaticCache), expected a dynamic one or session.new_cache()")
        if session.policy is None:
            return args, kwargs
        wanted = kwargs.get("use_cache")
        wanted = getattr(model.config, "use_cache", True) if wanted is None else wanted
        if isinstance(given, PolicyCache):
            session.cache = given
        if isinstance(given, PolicyCache) or not (wanted or given is not None):
            return args, kwargs
        if isinstance(given, Cache) and given.get_seq_length() > 0:
            raise ValueError(
                f"cache: holds {given.get_seq_length()} tokens outside the policy, expected session.new_cache() or none"
            )
        kwargs = {n: x for n, x in kwargs.items() if n not in ("cache", "past_key_values")}
        return args, kwargs | {argument: session.new_cache()}

    return hook
