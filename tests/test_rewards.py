"""The reward contract, its adapters, and the embedded rewards."""

import re

import pytest
import torch
from conftest import letter_reward
from literal import Literal
from tolerances import assert_near, room, rounding
from transformers import AutoModel

import misvo
from misvo import embedded, rewards
from misvo.methods.misvo import leave_one_out

TEXTS = ["This is wonderful, I love it!", "This is terrible and sad."]


def call(reward, texts=TEXTS, prompt="p", **columns):
    return rewards.score(rewards.as_reward(reward), prompt, texts, [[1]] * len(texts), columns)


def test_adapters():
    assert call(len) == [float(len(t)) for t in TEXTS]
    assert call(lambda text: text.count("i")) == [float(t.count("i")) for t in TEXTS]
    assert call(lambda prompt, text: len(prompt)) == [1.0, 1.0]
    assert call(lambda completions: torch.tensor([1, 2])) == [1.0, 2.0]
    assert call(lambda prompts, completions: [True, None]) == [1.0, None]
    assert call(lambda completions, completion_ids, **kw: [float(len(i)) for i in completion_ids]) == [
        1.0,
        1.0,
    ]
    assert call(lambda completions, answer: [float(a == 4) for a in answer], answer=4, other=5) == [1.0, 1.0]
    assert call(lambda **kwargs: [float(len(kwargs["other"]))] * 2, other=5) == [2.0, 2.0]

    class Scorer:
        def __call__(self, prompts, completions, **kwargs):
            return [0.5] * len(completions)

    assert call(Scorer()) == [0.5, 0.5]


def test_embedded_rewards():
    good, bad = call("sentiment")
    assert good > 0.5 and bad < -0.5
    assert call("length:4") == [-2.0, -1.0]
    near, far = call("similarity:What a lovely thing, I adore it.")
    assert near > far and -1 <= far <= near <= 1


def test_a_similarity_does_not_depend_on_its_batch():
    mixed = TEXTS + [" ".join(["joy"] * (1 + 7 * index % 40)) for index in range(40)]  # of all lengths
    similarity = rewards.as_reward("similarity:joy")
    alone = [call(similarity, [text])[0] for text in mixed]
    together = call(similarity, mixed)
    tokenizer = similarity.encoder.tokenizer

    def cosines(model):
        states = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in ["joy", *TEXTS]
        ]
        target, *others = (state / state.norm() for state in states)
        return torch.stack([other @ target for other in others])

    allowed = room(cosines, AutoModel.from_pretrained(embedded.encoder_folder("minilm"), dtype=torch.float32))
    assert together == pytest.approx(alone, abs=allowed)
    assert allowed < 1e-3 * (max(alone) - min(alone))


def test_specs(tmp_path, monkeypatch):
    source = tmp_path / "mine.py"
    source.write_text("def shout(text):\n    return text.count('!')\nnumber = 3\n")
    assert call(rewards.load(f"{source}:shout")) == [1.0, 0.0]
    monkeypatch.syspath_prepend(tmp_path)
    assert call(rewards.load("mine:shout")) == [1.0, 0.0]
    (tmp_path / "broken.py").write_text("1/0")
    for spec, says in {
        f"{source}:whisper": "has no function 'whisper'",
        f"{source}:number": "has no function 'number'",
        f"{tmp_path}/none.py:f": "there is no file",
        f"{tmp_path}/broken.py:f": "could not be loaded: ZeroDivisionError",
        "no.such.module:f": "no embedded reward",
        "nope": "unknown reward 'nope'",
        "length": "write this reward as 'length:WORDS'",
        "length:long": "takes a number of words",
        "sentiment:3": "write this reward as 'sentiment'",
    }.items():
        with pytest.raises(misvo.MisvoError, match=re.escape(says)):
            rewards.load(spec)


def test_leave_one_out_is_each_reward_against_the_others():
    r = torch.tensor([1.0, 4.0, 2.5, -3.0], dtype=torch.float64)
    expected = torch.stack([r[i] - (r.sum() - r[i]) / 3 for i in range(4)])
    assert leave_one_out(r).tolist() == pytest.approx(expected.tolist(), abs=rounding(torch.float64, 8, 10.5))
    assert leave_one_out(r[[0, 1]]).tolist() == [-3.0, 3.0]


def test_unscored_responses_are_left_out_and_counted(policy):
    """Dropping a response from the estimator is the same as scoring only the others."""

    def shy(completions, **_):
        values = letter_reward(completions)
        return [None if i % 3 == 0 else value for i, value in enumerate(values)]

    result = misvo.steer(policy, "a b c", shy, rollouts=6, steps=1, max_new_tokens=5, learning_rate=1.0, preset="paper")
    assert result.trace[0]["unscored"] == 2
    scored = [c for c in result.candidates if c.reward is not None]
    assert len(scored) == 4 and result.trace[0]["mean"] == pytest.approx(sum(c.reward for c in scored) / 4)

    def replay(model):
        literal = Literal(model, policy.encode("a b c"), 5)
        return literal.run(scored, steps=1, K=4, cost="none", eta=1.0, penalty=0.0)

    expected, allowed = replay(policy.model), room(replay, policy.model)
    assert allowed < 1e-4 * expected.norm()  # rounding must not hide an error of the estimator
    assert_near(result.steering.vectors, expected, allowed)
