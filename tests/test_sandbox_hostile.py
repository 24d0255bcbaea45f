"""Hostile programs against the sandbox's walls: none gets out, outstays its limits or leaves anything behind."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hostile.escape import PROGRAMS as ESCAPE
from hostile.exhaustion import PROGRAMS as EXHAUSTION
from hostile.walls import call, leftovers, marked, tight_sandbox

from misvo.sandbox import Calls, Program
from misvo.sandbox.codec import encode

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=["auto", "none"])
def sandbox(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISVO_TEST_SECRET", "a-secret-of-the-user")
        with tight_sandbox(request.param) as sandbox:
            yield sandbox


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Things that a program must not reach: a file with a secret, listening sockets, another process, a path."""
    folder = tmp_path_factory.mktemp("outside")
    folder.chmod(0o755)
    canary = folder / "canary.txt"
    canary.write_text("the-canary-sings")
    canary.chmod(0o644)
    reached = []
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", tcp.getsockname()[1]))
    name = f"misvo-test-{os.getpid()}"
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name)
    unix.listen()
    for listener, wait in ((tcp, tcp.accept), (unix, unix.accept), (udp, lambda: udp.recvfrom(1))):
        threading.Thread(target=_note, args=(wait, reached, listener), daemon=True).start()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield {
        "CANARY": str(canary),
        "HOME": str(Path.home()),
        "PORT": str(tcp.getsockname()[1]),
        "SOCKET": name,
        "VICTIM": str(victim.pid),
        "TARGET": str(folder / "written"),
        "reached": reached,
        "victim": victim,
    }
    victim.kill()
    victim.wait()
    for listener in (tcp, udp, unix):
        listener.close()


def _note(wait, reached, listener):
    while True:
        try:
            wait()
        except OSError:
            return
        reached.append(listener)


@pytest.mark.parametrize("name", ESCAPE)
def test_no_escape(sandbox, outside, name):
    report = sandbox.report
    if len(report["missing"]) > 1:
        pytest.skip("this machine has neither namespaces nor their stand-ins: " + "; ".join(report["missing"]))
    source = ESCAPE[name]
    for word in ("CANARY", "HOME", "PORT", "SOCKET", "VICTIM", "TARGET"):
        source = source.replace(f"@{word}@", outside[word])
    assert call(sandbox, source, 1) is None  # every one of them answers once it got through
    assert outside["reached"] == []
    assert outside["victim"].poll() is None
    assert os.getpriority(os.PRIO_PROCESS, outside["victim"].pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert not Path(outside["TARGET"]).exists()
    assert not leftovers(sandbox)


def test_each_program_has_namespaces_of_its_own(sandbox):
    """Seen from outside while two programs sleep: the system-call filter alone would hide that a wall is missing."""
    if sandbox.report["plan"] == "none":
        pytest.skip("no namespaces in this plan")
    sleeper = Program("import time\ndef solve(): time.sleep(9)", "solve", Calls.of([encode([])]))
    thread = threading.Thread(target=sandbox.run, args=([sleeper, sleeper],))
    thread.start()
    seen, deadline = {}, time.monotonic() + 5
    while len(seen) < min(2, sandbox.workers) and time.monotonic() < deadline:
        for pid in marked(sandbox.limits.wall_seconds):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1" and "Seccomp:\t2" in status:
                    links = ("user", "mnt", "pid", "net", "ipc", "uts")
                    seen[pid] = {link: os.readlink(f"/proc/{pid}/ns/{link}") for link in links}
        time.sleep(0.02)
    thread.join()
    if not seen and os.geteuid() != 0:
        pytest.skip("only root may look at the namespaces of a process that gave up its rights")
    ours = {link: os.readlink(f"/proc/self/ns/{link}") for link in ("user", "mnt", "pid", "net", "ipc", "uts")}
    every = [ours, *seen.values()]
    assert len(seen) == min(2, sandbox.workers)
    for link in ours:
        assert len({links[link] for links in every}) == len(every), link


def test_the_canary_can_be_read_outside(outside):
    """The escapes above fail for the right reason."""
    scope = {}
    exec(ESCAPE["read a file of the user"].replace("@CANARY@", outside["CANARY"]), scope)
    assert scope["solve"](1) == "the-canary-sings"


def test_the_environment_is_scrubbed(sandbox):
    names = call(sandbox, "import os\ndef solve(n): return sorted(os.environ)", 1)
    assert "MISVO_TEST_SECRET" in os.environ and "MISVO_TEST_SECRET" not in names
    ours = ("PYTHON", "OMP", "OPENBLAS", "MALLOC", "LANG", "LC_", "PATH", "HOME", "PWD", "TMPDIR")
    assert [name for name in names if not name.startswith(ours)] == []


@pytest.mark.parametrize("sandbox", ["auto", pytest.param("none", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("name", EXHAUSTION)
def test_no_exhaustion(sandbox, name):
    """Ended within its limits, without an answer, nothing left behind, the program beside it not disturbed."""
    calls = Calls.of([encode([n]) for n in range(5)])
    start = time.monotonic()
    hostile, honest = sandbox.run(
        [Program(EXHAUSTION[name], "solve", calls), Program("def solve(n): return n", "solve", calls)]
    )
    assert time.monotonic() - start < 60  # its own limits take two seconds; the machine may be busy
    assert hostile.answers == {} and honest.answers == {n: n for n in range(5)}
    assert hostile.ended in ("exit", "killed", "idle", "flood") and hostile.cpu_seconds < 2.5
    assert not leftovers(sandbox)


def test_nothing_survives_the_verifier():
    """Killed without warning, the verifier takes zygote, attendants and programs with it."""
    mark = 90 + random.random()
    source = f"""
    from misvo.sandbox import *
    limits = Limits(idle_seconds=80, wall_seconds={mark})
    print("started", flush=True)
    Sandbox(limits).run([Program("import time\\nprint(1)\\ntime.sleep(90)\\ndef solve(): 0", "solve", Calls.of([]))])
    """
    verifier = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=-1
    )
    verifier.stdout.readline()
    deadline = time.monotonic() + 60  # the machine may be busy
    while len(marked(mark)) < 3 and time.monotonic() < deadline:  # zygote, attendant, program
        time.sleep(0.05)
    assert len(marked(mark)) >= 3
    verifier.send_signal(signal.SIGKILL)
    verifier.wait()
    verifier.stdout.close()
    while marked(mark) and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    assert marked(mark) == []
