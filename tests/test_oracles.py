"""A second opinion: independent implementations that are installed.  They never judge; a difference starts a search."""

import importlib.util
import pathlib
import sys

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

import foveal
from foveal import attention

close = torch.testing.assert_close


def fla(name):
    """A reference of flash-linear-attention by its file: importing the package would need a GPU compiler."""
    for package in ("einops", "fla"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'foveal[oracles]'")
    root = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"fla_{name}_naive", root / "ops" / name / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


B, H, T, K, V = 2, 3, 64, 8, 6


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def qkv():
    """In layout [B, T, H, K], as fla takes them."""
    return draw(B, T, H, K), normalize(draw(B, T, H, K) + 1, dim=-1), draw(B, T, H, V)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def test_linear_matches_fla(qkv):
    q, k, v = qkv
    positive = (q.abs() + 0.1, k.abs() + 0.1, v)
    want = first(fla("linear_attn").naive_recurrent_linear_attn(*positive, normalize=True))
    close(attention(*positive, foveal.Linear(feature_map="identity"), layout="bthd"), want, rtol=1e-4, atol=1e-5)


def test_retention_matches_fla(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv)
    close(attention(q, k, v, "retention"), fla("retention").naive_retention(q, k, v), rtol=1e-4, atol=1e-5)


def test_gla_matches_fla(qkv):
    decay, state = logsigmoid(draw(B, T, H, K)), draw(B, H, K, V)
    want, final = fla("gla").naive_recurrent_gla(*qkv, decay, initial_state=state, output_final_state=True)
    got = attention(
        *qkv, "gla", layout="bthd", log_decay=decay, initial_state=foveal.RecurrentState(state), output_final_state=True
    )
    close(got.output, want, rtol=1e-4, atol=1e-5)
    close(got.state.matrix, final, rtol=1e-4, atol=1e-5)


def test_delta_rule_matches_fla(qkv):
    q, k, v = (x.transpose(1, 2) for x in qkv)
    beta = draw(B, H, T).sigmoid()
    spec = foveal.DeltaRule(normalize_qk=False)
    for reference in (fla("delta_rule").delta_rule_recurrence, fla("delta_rule").delta_rule_chunkwise):
        close(attention(q, k, v, spec, beta=beta), first(reference(q, k, v, beta)), rtol=1e-4, atol=1e-5)


def test_gated_delta_rule_matches_fla(qkv):
    beta, decay = draw(B, T, H).sigmoid(), logsigmoid(draw(B, T, H))
    spec = foveal.GatedDeltaRule(normalize_qk=False)
    got = attention(*qkv, spec, layout="bthd", beta=beta, log_decay=decay)
    module = fla("gated_delta_rule")
    close(got, first(module.naive_recurrent_gated_delta_rule(*qkv, beta, decay)), rtol=1e-4, atol=1e-5)
    close(got, first(module.naive_chunk_gated_delta_rule(*qkv, decay, beta)), rtol=1e-4, atol=1e-5)


def test_mamba2_matches_fla_s_scalar_decay(qkv):
    q, k, v = qkv
    dt, A = draw(B, T, H).exp(), -draw(H).exp()
    want = first(fla("simple_gla").naive_recurrent_simple_gla(q, k * dt[..., None], v, dt * A, scale=1.0))
    close(attention(q, k, v, "mamba2", layout="bthd", dt=dt, A=A, scale=1.0), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_matches_torch_in_values_and_gradients(causal, dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in (draw(2, 6, 33, 16), draw(2, 2, 33, 16), draw(2, 2, 33, 16)))
    want = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    for options in ({}, {"form": "parallel"}, {"form": "chunked"}):
        got = attention(q, k, v, causal=causal, **options)
        close(got, want)
        for a, b in zip(torch.autograd.grad(got.square().sum(), (q, k, v)), want_grads, strict=True):
            close(a, b)


def test_softmax_with_masks_matches_torch():
    q, k, v = draw(2, 4, 20, 8), draw(2, 4, 31, 8), draw(2, 4, 31, 8)
    mask = draw(2, 1, 20, 31) > 0
    bias = draw(1, 4, 20, 31)
    close(attention(q, k, v, causal=False, mask=mask), scaled_dot_product_attention(q, k, v, mask))
    close(attention(q, k, v, causal=False, mask=bias, form="parallel"), scaled_dot_product_attention(q, k, v, bias))


def test_gated_delta_rule_matches_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)  # its kernels want a GPU as soon as triton is installed
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = draw(1, 70, 2, 8), draw(1, 70, 2, 8) + 1, draw(1, 70, 2, 5)
    beta, decay = draw(1, 70, 2).sigmoid(), logsigmoid(draw(1, 70, 2))
    want, _ = modeling.torch_chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)
    got = attention(q, k, v, "gated_delta_rule", layout="bthd", beta=beta, log_decay=decay)
    close(got, want, rtol=1e-4, atol=1e-5)
