"""The process that all programs are forked from: a bare interpreter that has never seen a test or an answer.

`misvo.sandbox` starts one, as `python -s -S -P zygote.py SETTINGS` with a scrubbed environment, and keeps it.
Forking a warm interpreter costs a tenth of starting one. The zygote only passes file handles on: what a program
gets and what it answers goes through pipes that the zygote never reads, so nothing of one run can be found in
the next.

It cannot import misvo (that would bring the user's packages along), so it makes a bare package of this folder
and takes its siblings from there.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import types

if __name__ == "__main__":  # run by its path: `from .` means this folder, without any `__init__`
    __package__ = "sandbox"
    sys.modules[__package__] = types.ModuleType(__package__)
    sys.modules[__package__].__path__ = [os.path.dirname(os.path.abspath(__file__))]

from . import cell, kernel, landlock, seccomp

# What answers import most: loaded once, inherited by every fork.
_WARM = ("bisect", "cmath", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math")
_WARM += ("operator", "random", "re", "string", "typing")


def find_view(packages):
    """What a program may read: this interpreter's library without site-packages, system libraries, a few devices."""
    library = os.path.dirname(os.__file__)
    wanted = [os.path.join(sys.base_prefix, "lib"), library, "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    wanted += ["/usr/share/zoneinfo", "/etc/ld.so.cache"]
    wanted += [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
    real = {path: os.path.realpath(path) for path in wanted if os.path.exists(path)}
    paths = [path for path in dict.fromkeys(real.values()) if not any(_below(path, other) for other in real.values())]
    homes = [os.path.realpath(home) for home in (library, "/usr/lib/python3", f"/usr/lib/{os.path.basename(library)}")]
    folders = [f"{home}/{name}" for home in dict.fromkeys(homes) for name in ("site-packages", "dist-packages")]
    return {
        "paths": paths,
        "links": {path: target for path, target in real.items() if path != target},
        "hidden": [folder for folder in folders if os.path.isdir(folder) and any(_below(folder, p) for p in paths)],
        "packages": [os.path.realpath(path) for path in packages],
    }


def _below(path, folder):
    return path.startswith(folder + "/")


def probe(plan, view, limits):
    """Why a cell of this plan cannot be built here, or None: build one, in a child that leaves again."""
    reader, writer = os.pipe()
    attendant = os.fork()
    if attendant == 0:
        os.close(reader)
        try:
            scratch = cell.build_jail(plan, view)
            cell.enter(plan)
            if os.fork() == 0:
                cell.confine(plan, view, limits, scratch, keep=(writer,))
                importlib.import_module("colorsys")  # not loaded yet: can the library still be read?
                os._exit(0)
            os.wait()
        except Exception as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        problem = file.read().decode()
    os.waitpid(attendant, 0)
    return problem or None


def choose_plan(wanted, view, limits):
    """The first plan that works, and why the ones before it did not."""
    problems = {}
    for plan in cell.PLANS if wanted == "auto" else (wanted,):
        if plan == "none" or not (problem := probe(plan, view, limits)):
            return plan, problems
        problems[plan] = problem
    return "none", problems


def main(settings):
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    for name in _WARM:
        importlib.import_module(name)
    view = find_view(settings["packages"])
    plan, problems = choose_plan(settings["plan"], view, settings["limits"])
    stay = plan == "none"
    sys.path.extend({os.path.dirname(path) if stay else kernel.PACKAGES: 1 for path in settings["packages"]})
    facts = {"plan": plan, "problems": problems}
    facts |= {"seccomp": seccomp.available(), "landlock": landlock.version() > 0}
    scratch = cell.build_jail(plan, view)
    control.send(json.dumps(facts).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # attendants report for themselves, nobody waits for them
    seccomp.program(os.uname().machine, 1) if seccomp.available() else None  # remembered: programs are process 1
    gc.collect()
    gc.freeze()
    while True:
        message, handles, _, _ = socket.recv_fds(control, 4096, 3)
        if not message:
            return  # the verifier is gone
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            cell.attend(plan, view, scratch, json.loads(message), *handles)
        for handle in handles:
            os.close(handle)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
