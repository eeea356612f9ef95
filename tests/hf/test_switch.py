"""Switching a model changes what it was asked to change, and nothing once the context ends."""

import pytest
import torch
from transformers import BertConfig, BertModel, DynamicCache, T5Config, T5ForConditionalGeneration

import foveal
from foveal import hf
from tests.hf import tiny

close = torch.testing.assert_close
NAMES = tuple(tiny.CONFIGS)
EVICTING = ("h2o", "knorm", "random", "snapkv", "streaming_llm", "tova")
POLICIES = (*EVICTING, "quest")


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = tiny.make(name)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def policy(name, budget):
    cls = foveal.get(name)
    small = {"window": 4, "page": 4, "sinks": 2}
    return cls(budget=budget, **{n: x for n, x in small.items() if n in cls.settings()})


def generated(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("pads", [0, 7])
@pytest.mark.parametrize("name", NAMES)
def test_softmax_changes_no_logit_and_no_text(models, name, pads):
    model, inputs = models(name), tiny.prompt(pads=pads)
    real = inputs["attention_mask"].bool()
    want, text = model(**inputs).logits, generated(model, inputs)
    with hf.use(model, attention="softmax"):
        close(model(**inputs).logits[real], want[real], rtol=1e-4, atol=1e-4)
        assert torch.equal(generated(model, inputs), text)
    assert torch.equal(model(**inputs).logits, want)


@pytest.mark.parametrize("cache", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_budget_above_the_length_changes_nothing(models, name, cache):
    model, inputs = models(name), tiny.prompt(pads=7)
    want = generated(model, inputs)
    with hf.use(model, cache=policy(cache, 100)):
        assert torch.equal(generated(model, inputs), want)


@pytest.mark.parametrize("cache", EVICTING)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_smaller_budget_frees_counted_memory(models, name, cache):
    model, inputs = models(name), tiny.prompt(T=64)
    with hf.use(model, cache=policy(cache, 16)) as session:
        model(**inputs, use_cache=True)
        full = [n for n, kind in enumerate(hf.models.layer_types(model)) if kind == "full_attention"]
        for n in full:
            layer = session.cache.layers[n]
            assert session.cache.lengths[n].tolist() == [[16, 16], [16, 16]]
            # keys and values, batch, heads, entries, width, bytes
            assert layer.nbytes == 2 * 2 * 2 * 16 * 8 * 4
            assert layer.get_seq_length() == 64
            assert (layer.positions.diff(dim=-1) > 0).all()
        assert session.cache.peak_nbytes > session.cache.nbytes


def test_quest_says_that_it_keeps_everything(models):
    model, inputs = models("llama"), tiny.prompt(T=64)
    assert not foveal.get("quest").frees_memory
    with hf.use(model, cache=policy("quest", 16)) as session:
        model(**inputs, use_cache=True)
        assert session.cache.lengths[2].tolist() == [[64, 64], [64, 64]]


@pytest.mark.parametrize("cache", POLICIES)
def test_transformers_46773_a_padded_row_is_the_row_alone(models, cache):
    """12: in a batch, padded, compressed and decoded, a row's text is what it is alone."""
    model = models("llama")
    inputs = tiny.prompt(B=3, T=48, pads=19)
    alone = {n: x[-1:, 19:] for n, x in inputs.items()}
    for budget in (16, 0.4):
        with hf.use(model, cache=policy(cache, budget)):
            together, own = generated(model, inputs), generated(model, alone)
        assert together[-1, 48:].tolist() == own[0, 29:].tolist()


@pytest.mark.parametrize("cache", POLICIES)
def test_decoding_by_hand_equals_generate(models, cache):
    model, inputs = models("llama"), tiny.prompt(B=1)
    with hf.use(model, cache=policy(cache, 16)) as session:
        want = generated(model, inputs)[0, 40:]
        out, got = model(**inputs, **tiny.past(session.new_cache())), []
        for _ in range(12):
            token = out.logits[:, -1:].argmax(-1)
            got.append(token.item())
            out = model(token, **tiny.past(tiny.cache_of(out)))
    assert got == want.tolist()


def test_eviction_equals_a_mask_over_what_was_kept():
    """Keys stay rotated by their true positions: decoding equals the full prompt masked to the kept tokens."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    # one layer and one key head, so that one mask says what was kept
    config = LlamaConfig(**(tiny.SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 1}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tiny.prompt(B=1, T=45)["input_ids"]
    for name in ("random", "knorm", "snapkv"):  # these evict no generated token
        with hf.use(model, cache=policy(name, 16)) as session:
            past = tiny.cache_of(model(ids[:, :40], use_cache=True))
            kept = session.cache.layers[0].positions[0, 0].tolist()
            got = torch.cat([model(ids[:, t : t + 1], **tiny.past(past)).logits for t in range(40, 45)], 1)
        visible = torch.ones(45, 45, dtype=torch.bool).tril()
        visible[40:, :40] = False
        visible[40:, kept] = True
        want = model(ids, attention_mask=visible[None, None]).logits[:, 40:]
        close(got, want, rtol=1e-4, atol=1e-4)


def test_streaming_llm_places_kept_tokens_side_by_side(models):
    """What a cut cache answers is what the model answers to the kept tokens at positions 0, 1, 2, ..."""
    model = models("llama")
    one = tiny.make("llama")
    ids = tiny.prompt(B=1, T=40)["input_ids"]
    with hf.use(model, cache=foveal.get("streaming_llm")(budget=10, sinks=3)) as session:
        model(ids, use_cache=True)
        layer = session.cache.layers[0]
        kept = [0, 1, 2, *range(33, 40)]
        assert layer.positions[0, 0].tolist() == kept
        got = layer.keys
    # the first layer's keys depend on the token and its position only
    out = one(ids[:, kept], use_cache=True, **tiny.past(DynamicCache(config=one.config)))
    plain = tiny.cache_of(out).layers[0].keys
    # slots count from 0 here and end at the true position there: rotate all by the difference
    moved = hf.models.move(plain, torch.tensor([30]), *hf.models.rotation(one))
    close(got, moved, rtol=1e-4, atol=1e-5)


def test_streaming_llm_keeps_closing_the_gap_while_decoding(models):
    model = models("llama")
    ids = tiny.prompt(B=1, T=60)["input_ids"]
    with hf.use(model, cache=foveal.get("streaming_llm")(budget=10, sinks=3)) as session:
        cache = tiny.cache_of(model(ids[:, :40], use_cache=True))
        for t in range(40, 60):
            model(ids[:, t : t + 1], **tiny.past(cache))
        got = session.cache.layers[0].keys
    kept = [0, 1, 2, *range(53, 60)]
    plain = tiny.cache_of(model(ids[:, kept], use_cache=True)).layers[0].keys
    close(got, hf.models.move(plain, torch.tensor([50]), *hf.models.rotation(model)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gemma3"])
def test_moving_keys_is_rotary_embedding(models, name):
    """Rotating by p what stands at position 0 is standing at position p."""
    model = models(name)
    decoder = model.get_decoder()
    k = torch.randn(1, 2, 5, 8)
    at = lambda start: decoder.rotary_emb(k, torch.arange(start, start + 5)[None])  # noqa: E731
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    here, there = (apply_rotary_pos_emb(k, k, *at(start))[1] for start in (2, 9))
    close(hf.models.move(here, torch.tensor([7]), *hf.models.rotation(model)), there, rtol=1e-4, atol=1e-5)


def test_h2o_sums_go_on_over_calls(models):
    """Scores after a prompt in two parts equal those of the prompt at once."""
    model = models("llama")
    ids = tiny.prompt(B=1, T=40)["input_ids"]
    with hf.use(model, cache=policy("h2o", 100)) as session:
        model(ids, use_cache=True)
        want = [layer.past for layer in session.cache.layers]
        cache = tiny.cache_of(model(ids[:, :25], use_cache=True, **tiny.past(session.new_cache())))
        model(ids[:, 25:39], **tiny.past(cache))
        model(ids[:, 39:], **tiny.past(cache))
        for layer, total in zip(cache.layers, want, strict=True):
            close(layer.past, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", POLICIES)
def test_a_second_question_on_a_compressed_cache(models, cache):
    """The budget holds after each longer call; tokens go on counting."""
    model = models("llama")
    ids = tiny.prompt(B=2, T=60)["input_ids"]
    with hf.use(model, cache=policy(cache, 16)) as session:
        past = tiny.cache_of(model(ids[:, :30], use_cache=True))
        out = model(ids[:, 30:50], **tiny.past(past))
        assert past.get_seq_length() == 50
        if cache != "quest":
            assert session.cache.lengths[1].tolist() == [[16, 16], [16, 16]]
        text = model.generate(
            torch.cat((ids[:, :50], out.logits[:, -1:].argmax(-1)), 1),
            **tiny.past(past),
            max_new_tokens=5,
            do_sample=False,
        )
        assert text.shape[0] == 2


@pytest.mark.parametrize("cache", POLICIES)
def test_beams_and_samples_run_under_a_policy(models, cache):
    model, inputs = models("llama"), tiny.prompt(pads=7)
    with hf.use(model, cache=policy(cache, 100)):
        wide = model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False)
        torch.manual_seed(0)
        drawn = model.generate(**inputs, max_new_tokens=6, do_sample=True)
    assert torch.equal(wide, model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False))
    torch.manual_seed(0)
    assert torch.equal(drawn, model.generate(**inputs, max_new_tokens=6, do_sample=True))
    with hf.use(model, cache=policy(cache, 12)):
        assert model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False).shape[0] == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attention", ["moba", "sliding_window", "sparse_transformer"])
def test_mechanisms_at_their_dense_limit_change_nothing(models, name, attention):
    model, inputs = models(name), tiny.prompt(pads=7)
    spec = {
        "moba": foveal.MoBA(block_size=8, top_k=100),
        "sliding_window": foveal.SlidingWindow(window=1000),
        "sparse_transformer": foveal.SparseTransformer(stride=1000, block_size=8),
    }[attention]
    if name == "gemma2" and attention != "sliding_window":  # caps its scores
        with hf.use(model, attention=spec), pytest.raises(hf.UnsupportedModel, match="caps its scores at 50"):
            model(**inputs)
        return
    want = generated(model, inputs)
    with hf.use(model, attention=spec):
        assert torch.equal(generated(model, inputs), want)


def test_mechanisms_change_what_full_layers_see(models):
    model, inputs = models("llama"), tiny.prompt()
    want = model(**inputs).logits
    with hf.use(model, attention=foveal.MoBA(block_size=4, top_k=1)):
        assert (model(**inputs).logits - want).abs().max() > 1e-3
    with hf.use(model, attention=foveal.Softmax(window=1)):
        alone = model(**inputs).logits
    close(alone[:, :1], want[:, :1])
    assert (alone - want).abs().max() > 1e-3


@pytest.mark.parametrize("cache", [None, *POLICIES])
def test_fla_747_windows_padding_and_hybrid_layers_decode_like_the_full_forward(models, cache):
    """29: one token after the other over [sliding, full, full] layers, with left padding."""
    model = models("gemma3")
    inputs = tiny.prompt(T=30, pads=5)
    real = inputs["attention_mask"].bool()
    want = model(**inputs).logits
    with hf.use(model, cache=None if cache is None else policy(cache, 100)):
        past, rows = None, []
        for t in range(30):
            positions = (inputs["attention_mask"][:, : t + 1].cumsum(-1) - 1).clamp(min=0)[:, -1:]
            out = model(
                inputs["input_ids"][:, t : t + 1],
                attention_mask=inputs["attention_mask"][:, : t + 1],
                position_ids=positions,
                **tiny.past(past),
                use_cache=True,
            )
            past = tiny.cache_of(out)
            rows.append(out.logits)
    plain = model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)).logits
    close(torch.cat(rows, 1)[real], plain[real], rtol=1e-4, atol=1e-4)
    del want


def test_kvpress_152_an_empty_cache_is_still_a_cache(models):
    """28: policies are found by type, never by truth; prompts of 1 to 3 tokens keep at least one entry."""
    model = models("llama")
    for T in (1, 2, 3):
        with hf.use(model, cache="knorm", compression_ratio=0.9) as session:
            out = model(tiny.prompt(B=1, T=T)["input_ids"], **tiny.past(session.new_cache()))
            assert session.cache.lengths[0].tolist() == [[1, 1]]
            assert out.logits.isfinite().all()


def test_the_model_is_restored_exactly_also_after_an_error(models):
    from transformers import AttentionInterface, AttentionMaskInterface

    model = models("llama")
    before = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    implementation, hooks = model.config._attn_implementation, len(model._forward_pre_hooks)
    with pytest.raises(RuntimeError, match="stop"), hf.use(model, attention="moba", cache="knorm"):
        raise RuntimeError("stop")
    assert (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == before
    assert model.config._attn_implementation == implementation
    assert len(model._forward_pre_hooks) == hooks


def test_what_cannot_be_switched_says_why(models):
    model = models("llama")
    with (
        pytest.raises(TypeError, match="model: got Linear, expected a transformers model"),
        hf.use(torch.nn.Linear(1, 1)),
    ):
        pass
    bert = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    with pytest.raises(hf.UnsupportedModel, match="BertModel cannot generate"), hf.use(bert):
        pass
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20))
    with pytest.raises(hf.UnsupportedModel, match="encoder-decoder"), hf.use(t5):
        pass
    with pytest.raises(hf.UnsupportedModel, match="sliding layers only"), hf.use(tiny.sliding_only(), cache="knorm"):
        pass
    for options, message in [
        ({"attention": "gla"}, "attention: gla needs log_decay"),
        ({"attention": "linear"}, "attention: linear keeps a state"),
        ({"attention": "nothing"}, "unknown name 'nothing'"),
        ({"cache": "snapkw"}, "policy: unknown name 'snapkw'; did you mean 'snapkv'"),
        ({"cache": "snapkv", "budget": 0}, "snapkv: budget has 0"),
        ({"cache": "snapkv", "budget": 8}, "snapkv: budget has 8, expected at least window=32"),
        ({"cache": "knorm", "budget": 1.5}, "knorm: budget has 1.5"),
        ({"cache": "knorm", "budget": 5, "compression_ratio": 0.5}, "given beside budget"),
        ({"cache": "knorm", "compression_ratio": 1.0}, "compression_ratio: has 1.0"),
        ({"budget": 5}, "budget: given without a cache policy"),
    ]:
        with pytest.raises(ValueError, match=message), hf.use(model, **options):
            pass
    with hf.use(model), pytest.raises(ValueError, match="is switched already"), hf.use(model):
        pass
    with hf.use(model) as session, pytest.raises(ValueError, match="this session has no policy"):
        session.new_cache()


def test_a_cache_from_outside_is_refused(models):
    model, ids = models("llama"), tiny.prompt(B=1)["input_ids"]
    past = tiny.cache_of(model(ids, use_cache=True))
    with hf.use(model, cache="knorm"), pytest.raises(ValueError, match="holds 40 tokens outside the policy"):
        model(ids[:, :1], **tiny.past(past))


def test_compressed_caches_are_not_cut_back(models):
    model, ids = models("llama"), tiny.prompt(B=1)["input_ids"]
    with hf.use(model, cache="knorm", budget=8):
        past = tiny.cache_of(model(ids, use_cache=True))
        with pytest.raises(NotImplementedError, match="cannot be cut back"):
            past.crop(-3)
