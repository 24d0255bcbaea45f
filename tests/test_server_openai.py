"""The stock `openai` client against a real server on loopback; what comes back is held against misvo itself."""

import asyncio
import json
import math
import subprocess

import openai
import pytest
import torch
from conftest import make_policy
from serving import served

import misvo
from misvo.candidate import Candidate
from misvo.server import Config, answers

CHAT = [{"role": "user", "content": "a b c"}]
STEER = {"reward": "letters", "rollouts": 4, "steps": 3}


def letters(completions, **_):
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [sum(0.3 * (ord(word[-1]) % 7) for word in text.split()) - 0.1 * len(text.split()) for text in texts]


@pytest.fixture(scope="module")
def server():
    config = Config(name="tiny", default_tokens=12, keep_alive=0.05)
    with served(make_policy(chat=True), {"letters": letters}, config) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def alone():
    return make_policy(chat=True)


def ask(client, messages=CHAT, misvo=None, **options):
    extra = {} if misvo is None else {"misvo": misvo}
    options = {"model": "tiny", "seed": 3, "max_tokens": 8, **options}
    return client.chat.completions.create(messages=messages, extra_body=extra, **options)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_plain_answer_is_a_sample_of_the_model(client, alone):
    answer = ask(client, n=3)
    expected = alone.generate(CHAT, samples=3, seed=3, max_new_tokens=8)
    assert [choice.message.content for choice in answer.choices] == expected
    sampled = alone.sample(CHAT, samples=3, seed=3, max_new_tokens=8).rollouts
    assert answer.usage.completion_tokens == int(sampled.lengths.sum())
    assert answer.usage.prompt_tokens == len(alone.encode(CHAT))
    reasons = ["stop" if ended else "length" for ended in sampled.ended.tolist()]
    assert [choice.finish_reason for choice in answer.choices] == reasons and set(reasons) == {"stop", "length"}


def test_a_steered_answer_is_that_of_steer(client, alone):
    answer = ask(client, misvo=STEER, n=4)
    result = misvo.steer(alone, CHAT, letters, rollouts=4, steps=3, max_new_tokens=8, seed=3)
    assert answer.choices[0].message.content == result.text
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 4 == len(texts)
    told = answer.misvo["answers"]
    by_place = {(candidate.step, candidate.rollout): candidate for candidate in result.candidates}
    for text, row in zip(texts, told, strict=True):
        candidate = by_place[row["step"], row["rollout"]]
        assert candidate.text == text and candidate.reward == pytest.approx(row["reward"], abs=1e-12)
        assert row["kl"] == pytest.approx(candidate.kl, abs=1e-5)
    assert answer.usage.completion_tokens == sum(len(candidate.tokens) for candidate in result.candidates)
    cost = answer.misvo["usage"]
    assert (cost["rollouts"], cost["reward_calls"]) == (12, 12) and 0 < cost["seconds"] < 60
    assert cost["answer_tokens"] == sum(row["tokens"] for row in told)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "best-of-n"},
        {"method": "particles", "block": 3, "target_ess": 2},
        {"method": "blockwise", "block": 2, "branches": 2},
        {"method": "aisp", "sigma2": 0.2, "tie": "shared"},
        {"method": "re-control", "value_steps": 1, "value_iterations": 3},
    ],
    ids=lambda options: options["method"],
)
def test_other_methods_are_those_of_steer(client, alone, options):
    answer = ask(client, misvo={**STEER, **options}, n=3)
    result = misvo.steer(alone, CHAT, letters, rollouts=4, steps=3, max_new_tokens=8, seed=3, **options)
    assert answer.choices[0].message.content == result.text
    assert answer.misvo["answers"][0]["reward"] == pytest.approx(result.reward, abs=1e-9)
    assert answer.usage.completion_tokens == sum(len(candidate.tokens) for candidate in result.candidates)


def test_the_n_best_are_in_order(client):
    """Under preset `paper` every response counts, so the rewards fall."""
    answer = ask(client, misvo={**STEER, "preset": "paper"}, n=6)
    rewards = [row["reward"] for row in answer.misvo["answers"]]
    assert rewards == sorted(rewards, reverse=True) and len(rewards) == 6
    with pytest.raises(openai.BadRequestError, match="n is larger than rollouts"):
        ask(client, misvo=STEER, n=13)


def test_a_text_is_an_answer_once():
    rewards = {"a": 1.0, "b": 3.0, "c": 2.0}
    texts = ["a", "b", "b", "c", "b", "c", "a"]
    result = misvo.Result("p", misvo.Settings(), [Candidate(0, i, [i], t, rewards[t]) for i, t in enumerate(texts)])
    chosen = answers.best(result, 5)
    assert [(candidate.text, candidate.rollout) for candidate in chosen] == [("b", 1), ("c", 3), ("a", 0)]
    assert [candidate.text for candidate in answers.best(result, 2)] == ["b", "c"]


