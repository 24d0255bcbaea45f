"""`misvo steer --file`: a line is what its prompt gets alone, and none is lost or made twice, whatever happens."""

import json
import os
import signal
import subprocess
import sys

import pytest
from bench_helpers import make_world, read_lines

import misvo
from misvo import cli, many

# Prompts, rewards and the calls that the reward had, one line each.
REWARD = """
import os, signal
from pathlib import Path

CALLS = Path(__file__).with_name("calls.txt")

def letters(prompts, completions, bonus=None, **_):
    with CALLS.open("a") as file:
        file.write(prompts[0] + "\\n")
    if os.environ.get("DIES_AT") == prompts[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("STOPS_AT") == prompts[0]:
        os.kill(os.getpid(), signal.SIGINT)
    if os.environ.get("FAILS_AT") in (prompts[0], "all"):
        raise RuntimeError("no letters today")
    bonus = bonus or [0.0] * len(completions)
    return [sum(0.3 * (ord(w[-1]) % 7) for w in t.split()) + b for t, b in zip(completions, bonus)]

def other(completions, **_):
    return [float(len(text)) for text in completions]
"""
RECORDS = [
    {"id": "p0", "prompt": "a"},
    {"id": "p1", "prompt": "b", "bonus": 5.0},
    {"id": "p2", "prompt": "c d"},
    {"id": "p3", "prompt": "e f g", "bonus": -5.0},
    {"id": "p4", "prompt": "h"},
]
SIZES = {"rollouts": 3, "steps": 3, "max_new_tokens": 6, "seed": 4}
OPTIONS = ["-k", "3", "-n", "3", "-t", "6", "--seed", "4", "--max-rows", "3"]  # one prompt decodes at a time


