"""Corners of caches and models: chunks, padding, closed contexts, windows, custom masks, shared keys, vision."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, LlamaConfig, MistralConfig

import foveal
from foveal import hf
from tests.hf import tiny

close = torch.testing.assert_close
POLICIES = ("h2o", "knorm", "quest", "random", "snapkv", "streaming_llm", "tova")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def llama():
    return tiny.make("llama")


def policy(name, budget):
    cls = foveal.get(name)
    small = {"window": 4, "page": 4, "sinks": 2}
    return cls(budget=budget, **{n: x for n, x in small.items() if n in cls.settings()})


def generated(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=10, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("cache", POLICIES)
def test_a_prompt_in_chunks_is_the_prompt(llama, cache):
    inputs = tiny.prompt(pads=11)
    with hf.use(llama, cache=policy(cache, 100)):
        assert torch.equal(generated(llama, inputs, prefill_chunk_size=8), generated(llama, inputs))
    with hf.use(llama, cache=policy(cache, 16)) as session:
        generated(llama, inputs, prefill_chunk_size=8)
        assert session.cache.get_seq_length() == 49


@pytest.mark.parametrize("cache", POLICIES)
def test_rows_can_be_repeated_and_reordered_after_eviction(llama, cache):
    """What beam search does to a cache: afterwards every row answers as it would have in its old place."""
    inputs, rows = tiny.prompt(pads=7), torch.tensor([1, 0, 1])
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)), 1)
    tokens = tiny.prompt(B=2, T=3, seed=5)["input_ids"]
    with hf.use(llama, cache=policy(cache, 12)):
        past = tiny.cache_of(llama(**inputs, use_cache=True))
        other = copy.deepcopy(past)
        other.batch_repeat_interleave(2)
        other.reorder_cache(torch.tensor([2, 0, 2, 1]))
        other.batch_select_indices(torch.arange(3))
        for t in range(3):
            want = llama(tokens[:, t : t + 1], attention_mask=mask[:, : 41 + t], **tiny.past(past)).logits
            got = llama(tokens[rows, t : t + 1], attention_mask=mask[rows, : 41 + t], **tiny.past(other)).logits
            close(got, want[rows])


@pytest.mark.parametrize("cache", POLICIES)
def test_transformers_46773_padding_alone_in_a_call(llama, cache):
    """12: one left-padded row, token by token, so that the first calls hold padding only."""
    inputs = tiny.prompt(B=1, T=30, pads=6)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    want = llama(**inputs, position_ids=positions).logits[:, 6:]
    past, got = None, []
    with hf.use(llama, cache=policy(cache, 100)):
        for t in range(30):
            out = llama(
                inputs["input_ids"][:, t : t + 1],
                attention_mask=inputs["attention_mask"][:, : t + 1],
                position_ids=positions[:, t : t + 1],
                use_cache=True,
                **tiny.past(past),
            )
            past = tiny.cache_of(out)
            got.append(out.logits)
    close(torch.cat(got, 1)[:, 6:], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", POLICIES)
def test_a_share_of_a_short_prompt_keeps_the_newest(llama, cache):
    """A limit of two entries is below the window of snapkv and the sinks of streaming_llm."""
    ids = tiny.prompt(B=1, T=8)["input_ids"]
    with hf.use(llama, cache=foveal.get(cache)(budget=0.25)) as session:
        past = tiny.cache_of(llama(ids, use_cache=True))
        out = llama(ids[:, :1], **tiny.past(past))
        assert out.logits.isfinite().all()
        if cache in ("h2o", "snapkv", "streaming_llm", "tova"):
            assert session.cache.layers[0].positions[0, :, -1].tolist() == [8, 8]


def test_streaming_llm_under_a_share_places_kept_tokens_side_by_side(llama):
    """Limits below the number of sinks turn no key but the sinks that are left."""
    ids = tiny.prompt(B=1, T=14)["input_ids"]
    with hf.use(llama, cache=foveal.get("streaming_llm")(budget=0.25, sinks=4)) as session:
        past = tiny.cache_of(llama(ids[:, :8], use_cache=True))
        for t in range(8, 14):
            llama(ids[:, t : t + 1], **tiny.past(past))
        layer = session.cache.layers[0]
        kept, got = layer.positions[0, 0].tolist(), layer.keys
    assert kept[0] == 0
    assert kept[-1] == 13
    plain = tiny.cache_of(llama(ids[:, kept], use_cache=True)).layers[0].keys
    close(got, hf.models.move(plain, torch.tensor([14 - len(kept)]), *hf.models.rotation(llama)), rtol=1e-4, atol=1e-5)


def test_frequencies_that_change_with_the_length_are_those_of_the_call():
    """Dynamic rotary embedding stretches beyond the trained length; sinks are turned by what the call used."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(**(tiny.SIZES | {"max_position_embeddings": 16}), rope_parameters=rope)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = tiny.prompt(B=1, T=40)["input_ids"]
    sinks = tiny.cache_of(model(ids, use_cache=True)).layers[0].keys[:, :, :2]
    model(ids[:, :4])  # back to the short ones
    short = model.get_decoder().rotary_emb.inv_freq
    with hf.use(model, cache=policy("streaming_llm", 10)) as session:
        model(ids, use_cache=True)
        got = session.cache.layers[0].keys[:, :, :2]
    long = model.get_decoder().rotary_emb.inv_freq
    assert not torch.equal(short, long)
    close(got, hf.models.move(sinks, torch.tensor([30]), long, False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads", [0, 7])
def test_a_model_with_windows_in_all_layers(pads):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**tiny.SIZES, sliding_window=12)).eval()
    inputs = tiny.prompt(pads=pads)
    real = inputs["attention_mask"].bool()
    want, text = model(**inputs).logits, generated(model, inputs)
    with hf.use(model, attention="softmax"):
        close(model(**inputs).logits[real], want[real], rtol=1e-4, atol=1e-4)
        assert torch.equal(generated(model, inputs), text)
    with pytest.raises(hf.UnsupportedModel, match="sliding layers only"), hf.use(model, attention="moba"):
        pass


