"""The sampler that a model came with, and what ends a response: truncation, ends held back, stop texts, same noise."""

import warnings

import pytest
import torch
from conftest import ENDS, letter_reward, make_model, make_policy, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import misvo
from misvo.interventions import Vectors
from misvo.own_sampler import OwnSampler
from misvo.rollouts import Request
from misvo.sampling import Sampler
from misvo.selection import whole
from misvo.settings import Settings
from misvo.text import before_stop, pieces
from misvo.truncation import Truncation

MANY = {"rollouts": 32, "steps": 1, "max_new_tokens": 20}
SIZES = {"rollouts": 4, "steps": 2, "max_new_tokens": 12, "seed": 3}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    spread=st.floats(0.2, 6),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.3, 2.0),
)
def test_truncation_is_that_of_transformers(seed, spread, top_k, top_p, min_p, temperature):
    logits = spread * torch.randn(3, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = torch.softmax(LogitsProcessorList(warpers)(None, logits), -1)
    law, cut = torch.softmax(logits / temperature, -1), Truncation(top_k, top_p, min_p)
    for mine in (cut.law(law.clone()), cut.entries(law.clone()).dense()):
        assert torch.equal(mine > 0, expected > 0)  # in fp64 no border is near enough for rounding to decide
        assert torch.allclose(mine, expected, rtol=1e-12, atol=0)


def test_what_a_generation_config_says_and_what_it_cannot():
    assert OwnSampler.of(None) == OwnSampler.of(GenerationConfig()) == OwnSampler(0.7, 0.9)
    qwen = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    own = OwnSampler.of(qwen)
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0.6, 0.95, 20, 0.0)
    assert own.left_out == ("repetition_penalty",) and "repetition_penalty" in own.note
    assert OwnSampler.of(GenerationConfig(repetition_penalty=1.0)).note is None
    some = OwnSampler.of(GenerationConfig(top_k=5, stop_strings="END", min_new_tokens=3))
    assert (some.temperature, some.top_p, some.top_k, some.stop, some.min_new_tokens) == (1.0, 1.0, 5, ("END",), 3)