@pytest.fixture
def world(tmp_path):
    folder = make_world(tmp_path)
    (folder / "mine.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


@pytest.fixture(autouse=True)
def own_ctrl_c():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def arguments(world, *more, reward="letters", model="model", options=OPTIONS):
    where = ["--file", world / "prompts.jsonl", "--out", world / "results.jsonl", "--model", world / model]
    return ["steer", *map(str, where), "--reward", f"{world}/mine.py:{reward}", *options, *map(str, more)]


def misvo_steer(monkeypatch, *given):
    """The command in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["misvo", *given])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def alone(world, record):
    """What a line should be, made of the responses that `misvo.steer` gives this prompt by itself."""
    columns = {name: value for name, value in record.items() if name not in ("id", "prompt")}
    reward = f"{world}/mine.py:letters"
    result = misvo.steer(str(world / "model"), record["prompt"], reward, columns=columns, **SIZES)
    first, last = ([c for c in result.candidates if c.step == step] for step in (0, 2))
    plain = result.unsteered
    assert plain in first
    return {
        "id": record["id"],
        "prompt": record["prompt"],
        "columns": columns,
        "text": result.text,
        "reward": result.reward,
        "unsteered_text": plain.text,
        "unsteered_reward": plain.reward,
        "kl_per_token": pytest.approx(sum(sum(c.token_kl) for c in last) / sum(len(c.tokens) for c in last), abs=1e-4),
        "first_mean": pytest.approx(sum(c.reward for c in first) / 3),
        "last_mean": pytest.approx(sum(c.reward for c in last) / 3),
        "tokens": sum(len(c.tokens) for c in result.candidates),
        "error": None,
    }


def test_every_line_is_what_the_prompt_gets_alone(world, monkeypatch, capsys):
    expected = {record["id"]: alone(world, record) for record in RECORDS}
    for ahead, options in ((16, OPTIONS[:-2]), (1, OPTIONS)):  # all in one batch; one at a time
        monkeypatch.setattr(many, "AHEAD", ahead)
        capsys.readouterr()
        assert misvo_steer(monkeypatch, *arguments(world, "--json", "--overwrite", options=options)) == 0
        lines = read_lines(world / "results.jsonl")
        assert {line["id"]: line for line in lines} == expected and len(lines) == 5
        summary = json.loads(capsys.readouterr().out)
        assert (summary["prompts"], summary["fresh"], summary["failed"]) == (5, 5, 0)
        assert summary["tokens"] == sum(line["tokens"] for line in lines)
        for name in ("reward", "unsteered_reward", "first_mean", "last_mean", "kl_per_token"):
            assert summary[name] == pytest.approx(sum(line[name] for line in lines) / 5)
        better = [line for line in lines if line["reward"] > line["unsteered_reward"]]
        assert summary["better_than_unsteered"] == len(better)


def test_a_killed_command_goes_on_where_it_was(world, monkeypatch, capsys):
    results, calls = world / "results.jsonl", world / "calls.txt"
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    whole = {line["id"]: line for line in read_lines(results)}
    calls.unlink()
    command = [sys.executable, "-m", "misvo.cli", *arguments(world, "--overwrite")]
    killed = subprocess.run(command, env={**os.environ, "DIES_AT": "e f g"}, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    before = results.read_bytes()
    done = [json.loads(line)["prompt"] for line in before.splitlines()]
    assert 2 <= len(done) <= 3 and "e f g" not in done  # two are under way at most: one decodes, one is scored
    assert all(calls.read_text().split("\n").count(prompt) == 3 for prompt in done)
    calls.unlink()
    with results.open("ab") as file:
        file.write(before.splitlines()[1][:70])  # as a write that was torn leaves it
    capsys.readouterr()
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    assert results.read_bytes().startswith(before)
    lines = read_lines(results)
    assert {line["id"]: line for line in lines} == whole and len(lines) == 5
    left = sorted(record["prompt"] for record in RECORDS if record["prompt"] not in done)
    assert sorted(calls.read_text().splitlines()) == sorted(3 * left)  # nothing was done again but what was cut short
    shown = capsys.readouterr().out
    assert "5 prompts in" in shown and f"{len(left)} of them now" in shown
    assert misvo_steer(monkeypatch, *arguments(world)) == 0  # and again: there is nothing left to do
    assert len(calls.read_text().splitlines()) == 3 * len(left) and "0 of them now" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done_and_says_so(world, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setenv("STOPS_AT", "c d")
        assert misvo_steer(patch, *arguments(world)) == 130
    told, lines = capsys.readouterr().err, read_lines(world / "results.jsonl")
    assert 1 <= len(lines) < 5 and "Traceback" not in told and told.endswith("misvo: stopped.\n")
    assert f"misvo: {len(lines)} of 5 prompts are done and safe in {world}/results.jsonl" in told
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    after = read_lines(world / "results.jsonl")
    assert after[: len(lines)] == lines and sorted(line["id"] for line in after) == [f"p{n}" for n in range(5)]


def test_results_of_another_make_are_refused_and_kept(world, monkeypatch, capsys):
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    results = world / "results.jsonl"
    before = results.read_bytes()
    (world / "model").rename(world / "other")

    def refused(*given, says):
        capsys.readouterr()
        assert misvo_steer(monkeypatch, *given) == 2
        told = capsys.readouterr().err
        assert says in told and "--overwrite" in told and told.count("\n") == 1 and results.read_bytes() == before

    refused(*arguments(world, "-n", "4"), says="settings.steps: 3 → 4")
    refused(*arguments(world, reward="other"), says="reward: ")
    refused(*arguments(world, model="other"), says="model: ")
    refused(*arguments(world, "--column", "bonus=1"), says="other columns by the id 'p0'")
    (world / "prompts.jsonl").write_text(json.dumps({"id": "p2", "prompt": "x y"}) + "\n")
    refused(*arguments(world), says="another prompt or other columns by the id 'p2'")
    (world / "results.jsonl.settings.json").unlink()
    refused(*arguments(world), says="holds something else than results")
    # A mistake beside --overwrite costs nothing; then it does what it says.
    assert misvo_steer(monkeypatch, *arguments(world, "--overwrite")) == 2 and results.read_bytes() == before
    assert misvo_steer(monkeypatch, *arguments(world, "--overwrite", model="other")) == 0
    assert [line["prompt"] for line in read_lines(results)] == ["x y"]


def test_more_prompts_can_be_added_to_the_file(world, monkeypatch):
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    with (world / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"id": "p5", "prompt": "i j"}) + "\n")
    (world / "calls.txt").unlink()
    assert misvo_steer(monkeypatch, *arguments(world)) == 0
    assert sorted(line["id"] for line in read_lines(world / "results.jsonl")) == [f"p{n}" for n in range(6)]
    assert set((world / "calls.txt").read_text().split("\n")) == {"i j", ""}


def test_a_reward_that_fails_costs_its_own_prompt_and_can_be_tried_again(world, monkeypatch, capsys):
    results = world / "results.jsonl"
    with monkeypatch.context() as patch:
        patch.setenv("FAILS_AT", "b")
        assert misvo_steer(patch, *arguments(world, "--json")) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["failed"] == 1 and "1 of 5 prompts failed, the first, 'p1', with: " in shown.err
    lines = {line["id"]: line for line in read_lines(results)}
    assert "no letters today" in lines["p1"]["error"] and lines["p1"]["reward"] is None
    assert all(line["error"] is None and line["reward"] is not None for name, line in lines.items() if name != "p1")
    assert misvo_steer(monkeypatch, *arguments(world)) == 0  # lines that are whole count, this one too
    assert {line["id"]: line for line in read_lines(results)} == lines
    assert misvo_steer(monkeypatch, *arguments(world, "--retry-errors")) == 0
    again = read_lines(results)
    assert sorted(line["id"] for line in again) == sorted(lines)
    expected = {**lines, "p1": alone(world, RECORDS[1])}
    assert {line["id"]: line for line in again} == expected
    with monkeypatch.context() as patch:
        patch.setenv("FAILS_AT", "all")
        assert misvo_steer(patch, *arguments(world, "--overwrite")) == 2
    assert "5 of 5 prompts failed" in capsys.readouterr().err


def test_text_files_system_messages_and_a_bad_prompt_among_good_ones(world, monkeypatch, capsys):
    (world / "prompts.txt").write_text("a\n\nb c\n")
    given = arguments(world)
    given[given.index(str(world / "prompts.jsonl"))] = str(world / "prompts.txt")
    assert misvo_steer(monkeypatch, *given) == 0
    assert sorted((line["id"], line["prompt"]) for line in read_lines(world / "results.jsonl")) == [
        ("0000", "a"),
        ("0001", "b c"),
    ]
    results = (world / "results.jsonl").read_bytes()
    capsys.readouterr()
    assert misvo_steer(monkeypatch, *given, "--system", "d", "--overwrite") == 2  # the tiny model has no chat template
    assert "the prompt with the id '0000' cannot be steered: this model has no chat template" in capsys.readouterr().err
    (world / "prompts.txt").write_text("a\n" + "b " * 200 + "\n")
    assert misvo_steer(monkeypatch, *given, "--overwrite") == 2
    assert "the prompt with the id '0001' cannot be steered" in capsys.readouterr().err
    assert (world / "results.jsonl").read_bytes() == results


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["steer", "x", "--file", "p.jsonl", "--out", "r.jsonl"], "PROMPT and --file exclude each other"),
        (["steer", "--file", "p.jsonl"], "give --out RESULTS.jsonl"),
        (["steer", "x", "--out", "r.jsonl"], "--out goes with --file"),
        (["steer", "x", "--retry-errors"], "--retry-errors goes with --file"),
        (["steer", "--file", "p.jsonl", "--out", "r.jsonl", "--save", "s"], "--save is for a single prompt"),
        (["steer"], "there is nothing to steer"),
        (["steer", "--file", "p.jsonl", "--out", "p.jsonl"], "give the results a file of their own"),
        (["steer", "--file", "p.jsonl", "--out", "."], "is a folder"),
        (["steer", "--file", "none.jsonl", "--out", "r.jsonl"], "there is no file none.jsonl"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(given, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    assert misvo_steer(monkeypatch, *given) == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1
    assert (tmp_path / "p.jsonl").read_text() == '{"prompt": "a"}\n' and not (tmp_path / "r.jsonl").exists()
