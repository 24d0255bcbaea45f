"""Where a run goes is looked at before there is one: no such model could be loaded, so nothing else can be said."""

import sys
from pathlib import Path

import pytest
from conftest import letter_reward, make_policy

import misvo
from misvo import cli
from misvo.outputs import Outputs


def steer(monkeypatch, capfd, *arguments):
    """What `misvo steer` says before it exits with code 2."""
    command = ["misvo", "steer", "a b", "--reward", "length:4", "--model", "no-such/model", *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capfd.readouterr()
    assert stop.value.code == 2 and shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_pictures_that_cannot_be_drawn(tmp_path, monkeypatch, capfd):
    (tmp_path / "run.png").mkdir()
    for path, says in (
        ("/nonexist/x.png", "misvo: there is no folder /nonexist to draw x.png in: make it first."),
        (tmp_path / "x.xyz", "x.xyz is no picture that can be drawn: its name may end in "),
        (tmp_path / "run.png", "run.png is a folder: give --plot the name of a picture"),
        ("/proc/x.png", "/proc/x.png cannot be drawn: "),
    ):
        assert says in steer(monkeypatch, capfd, "--plot", path)
    assert "png, " in steer(monkeypatch, capfd, "--plot", "x.xyz")


def test_folders_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    for path, says in (
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "file" / "below", "Not a directory"),
        ("/proc/run", "the run cannot be saved in /proc/run: "),
    ):
        assert says in steer(monkeypatch, capfd, "--save", path)


def test_what_can_be_written_is_left_as_it_was(tmp_path, monkeypatch, capfd):
    arguments = ["--save", tmp_path / "new" / "run", "--plot", tmp_path / "picture", "--overwrite"]
    assert "no model could be loaded" in steer(monkeypatch, capfd, *arguments)
    Outputs(Path("relative") / "run", Path("run.PDF")).check()
    assert list(tmp_path.iterdir()) == [] and not Path("relative").exists()


def test_another_run_is_overwritten_by_request_only(tmp_path, monkeypatch, capfd):
    options = {"rollouts": 3, "steps": 1, "max_new_tokens": 4, "preset": "paper"}
    old, new = (misvo.steer(make_policy(), prompt, letter_reward, **options) for prompt in ("a", "b"))
    old.save(tmp_path)
    says = steer(monkeypatch, capfd, "--save", tmp_path)
    assert says == f"misvo: {tmp_path} already holds a run or a steering: give another folder, or --overwrite.\n"
    assert Outputs(tmp_path).deliver(new, "letters") and misvo.Result.load(tmp_path).prompt == "a"
    assert "answer: letters" in capfd.readouterr().out
    assert "no model could be loaded" in steer(monkeypatch, capfd, "--save", tmp_path, "--overwrite")
    assert Outputs(tmp_path, overwrite=True).deliver(new, "letters") == []
    assert misvo.Result.load(tmp_path).prompt == "b"


def test_files_are_written_also_where_nobody_reads_the_answer(tmp_path, monkeypatch):
    """As in `misvo steer ... | head -0`."""

    class Closed:
        def write(self, _):
            raise BrokenPipeError("nobody is there")

        def flush(self):
            pass

    result = misvo.steer(make_policy(), "a", letter_reward, rollouts=3, steps=1, max_new_tokens=4, preset="paper")
    monkeypatch.setattr(sys, "stdout", Closed())
    problems = Outputs(tmp_path / "s", tmp_path / "p.svg", as_json=True).deliver(result, "letters")
    assert problems == ["the answer could not be printed: nobody is there"]
    assert misvo.Result.load(tmp_path / "s").text == result.text and (tmp_path / "p.svg").stat().st_size > 1000
