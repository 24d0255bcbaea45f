"""The formulas behind the table for GPUs: linear in every size, and never of the size K×T×V."""

from pathlib import Path

import pytest
from conftest import make_policy

from misvo import projection
from misvo.footprint import PAPER, Shape, paper_table, run_bytes
from misvo.settings import Settings


def total(parts):
    return sum(parts.values())


def test_the_shape_of_a_loaded_model():
    policy = make_policy("llama")
    shape = Shape.of(policy)
    config = policy.config
    width = config.hidden_size // config.num_attention_heads
    assert shape.cache_per_token == config.num_hidden_layers * 2 * config.num_key_value_heads * width * 4
    assert (shape.vocabulary, shape.width) == (config.vocab_size, config.hidden_size)


@pytest.mark.parametrize("name", PAPER)
def test_steering_costs_a_mean_law_and_not_a_law_for_each_rollout(name):
    shape, rollouts = PAPER[name]

    def needed(tokens=512, **options):
        return run_bytes(shape, Settings(rollouts=rollouts, max_new_tokens=tokens, **options), 256)

    plain, steered = needed(method="best-of-n"), needed()
    assert 0 < total(steered) - total(plain) < 0.2 * rollouts * 512 * shape.vocabulary * 4
    assert total(needed(tie="shared")) < total(needed(law_dtype="bfloat16")) < total(steered)
    twice = needed(tokens=1024)
    assert twice["mean law"] == 2 * steered["mean law"] and twice["states"] == 2 * steered["states"]


def test_sliding_layers_stop_growing_and_convolutions_never_grow():
    gemma, lfm = PAPER["Gemma 3 4B"][0], PAPER["LFM2.5 1.2B"][0]
    assert gemma.cache(3000) - gemma.cache(2000) == 1000 * gemma.cache_per_token
    assert gemma.cache(200) - gemma.cache(100) == 100 * (gemma.cache_per_token + gemma.cache_in_window)
    assert lfm.cache(0) == lfm.cache_fixed > 0


def test_a_row_of_the_table_by_hand():
    """Llama 3 8B from its published sizes: what stands in memory while 32 responses to 256 tokens reach 512."""
    layers, heads, head_width, width, vocabulary = 32, 8, 128, 4096, 128_256
    token = layers * 2 * heads * head_width * 2  # bytes of keys and values in 16 bits
    caches, laws_each = (32 * (256 + 512) + 256) * token, 32 * vocabulary * 4  # of rows and prompt; logits, or laws
    assert laws_each > projection.BYTES  # so many laws wait for nothing
    race = 64 * 2**15
    raised = 16 * 2**20  # of a head of 16 bits, a block at a time
    steered = caches + race + raised + 2 * laws_each + 2 * 32 * 512 * width * 4  # expected rows of this step, the first
    law, shift = vocabulary * 4, 8 * vocabulary * 4
    expected = {
        "weights": 16.06,
        "best-of-n": (caches + race + 2 * laws_each) / 1e9,
        "paper, fp32 laws": (steered + 512 * law + shift) / 1e9,
        "paper, bf16 laws": (steered + 512 * law / 2 + shift) / 1e9,
        # one law, one shift; what top-p needs of the laws, and the states that a budget looks at, in 16 bits
        "auto": (steered + law + law + 2 * laws_each + 32 * 512 * width * 2) / 1e9,
        "K×T×V in fp32": 32 * 512 * vocabulary * 4 / 1e9,
    }
    (row,) = (row for row in paper_table() if row["model"] == "Llama 3 8B")
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    # Each of 32 steps and 512 tokens reads the weights, the head again and half-full caches at 4.8 TB/s.
    read = 16.06e9 + vocabulary * width * 2 + 32 * (256 + 256) * token
    assert row["K = N"] == 32 and row["seconds, at least"] == pytest.approx(32 * 512 * read / 4.8e12)


def test_the_table_in_the_docs_is_the_table():
    written = (Path(__file__).parent.parent / "docs" / "speed.md").read_text()
    rows = paper_table()
    assert [row["model"] for row in rows] == ["LFM2.5 1.2B", "Gemma 3 4B", "Llama 3 8B", "Phi-4 14B"]
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        assert f"| {' | '.join(cells)} |" in written
