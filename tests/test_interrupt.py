"""Ctrl-C and failing rewards: what was done until then is kept, and what happened is said."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest
import torch
from conftest import letter_reward, make_policy
from shell import run_shell

import misvo
from misvo import cli
from tests.bench_helpers import make_world

SIZES = {"rollouts": 3, "steps": 6, "max_new_tokens": 6}
REWARDS = """
import resource, sys, time
steps = []

def slow(completions, **_):
    steps.append(1)
    print(f"scoring {len(steps)}", file=sys.stderr, flush=True)
    if len(steps) > 2:
        time.sleep(60)
    return [float(len(text)) for text in completions]

def stubborn(completions, **_):
    try:
        return slow(completions)
    except KeyboardInterrupt:
        print("holding on", file=sys.stderr, flush=True)
        time.sleep(60)

def fills_the_disk(completions, **_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))  # from now on no file takes more
    return [float(len(text)) for text in completions]

def in_the_way(completions, trainer_state, folder="{FOLDER}", **_):
    with open(folder, "w") as file:
        file.write("a file where a folder should be")
    return [None if trainer_state.global_step else 1.0] * len(completions)

def nothing(completions, **_):
    return [None] * len(completions)

def fails(completions, **_):
    raise RuntimeError("no such luck")
"""


def interrupted_at(call):
    """A reward during whose n-th call somebody presses Ctrl-C."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return letter_reward(completions)

    return reward


def said(result):
    return [(c.step, c.rollout, c.tokens, c.reward) for c in result.candidates]


@pytest.mark.parametrize("method", ["misvo", "aisp", "best-of-n", "re-control"])
def test_an_interrupted_run_carries_what_it_had(method):
    """The vectors are those that a run of as many steps ends with."""
    with pytest.raises(KeyboardInterrupt) as caught:
        misvo.steer(make_policy(), "a b c", interrupted_at(4), method=method, patience=9, **SIZES, preset="paper")
    result = caught.value.result
    short = {"value_steps": 2} if method == "re-control" else {}
    whole = misvo.steer(
        make_policy(), "a b c", letter_reward, method=method, **{**SIZES, "steps": 3}, **short, preset="paper"
    )
    assert len(result.trace) == 3
    if method != "re-control":  # which would have collected for one step more
        assert said(result) == said(whole) and result.reward == whole.reward
    assert (result.steering is None) == (whole.steering is None)
    if result.steering is not None:
        assert torch.equal(result.steering.vectors, whole.steering.vectors) and result.steering.norm > 0
    json.dumps(result.to_dict())


def test_an_interrupt_before_the_first_reward_carries_an_empty_result():
    with pytest.raises(KeyboardInterrupt) as caught:
        misvo.steer(make_policy(), "a b c", interrupted_at(1), select="ordinary", **SIZES, preset="paper")
    told = caught.value.result.to_dict()
    assert (told["text"], told["reward"], told["best"], told["candidates"]) == (None, None, None, [])


def test_many_prompts_carry_a_result_each():
    policy, calls = make_policy(), []
    step = policy.body_step

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return step(*arguments)

    policy.body_step = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        misvo.steer_many(policy, ["a b c", "d", "e f"], letter_reward, max_rows=3, **SIZES, preset="paper")
    results = caught.value.results
    assert [result.prompt for result in results] == ["a b c", "d", "e f"]
    assert len(results[0].candidates) == 3 * len(results[0].trace) > 0 and results[2].candidates == []


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    (folder / "rewards.py").write_text(REWARDS.replace("{FOLDER}", str(folder / "taken")))
    return folder


def command(world, reward, *arguments):
    sizes = ["-k", "3", "-n", "6", "-t", "6", "--preset", "paper"]
    reward = ["--reward", f"{world}/rewards.py:{reward}"]
    return [sys.executable, "-m", "misvo.cli", "steer", "a b c", "--model", str(world / "model"), *reward, *sizes] + [
        str(argument) for argument in arguments
    ]


