"""The one table of what differs between architectures, and what a model must have to be switched."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


class UnsupportedModel(ValueError):
    """A model that cannot be switched; the message says why."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What must be known of an architecture beyond transformers' common interface.

    Args:
        rotary: path of the rotary embedding inside the decoder.
        frequencies: name of its buffer of inverse frequencies in full-attention layers.
        interleaved: whether pairs are neighbours (2 i, 2 i + 1) and not halves (i, i + K / 2).
    """

    rotary: str = "rotary_emb"
    frequencies: str = "inv_freq"
    interleaved: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "phi3": Family(),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(frequencies="full_attention_inv_freq"),
    "smollm3": Family(),
    "granite": Family(),
    "olmo2": Family(),
    "cohere": Family(interleaved=True),
}


def decoder_config(model: nn.Module) -> Any:
    """The configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]


def check(model: object) -> None:
    """Refuse models that have no decoder with a cache or bypass transformers' attention interface.

    Raises:
        TypeError: if it is no transformers model.
        UnsupportedModel: with the reason in one sentence.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, expected a transformers model")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"model: {name} is an encoder-decoder, expected a decoder-only language model")
    if not model.can_generate():
        raise UnsupportedModel(f"model: {name} cannot generate, expected a decoder with a language-modelling head")
    if not model._supports_attention_backend:
        raise UnsupportedModel(
            f"model: {name} does not use transformers' attention interface, so nothing can be switched"
        )
    causal = [module.is_causal for module in model.get_decoder().modules() if hasattr(module, "is_causal")]
    if causal and not any(causal):
        raise UnsupportedModel(f"model: {name} attends in both directions, expected a decoder")
    config = decoder_config(model)
    if not getattr(config, "num_attention_heads", 0):
        raise UnsupportedModel(f"model: {name} has no attention heads")


def layer_types(model: nn.Module) -> list[str]:
    """The kind of each decoder layer, ``"full_attention"`` or another."""
    config = decoder_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def check_cache(model: nn.Module) -> None:
    """Refuse models whose cache a policy cannot follow.

    Raises:
        UnsupportedModel: with the reason in one sentence.
    """
    name = type(model).__name__
    if "full_attention" not in layer_types(model):
        raise UnsupportedModel(f"model: {name} has sliding layers only, no cache to compress")
    if getattr(decoder_config(model), "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"model: {name} shares keys between layers, which cannot be compressed for one of them")


def rotation(model: nn.Module) -> tuple[Tensor, bool]:
    """Inverse frequencies of the rotary embedding in full-attention layers, and whether pairs are neighbours.

    Raises:
        UnsupportedModel: if the table above does not know the architecture.
    """
    kind = decoder_config(model).model_type
    family = FAMILIES.get(kind)
    decoder = model.get_decoder()  # type: ignore[operator]
    if family is None or not hasattr(decoder, family.rotary):
        raise UnsupportedModel(
            f"model: keys of {kind!r} cannot be moved to other positions, expected one of {sorted(FAMILIES)}"
        )
    return getattr(getattr(decoder, family.rotary), family.frequencies), family.interleaved


def move(k: Tensor, by: Tensor, frequencies: Tensor, interleaved: bool) -> Tensor:
    """Keys [B, G, n, K] rotated by a number of positions per row [B]; channels beyond the rotary ones stay."""
    width = 2 * len(frequencies)
    angle = by[:, None, None, None].double() * frequencies.to(k.device).double()
    cos, sin = angle.cos().to(k.dtype), angle.sin().to(k.dtype)
    turned, rest = k[..., :width], k[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        moved = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        moved = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((moved, rest), -1)
