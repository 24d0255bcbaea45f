"""The way of one prompt in docs/architecture.md is the way that the code takes: every file that it names is on it."""

import re
import sys
from pathlib import Path

import pytest
from bench_helpers import make_world

import misvo
from misvo import cli

PACKAGE = Path(misvo.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


ROOMS = ("commands.py", "calls.py", "session.py", "run.py", "scoring.py", "engines/adapting.py", "engines/torch.py")


def walk():
    """The files of each numbered step, in their order."""
    text = PAGE.read_text(encoding="utf-8").split("## One prompt's way")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    return [re.findall(r"`([\w/]+\.py)`", step) for step in steps]


def entered(call):
    """The files of the package whose functions a call enters, each with the file that first called it."""
    found, inside = {}, f"{PACKAGE}/"

    def watch(frame, event, _):
        path = frame.f_code.co_filename
        if event != "call" or path in found or not path.startswith(inside):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(inside):
            caller = caller.f_back
        found[path] = caller and caller.f_code.co_filename.removeprefix(inside)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {path.removeprefix(inside): caller for path, caller in found.items()}


@pytest.fixture(scope="module")
def way(tmp_path_factory):
    """The files that `misvo steer` enters, with nothing to import any more."""
    world = make_world(tmp_path_factory.mktemp("world"))
    sizes = ["-k", "4", "-n", "3", "-t", "6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        patch.setattr(
            sys, "argv", ["misvo", "steer", "a b", "--reward", "sentiment", "--model", f"{world}/model", *sizes]
        )

        def steer():
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code

        steer()
        return entered(steer)


def test_every_file_of_the_walk_is_on_the_way(way):
    named = [name for step in walk() for name in step]
    assert len(walk()) == 8 and len(named) > 20
    assert not set(named) - set(way)


def test_each_room_is_entered_from_the_one_before_it(way):
    """cli → commands → calls → session → run and engine → batch and law step: nobody reaches past a neighbour."""
    assert {name: way[name] for name in ROOMS} == {
        "commands.py": "cli.py",
        "calls.py": "commands.py",
        "session.py": "calls.py",
        "run.py": "session.py",
        "scoring.py": "session.py",
        "engines/adapting.py": "policy.py",  # which makes the engine
        "engines/torch.py": "engines/adapting.py",
    }
    assert way["engines/batch.py"] == way["law_step.py"] == "engines/torch.py"
    assert way["methods/misvo.py"] == way["meter.py"] == "run.py"
    assert way["cost.py"] == way["updates.py"] == "methods/misvo.py"


def test_what_leads_on_to_other_files_is_in_the_walk(way):
    """Only a file that ends where it stands may be left out."""
    named = {name for step in walk() for name in step}
    assert not {caller for caller in way.values() if caller} - named
