"""A sweep goes on with other settings where they decide nothing but speed, and only there."""

import json

import pytest

from misvo.bench import sweep
from misvo.errors import MisvoError
from tests.bench_helpers import make_config, make_world, read_lines


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def begin(world, folder):
    """A run whose last two rows are not there yet."""
    sweep.run(make_config(world, methods=("misvo",), seeds=(1,), memory="1GB"), folder)
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(rows[:3]))


@pytest.mark.parametrize("change", [{"memory": "2GB"}, {"memory": "1GB", "max_rows": 2}, {}], ids=str)
def test_a_run_goes_on_with_another_memory(world, tmp_path, change):
    begin(world, tmp_path / "r")
    done = sweep.run(make_config(world, methods=("misvo",), seeds=(1,), **change), tmp_path / "r")
    assert done.fresh == 2 and len(read_lines(tmp_path / "r" / "rows.jsonl")) == 5


@pytest.mark.parametrize("change", [{"law_dtype": "bfloat16"}, {"rollouts": 5}], ids=str)
def test_a_run_does_not_go_on_with_what_decides_its_rows(world, tmp_path, change):
    begin(world, tmp_path / "r")
    with pytest.raises(MisvoError, match=f"{next(iter(change))}: .* → "):
        sweep.run(make_config(world, methods=("misvo",), seeds=(1,), **change), tmp_path / "r")


def test_a_folder_that_names_its_memory_goes_on(world, tmp_path):
    """As folders do that were begun when memory was part of what is compared."""
    begin(world, tmp_path / "r")
    path = tmp_path / "r" / "config.json"
    config = json.loads(path.read_text())
    for cell in config["cells"].values():
        cell["settings"]["memory"] = "1GB"
    path.write_text(json.dumps(config))
    assert sweep.run(make_config(world, methods=("misvo",), seeds=(1,)), tmp_path / "r").fresh == 2
