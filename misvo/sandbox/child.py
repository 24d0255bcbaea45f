"""What runs inside the walls: load one program, call its function on each input, write down each answer.

This process holds the program and the inputs, nothing else: no expected value and no comparison comes near
it, so there is nothing in its memory, frames or files to find, and a program that forges answers has only
answered. Whatever the program breaks here, it breaks for itself.

Left out on purpose: judging. Standard library only: the sandbox loads this file by itself.
"""

import os
import random
import signal
import sys
import time
import types

from .codec import decode, dumps, encode, loads


class OutOfTime(BaseException):
    """One call used up its CPU time."""


def _alarm(number, frame):
    raise OutOfTime


def read_all(handle):
    pieces = []
    while piece := os.read(handle, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _write(handle, line):
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(handle, data) :]


def serve(job, result, limits):
    """Run the job `{"source", "entry_point", "calls"}` and write a line for each call.

    `[index, "ok", tree, microseconds]` with the CPU time it took, or `[index, "error", name, microseconds]`.
    """
    random.seed(0)  # a program that draws numbers scores the same every time
    signal.signal(signal.SIGPROF, _alarm)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        function = _load(job["source"], job["entry_point"])
    except BaseException as error:
        _write(result, dumps(["load", "error", type(error).__name__, 0]))
        return
    for index, arguments in enumerate(job["calls"]):
        start = time.process_time()
        try:
            try:
                # CPU time of this process, not wall-clock time: a busy machine does not change a score.
                signal.setitimer(signal.ITIMER_PROF, limits["call_seconds"])
                # Decoded for each call, so that what a program does to its arguments stays with that call.
                word, tree = "ok", dumps(encode(function(*decode(arguments))))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except BaseException as error:
            word, tree = "error", dumps(type(error).__name__)
        if len(tree) > limits["answer_bytes"]:
            word, tree = "error", '"TooLarge"'
        spent = int((time.process_time() - start) * 1e6)
        _write(result, f'[{index},"{word}",{tree},{spent}]')


def _load(source, entry_point):
    # A module under its own name, not "__main__": the answer's demonstration block must not run.
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    exec(compile(source, "<answer>", "exec", dont_inherit=True), module.__dict__)
    function = module.__dict__[entry_point]
    if not callable(function):
        raise TypeError(entry_point)
    return function


def read_job(request):
    """The job from its pipe, closed before any of the program runs."""
    job = loads(read_all(request))
    os.close(request)
    return job
