"""The reward contract, its adapters, and the embedded rewards."""

import re

import pytest
import torch
from conftest import letter_reward

import misvo
from misvo import rewards
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
    alone = [call("similarity:joy", [text])[0] for text in TEXTS]
    assert call("similarity:joy") == pytest.approx(alone, abs=1e-5)
    mixed = [" ".join(["joy"] * (1 + 7 * index % 40)) for index in range(40)]  # more than a batch, of all lengths
    assert call("similarity:joy", mixed) == pytest.approx([call("similarity:joy", [t])[0] for t in mixed], abs=1e-5)


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
    torch.testing.assert_close(leave_one_out(r), expected)
    torch.testing.assert_close(leave_one_out(r[[0, 1]]), torch.tensor([-3.0, 3.0], dtype=torch.float64))


def test_unscored_responses_are_left_out_and_counted(policy):
    """Dropping a response from the estimator is the same as scoring only the others."""

    def shy(completions, **_):
        values = letter_reward(completions)
        return [None if i % 3 == 0 else value for i, value in enumerate(values)]

    result = misvo.steer(policy, "a b c", shy, rollouts=6, steps=1, max_new_tokens=5, learning_rate=1.0)
    assert result.trace[0]["unscored"] == 2
    scored = [c for c in result.candidates if c.reward is not None]
    assert len(scored) == 4 and result.trace[0]["mean"] == pytest.approx(sum(c.reward for c in scored) / 4)
    from literal import Literal

    literal = Literal(policy.model, policy.encode("a b c"), 5)
    expected = literal.run(scored, steps=1, K=4, cost="none", eta=1.0, penalty=0.0)
    torch.testing.assert_close(result.steering.vectors.double(), expected, rtol=1e-4, atol=1e-6)