def test_auto_samples_as_the_model_came_and_paper_does_not():
    model = make_model("llama")
    model.generation_config = GenerationConfig(
        temperature=0.8, top_k=7, min_p=0.05, repetition_penalty=1.3, eos_token_id=ENDS
    )
    policy = misvo.Policy(model, make_tokenizer())
    with pytest.warns(UserWarning, match="repetition_penalty, which steering cannot express"):
        result = misvo.steer(policy, "a b c", letter_reward, **SIZES)
    resolved = result.settings
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (0.8, 1.0, 7, 0.05)
    told = {"temperature": 0.8, "top_p": 1.0, "top_k": 7, "min_p": 0.05, "min_new_tokens": 0, "stop": ()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left to the model, so nothing is left out
        same = misvo.steer(policy, "a b c", letter_reward, **SIZES, **told)
        paper = misvo.steer(policy, "a b c", letter_reward, preset="paper", **SIZES)
    assert [c.tokens for c in same.candidates] == [c.tokens for c in result.candidates]
    assert (paper.settings.temperature, paper.settings.top_p, paper.settings.top_k) == (1.0, 1.0, 0)
    # A run's steering brings its sampler along, and what is given wins over it.
    hot = misvo.steer(policy, "a b c", letter_reward, temperature=1.5, top_k=0, **SIZES).steering
    drawn = policy.generate("a b c", steering=hot, samples=4, seed=1)
    sampler = {"temperature": 1.5, "top_p": 1.0, "top_k": 0, "min_p": 0.05}
    assert drawn == policy.generate("a b c", steering=hot, samples=4, seed=1, **sampler)
    assert drawn != policy.generate("a b c", steering=hot, samples=4, seed=1, temperature=0.5)


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size", "typical_p", "num_beams"])
def test_what_cannot_be_expressed_is_refused_when_asked_for(policy, name):
    with pytest.raises(misvo.MisvoError, match=f"{name} is not a function of the next token's distribution"):
        misvo.steer(policy, "a b", letter_reward, **{name: 2})


@pytest.mark.parametrize(
    "options", [{"stop": 3}, {"stop": ["a", ""]}, {"stop": "\udcff"}, {"top_k": -1}, {"min_p": 1.5}]
)
def test_bad_samplers_are_refused(policy, options):
    with pytest.raises(misvo.MisvoError, match=next(iter(options))):
        misvo.steer(policy, "a b", letter_reward, **SIZES, **options)
    with pytest.raises(misvo.MisvoError, match="above max_new_tokens"):
        Settings(min_new_tokens=9, max_new_tokens=8)


def test_a_stop_text_ends_a_row_at_the_token_that_completes_it(policy):
    """It crosses token borders; rows are those without it, up to that token, and the text ends before it."""
    plain = misvo.steer(policy, "a b c", letter_reward, method="best-of-n", preset="paper", **MANY)
    words = [c.text.split() for c in plain.candidates if len(c.text.split()) > 3]
    stop = f"{words[0][1]} {words[0][2][:1]}"  # the end of one token, a blank, the beginning of another
    options = {"method": "best-of-n", "preset": "paper", **MANY, "stop": [stop, "no such text"]}
    stopped = misvo.steer(policy, "a b c", letter_reward, **options)
    cut = 0
    for before, after in zip(plain.candidates, stopped.candidates, strict=True):
        ends = [n for n in range(1, len(before.tokens) + 1) if stop in policy.decode(before.tokens[:n])]
        expected = before.tokens[: ends[0]] if ends else before.tokens
        assert after.tokens == expected and after.text == before.text.split(stop)[0]
        assert after.ended == (bool(ends) or before.tokens[-1] in ENDS)
        cut += bool(ends)
    assert cut
    sampler = {"temperature": 1.0, "top_p": 1.0, "stop": stop}
    assert policy.generate("a b c", samples=32, max_new_tokens=20, **sampler) == [c.text for c in stopped.candidates]


def test_no_response_ends_before_its_least_length(policy):
    options = {"method": "best-of-n", "preset": "paper", "rollouts": 40, "steps": 1, "max_new_tokens": 9}
    free = misvo.steer(policy, "a b c", letter_reward, **options)
    held = misvo.steer(policy, "a b c", letter_reward, **options, min_new_tokens=5)
    assert min(len(c.tokens) for c in free.candidates) < 5 < min(len(c.tokens) for c in held.candidates)
    assert not any(set(c.tokens[:5]) & set(ENDS) for c in held.candidates)


def test_changed_tokens_are_those_that_the_reference_draws_otherwise(policy):
    """Beside a reference run with the same noise: the first token that differs is the first that was changed."""
    prompt, sampler = tuple(policy.encode("a b c")), Sampler(0.9, 0.95)
    u = 0.4 * torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    size = (prompt, 5, 1, range(24), 12, sampler)
    reference = policy.engine().run(Request(*size)).responses()
    steered = policy.engine().run(Request(*size, Vectors.by_position(u)))
    parted = 0
    for row, (mine, own) in enumerate(zip(steered.responses(), reference, strict=True)):
        differs = next((t for t, pair in enumerate(zip(mine, own, strict=False)) if pair[0] != pair[1]), None)
        changed = torch.nonzero(steered.changed[row])[:, 0].tolist()
        assert (changed[0] if changed else None) == differs
        parted += differs is not None
    assert parted > 5
    nothing = policy.engine().run(Request(*size, Vectors.by_position(0 * u)))
    assert not nothing.changed.any() and nothing.responses() == reference


def test_a_chat_with_system_message_and_history_is_rendered_by_its_template():
    policy = make_policy(chat=True)
    chat = [("system", "a"), ("user", "b c"), ("assistant", "d"), ("user", "e")]
    messages = [{"role": role, "content": text} for role, text in chat]
    words = ["<system>", "a", "<user>", "b", "c", "<assistant>", "d", "<user>", "e", "<assistant>"]
    assert policy.encode(messages) == policy.tokenizer.convert_tokens_to_ids(words)
    result = misvo.steer(policy, messages, lambda completions: [len(c[0]["content"]) for c in completions], **SIZES)
    assert result.prompt == messages and len(result.candidates) == 8
    with pytest.raises(misvo.MisvoError, match="no chat template"):
        make_policy().encode(messages)


def test_texts_in_pieces():
    assert before_stop("one two three", ("three", "two")) == "one " and before_stop("one", ("x",)) == "one"
    parts = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: b""}

    def decode(tokens):
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    assert pieces([1, 2, 3, 4, 5], decode) == ["a", "", "é", " b", ""]
    assert pieces([1, 2], decode) == ["a", "�"]  # cut off within a letter


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("Sleep well.", False, True),
        ('He said "sleep!"', False, True),
        ("and then **", False, False),
        ("a list: one, two", False, False),
        ("a list: one, two", True, True),
        ("", False, False),
    ],
)
def test_whole_answers(text, ended, expected):
    assert whole(misvo.result.Candidate(0, 0, [1], text, 0.0, ended=ended)) is expected