def test_logprobs_are_those_of_the_policy_that_sampled(client, alone):
    """Held against a forward pass of the whole sequence, of the model as it is and under u of that step."""
    options = {"preset": "paper", "learning_rate": 3.0}
    answer = ask(client, misvo={**STEER, **options}, logprobs=True, temperature=0.8, n=6)
    # One that was sampled under a u that is not zero: of the reference itself it would prove nothing.
    index, row = next((i, row) for i, row in enumerate(answer.misvo["answers"]) if row["step"] > 0)
    how = {"rollouts": 4, "steps": row["step"], "max_new_tokens": 8, "seed": 3, "temperature": 0.8}
    u = misvo.steer(alone, CHAT, letters, **options, **how).steering.vectors
    told = answer.choices[index].logprobs.content
    tokens = [alone.tokenizer.convert_tokens_to_ids(one.token) for one in told]
    prompt = alone.encode(CHAT)
    with torch.no_grad():
        states = alone.body(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).last_hidden_state[0]
    for place, token in enumerate(tokens):
        hidden = states[len(prompt) - 1 + place]
        steered = torch.log_softmax(alone.head.weight @ (hidden + u[place]) / 0.8, -1)[token].item()
        plain = torch.log_softmax(alone.head.weight @ hidden / 0.8, -1)[token].item()
        assert told[place].logprob == pytest.approx(steered, abs=1e-4)
        assert row["ref_logprobs"][place] == pytest.approx(plain, abs=1e-4)
    assert max(abs(a.logprob - b) for a, b in zip(told, row["ref_logprobs"], strict=True)) > 1e-2


def test_seed_decides_all(client):
    first, again, other = (ask(client, misvo=STEER, seed=seed) for seed in (5, 5, 6))
    assert first.misvo["answers"] == again.misvo["answers"] and first.misvo["answers"] != other.misvo["answers"]
    free = [ask(client, seed=openai.omit, n=8, max_tokens=8) for _ in range(2)]
    assert free[0].misvo["seed"] != free[1].misvo["seed"]
    repeated = ask(client, seed=free[0].misvo["seed"], n=8)
    assert [c.message.content for c in repeated.choices] == [c.message.content for c in free[0].choices]


def test_stop_temperature_and_top_p(client, alone):
    whole = ask(client, temperature=0, max_tokens=8).choices[0].message.content
    ids = alone.encode(CHAT)
    with torch.no_grad():  # greedy decoding by hand
        for _ in range(8):
            token = int(alone.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            if token in alone.ends:
                break
    assert whole == alone.decode(ids[len(alone.encode(CHAT)) :])
    words = whole.split()
    assert len(words) > 1
    stopped = ask(client, temperature=0, stop=[words[1]]).choices[0]
    assert stopped.message.content.strip() == words[0] and stopped.finish_reason == "stop"
    hot = ask(client, temperature=1.7, top_p=0.4, n=6)
    expected = alone.generate(CHAT, samples=6, seed=3, max_new_tokens=8, temperature=1.7, top_p=0.4)
    assert [choice.message.content for choice in hot.choices] == expected


def test_a_stream_is_progress_then_text_then_usage(client):
    chunks = list(ask(client, misvo=STEER, stream=True, stream_options={"include_usage": True}))
    whole = ask(client, misvo=STEER)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    steps = [chunk for chunk in chunks if "step" in (getattr(chunk, "misvo", None) or {})]
    assert [chunk.misvo["step"] for chunk in steps] == [1, 2, 3]
    assert all(chunk.choices[0].delta.content is None and chunk.choices[0].finish_reason is None for chunk in steps)
    assert all({"mean", "best", "kl", "seconds_left"} <= set(chunk.misvo) for chunk in steps)
    assert chunks.index(steps[-1]) < texts.index(whole.choices[0].message.content)
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-2].misvo["answers"] == whole.misvo["answers"]


def test_a_stream_has_data_lines_and_comments_alone(server):
    """Stock clients break on named events and on ids; a slow reward leaves time for comments."""
    body = {"model": "tiny", "messages": CHAT, "stream": True, "seed": 1, "misvo": {**STEER, "steps": 2}}
    with server.http() as http:
        lines = http.post("/v1/chat/completions", json=body).text.split("\n")
    assert {line.partition(":")[0] for line in lines if line} <= {"data", ""}
    assert lines[-3:] == ["data: [DONE]", "", ""]


