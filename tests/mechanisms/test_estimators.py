"""Mechanisms that estimate softmax or better it: by codes for the keys, by regression around the query, by samples."""

import math

import pytest
import torch

import foveal
from foveal import attention
from foveal.mechanisms.linear.transformer_vq import commitment_loss

close = torch.testing.assert_close


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(T=24, K=6, V=4, H=2):
    return draw(1, H, T, K, seed=1), draw(1, H, T, K, seed=2), draw(1, H, T, V, seed=3)


# Transformer-VQ


@pytest.mark.parametrize("causal", [True, False])
def test_codes_that_are_the_keys_give_softmax(causal):
    q, k, v = qkv(T=12)
    vq = foveal.TransformerVQ(codes=12)
    close(attention(q, k, v, vq, codebook=k[0], causal=causal), attention(q, k, v, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
def test_few_codes_are_softmax_on_quantised_keys(causal):
    q, k, v = qkv(T=150)  # over two chunk borders; every code is used many times, so counts matter
    codebook = draw(2, 5, 6, seed=4)
    nearest = torch.cdist(k[0], codebook).argmin(-1)
    quantised = torch.stack([codebook[h][nearest[h]] for h in range(2)])[None]
    got = attention(q, k, v, foveal.TransformerVQ(codes=5), codebook=codebook, causal=causal)
    close(got, attention(q, quantised, v, causal=causal))


def test_a_code_counts_as_often_as_it_was_used():
    k = torch.tensor([0.1, -0.1, 0.9])[None, None, :, None]  # two keys fall to code 0, one to code 1
    q, v = torch.full_like(k, math.log(6.0)), torch.tensor([1.0, 2.0, 5.0])[None, None, :, None]
    codebook = torch.tensor([[[0.0], [1.0]]])
    got = attention(q, k, v, foveal.TransformerVQ(codes=2), codebook=codebook, scale=1.0)
    close(got.flatten(), torch.tensor([1.0, 1.5, (1 + 2 + 6 * 5) / 8]))


def test_codes_that_never_occurred_do_not_drown_the_others():
    """The best code is unused and its score beats those of the used ones by more than fp32 can hold."""
    q, k, v = (
        torch.full((1, 1, 4, 1), 1000.0),
        torch.tensor([0.0, 0.1, 0.0, 0.1])[None, None, :, None],
        draw(1, 1, 4, 2),
    )
    v, vq = v.float(), foveal.TransformerVQ(codes=3)
    codebook = torch.tensor([[[0.0], [0.1], [5.0]]])
    close(attention(q, k, v, vq, codebook=codebook), attention(q, k, v))
    head = attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], vq, codebook=codebook, output_final_state=True)
    tail = attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], vq, codebook=codebook, initial_state=head.state)
    close(tail, attention(q, k, v)[:, :, 2:])


@pytest.mark.parametrize("causal", [True, False])
def test_straight_through_gives_keys_the_gradient_of_quantised_keys(causal):
    q, k, v = (x.requires_grad_() for x in qkv(T=20))
    codebook, weight = draw(2, 5, 6, seed=4).requires_grad_(), draw(1, 2, 20, 4, seed=5)
    plain, through = (foveal.TransformerVQ(codes=5, straight_through=on) for on in (False, True))
    nearest = torch.cdist(k[0], codebook).argmin(-1).detach()
    quantised = torch.stack([codebook[h][nearest[h]] for h in range(2)])[None]
    want = attention(q, quantised, v, causal=causal)
    got = attention(q, k, v, through, codebook=codebook, causal=causal)
    close(got, want)
    wanted = torch.autograd.grad((want * weight).sum(), (q, quantised, v, codebook))
    found = torch.autograd.grad((got * weight).sum(), (q, k, v, codebook))
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    assert found[1].abs().min() > 0 or causal
    still = attention(q, k, v, plain, codebook=codebook, causal=causal)
    assert torch.autograd.grad(still.sum(), k, allow_unused=True)[0] is None


def test_straight_through_streams_and_its_formula_has_the_same_gradients():
    q, k, v = (x.requires_grad_() for x in qkv(T=11, H=1))
    spec, codebook = foveal.TransformerVQ(codes=3, straight_through=True), draw(1, 3, 6, seed=4)
    head = attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], spec, codebook=codebook, output_final_state=True)
    tail = attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], spec, codebook=codebook, initial_state=head.state)
    got = torch.cat((head.output, tail), 2)[0, 0]
    visible = torch.ones(11, 11, dtype=torch.bool).tril()
    want = spec.definition(q[0, 0], k[0, 0], v[0, 0], scale=6**-0.5, visible=visible, codebook=codebook[0])
    close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), (q, k, v)),
        torch.autograd.grad(want.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(mine, theirs)


def test_commitment_pulls_keys_to_their_codes():
    k = torch.tensor([0.25, 2.0])[None, None, :, None].requires_grad_()
    codebook = torch.tensor([[[0.0], [1.0]]], requires_grad=True)
    loss = commitment_loss(k, codebook)
    close(loss, torch.tensor((0.25**2 + 1.0) / 2))
    loss.backward()
    close(k.grad.flatten(), torch.tensor([0.25, 1.0]))
    assert codebook.grad is None
