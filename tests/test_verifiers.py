"""Rewards of the real package `verifiers` by path: functions as its rubrics call them, rubrics, groups of rubrics."""

import asyncio
import re

import pytest
import verifiers as vf
from conftest import make_policy
from test_trl import CHAT, SIZES, call

import misvo
from misvo import rewards

FILE = """
import verifiers as vf

parser = vf.XMLParser(["think", "answer"], answer_field="answer")

def right(parser, completion, answer, **kwargs):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0

async def roles(prompt, completion, state):
    said = [message["role"] for message in prompt + completion]
    return float(state["completion"] is completion and said == ["user", "assistant"])

def shortest(completions, **kwargs) -> list[float]:
    lengths = [len(messages[0]["content"]) for messages in completions]
    return [float(length == min(lengths)) for length in lengths]

def hard(info):
    return info["level"]

rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.5], parser=parser)
rubric.add_reward_func(shortest, weight=0.25)
rubric.add_metric(roles)
group = vf.RubricGroup([rubric, vf.Rubric(funcs=[hard], weights=[-10.0])])
empty = vf.Rubric()

class Strict(vf.Rubric):
    def __init__(self):
        super().__init__(funcs=[right], parser=parser)

def plain(completion, answer, **kwargs):
    return float(completion == answer)

def three(prompt, completion, answer):
    return float(len(prompt) + 10 * (completion == answer))
"""
GOOD, BAD = "<think>\nhm\n</think>\n<answer>\n4\n</answer>", "It is 4."


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "my_env.py"
    file.write_text(FILE)
    return str(file)


@pytest.mark.parametrize("prompt", ["What is 2 + 2?", CHAT])
def test_a_rubric_by_path_scores_as_it_does_itself(path, prompt):
    reward = rewards.load(f"{path}:rubric")
    got = call(reward, [GOOD, BAD], prompt, answer="4")
    rubric = reward.terms[0][0]
    states = [
        vf.State(
            prompt=[{"role": "user", "content": "What is 2 + 2?"}],
            completion=[{"role": "assistant", "content": text}],
            answer="4",
            trajectory=[],
        )
        for text in (GOOD, BAD)
    ]
    asyncio.run(rubric.score_group(states))  # verifiers' own way
    assert got == pytest.approx([state["reward"] for state in states])
    for name, values in got.parts.items():
        assert values == pytest.approx([state["metrics"][name] for state in states])
    assert got.parts["right"] == [1.0, 0.0] and got.parts["shortest"] == [0.0, 1.0] and got.parts["roles"] == [1.0, 1.0]
    assert got[0] == pytest.approx(1.0 + 0.5 * got.parts["format_reward_func"][0])  # what is a metric does not count


def test_groups_and_columns_of_any_kind(path):
    alone = call(rewards.load(f"{path}:rubric"), [GOOD, BAD], answer="4")
    got = call(rewards.load(f"{path}:group"), [GOOD, BAD], answer="4", info={"level": 3})
    assert got == pytest.approx([value - 30 for value in alone]) and got.parts["hard"] == [3.0, 3.0]


def test_a_class_of_rubrics_in_a_sum(path):
    got = call(rewards.load(f"2*{path}:Strict + length:1"), [GOOD, BAD], answer="4")
    assert got == [2.0 - 5, 0.0 - 2]  # six words and three


def test_functions_of_a_completion_and_columns(path):
    assert call(rewards.load(f"{path}:plain"), ["4", "5"], answer="4") == [1.0, 0.0]
    assert call(rewards.load(f"{path}:three"), ["4", "5"], "ab", answer="4") == [12.0, 2.0]
    assert call(lambda completion: len(completion), ["4", "55"]) == [1.0, 2.0]
    assert call(lambda question, completion: len(question), ["4"], "ab") == [2.0]  # a prompt and a text
    assert call(lambda question, completion: len(question), ["4"], "ab", question="abc") == [3.0]
    with pytest.raises(misvo.RewardError, match="takes 'answer', and there is no such column"):
        call(rewards.load(f"{path}:plain"), ["4"])
    with pytest.raises(misvo.RewardError, match="takes 'parser', and there is no such column"):
        call(rewards.load(f"{path}:right"), ["4"], answer="4")


def test_what_a_function_raises_is_no_zero(path):
    """`verifiers` logs it and takes 0, from which steering would learn."""
    with pytest.raises(misvo.RewardError, match=re.escape("KeyError ('level')")):
        call(rewards.load(f"{path}:group"), [GOOD], answer="4", info={})
    with pytest.raises(misvo.MisvoError, match="this rubric has no functions"):
        rewards.load(f"{path}:empty")


def test_steered_by_a_rubric():
    def letters(completion, answer):
        return float(sum(message["content"].count(answer) for message in completion))

    result = misvo.steer(make_policy(), "a b", vf.Rubric(funcs=[letters]), columns={"answer": "a"}, **SIZES)
    assert [c.reward for c in result.candidates] == [float(c.text.count("a")) for c in result.candidates]
    assert {c.reward for c in result.candidates} > {0.0} and "letters" in result.trace[0]["parts"]
