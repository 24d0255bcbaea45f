"""What TRL's users type: the shapes of its documentation, and the real package's own rewards, unchanged and by path."""

import asyncio
import os
import re
import signal
import statistics

import pytest
import torch
from conftest import letter_reward, make_policy
from trl.rewards import (
    accuracy_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)

import misvo
from misvo import rewards
from misvo.rewards import Clipped, Combined, Standardised, insisting

TEXTS = ["a b c", "d", "e f"]
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
SIZES = {"rollouts": 4, "steps": 3, "max_new_tokens": 5, "preset": "paper"}


def call(reward, texts=TEXTS, prompt="p", weights=None, **columns):
    tokens = [list(range(len(text))) for text in texts]
    return rewards.score(rewards.as_reward(reward, weights), prompt, texts, tokens, columns)


def words(text):
    return float(len(text.split()))


# The shapes of TRL's page on custom reward functions.


def longer(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def in_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]


def right(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if m and m.group(1) == truth else 0.0 for m, truth in zip(found, ground_truth, strict=True)]


def about_maths(prompts, completions, task, **kwargs):
    return [words(text) if kind == "math" else None for text, kind in zip(completions, task, strict=True)]


def about_code(prompts, completions, task, **kwargs):
    return [100.0 if kind == "coding" else None for kind in task]


