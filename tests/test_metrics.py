"""Metrics against calculations by hand."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_near, room

from misvo import metrics
from misvo.errors import MisvoError


def test_diversity_by_hand():
    """a b a b a: 2-grams ab ba ab ba (2 of 4), 3-grams aba bab aba (2 of 3), 4-grams abab baba (2 of 2)."""
    assert metrics.repetition("a b a b a", 2) == 1 / 2
    assert metrics.repetition("a b a b a", 3) == pytest.approx(1 / 3)
    assert metrics.diversity("a b a b a") == pytest.approx(1 / 2 * 2 / 3 * 1)
    assert metrics.diversity(" the\n the  the the the ") == pytest.approx(1 / 4 * 1 / 3 * 1 / 2)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_diversity_counts_like_a_naive_count(words):
    expected = Fraction(1)
    for n in (2, 3, 4):
        grams = [tuple(words[i : i + n]) for i in range(len(words)) if i + n <= len(words)]
        if grams:
            distinct = sum(1 for i, gram in enumerate(grams) if gram not in grams[:i])
            expected *= Fraction(distinct, len(grams))
    assert metrics.diversity(" ".join(words)) == pytest.approx(float(expected))


def test_short_texts_repeat_nothing():
    for text in ("", "one", "one two", "one two three"):
        assert metrics.diversity(text) == 1.0
    assert metrics.diversity("one one one") == pytest.approx(1 / 2)  # two 2-grams, one distinct; one 3-gram


def test_coherence_is_a_cosine():
    vectors = {"p": [1.0, 0.0], "same": [1.0, 0.0], "half": [0.5, math.sqrt(0.75)], "against": [-1.0, 0.0]}

    def encoder(texts):
        return torch.tensor([vectors[text] for text in texts])

    found = [metrics.coherence(encoder, "p", text) for text in ("same", "half", "against")]
    assert found == pytest.approx([1.0, 0.5, -1.0])
    assert metrics.coherence(encoder, [{"role": "user", "content": "p"}], "half") == pytest.approx(0.5)


def test_minilm_finds_an_answer_closer_than_another_topic():
    name, encoder = metrics.load_encoder("minilm")
    prompt = "How do I bake bread that rises well?"
    close = metrics.coherence(encoder, prompt, "Let the bread dough rise in a warm place before you bake it.")
    far = metrics.coherence(encoder, prompt, "The parliament votes on the new tax law on Monday.")
    assert name == "minilm" and close > 0.5 > 0.2 > far


def test_simcse_loads_a_checkpoint_and_uses_the_cls_pooler(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=8, **shape)).eval()
    model.save_pretrained(tmp_path)
    name, encoder = metrics.load_encoder(str(tmp_path))
    assert name == str(tmp_path)

    @torch.no_grad()
    def unit_vector(model):
        states = model(torch.tensor([[2, 5, 6, 3]])).last_hidden_state[0, 0]  # [CLS] a b [SEP]
        pooled = torch.tanh(model.pooler.dense.weight @ states + model.pooler.dense.bias)
        return pooled / pooled.norm()

    assert_near(encoder(["a b"])[0], unit_vector(model), room(unit_vector, model))


def test_without_a_hub_auto_falls_back_and_simcse_says_so():
    assert metrics.load_encoder("auto")[0] == "minilm"
    assert metrics.load_encoder("none") == ("none", None)
    with pytest.raises(MisvoError, match="no sentence encoder could be loaded"):
        metrics.load_encoder("simcse")


def test_mean_over_seeds_averages_prompts_first():
    found = metrics.over_seeds({1: [0.0, 2.0], 2: [4.0, 4.0, 4.0], 3: [1.0]})
    assert found.mean == pytest.approx((1 + 4 + 1) / 3) and found.std == pytest.approx(math.sqrt(3.0))
    assert metrics.spread([2.0]) == metrics.Spread(2.0, None, 1)
    with pytest.raises(MisvoError):
        metrics.spread([])


def test_paired_bootstrap_against_all_resamples():
    """With three prompts all 27 resamples can be written down."""
    ours, theirs = {"a": 3.0, "b": 1.0, "c": 7.0, "only ours": 9.0}, {"a": 1.0, "b": 2.0, "c": 3.0, "only theirs": 0.0}
    means = sorted(sum(picks) / 3 for picks in itertools.product([2.0, -1.0, 4.0], repeat=3))
    found = metrics.paired_bootstrap(ours, theirs, level=0.8, resamples=100_000)
    low, high = np.quantile(means, [0.1, 0.9], method="inverted_cdf")
    assert found.prompts == 3 and found.mean == pytest.approx(5 / 3)
    assert found.low == pytest.approx(low) and found.high == pytest.approx(high)
    assert metrics.paired_bootstrap({"a": 1.0}, {"b": 1.0}) is None
    assert found == metrics.paired_bootstrap(ours, theirs, level=0.8, resamples=100_000)  # a fixed seed


def test_paired_bootstrap_covers_the_truth():
    """Pairing removes what prompts have in common: a small shift shows through a large spread between prompts."""
    chance = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        level = chance.normal(0, 10, 40)
        ours = dict(enumerate(level + 0.5 + chance.normal(0, 0.5, 40)))
        found = metrics.paired_bootstrap(ours, dict(enumerate(level)), resamples=500)
        hits += found.low <= 0.5 <= found.high
        assert found.high - found.low < 0.6
    assert hits >= 48  # 95 % nominal; percentile intervals of 40 prompts are a little short