def press_ctrl_c(world, *arguments):
    """Start a run whose third reward takes a minute, in a terminal, and press the keys: exit code, what it showed."""
    keyboard, terminal = pty.openpty()

    def take_terminal():
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    arguments = command(world, "slow", *arguments)
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    run = subprocess.Popen(arguments, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(terminal)
    shown, pressed = b"", False
    with contextlib.suppress(OSError):  # how Linux says that nobody is left at the other end
        while more := os.read(keyboard, 10_000):
            shown += more
            if b"scoring 3" in shown and not pressed:
                pressed = bool(os.write(keyboard, b"\x03"))
    return run.wait(60), shown.decode()


def interrupt(world, reward, marks, *arguments):
    """Start a run and send SIGINT as each mark appears on standard error: exit code, standard output and error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(world, reward, *arguments), **pipes) as run:
        told, marks = "", [*marks]
        for line in run.stderr:
            told += line
            if marks and marks[0] in line:
                marks.pop(0)
                run.send_signal(signal.SIGINT)
                started = time.monotonic()
        shown = run.stdout.read()
    assert not marks and time.monotonic() - started < 30  # the reward would have taken a minute
    return run.returncode, shown, told


def words(shown):
    """What a terminal shows, without the frames and breaks of its lines."""
    return " ".join(shown.replace("│", " ").split())


def test_ctrl_c_shows_the_best_so_far_and_writes_all_files(world, tmp_path):
    code, shown = press_ctrl_c(world, "--save", tmp_path / "s", "--plot", tmp_path / "p.png")
    assert code == 130 and "Traceback" not in shown
    assert shown.endswith(f"misvo: what was done until then is in {tmp_path}/s.\r\nmisvo: stopped.\r\n")
    saved = json.loads((tmp_path / "s" / "result.json").read_text())
    assert len(saved["trace"]) == 2 and len(saved["candidates"]) == 6
    assert saved["reward"] == max(c["reward"] for c in saved["candidates"])
    assert misvo.Steering.from_pretrained(tmp_path / "s").norm == pytest.approx(saved["norm"])
    assert saved["text"].split()[0] in words(shown) and f"{saved['reward']:.3f}" in words(shown)
    assert "mean reward" in shown and "stopped at step 2 of 6: this is the best so far." in words(shown)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_sigint_leaves_the_json_of_what_was_done_and_nothing_else_on_standard_output(world):
    code, shown, told = interrupt(world, "slow", ["scoring 3"], "--json")
    printed = json.loads(shown)
    assert code == 130 and told.endswith("misvo: stopped.\n") and "Traceback" not in told
    assert "until then" not in told  # nobody named a folder
    assert len(printed["trace"]) == 2 and len(printed["candidates"]) == 6
    assert printed["reward"] == max(c["reward"] for c in printed["candidates"])


def test_a_second_ctrl_c_ends_at_once(world):
    code, shown, told = interrupt(world, "stubborn", ["scoring 3", "holding on"])
    assert code == -signal.SIGINT and shown == "" and "Traceback" not in told


def test_an_interrupt_does_not_wait_for_a_reward_in_another_thread():
    ended, calls, threads = threading.Event(), [], set()

    def hangs(completions, **_):
        calls.append(1)
        threads.add(threading.current_thread())
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(20)
        return letter_reward(completions)

    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            misvo.steer_many(make_policy(), ["a b c", "d"], hangs, **SIZES, preset="paper")
        assert time.monotonic() - started < 15 and threading.main_thread() not in threads
        assert sum(len(result.trace) for result in caught.value.results) in (1, 2)  # the second may not be told yet
    finally:
        ended.set()


def test_an_interrupt_of_the_last_measurement_keeps_the_whole_run(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(misvo.meter, "kl_ref", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        misvo.steer(make_policy(), "a b c", letter_reward, kl_ref=True, **SIZES, preset="paper")
    monkeypatch.undo()
    whole = misvo.steer(make_policy(), "a b c", letter_reward, **SIZES, preset="paper")
    assert said(caught.value.result) == said(whole)
    assert torch.equal(caught.value.result.steering.vectors, whole.steering.vectors)


@pytest.mark.parametrize(
    ("reward", "says"),
    [("nothing", "the reward scored none of the 3 responses of step 0"), ("fails", "RuntimeError (no such luck)")],
)
def test_the_rewards_own_sentence_shows_and_what_was_done_is_kept(world, tmp_path, reward, says):
    folder = tmp_path / "s"
    done = run_shell(*command(world, reward, "--save", folder)[3:])
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    kept = reward == "nothing"  # where nothing was scored nothing else was done
    assert (f"misvo: what was done until then is in {folder}." in done.stderr) == kept
    if kept:
        saved = json.loads((folder / "result.json").read_text())
        assert [c["reward"] for c in saved["candidates"]] == [None] * 3 and saved["best"] is None


def test_a_folder_that_is_lost_on_the_way_does_not_hide_the_rewards_sentence(world, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", command(world, "in_the_way", "--save", world / "taken")[2:])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capfd.readouterr()
    assert stop.value.code == 2 and "stopped at step 1 of 6" in shown.out
    assert f"misvo: the run could not be saved in {world / 'taken'}: " in shown.err
    assert shown.err.endswith("misvo: the reward scored none of the 3 responses of step 1: all were None.\n")


def test_a_disk_that_fills_up_costs_the_files_and_not_the_answer(world, tmp_path):
    arguments = ["--save", tmp_path / "s", "--plot", tmp_path / "p.png"]
    done = subprocess.run(command(world, "fills_the_disk", *arguments), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "answer: " in done.stdout and "mean reward" in done.stdout and "stopped" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"misvo: the run could not be saved in {tmp_path / 's'}: ") and "File too large" in last
    assert f"the picture could not be drawn in {tmp_path / 'p.png'}: " in last
    assert not (tmp_path / "s" / "result.json").exists()


def test_without_a_reference_step_the_best_is_chosen_among_all():
    """Steps of best-of-n end in any order: a run that was cut short need not have the first one."""
    candidates = [
        misvo.result.Candidate(3, 0, [5, 6], "a", 1.0, -1.0),
        misvo.result.Candidate(3, 1, [7], "b", 2.0, -9.0),
    ]
    assert misvo.Result("p", misvo.Settings("best-of-n", select="ordinary"), candidates).text == "b"
