"""Scoring stored candidates again: the figures against calculations by hand, from objects, files and the shell."""

import json
import re
import statistics
import sys

import pytest
from conftest import letter_reward, make_policy

import misvo
from misvo.result import Candidate
from misvo.rewards import Combined, Standardised

OPTIONS = {"rollouts": 4, "steps": 3, "max_new_tokens": 6, "learning_rate": 2.0}


@pytest.fixture(scope="module")
def result():
    return misvo.steer(make_policy(), "a b c", letter_reward, **OPTIONS, preset="paper")


@pytest.fixture
def folder(result, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(result.to_dict()))
    return tmp_path


def candidates(*rows):
    """(step, text, old reward) -> candidates"""
    return [Candidate(step, i, [1], text, old) for i, (step, text, old) in enumerate(rows)]


# The old reward likes the letter z; the new one counts other words. Step 1 is where the run went for z.
HACKED = candidates(
    (0, "a b c", 0.0), (0, "a b z", 1.0), (0, "a b c d", 0.0), (1, "a z z", 2.0), (1, "z z z", 3.0), (1, "", None)
)


def other_words(text):
    return float(sum(word != "z" for word in text.split())) if text else None


def test_the_second_judge_sees_the_hack():
    seen = misvo.rescore(HACKED, other_words, prompt="p")
    assert [(c.text, new) for c, new in seen] == list(
        zip([c.text for c in HACKED], [3.0, 2.0, 4.0, 1.0, 0.0, None], strict=True)
    )
    assert seen.old_best == (HACKED[4], 0.0) and seen.new_best == (HACKED[2], 4.0)
    assert seen.rank == 5
    # Ranks by hand: old 1.5 3 1.5 4 5, new 4 3 5 2 1.
    old, new = [1.5, 3, 1.5, 4, 5], [4, 3, 5, 2, 1]
    assert seen.correlation == pytest.approx(statistics.correlation(old, new)) and seen.correlation < -0.9
    assert seen.steps == [
        {"step": 0, "old": pytest.approx(1 / 3), "new": 3.0, "best_old": 1.0, "best_new": 2.0},
        {"step": 1, "old": 2.5, "new": 0.5, "best_old": 3.0, "best_new": 0.0},
    ]


def test_the_first_of_equals_leads():
    seen = misvo.rescore(candidates((0, "a", 1.0), (0, "a b", 1.0), (1, "a b c", 1.0)), other_words, prompt="p")
    assert [row["best_new"] for row in seen.steps] == [1.0, 1.0] and seen.old_best.reward == 1.0


def test_what_is_undefined_is_none():
    flat = misvo.rescore(HACKED, lambda text: 1.0, prompt="p")
    assert flat.correlation is None and flat.rank == 1 and flat.new_best.candidate is HACKED[0]
    shy = misvo.rescore(HACKED, lambda text: None if text == "z z z" else 1.0, prompt="p")
    assert shy.rank is None and shy.old_best == (HACKED[4], None)
    none = misvo.rescore(HACKED, lambda text: None, prompt="p")
    assert none.correlation is None and [row["new"] for row in none.steps] == [None, None]
    with pytest.raises(misvo.MisvoError, match="no response has a reward of the new kind"):
        _ = none.new_best


def test_the_same_reward_gives_the_same_rewards(result, folder):
    """Also with a scale that was learned from the first step, and with columns."""
    for source in (result, result.to_dict(), folder, str(folder), folder / "result.json", result.candidates):
        seen = misvo.rescore(source, letter_reward, prompt="a b c" if isinstance(source, list) else None)
        assert list(seen.rewards) == [c.reward for c in result.candidates]
        assert seen.candidates == result.candidates and seen.prompt == "a b c"
        assert seen.correlation == pytest.approx(1.0) and seen.rank == 1
        assert seen.old_best.candidate == result.best == seen.new_best.candidate
        assert [row["old"] for row in seen.steps] == pytest.approx([row["mean"] for row in result.trace])
        assert [row["best_new"] for row in seen.steps] == [row["best"] for row in result.trace]
    scaled = Combined({"letters": Standardised(letter_reward)})
    run = misvo.steer(make_policy(), "a b c", scaled, **OPTIONS, preset="paper")
    again = misvo.rescore(run, scaled)
    assert list(again.rewards) == [c.reward for c in run.candidates]
    assert again.rewards.parts["letters/raw"] == pytest.approx(letter_reward([c.text for c in run.candidates]))
    assert again.to_dict()["parts"] == again.rewards.parts

    def with_column(completions, wished, completion_ids, **_):
        return [float(w in text) + len(ids) for text, w, ids in zip(completions, wished, completion_ids, strict=True)]

    seen = misvo.rescore(result, with_column, columns={"wished": "a"})
    assert list(seen.rewards) == [float("a" in c.text) + len(c.tokens) for c in result.candidates]


