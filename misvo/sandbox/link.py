"""The verifier's end of the line to the sandbox: start a zygote, hand it programs, read what comes back.

Everything read here was written by hostile code, or may have been: it is counted, cut at a limit and parsed
as plain data, and nothing in it can raise more than OSError.
"""

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile

from misvo.errors import MisvoError
from misvo.sandbox.codec import NotPlain, loads

_ZYGOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote.py")
_START_SECONDS = 60


class Zygote:
    """A running `zygote`, and the socket that hands it work."""

    def __init__(self, plan, packages, limits, bwrap=None):
        self.bubblewrap = bwrap is not None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"control": theirs.fileno(), "plan": plan, "packages": packages, "limits": limits}
        # The interpreter below a virtual environment: the user's packages stay out of sight.
        python = getattr(sys, "_base_executable", None) or sys.executable
        command = [python, "-s", "-S", "-P", _ZYGOTE, json.dumps(settings)]
        if bwrap:
            command = [bwrap, *_bwrap_options(packages), "--", *command]
        # PYTHONHASHSEED: the order of a set of strings, and so a score, is the same every time.
        environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
        # One arena and one thread: the address-space limit is for data, not for what libraries set aside.
        environment |= {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the user's program
            )
            theirs.close()
            self.control.settimeout(_START_SECONDS)
            try:
                self.facts = json.loads(self.control.recv(1 << 16))
            except (OSError, ValueError):
                self.close()
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise MisvoError(f"The sandbox did not start: {last or 'no sign of it'}.") from None
            self.control.settimeout(None)

    @property
    def alive(self):
        return self.process.poll() is None

    def close(self):
        self.control.close()  # the zygote leaves when it reads the end of this socket
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(plan, packages, limits):
    """A zygote inside bubblewrap where that is installed and allowed, else a plain one."""
    bwrap = shutil.which("bwrap")
    if bwrap:
        with contextlib.suppress(MisvoError):  # installed, but not allowed here
            return Zygote(plan, packages, limits, bwrap)
    return Zygote(plan, packages, limits)


def _bwrap_options(packages):
    """Bubblewrap's walls around the zygote: no network, no home, nothing writable but an empty /tmp."""
    options = ["--unshare-all", "--new-session", "--chdir", "/"]
    options += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    shown = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    shown += [os.path.join(sys.base_prefix, name) for name in ("bin", "lib")]
    for path in [*shown, os.path.dirname(_ZYGOTE)]:
        if os.path.islink(path):  # /lib -> usr/lib
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind-try", path, path]
    for name in ("site-packages", "dist-packages"):
        folder = os.path.join(os.path.dirname(os.__file__), name)
        if os.path.isdir(folder):
            options += ["--tmpfs", folder]
    for path in packages:
        options += ["--ro-bind-try", path, path]
    return options


def exchange(zygote, request, settings):
    """(lines of the program's process, how it ended); OSError when the walls did not come to stand."""
    with contextlib.ExitStack() as stack:
        ends = [_pipe(stack) for _ in range(3)]
        (job_out, job_in), (result_out, result_in), (report_out, report_in) = ends
        theirs = (job_out, result_in, report_in)
        socket.send_fds(zygote.control, [json.dumps(settings).encode()], [file.fileno() for file in theirs])
        for file in theirs:
            file.close()
        with contextlib.suppress(BrokenPipeError):  # the process died first; the report says why
            rest = memoryview(request)
            while rest:
                rest = rest[job_in.write(rest) :]
        job_in.close()
        patience = settings["wall_seconds"] + _START_SECONDS
        data, flooded = _read(result_out, settings["output_bytes"], patience)
        if flooded:  # leaving closes our ends, and then the attendant ends the program
            ended = {"ended": "flood", "cpu": 0.0}
        else:
            ended = json.loads(_read(report_out, 1 << 16, patience)[0] or b'{"ended": "setup"}')
    lines = data.split(b"\n")[:-1]  # what follows the last newline is not a whole line
    if not lines or lines[0] != b'["ready"]':
        said = lines[0].decode(errors="replace") if lines else "its process died"
        raise OSError(ended.get("why") or said)
    return lines[1:], ended


def _pipe(stack):
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", 0)), stack.enter_context(open(writer, "wb", 0))


def _read(file, limit, patience):
    """(all bytes until the end or the limit, whether the limit cut it short)."""
    pieces, size = [], 0
    while _ready(file, patience):
        piece = file.read(1 << 18)
        if not piece:
            return b"".join(pieces), False
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return b"".join(pieces)[:limit], True
    raise OSError("its process does not end")


def _ready(file, patience):
    poller = select.poll()  # select() refuses handles above 1023, which a large program may have
    poller.register(file, select.POLLIN)
    return poller.poll(patience * 1000)


def parse_answers(lines, count):
    """({index: tree}, {index: CPU seconds}) of the calls, `count` in all, that were answered.

    The first word on a call counts. Lines that are no word on any call, as programs may write, are passed over,
    up to a number: reading a flood of them would be work for us.
    """
    first = {}
    for line in lines[: 2 * count + 8]:
        try:
            parsed = loads(line)
        except NotPlain:
            continue
        if type(parsed) is not list or [type(part) for part in parsed[:2] + parsed[3:]] != [int, str, int]:
            continue
        if parsed[0] in range(count):
            first.setdefault(parsed[0], parsed)
    answered = [parsed for parsed in first.values() if parsed[1] == "ok"]
    return {part[0]: part[2] for part in answered}, {part[0]: part[3] / 1e6 for part in answered}
