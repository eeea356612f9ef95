"""The demo's questions make sense to the demo's model."""

import pytest

from foveal import compare, hf


@pytest.mark.model
def test_the_demo_model_finds_hidden_facts_and_a_window_does_not():
    model, tokenizer = hf.load()
    text, _ = compare.read(None)
    found = compare.run(
        model, tokenizer, text, methods=["full", "streaming_llm"], length=512, budget=96, rounds=1, continuation=8
    )
    full, window = found.measurements
    assert full.recall.found >= 4
    # 96 of 512 entries reach back to about 81% of the text
    assert [window.recall_at(depth).found for depth in (0.25, 0.5, 0.75)] == [0, 0, 0]
    assert window.recall_at(0.95).found == 1
    assert window.held_bytes * 512 == full.held_bytes * 96