async def asks_a_service(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [words(text) for text in completions]


def logs(completions, log_extra, log_metric, trainer_state, **kwargs):
    values = [words(text) for text in completions]
    log_extra("words", values)
    log_extra("first", [text[:1] for text in completions])
    log_metric("share", values.count(1.0) / len(values))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return values


def test_documented_shapes():
    assert call(longer) == [5.0, 1.0, 3.0]
    assert call(in_format, ["<think>x</think><answer>y</answer>", "y"], CHAT) == [1.0, 0.0]
    assert call(right, [r"\boxed{2}", "2"], ground_truth="2") == [1.0, 0.0]
    assert call(asks_a_service) == [3.0, 1.0, 2.0]
    got = call(logs)
    assert got == [3.0, 1.0, 2.0] and got.means() == {"share": 1 / 3, "progress": 0.0, "words": 2.0}
    assert got.parts["words"] == [3.0, 1.0, 2.0] and got.extra == {"first": ["a", "d", "e"]}


def test_rewards_of_several_tasks_abstain_where_they_have_nothing_to_say():
    both = [about_maths, about_code]
    assert call(both, task="math") == [3.0, 1.0, 2.0] and call(both, task="coding") == [100.0] * 3
    assert call(both, task="poetry") == [None] * 3
    some = [about_maths, lambda completions: [1.0, None, 1.0]]
    assert call(some, task="math") == [4.0, None, 3.0]  # which scored some and not others: no number stands for that

    def broken(completions):
        raise RuntimeError("no such luck")

    tokens = [[1]] * 3
    reward = insisting(rewards.as_reward([words, broken]), "none")
    got = rewards.score(reward, "p", TEXTS, tokens, {})
    assert got == [None] * 3 and "no such luck" in str(got.failure)  # a failure is no abstention


def test_a_function_of_one_text_may_take_keywords():
    def of_text(text, **kwargs):
        kwargs["log_metric"]("step", kwargs["trainer_state"].global_step)
        kwargs["log_extra"]("letters", [len(text)])
        return words(text) + 10 * kwargs["answer"] + 100 * len(kwargs["completion_ids"])

    got = call(of_text, answer=4)
    assert got == [543.0, 141.0, 342.0] and got.parts == {"step": [0.0] * 3, "letters": [5.0, 1.0, 3.0]}
    assert call(lambda response, *, answer: words(response) * answer, answer=3) == [9.0, 3.0, 6.0]
    assert call(lambda prompt, response, **_: float(len(prompt + response))) == [6.0, 2.0, 4.0]

    def of_a_column(solution, **kwargs):  # a column's name, not a text
        return [float(text == right) for text, right in zip(kwargs["completions"], solution, strict=True)]

    assert call(of_a_column, solution="d") == [0.0, 1.0, 0.0]


def test_a_reward_gets_what_it_takes_and_no_more():
    def strict(completions, trainer_state):
        return [float(trainer_state.max_steps)] * len(completions)

    assert call(strict, answer=4) == [1.0] * 3
    assert call(Combined({"in": Clipped([strict, logs])})) == [4.0, 2.0, 3.0]


def test_a_list_is_a_weighted_sum_under_the_names_of_its_functions():
    class Scorer:
        def __call__(self, completions, **_):
            return [2.0] * len(completions)

    got = call([words, longer, Scorer(), words, "length:2"], weights=[1.0, 0.5, 10, -3.0, 100.0])
    expected = [words(t) + 0.5 * len(t) + 20 - 3 * words(t) - 100 * abs(words(t) - 2) for t in TEXTS]
    assert got == pytest.approx(expected) and [*got.parts] == ["words", "longer", "Scorer", "words_2", "length:2"]
    assert call((words, len)) == [words(t) + len(t) for t in TEXTS]


@pytest.mark.parametrize(
    ("reward", "weights", "says"),
    [
        ([words, len], [1.0], "reward_weights must be a list of 2 numbers"),
        ([words, len], 3.0, "reward_weights must be a list of 2 numbers"),
        ([words, len], [1.0, "x"], "the weight of 'len' must be a finite number"),
        (words, [1.0], "reward_weights goes with a list of rewards"),
        ([], None, "a combined reward needs at least one part"),
        ([words, 3], None, "a reward must be callable"),
    ],
)
def test_lists_that_make_no_sum(reward, weights, says):
    with pytest.raises(misvo.MisvoError, match=says):
        misvo.steer(make_policy(), "a b", reward, reward_weights=weights, **SIZES)


def test_steer_takes_lists_and_its_trace_has_what_was_logged():
    options = {"reward_weights": [1.0, 0.5], **SIZES}
    result = misvo.steer(make_policy(), "a b", [letter_reward, logs], **options)
    for step, row in enumerate(result.trace):
        texts = [c.text for c in result.candidates if c.step == step]
        counts, letters = [words(text) for text in texts], letter_reward(texts)
        assert [c.reward for c in result.candidates if c.step == step] == pytest.approx(
            [one + 0.5 * other for one, other in zip(letters, counts, strict=True)]
        )
        expected = {
            "letter_reward": statistics.fmean(letters),
            "logs": statistics.fmean(counts),
            "logs/share": counts.count(1.0) / len(counts),
            "logs/progress": step / 3,
            "logs/words": statistics.fmean(counts),
        }
        assert row["parts"] == pytest.approx(expected)
        assert row["extra"] == {"logs/first": [text[:1] for text in texts]}
    alone = misvo.steer_many(make_policy(), ["a b"], [letter_reward, logs], **options)[0]
    assert [c.reward for c in alone.candidates] == [c.reward for c in result.candidates]
    misvo.Result.from_dict(result.to_dict())


def test_what_is_logged_now_and_then_stays_with_its_step():
    def sometimes(completions, trainer_state, log_metric, **_):
        if trainer_state.global_step == 1:
            log_metric("seen", 5.0)
        return letter_reward(completions)

    result = misvo.steer(make_policy(), "a b", sometimes, **SIZES)
    assert [row.get("parts") for row in result.trace] == [None, {"seen": 5.0}, None]
    again = misvo.rescore(result, sometimes)
    assert again.rewards.parts == {"seen": [None] * 4 + [5.0] * 4 + [None] * 4}
    assert [*again.rewards] == [c.reward for c in result.candidates]


def test_logs_that_make_no_sense():
    for log, says in (
        (lambda log_metric, **_: log_metric("x", "high"), "log_metric('x', …) takes a number, not 'high'"),
        (lambda log_extra, **_: log_extra("x", [1, 2]), "log_extra('x', …) takes a value for each of the 3 responses"),
    ):

        def reward(completions, log=log, **kwargs):
            log(**kwargs)
            return [0.0] * len(completions)

        with pytest.raises(misvo.RewardError, match=re.escape(says)):
            call(reward)

    def odd(completions, log_metric, log_extra, **_):
        log_metric("x", float("nan"))
        log_extra("y", [torch.tensor(1.0), None, float("inf")])
        return [0.0] * len(completions)

    assert call(odd).parts == {"x": [None] * 3, "y": [1.0, None, None]}


def test_columns_are_a_dict_of_their_own_names():
    for columns, says in (
        (["x"], "columns must be a dict such as {'answer': 4}, not \"['x']\"."),
        ({"completions": 1}, "a column cannot be called 'completions'"),
        ({"trainer_state": 1}, "a column cannot be called 'trainer_state'"),
        ({3: 1}, "a column cannot be called 3"),
    ):
        with pytest.raises(misvo.MisvoError, match=re.escape(says)):
            misvo.steer(make_policy(), "a b", letter_reward, columns=columns, **SIZES)
    with pytest.raises(misvo.MisvoError, match="columns of steer_many are a list with a dict for each prompt"):
        misvo.steer_many(make_policy(), ["a b"], letter_reward, columns={"answer": [4]}, **SIZES)


def meeting(count):
    """An async reward of one text that returns when `count` calls are under way at once, and not before."""
    barrier = asyncio.Barrier(count)

    async def meets(completions, **_):
        await asyncio.wait_for(barrier.wait(), 10)
        return [words(text) for text in completions]

    return meets


def test_async_rewards_run_side_by_side():
    meets = meeting(3)
    reward = Combined({"one": meets, "in": Clipped(Combined({"two": meets})), "scale": Standardised(meets, 0, 1)})
    assert call(reward) == [9.0, 3.0, 6.0]
    insists = insisting(rewards.as_reward([meets, meets, meets]), "none", 1)
    assert rewards.score(insists, "p", TEXTS, [[1]] * 3, {}) == [9.0, 3.0, 6.0]
    barrier = asyncio.Barrier(len(TEXTS))

    async def each(text):
        await asyncio.wait_for(barrier.wait(), 10)
        return words(text)

    assert call(each) == [3.0, 1.0, 2.0]


def test_one_loop_serves_all_calls_also_where_another_one_runs():
    """A client that was opened in the first call is still good in the last: its loop is alive."""
    loops = []

    async def remembers(completions, **_):
        loops.append(asyncio.get_running_loop())
        return letter_reward(completions)

    policy = make_policy()

    async def notebook():
        return misvo.steer(policy, "a b", remembers, **SIZES)

    outside, inside = misvo.steer(policy, "a b", remembers, **SIZES), asyncio.run(notebook())
    misvo.steer_many(policy, ["a b", "c"], remembers, **SIZES)
    assert len(loops) == 12 and len(set(loops)) == 1 and loops[0].is_running()
    expected = misvo.steer(policy, "a b", letter_reward, **SIZES)
    for result in (outside, inside):
        assert [c.reward for c in result.candidates] == [c.reward for c in expected.candidates]


def test_ctrl_c_reaches_an_async_reward():
    cancelled = []

    async def hangs(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            try:
                await asyncio.sleep(0.2)  # until somebody waits for it
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
        return letter_reward(completions)

    with pytest.raises(KeyboardInterrupt) as caught:
        misvo.steer(make_policy(), "a b", hangs, **SIZES)
    assert len(caught.value.result.trace) == 2
    call(asks_a_service)  # by then the loop has seen to it
    assert cancelled == [True]


def test_async_rewards_fail_in_a_sentence():
    async def leaves(completions, **_):
        raise SystemExit(3)

    async def waits(completions, **_):
        return call(asks_a_service, completions)

    for reward, says in ((leaves, "SystemExit in an async reward"), (waits, "cannot wait for another one")):
        with pytest.raises(misvo.RewardError, match=says):
            call(reward)
        assert call(asks_a_service) == [3.0, 1.0, 2.0]  # the loop is still there


def test_trls_own_rewards_unchanged():
    texts = ["<think>\nYes.\n</think>\nTwo.", "Two.", "two two two two"]
    assert call(think_format_reward, texts, CHAT) == [1.0, 0.0, 0.0]
    punishes = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=10)
    lengths = [len(text) for text in texts]  # `call` gives a token for each letter
    soft = [0.0 if n <= 10 else (10 - n) / 10 if n <= 20 else -1.0 for n in lengths]
    assert call(punishes, texts, CHAT) == soft

    async def thinks(completions, **kwargs):
        return think_format_reward(completions, **kwargs)

    got = call([thinks, think_format_reward, punishes], texts, CHAT, weights=[1.0, 2.0, 0.5])
    assert got == pytest.approx([3.0 + 0.5 * soft[0], 0.5 * soft[1], 0.5 * soft[2]])
    repeats = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    result = misvo.steer(make_policy(), "a b", [repeats, punishes, letter_reward], **SIZES)
    ids = [c.tokens for c in result.candidates if c.step == 0]
    expected = statistics.fmean(repeats(completion_ids=ids))
    assert next(iter(result.trace[0]["parts"].values())) == pytest.approx(expected)


def test_trls_accuracy_logs_what_it_parsed():
    texts = [r"It is \boxed{\frac{1}{3}}.", r"\boxed{\frac{1}{2}}", "no idea"]
    got = call(accuracy_reward, texts, CHAT, solution=r"\frac{1}{3}")
    assert got == [1.0, 0.0, 0.0] and got.extra["solution"] == [r"\frac{1}{3}"] * 3
    assert "1/3" in got.extra["answer_parsed"][0] and got.extra["answer_parsed"][2] == "[unparseable]"


def test_trls_rewards_by_path():
    texts = ["<think>\nYes.\n</think>\nTwo.", "Two.", "two two"]
    assert call(rewards.load("trl.rewards:think_format_reward"), texts, CHAT) == [1.0, 0.0, 0.0]
    got = call(rewards.load("trl.rewards:think_format_reward + 0.5*length:1"), texts, CHAT)
    assert got == [1.0 - 0.5 * (len(texts[0].split()) - 1), 0.0, -0.5]
    boxed = [r"It is \boxed{0.5}.", r"\boxed{2}"]
    assert call(rewards.load("trl.rewards:accuracy_reward"), boxed, CHAT, solution=r"\frac{1}{2}") == [1.0, 0.0]
