"""The trainable layer: any mechanism, one set of options, decoding and packing included."""

import pytest
import torch

import foveal
from foveal import AttentionLayer

close = torch.testing.assert_close
NAMES = foveal.list_mechanisms()


def make(name, **options):
    torch.manual_seed(0)
    return AttentionLayer(16, 4, name, kv_heads=2, **options).double()


@pytest.mark.parametrize("conv", [0, 4])
@pytest.mark.parametrize("name", NAMES)
def test_one_token_after_the_other_equals_the_whole(name, conv):
    layer, x = make(name, conv=conv, rope=100.0), torch.randn(2, 11, 16, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, :4] = False
    want = layer(x, mask=mask)
    state, rows = None, []
    for t in range(11):
        out, state = layer(x[:, t : t + 1], mask=mask[:, t : t + 1], initial_state=state, output_final_state=True)
        rows.append(out)
        if t == 5:
            state = state.index_select(torch.tensor([1, 0])).index_select(torch.tensor([1, 0])).detach()
    close(torch.cat(rows, 1)[mask], want[mask])
    assert state.length.tolist() == [11, 7]


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_equal_each_alone(name):
    layer, x = make(name, conv=3, rope=100.0), torch.randn(1, 12, 16, dtype=torch.float64)
    got = layer(x, cu_seqlens=torch.tensor([0, 5, 5, 6, 12]))
    close(got, torch.cat([layer(x[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 12))], 1))


CHOOSES = {"sea": "gates.estimate"}  # trained by its own loss, as in the paper


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name):
    layer, x = make(name, conv=4, bias=True), torch.randn(2, 9, 16, dtype=torch.float64)
    layer(x).square().sum().backward()
    for parameter, value in layer.named_parameters():
        if parameter.startswith(CHOOSES.get(name, "nothing")):  # which keys are looked at has no derivative
            assert value.grad is None or (value.grad == 0).all()
            continue
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter
        assert value.grad.abs().sum() > 0, parameter


def test_gates_lie_in_their_legal_range():
    layer = make("gated_delta_rule")
    assert set(layer.gates) == {"log_decay", "beta"}
    x = 100 * torch.randn(1, 50, 16, dtype=torch.float64)
    decay, beta = (layer._gate(name, layer.gates[name](x)) for name in ("log_decay", "beta"))
    assert decay.shape == beta.shape == (1, 50, 4)
    assert (decay <= 0).all()
    assert ((beta >= 0) & (beta <= 1)).all()
    assert set(make("mamba2").constants) == {"A", "D"}


def test_convolution_equals_torch_s_padded_one():
    layer, x = make("linear", conv=4), torch.randn(1, 9, 16, dtype=torch.float64)
    mixed = layer.qkv(x)
    got, _ = layer._convolve(mixed, torch.ones(1, 9, dtype=torch.bool), torch.zeros(1, 9, dtype=torch.long), None)
    padded = torch.nn.functional.pad(mixed.mT, (3, 0))
    close(got, torch.nn.functional.silu(layer.conv(padded)).mT)


def test_widths_of_keys_and_values_are_free():
    layer = AttentionLayer(16, 4, "gla", key_dim=6, value_dim=10)
    assert layer(torch.randn(2, 7, 16)).shape == (2, 7, 16)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AttentionLayer(16, 3), "dim: has 16, expected a multiple of heads=3"),
        (lambda: AttentionLayer(16, 4, kv_heads=3), "heads: has 4, expected a positive multiple of kv_heads=3"),
        (lambda: AttentionLayer(12, 4, rope=10.0), "key_dim: has 3, expected an even width"),
        (lambda: AttentionLayer(16, 4)(torch.randn(2, 3, 8)), r"hidden: has shape \(2, 3, 8\), expected \[B, T, 16\]"),
        (
            lambda: AttentionLayer(16, 4)(
                torch.randn(1, 5, 16), cu_seqlens=torch.tensor([0, 5]), output_final_state=True
            ),
            "cu_seqlens: given beside a state",
        ),
    ],
)
def test_bad_sizes_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, float("inf")), (float("-inf"), 0.0), (-2.0, 3.0), (float("-inf"), float("inf"))]
)
def test_a_parameter_starts_where_it_says(low, high):
    item = foveal.Input("H", low=low, high=high, optional=True, start=0.0)
    inside = torch.tensor([-1.5, -0.25, 0.25, 0.75, 2.0]).clamp(low + 0.1 * (low > -9), high - 0.1 * (high < 9))
    torch.testing.assert_close(item.activation(item.unbounded(inside)), inside)
    ends = item.activation(item.unbounded(torch.tensor([low, high]).clamp(-5, 5)))
    assert ((ends >= low) & (ends <= high)).all()
    assert torch.allclose(ends, torch.tensor([low, high]).clamp(-5, 5), atol=5e-3)
