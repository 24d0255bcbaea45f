"""Which module knows which: read off the source, nothing is imported. No cycles, and rooms that know only those above.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING. So does a text that is the full
name of a module, as in the tables that load their entries on first use. That a module's package is imported before
it does not count: else a package could not import what is in it.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import misvo

PACKAGE = Path(misvo.__file__).parent
PICTURE = Path(__file__).parent.parent / "docs" / "architecture.md"  # its first block is the table of rooms


def modules(package):
    """Name -> file of every module of a package."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package):
    """Module -> the modules of the same package that it imports."""
    known = modules(package)
    return {name: set(_imported(name, path, known)) for name, path in known.items()}


def _imported(name, path, known):
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b`: the module a.b where there is one, else something in a
            named = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != name:
            named = [node.value] if "." in node.value else []  # "misvo" is the name of a method, too
        else:
            continue
        yield from (other for other in named if other in known)


def cycle(graph):
    """A cycle as "a → b → a", each importing the next; None where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return None


def reached(graph, start):
    """All that a module imports, and what that imports in turn."""
    found, todo = set(), [start]
    while todo:
        fresh = graph[todo.pop()] - found
        found |= fresh
        todo += fresh
    return found


def test_no_cycles():
    graph = imports(PACKAGE)
    assert {"misvo.errors", "misvo.prompts"} <= graph["misvo.rewards.contract"]  # the graph is not empty
    assert cycle(graph) is None


def rooms(text):
    """The lines of the picture: module or folder -> how far down it stands."""
    lines = text.split("```")[1].strip().splitlines()
    rows = [re.split(r"\s{2,}", line)[0].split(" · ") for line in lines]
    places = [(name, depth) for depth, row in enumerate(rows) for name in row]
    assert len(dict(places)) == len(places), "a module stands in two rooms"
    return dict(places)


def room_of(module):
    return [*module.split("."), "__init__"][1]


def upward(graph, depths):
    """The imports that go down the picture, as "a → b"."""
    edges = ((name, other) for name, others in graph.items() for other in others)
    return {f"{a} → {b}" for a, b in edges if depths[room_of(a)] < depths[room_of(b)]}


def test_rooms_import_what_stands_above_them():
    graph, depths = imports(PACKAGE), rooms(PICTURE.read_text(encoding="utf-8"))
    there = {room_of(name) for name in graph}
    assert not there - set(depths), "put these into the picture of docs/architecture.md, where they belong"
    assert not set(depths) - there, "the picture of docs/architecture.md shows what is not there"
    assert not upward(graph, depths)


def test_an_import_from_below_is_found(tmp_path):
    depths = rooms("A picture:\n```\na · b   first\nc       second\n__init__  last\n```\n")
    assert depths == {"a": 0, "b": 0, "c": 1, "__init__": 2}
    files = {"__init__.py": "from made_up import c", "a.py": "", "b.py": "from . import a", "c/__init__.py": ""}
    package = write(tmp_path, {**files, "c/inner.py": "from made_up.b import x\nfrom made_up import c"})
    assert not upward(imports(package), depths)
    write(tmp_path, {"a.py": "def later():\n    from made_up.c.inner import x"})
    assert upward(imports(package), depths) == {"made_up.a → made_up.c.inner"}


def test_no_name_that_only_an_import_would_explain():
    """An annotation that ruff is told not to look up is an import left out for fear of a cycle."""
    marked = {
        f"misvo/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*.py")
        if any("noqa" in line and "F821" in line for line in path.read_text(encoding="utf-8").splitlines())
    }
    assert not marked


def test_the_sandbox_knows_nothing_of_rewards():
    graph = imports(PACKAGE)
    room = {name for name in graph if name == "misvo.sandbox" or name.startswith("misvo.sandbox.")}
    assert {other for name in room for other in graph[name]} - room == {"misvo.errors"}
    # What runs beside a program has no misvo at all.
    inside = {f"misvo.sandbox.{name}" for name in ("cell", "child", "codec", "kernel", "landlock", "seccomp")}
    assert reached(graph, "misvo.sandbox.zygote") == inside


def write(folder, files):
    package = folder / "made_up"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    "back",
    [
        "from made_up.sub.a import thing",
        "from made_up.sub import a",
        "import made_up.sub.a as other",
        "from .sub import a",
        "from .sub.a import *",
        "def later():\n    from made_up.sub.a import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made_up.sub.a import thing",
        "import importlib\nHOMES = {'thing': 'made_up.sub.a'}\nimportlib.import_module(HOMES['thing'])",
    ],
)
def test_a_planted_cycle_is_found(tmp_path, back):
    """sub.a → sub.b → c → sub.a, with the last import written in every way."""
    files = {"__init__.py": "", "sub/__init__.py": "", "sub/a.py": "from . import b", "sub/b.py": "from ..c import x"}
    package = write(tmp_path, {**files, "c.py": "import ast"})
    assert cycle(imports(package)) is None
    found = cycle(imports(write(tmp_path, {"c.py": back}))).split(" → ")
    assert found[0] == found[-1] and set(found) == {"made_up.sub.a", "made_up.sub.b", "made_up.c"}
    graph = imports(package)
    assert all(after in graph[before] for before, after in pairwise(found))


def test_a_package_may_import_what_is_in_it(tmp_path):
    """But what is in it may then use its neighbours only, not what the package itself defines."""
    files = {"__init__.py": "from made_up.a import f\nX = 1", "a.py": "from made_up import b", "b.py": ""}
    assert cycle(imports(write(tmp_path, files))) is None
    package = write(tmp_path, {"a.py": "def f():\n    from made_up import X"})
    assert set(cycle(imports(package)).split(" → ")) == {"made_up", "made_up.a"}