def test_a_mask_of_queries_and_keys_is_for_softmax_only(llama):
    inputs = tiny.prompt(B=1, T=10)
    square = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
    want = llama(**inputs).logits
    with hf.use(llama, attention="softmax"):
        close(llama(inputs["input_ids"], attention_mask=square).logits, want, rtol=1e-4, atol=1e-4)
    for spec in ("moba", foveal.Softmax(window=2)):
        with hf.use(llama, attention=spec), pytest.raises(ValueError, match="attention_mask: has 4 axes"):
            llama(inputs["input_ids"], attention_mask=square)
    with hf.use(llama, cache="knorm"), pytest.raises(ValueError, match="attention_mask: has 4 axes"):
        llama(inputs["input_ids"], attention_mask=square)


@pytest.mark.parametrize(
    "spec",
    [foveal.MoBA(block_size=8, top_k=100), foveal.SparseTransformer(stride=1000, block_size=8), foveal.Softmax()],
    ids=lambda spec: spec.name,
)
def test_the_pages_of_quest_take_the_place_of_a_mechanism(llama, spec):
    """While decoding, what quest reads is what softmax sees, whatever read the prompt."""
    inputs = tiny.prompt(pads=7)
    with hf.use(llama, cache=policy("quest", 16)):
        want = generated(llama, inputs)
    with hf.use(llama, attention=spec, cache=policy("quest", 16)):
        assert torch.equal(generated(llama, inputs), want)
    assert not torch.equal(generated(llama, inputs), want)


def test_distances_do_not_outlive_an_eviction(llama):
    spec = foveal.Softmax(alibi=True)
    with pytest.raises(ValueError, match="measures distances"), hf.use(llama, attention=spec, cache="knorm"):
        pass


def test_padding_behind_is_refused_where_the_last_queries_decide(llama):
    inputs = tiny.prompt(B=2, T=30)
    inputs["attention_mask"][1, -5:] = 0
    for cache in ("snapkv", "tova"):
        with hf.use(llama, cache=policy(cache, 12)), pytest.raises(ValueError, match="attention_mask: row 1 ends in"):
            llama(**inputs, use_cache=True)
    with hf.use(llama, cache=policy("knorm", 12)) as session:
        llama(**inputs, use_cache=True)
        assert session.cache.lengths[0].tolist() == [[12, 12], [12, 12]]


