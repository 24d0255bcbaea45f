"""The sandbox as its users see it: what programs can do, and the pool that runs them."""

import os
import pickle

import pytest
from hostile.walls import call, tight_sandbox

from misvo.errors import MisvoError
from misvo.sandbox import Calls, Limits, Program, Sandbox, isolation_report
from misvo.sandbox.codec import decode, encode


@pytest.fixture(scope="module", params=["auto", "none"])
def sandbox(request):
    with tight_sandbox(request.param) as sandbox:
        yield sandbox


# --- programs -----------------------------------------------------------------------------------------------------


def test_programs_run_side_by_side_and_answers_come_in_order(sandbox):
    calls = Calls.of([encode([3]), encode([4])])
    outcomes = sandbox.run([Program(f"def solve(n): return n * {k}", "solve", calls) for k in range(8)])
    assert [outcome.answers for outcome in outcomes] == [{0: 3 * k, 1: 4 * k} for k in range(8)]


def test_plain_data_of_every_kind_goes_in_and_comes_back(sandbox):
    values = [None, True, -3, 1 << 200, 0.1, float("inf"), 2 - 3j, "é\ud800\0", b"\xff", [1, (2,)], {3}, frozenset([4])]
    values += [{"k": {(1, 2): [None]}}, [], (), {}, set()]
    assert call(sandbox, "def solve(*values): return list(values)", *values) == values


def test_subclasses_and_numpy_scalars_come_back_as_plain_data(sandbox):
    pytest.importorskip("numpy")
    source = """
    from collections import Counter, OrderedDict, defaultdict, namedtuple
    import numpy
    def solve(text):
        point = namedtuple("P", "x y")(1, 2)
        numbers = numpy.float64(0.5), numpy.int64(3), numpy.bool_(True)
        return defaultdict(int, Counter(text)), OrderedDict(a=1), point, *numbers
    """
    assert call(sandbox, source, "aab") == ({"a": 2, "b": 1}, {"a": 1}, (1, 2), 0.5, 3, True)


def test_the_standard_library_threads_and_a_temporary_folder_are_there(sandbox):
    source = """
    import asyncio, decimal, hashlib, os, sqlite3, tempfile, threading
    async def later(n): return n
    def solve(n):
        box = []
        thread = threading.Thread(target=box.append, args=(n,))
        thread.start()
        thread.join()
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("kept")
            file.seek(0)
            return box, asyncio.run(later(n)), file.read(), os.listdir("."), str(decimal.Decimal("0.1"))
    """
    box, later, text, files, number = call(sandbox, source, 5)
    assert (box, later, text, number) == ([5], 5, "kept", "0.1") and len(files) <= 1


def test_programs_start_from_nothing(sandbox):
    """No file, variable or module of one program is there for the next."""
    source = """
    import builtins, os
    def solve(n):
        seen = (os.listdir("."), hasattr(builtins, "mark"), "MARK" in os.environ)
        open("mark", "w").write("x"), setattr(builtins, "mark", 1), os.environ.update(MARK="1")
        return seen
    """
    assert [call(sandbox, source, 1) for _ in range(2)] == [([], False, False)] * 2


def test_arguments_are_fresh_for_each_call(sandbox):
    calls = Calls.of([encode([[1, 2]]), encode([[1, 2]])])
    [outcome] = sandbox.run([Program("def solve(x): x.append(0); return x", "solve", calls)])
    assert [decode(outcome.answers[index]) for index in (0, 1)] == [[1, 2, 0]] * 2


def test_a_call_that_never_ends_costs_only_itself(sandbox):
    source = "def solve(n):\n    while n == 1: pass\n    return n"
    [outcome] = sandbox.run([Program(source, "solve", Calls.of([encode([n]) for n in range(4)]))])
    assert outcome.answers == {0: 0, 2: 2, 3: 3}


def test_random_numbers_and_set_order_are_the_same_every_time(sandbox):
    source = "import random\ndef solve(n): return [random.random(), list(set('deterministic')), hash('x')]"
    assert call(sandbox, source, 1) == call(sandbox, source, 1)


def test_extra_time_is_granted(sandbox):
    spin = "import time\ndef solve(n):\n    while time.process_time() < 1.6: pass\n    return n"
    slow, fast = sandbox.run([Program(spin, "solve", Calls.of([encode([1])]), extra) for extra in (2.0, 0.0)])
    assert slow.answers == {0: 1} and fast.answers == {}
    assert 1.5 < slow.cpu_seconds < 2.5 and 1.5 < slow.call_seconds[0] < 2.5


# --- the pool -----------------------------------------------------------------------------------------------------


def test_a_dead_zygote_is_replaced(sandbox):
    sandbox._zygote.process.kill()
    sandbox._zygote.process.wait()
    assert call(sandbox, "def solve(n): return n", 1) == 1


def test_a_forked_verifier_starts_its_own_zygote(sandbox):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, pickle.dumps(call(sandbox, "def solve(n): return n", 6)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        assert pickle.loads(file.read()) == 6
    os.waitpid(pid, 0)
    assert call(sandbox, "def solve(n): return n", 7) == 7


def test_the_report_names_what_stands_and_what_is_missing():
    report = isolation_report()
    assert "resource limits" in report["layers"]
    weak = report["plan"] == "none" and not report["bubblewrap"]
    assert weak == any("namespaces" in text for text in report["missing"])


def test_missing_walls_are_said_once_or_refused():
    with pytest.raises(MisvoError, match="cannot isolate"):
        Sandbox(require_sandbox=True, _plan="none") if not isolation_report()["bubblewrap"] else _refuse()
    if not isolation_report()["missing"]:
        Sandbox(require_sandbox=True).close()


def _refuse():
    raise MisvoError("cannot isolate (bubblewrap gives namespaces even to the plan without)")


def test_one_warning(monkeypatch):
    if isolation_report()["bubblewrap"]:
        pytest.skip("bubblewrap gives namespaces even to the plan without")
    monkeypatch.setattr("misvo.sandbox._warned", set())
    with pytest.warns(UserWarning, match="weaker walls") as caught:
        for _ in range(3):
            Sandbox(_plan="none").close()
    assert len([warning for warning in caught if "weaker walls" in str(warning.message)]) == 1


@pytest.mark.parametrize("name, value", [("cpu_seconds", 0), ("memory", -1), ("wall_seconds", float("nan"))])
def test_limits_are_checked(name, value):
    with pytest.raises(MisvoError, match=name):
        Limits(**{name: value})
