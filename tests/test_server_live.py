"""Plain samples are streamed while they are written: no half letters, nothing of a stop text, and in the end all."""

import threading

import pytest
from conftest import make_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from misvo.server import Config, answers, live
from misvo.server.errors import ApiError
from misvo.server.live import Live, settled
from misvo.text import before_stop

CHAT = [{"role": "user", "content": "a b c"}]


def bytes_tokenizer() -> Tokenizer:
    """A token for each byte: every letter beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = bytes_tokenizer()


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("ab né中😀\u200d👩\n."), max_size=12),
    st.lists(st.text(st.sampled_from("ab é中😀"), min_size=1, max_size=4), max_size=2).map(tuple),
    st.integers(0, 2**20),
)
def test_what_was_told_is_the_beginning_of_the_text(text, stops, looks):
    """Whatever the letters and stop texts, and however often one looks."""
    tokens = BYTES.encode(text).ids
    stopped = (n for n in range(len(tokens) + 1) if any(stop in BYTES.decode(tokens[:n]) for stop in stops))
    tokens = tokens[: next(stopped, None)]  # no token is drawn behind the first stop text
    text = BYTES.decode(tokens)
    final, telling, told = before_stop(text, stops), Live(BYTES.decode, stops, False), ""
    for count in range(len(tokens) + 1):
        if looks >> (count % 20) & 1:
            for index, piece in telling.pieces([tokens[:count]]):
                assert index == 0 and piece
                told += piece
            assert final.startswith(told)
    assert told + answers.rest(final, told) == final


def test_letters_and_stop_texts_are_held_back_and_nothing_else():
    assert settled("abc", ()) == "abc"
    assert settled("ab\ufffd", ()) == "ab"
    assert settled("a\ufffdb", ()) == "a\ufffdb"  # a letter that the model itself has broken
    assert settled("say EN", ("END", "NO")) == "say "
    assert settled("say END now", ("END",)) == "say "
    assert settled("say N", ("END", "NO")) == "say "
    assert settled("do n", (), tidied=True) == "do"  # may become "don't"
    with pytest.raises(ApiError):
        answers.rest("don't", "do n")


@pytest.fixture
def gated(monkeypatch):
    """A server that stops decoding behind some tokens until the gate is opened."""
    monkeypatch.setattr(live, "PAUSE", 0.0)
    gate = threading.Event()
    with served(make_policy(chat=True), {}, Config(name="tiny", keep_alive=0.05)) as server:
        engine = server.core.engine._session.engine
        advance = engine.advance

        def some_tokens():
            if engine.drawn >= 4:
                gate.wait(20)
            return advance()

        engine.advance = some_tokens
        yield server, gate
        gate.set()


def test_text_comes_while_it_is_written(gated):
    """With the gate shut, four of eight tokens have been drawn, and the client has their text already."""
    server, gate = gated
    stream = server.client().chat.completions.create(
        model="tiny", messages=CHAT, seed=5, max_tokens=8, stream=True, extra_body={"misvo": {"min_new_tokens": 8}}
    )
    alone = make_policy(chat=True).generate(CHAT, seed=5, max_new_tokens=8, min_new_tokens=8)
    words, told = alone.split(" "), ""
    for chunk in stream:
        told += chunk.choices[0].delta.content or ""
        if len(told.split()) >= 3:
            break
    assert not gate.is_set() and alone.startswith(told) and len(told) < len(alone) and len(words) == 8
    gate.set()
    rest = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert told + "".join(rest) == alone
    assert len([piece for piece in rest if piece]) > 1


def test_many_samples_prompts_and_stop_texts(gated):
    """Each choice gets its own text; that of a stop text is never told."""
    server, gate = gated
    gate.set()
    how = {"n": 3, "seed": 4, "max_tokens": 9, "stop": ["w2 w", "e"]}
    asked = {"model": "tiny", "prompt": ["a b", "c d e"], **how}
    whole = server.client().completions.create(**asked)
    parts, many = {}, 0
    for chunk in server.client().completions.create(**asked, stream=True, logprobs=0):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
            many += bool(choice.text)
    assert [parts[index] for index in range(6)] == [choice.text for choice in whole.choices]
    assert many > 6  # in pieces, not at once


def test_logprobs_come_with_the_last_chunk(gated):
    server, gate = gated
    gate.set()
    asked = {"model": "tiny", "messages": CHAT, "seed": 4, "max_tokens": 6, "logprobs": True}
    whole = server.client().chat.completions.create(**asked).choices[0].logprobs.content
    chunks = [chunk.choices[0] for chunk in server.client().chat.completions.create(**asked, stream=True)]
    assert [choice.logprobs.content for choice in chunks if choice.logprobs] == [whole]
    assert chunks[-1].finish_reason


def test_responses_are_streamed_as_they_are_written(gated):
    server, gate = gated
    client = server.client()
    steer = {"misvo": {"min_new_tokens": 8}, "seed": 5}
    asked = {"model": "tiny", "input": CHAT, "max_output_tokens": 8, "extra_body": steer}
    stream, told, kinds = client.responses.create(**asked, stream=True), "", []
    for event in stream:
        kinds.append(event.type)
        told += event.delta if event.type == "response.output_text.delta" else ""
        if len(told.split()) >= 3:
            break
    assert not gate.is_set() and kinds.count("response.output_item.added") == 1
    gate.set()
    for event in stream:
        kinds.append(event.type)
        told += event.delta if event.type == "response.output_text.delta" else ""
    assert told == make_policy(chat=True).generate(CHAT, seed=5, max_new_tokens=8, min_new_tokens=8)
    assert kinds.count("response.output_item.added") == 1 and kinds[-1] == "response.completed"
    # A background response has the same events, for whoever comes later and wherever one goes on.
    response = client.responses.create(**asked, background=True)
    server.idle()
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == told
    later = list(client.responses.retrieve(response.id, stream=True, starting_after=5))
    assert [event.sequence_number for event in later] == list(range(6, len(events)))