def test_the_choice_of_the_run_counts_where_it_is_known():
    """A run may choose another response than the one with the highest reward; files of old had less in them."""
    rows = [{"step": c.step, "rollout": c.rollout, "tokens": [1], "text": c.text, "reward": c.reward} for c in HACKED]
    stored = {"prompt": "p", "candidates": rows, "best": {"step": 0, "rollout": 1}}
    seen = misvo.rescore(stored, other_words)
    assert seen.old_best == (HACKED[1], 2.0) and seen.rank == 3
    assert seen.steps[-1]["best_old"] == 3.0  # the trace keeps to the reward


def test_progress_is_told_step_by_step(result):
    told = []
    misvo.rescore(result, len, progress=told.append)
    assert told == [0, 1, 2]


def test_refusals(result, tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"prompt": "p", "candidates": [{"step": 0}]}')
    (tmp_path / "list.json").write_text("[1]")
    for source, says in [
        (tmp_path, "there is no " + str(tmp_path / "result.json")),
        (tmp_path / "broken.json", "could not be read"),
        (tmp_path / "other.json", "holds no result of a run: 'rollout' is missing"),
        (tmp_path / "list.json", "holds no result of a run"),
        (3, "the source is no result of a run"),
        (result.candidates, "do not know their prompt"),
        ({"prompt": "p", "candidates": []}, "there are no candidates"),
    ]:
        with pytest.raises(misvo.MisvoError, match=re.escape(says)):
            misvo.rescore(source, len)
    with pytest.raises(misvo.RewardError, match="ZeroDivisionError"):
        misvo.rescore(result, lambda text: 1 / 0)


def shell(capsys, monkeypatch, *arguments):
    """The command in this process: what it prints, what it complains of, and its exit code."""
    from misvo import cli

    monkeypatch.setattr(sys, "argv", ["misvo", "rescore", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    return (*capsys.readouterr(), code or 0)


def test_the_shell(result, folder, capsys, monkeypatch):
    spec = "2*length:3 - repetition:1"
    printed, _, code = shell(capsys, monkeypatch, folder, "--reward", spec, "--json")
    seen = misvo.rescore(result, spec)
    assert code == 0 and json.loads(printed) == {"reward": spec, **json.loads(json.dumps(seen.to_dict()))}

    printed, _, code = shell(capsys, monkeypatch, folder, "--reward", spec)
    for part in ("choice of the run", "best by the new reward", "mean new", "Rank correlation"):
        assert part in printed
    assert code == 0 and f"place {seen.rank} of 12" in printed

    mine = folder / "mine.py"
    mine.write_text("def f(completions, answer):\n    return [float(len(a)) for a in answer]\n")
    (folder / "columns.json").write_text('{"answer": "four"}')
    arguments = [folder, "--json", "--reward", f"{mine}:f", "--columns", folder / "columns.json"]
    printed, _, _ = shell(capsys, monkeypatch, *arguments)
    assert {c["new"] for c in json.loads(printed)["candidates"]} == {4.0}
    (folder / "columns.json").write_text("[4]")
    for arguments, says in (
        ([folder / "none", "--reward", "length:3"], "there is no"),
        ([folder, "--reward", "nope"], "unknown reward 'nope'"),
        ([folder, "--reward", "length:3", "--columns", mine], "could not be read"),
        ([folder, "--reward", "length:3", "--columns", folder / "columns.json"], "must hold a JSON object"),
    ):
        printed, complaint, code = shell(capsys, monkeypatch, *arguments)
        assert code == 2 and says in complaint and complaint.strip().startswith("misvo: ") and printed == ""
