"""What a release needs: one version everywhere, and a wheel that works in an environment that knows nothing else."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import misvo

ROOT = Path(__file__).parent.parent


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    told = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert project["version"] == misvo.__version__ == citation["version"] == told[0]


def test_github_runs_what_ci_runs():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    told = yaml.safe_load(text)
    there = {step["run"] for job in told["jobs"].values() for step in job["steps"] if "run" in step}
    made = r"^make (?!-j).*$"  # but for environments side by side, which there each job makes for itself
    here = set(re.findall(made, (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(here) == 5 and here <= there
    jobs = re.findall(r"^  ([\w-]+):$", text.partition("\njobs:\n")[2], re.MULTILINE)
    assert len(jobs) == len(set(jobs)) == len(told["jobs"])  # GitHub refuses two jobs of one name, PyYAML does not
    assert len(told["jobs"]["test"]["strategy"]["matrix"]["python"]) == 3


def test_commits_that_are_named_are_there():
    """CONTRIBUTING shows real commits; a clone without its history cannot tell."""
    named = set(re.findall(r"`([0-9a-f]{7})`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert len(named) >= 6
    if (
        subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True).stdout
        != b"false\n"
    ):
        pytest.skip("there is no whole history here")
    for commit in named:
        subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, built by the backend from a copy of what git knows, as `python -m build` does."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in files.split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def data_files():
    """What of the package is no Python: read at run time, so it has to travel."""
    told = subprocess.run(["git", "ls-files", "misvo"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return {name for name in told.split() if not name.endswith(".py")}


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_package(built):
    wheel, sdist = built
    assert "misvo/py.typed" in data_files()
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "misvo").rglob("*.py")}
    assert data_files() <= inside and modules <= inside
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert data_files() | modules | {"pyproject.toml", "README.md", "LICENSE"} <= packed


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(built, tmp_path):
    """`misvo --help` needs neither torch nor a model: the wheel with typer and rich alone answers."""
    home = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", str(built[0])], check=True)
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), "typer", "rich"], check=True)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": bare, "capture_output": True, "text": True, "check": True}
    shown = subprocess.run([str(home / "bin" / "misvo"), "--help"], **options).stdout
    assert "steer" in shown and "serve" in shown
    version = subprocess.run([str(home / "bin" / "misvo"), "--version"], **options).stdout
    assert version.strip() == f"misvo {misvo.__version__}"
    where = subprocess.run([str(python), "-c", "import misvo; print(misvo.__file__)"], **options).stdout
    assert str(home) in where
