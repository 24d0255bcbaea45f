"""One program, one cell: a fresh process behind every wall this machine can build, with an attendant.

The zygote goes behind the first wall itself, once: a private file system (`build_jail`). Then it forks an attendant
for each program. The attendant makes the program's own namespaces and forks the program's process into them, waits,
and reports how it ended. It is also what enforces the two limits that are not CPU time: idleness (a program
that sleeps) and the wall clock as a backstop.

Three plans, best first; `zygote` finds out once which one works here:
  root  namespaces by root's right; the program becomes nobody;
  user  namespaces inside a new user namespace, as any user may where the kernel allows it;
  none  no namespaces: Landlock, the system-call filter and limits are what is left.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time

from . import child, kernel, landlock, seccomp

PLANS = ("root", "user", "none")
_TICK = 0.2  # seconds between two looks at a program
_PROGRESS = 0.004  # less CPU time than this part of the time is idleness


def build_jail(plan, view):
    """The zygote's part, once: leave the user's file system. The folder that programs will work in, None without."""
    if plan == "none":
        return None
    if plan == "user":
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare("user", "mount")
        kernel.map_own_ids(uid, gid)
    else:
        kernel.unshare("mount")
    return kernel.private_root(view)


def enter(plan):
    """The attendant's part: namespaces that its next child lives in."""
    if plan == "none":
        kernel.adopt_orphans()
    else:
        kernel.unshare("mount", "uts", "ipc", "pid", "net")


def confine(plan, view, limits, scratch, keep=()):
    """The program's part, in the order that each step allows the next; after it there is no way back."""
    if plan != "none":
        kernel.empty_folder(scratch, limits["file_bytes"])
        socket.sethostname("sandbox")
    os.chdir(scratch)
    silence(keep)
    os.setsid()
    os.umask(0o077)
    if plan == "root":
        kernel.become_nobody()
    elif plan == "none" and os.geteuid() == 0 and kernel.open_to_all(view["paths"]):
        with contextlib.suppress(OSError):  # a container may have no other user to become
            os.chown(scratch, kernel.NOBODY, kernel.NOBODY)
            kernel.become_nobody()
    if plan != "none":
        kernel.unshare("user")  # one of its own, in which it is nobody: no id is mapped
    kernel.die_with_parent()
    kernel.no_new_privileges()
    kernel.drop_capabilities()
    filtered = seccomp.available()
    # Without a user namespace the process limit counts all that the user runs; the filter does better there.
    kernel.set_limits(limits, count_processes=plan != "none" or not filtered)
    if plan == "none" and landlock.version():
        landlock.restrict(view, [scratch, "/dev/null"])
    if filtered:
        seccomp.install()


def silence(keep):
    """No standard streams, and no file left open but `keep`."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    low = 3
    for handle in sorted(keep):
        os.closerange(low, handle)
        low = handle + 1
    os.closerange(low, 4096)


def attend(plan, view, scratch, limits, request, result, report):
    """Run the program behind `request`; never returns. The line on `report` says how it ended."""
    outcome = {"ended": "setup", "cpu": 0.0}
    try:
        if plan == "none":
            scratch = _temporary_folder()
        enter(plan)
        pid = os.fork()
        if pid == 0:
            _program(plan, view, limits, scratch, request, result)
        os.close(request)
        os.close(result)
        outcome = watch(pid, report, limits)
        if plan == "none":
            end_orphans()
    except OSError as error:
        outcome["why"] = str(error)
    finally:
        if plan == "none":
            _remove(scratch)
        try:
            os.write(report, json.dumps(outcome).encode())
        finally:
            os._exit(0)


def _program(plan, view, limits, scratch, request, result):
    """The program's process; never returns, and runs nothing of the program at exit."""
    try:
        confine(plan, view, limits, scratch, keep=(request, result))
        os.environ["HOME"] = os.environ["TMPDIR"] = scratch
        job = child.read_job(request)
        os.write(result, b'["ready"]\n')  # the walls stand: from here on, a failure is the program's
        child.serve(job, result, limits)
    except BaseException as error:
        os.write(result, json.dumps(["broken", repr(error)]).encode() + b"\n")
    finally:
        os._exit(0)


def _temporary_folder():
    path = f"/tmp/misvo-{os.urandom(8).hex()}"
    os.mkdir(path, 0o700)
    return path


def _remove(folder):
    """Remove a folder that a program wrote in: it may hold anything, deeply nested, and links to anywhere."""
    import shutil  # large, and only this plan needs it: the zygote stays small

    shutil.rmtree(folder, ignore_errors=True)


def watch(pid, report, limits):
    """Wait for the program; end it when it idles, when the backstop passes or when nobody listens.

    Idleness is counted in our own ticks without progress, not in seconds: when the machine is too busy, or
    suspended, we do not tick either.
    """
    handle = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.register(report, 0)  # POLLERR: the verifier is gone
    clock = (~pid << 3) | 2  # the CPU clock of another process, see clock_getcpuclockid(3)
    patience = max(1, round(limits["idle_seconds"] / _TICK))
    start, ticks, spent, why = time.monotonic(), 0, 0.0, None
    while why is None:
        events = dict(poller.poll(_TICK * 1000))
        if handle in events:
            break
        try:
            cpu = time.clock_gettime(clock)
        except OSError:
            continue  # it has just ended
        ticks += 1
        if cpu - spent > _PROGRESS * limits["idle_seconds"]:
            spent, ticks = cpu, 0
        if events:
            why = "abandoned"
        elif ticks >= patience:
            why = "idle"
        elif time.monotonic() - start > limits["wall_seconds"]:
            why = "wall"
    if why:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(handle)
    code = os.waitstatus_to_exitcode(status)
    ended = why or ("exit" if code == 0 else "killed")
    return {"ended": ended, "code": code, "cpu": usage.ru_utime + usage.ru_stime}


def end_orphans():
    """Without a pid namespace: what the program started is our child by now; end it, and what that started."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not children:
            return
        for orphan in children:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
