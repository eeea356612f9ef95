"""Tiny random models of the architectures that the switch supports."""

import inspect

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "attention_dropout": 0.0,
}
SLIDING = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=8, sliding_window=12, layer_types=SLIDING, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=12, layer_types=SLIDING, query_pre_attn_scalar=8
    ),
    "phi3": lambda: Phi3Config(**SIZES),
}


def make(name):
    """A model whose weights are large enough for attention to be far from even."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model


def past(cache):
    """A cache as the keyword that this transformers' models take."""
    return {"cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values": cache}


def cache_of(out):
    """The cache that a model returned."""
    return out["cache"] if "cache" in out else out["past_key_values"]


def sliding_only():
    """A Mistral whose layers all have a window."""
    return AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=8)).eval()


def prompt(B=2, T=40, pads=0, seed=1):
    """Token ids and mask; the last row starts with ``pads`` tokens of padding."""
    ids = torch.randint(2, 90, (B, T), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if pads:
        ids[-1, :pads], mask[-1, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