def test_keys_shared_between_layers_are_refused():
    layers = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 5}
    small = {
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    }
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3nTextConfig(**{**tiny.SIZES, **layers, **small}, head_dim=8, sliding_window=12, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(hf.UnsupportedModel, match="shares keys between layers"), hf.use(model, cache="knorm"):
        pass
    inputs = tiny.prompt()
    want = model(**inputs).logits
    with hf.use(model, attention="softmax"):
        close(model(**inputs).logits, want, rtol=1e-4, atol=1e-4)


def test_a_vision_tower_keeps_its_attention():
    """Its tokens see each other in both directions."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(**(tiny.SIZES | {"vocab_size": 120}))
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=100)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = tiny.prompt(B=1, T=20)["input_ids"]
    ids[:, 3:7] = 100  # four patches
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 8, 8)}
    want = model(**inputs).logits
    with hf.use(model, attention="softmax", cache=policy("knorm", 12)) as session:
        out = model(**inputs, use_cache=True)
        close(out.logits, want, rtol=1e-4, atol=1e-4)
        assert session.cache.lengths[0].tolist() == [[12, 12]]


def test_a_cache_is_of_no_use_once_its_context_has_ended(llama):
    ids = tiny.prompt(B=1, T=20)["input_ids"]
    with hf.use(llama, cache="knorm", budget=8):
        past = tiny.cache_of(llama(ids, use_cache=True))
    with pytest.raises(ValueError, match=r"cache: its hf\.use context has ended"):
        llama(ids[:, :1], **tiny.past(past))


def test_the_session_knows_the_latest_cache(llama):
    ids = tiny.prompt(B=1, T=20)["input_ids"]
    with hf.use(llama, cache="knorm", budget=8) as session:
        first, second = session.new_cache(), session.new_cache()
        for cache in (second, first):
            llama(ids, **tiny.past(cache))
            assert session.cache is cache


def test_the_peak_is_one_full_layer_beside_the_compressed_ones(llama):
    ids = tiny.prompt(B=1, T=40)["input_ids"]
    with hf.use(llama, cache=policy("knorm", 10)) as session:
        llama(ids, use_cache=True)
        entry = 2 * 2 * 8 * 4  # keys and values, heads, width, bytes
        assert session.cache.nbytes == 3 * 10 * entry
        assert session.cache.peak_nbytes == (10 + 10 + 40) * entry


def test_memory_grows_in_steps_that_are_counted(llama):
    """Generated tokens are written into room for 32; what it holds is counted, used or not."""
    ids = tiny.prompt(B=1, T=60)["input_ids"]
    entry = 2 * 2 * 8 * 4  # keys and values, heads, width, bytes
    with hf.use(llama, cache=policy("knorm", 10)) as session:
        past = tiny.cache_of(llama(ids[:, :20], use_cache=True))
        for t in range(20, 60):
            llama(ids[:, t : t + 1], **tiny.past(past))
            held = 10 + 32 if t < 52 else 10 + 64
            assert session.cache.layers[0].nbytes == held * entry
            assert session.cache.lengths[0].tolist() == [[10 + t - 19] * 2]


@pytest.mark.parametrize("cache", POLICIES)
def test_long_answers_equal_the_full_forward(llama, cache):
    """Beyond one step of memory, over a copy, and with the prompt read in another inference mode."""
    ids = tiny.prompt(B=2, T=90)["input_ids"]
    want = llama(ids).logits
    with hf.use(llama, cache=policy(cache, 100)):
        past, rows = tiny.cache_of(llama(ids[:, :10], use_cache=True)), []
        for t in range(10, 90):
            if t == 25:
                twin = copy.deepcopy(past)
            with torch.inference_mode(t % 20 < 10), torch.no_grad():
                rows.append(llama(ids[:, t : t + 1], **tiny.past(past)).logits)
        close(torch.cat(rows, 1), want[:, 10:], rtol=1e-4, atol=1e-4)
        again = llama(ids[:, 25:26], **tiny.past(twin)).logits
        close(again, want[:, 25:26], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", POLICIES)
def test_gradients_pass_a_cache(cache):
    """With gradients on nothing is written in place."""
    with torch.inference_mode(False), torch.enable_grad():
        model, ids = tiny.make("llama"), tiny.prompt(B=1, T=24)["input_ids"]
        weight = model.get_input_embeddings().weight
        (want,) = torch.autograd.grad(model(ids).logits[:, 20:].square().mean(), weight)
        with hf.use(model, cache=policy(cache, 100)):
            past = tiny.cache_of(model(ids[:, :20], use_cache=True))
            rows = [model(ids[:, t : t + 1], **tiny.past(past)).logits for t in range(20, 24)]
            (got,) = torch.autograd.grad(torch.cat(rows, 1).square().mean(), weight)
        close(got, want, rtol=1e-4, atol=1e-5)
