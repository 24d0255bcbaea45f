"""The formulas behind the table for GPUs: linear in every size, and never of the size K×T×V."""

import pytest
from conftest import make_policy

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


def test_the_table_has_all_four_models():
    assert [row["model"] for row in paper_table()] == list(PAPER)
