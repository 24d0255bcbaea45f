"""How long a user waits: `misvo --help`, `misvo steer` from the start of the process to its first token, and the first
conversion of the embedded model.

    python benchmarks/startup.py
    python benchmarks/startup.py --only conversion --rounds 1

By the clock, and in CPU time of the process, which others disturb less. For `steer` the embedded model has to be in its
cache (`make demo` puts it there); conversions go to a folder of their own, which is deleted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from measure import write_json

STEER = """
import sys, time
from misvo import cli

started, imports = float(sys.argv[1]), cli.import_transformers

def then_watch():  # not before: the command is to import what it imports in its own order
    imports()
    from misvo.engines.torch import TorchEngine

    advance = TorchEngine.advance

    def first(engine):
        TorchEngine.advance = advance
        done = advance(engine)
        print(time.time() - started, time.process_time(), file=sys.stderr)
        return done

    TorchEngine.advance = first

cli.import_transformers = then_watch
sys.argv[1:] = ["steer", "Hello.", "-k", "2", "-n", "1", "-t", "1", "--json"]
cli.main()
"""
CONVERSION = """
import sys, time
from misvo.cli_process import import_transformers, quiet_libraries
from misvo.embedded import model_folder

quiet_libraries(decoding=True)
import_transformers()
model_folder("smollm2-135m")
print(time.time() - float(sys.argv[1]), time.process_time(), file=sys.stderr)
"""
HELP = """
import sys, time
from misvo import cli

started = float(sys.argv[1])
sys.argv[1:] = ["--help"]
try:
    cli.main()
finally:
    print(time.time() - started, time.process_time(), file=sys.stderr)
"""


def in_a_process(code, **environment):
    """Seconds from the start of a process to what it waits for, by the clock and of its CPU time, as it tells."""
    command = [sys.executable, "-c", code, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return [float(number) for number in done.stderr.splitlines()[0].split()]


def conversion():
    with tempfile.TemporaryDirectory() as folder:
        return in_a_process(CONVERSION, MISVO_CACHE=folder)


CALLS = {"help": lambda: in_a_process(HELP), "steer": lambda: in_a_process(STEER), "conversion": conversion}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    report = {name: [CALLS[name]() for _ in range(arguments.rounds)] for name in arguments.only}
    for name, values in report.items():
        clock, cpu = zip(*values, strict=True)
        spread = f"from {min(clock):.2f} to {max(clock):.2f}"
        print(f"{name}: {statistics.median(clock):.2f} s ({spread}), CPU {statistics.median(cpu):.2f} s")
    write_json(arguments.json, {"arguments": vars(arguments), "seconds": report})


if __name__ == "__main__":
    main()