def test_many_choices_in_a_stream(client):
    parts: dict[int, str] = {}
    for chunk in ask(client, misvo=STEER, stream=True, n=3):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    whole = ask(client, misvo=STEER, n=3)
    assert [parts[index] for index in range(3)] == [choice.message.content for choice in whole.choices]


def test_the_async_client(server):
    async def many():
        async with server.async_client() as client:
            asked = [
                client.chat.completions.create(
                    model="tiny", messages=CHAT, seed=seed, max_tokens=8, extra_body={"misvo": STEER}
                )
                for seed in range(6)
            ]
            stream = await client.chat.completions.create(
                model="tiny", messages=CHAT, seed=1, max_tokens=8, stream=True, extra_body={"misvo": STEER}
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)], text

    texts, streamed = asyncio.run(many())
    client = server.client()
    assert texts == [ask(client, misvo=STEER, seed=seed).choices[0].message.content for seed in range(6)]
    assert streamed == texts[1]


def test_completions_take_texts_as_they_are(client, alone):
    answer = client.completions.create(model="tiny", prompt=["a b", "c d e"], n=2, seed=4, max_tokens=6, logprobs=0)
    expected = [
        text for prompt in ("a b", "c d e")
        for text in alone.generate(prompt, samples=2, seed=4, max_new_tokens=6, raw=True)
    ]  # fmt: skip
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for value in answer.choices[0].logprobs.token_logprobs)
    ids = client.completions.create(model="tiny", prompt=alone.tokenizer("a b")["input_ids"], n=2, seed=4, max_tokens=6)
    assert [choice.text for choice in ids.choices] == expected[:2]
    steered = client.completions.create(
        model="tiny", prompt="a b", seed=4, max_tokens=6, extra_body={"misvo": {**STEER, "reward": "letters"}}
    )
    result = misvo.steer(alone, "a b", letters, rollouts=4, steps=3, max_new_tokens=6, seed=4, raw=True)
    assert steered.choices[0].text == result.text
    streamed = client.completions.create(model="tiny", prompt="a b", seed=4, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected[0]


def test_roles_and_parts_of_text(client, alone):
    parts = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]},
    ]
    plain = [{"role": "system", "content": "d"}, {"role": "user", "content": "a b\nc"}]
    assert ask(client, parts).choices[0].message.content == alone.generate(plain, seed=3, max_new_tokens=8)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"misvo": {"rewrad": "letters"}}}, "misvo.rewrad"),
        ({"extra_body": {"misvo": {"value": "/etc", "reward": "letters"}}}, "misvo.value"),
        ({"extra_body": {"misvo": {"method": "lora", "reward": "letters"}}}, "misvo.method"),
        ({"extra_body": {"misvo": {"rollouts": 4}}}, "misvo.rollouts"),
        ({"extra_body": {"misvo": {"reward": "letters", "steering": "x"}}}, "misvo.steering"),
        ({"temperature": 0, "extra_body": {"misvo": {"reward": "letters"}}}, "temperature"),
        ({"store": True}, "store"),
        ({"n": 0}, "n"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, options, names):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, **options})
    assert refused.value.status_code == 400
    assert refused.value.param == names and names.rpartition(".")[2] in refused.value.message


def test_what_asks_for_nothing_passes(client):
    idle = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "service_tier": "auto"}
    assert ask(client, user="me", **idle, response_format={"type": "text"}).choices


def test_settings_of_misvo_are_said_in_its_words(client):
    with pytest.raises(openai.BadRequestError, match="unknown cost 'far'"):
        ask(client, misvo={**STEER, "cost": "far"})
    with pytest.raises(openai.BadRequestError, match="rollouts must be a whole number of at least 2"):
        ask(client, misvo={**STEER, "rollouts": 1})
    with pytest.raises(openai.BadRequestError, match="context of 128 tokens"):
        ask(client, max_tokens=500)
    assert len(ask(client, max_tokens=openai.omit).choices) == 1


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="this server has the model 'tiny' only"):
        ask(client, model="gpt-5")


def test_curl(server):
    body = json.dumps({"model": "tiny", "messages": CHAT, "seed": 3, "max_tokens": 8, "misvo": STEER})
    command = ["curl", "-sS", "--noproxy", "*", "-H", "Content-Type: application/json", "-d", body]
    told = json.loads(subprocess.run([*command, f"{server.url}/v1/chat/completions"], capture_output=True).stdout)
    assert told["choices"][0]["message"]["content"] == ask(server.client(), misvo=STEER).choices[0].message.content
    streamed = json.dumps({**json.loads(body), "stream": True})
    shown = subprocess.run([*command[:-1], streamed, f"{server.url}/v1/chat/completions"], capture_output=True).stdout
    assert shown.count(b"\n\n") == shown.count(b"data: ") + shown.count(b": keep-alive\n\n")
