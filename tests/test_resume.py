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


@pytest.mark.parametrize(
    "change",
    [{"law_dtype": "bfloat16"}, {"rollouts": 5}, {"raw": True}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=str,
)
def test_a_run_does_not_go_on_with_what_decides_its_rows(world, tmp_path, change):
    begin(world, tmp_path / "r")
    with pytest.raises(MisvoError, match=f"{next(iter(change))}: .* → "):
        sweep.run(make_config(world, methods=("misvo",), seeds=(1,), **change), tmp_path / "r")


@pytest.mark.parametrize("idle", [{"memory": "1GB", "max_rows": 3}, {"sigma2": 0.3, "value": "folder"}], ids=str)
def test_a_folder_that_names_what_decides_nothing_goes_on(world, tmp_path, idle):
    """As folders do that were begun when speed, or options of other methods, were part of what is compared."""
    begin(world, tmp_path / "r")
    rewrite(tmp_path / "r" / "config.json", idle)
    assert sweep.run(make_config(world, methods=("misvo",), seeds=(1,)), tmp_path / "r").fresh == 2


def test_a_folder_of_another_version_does_not(world, tmp_path):
    begin(world, tmp_path / "r")
    rewrite(tmp_path / "r" / "config.json", {"momentum": 0.9})
    with pytest.raises(MisvoError, match=r"momentum: 0\.9 → "):
        sweep.run(make_config(world, methods=("misvo",), seeds=(1,)), tmp_path / "r")


def rewrite(path, settings):
    config = json.loads(path.read_text())
    for cell in config["cells"].values():
        cell["settings"] |= settings
    path.write_text(json.dumps(config))
