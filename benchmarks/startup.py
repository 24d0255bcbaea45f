"""How long a user waits: `misvo --help`, and `misvo steer` from the start of the process to its first token.

    python benchmarks/startup.py

The embedded model has to be in its cache (`make demo` puts it there).
"""

import argparse
import statistics
import subprocess
import sys
import time

from measure import seconds, write_json

STEER = """
import sys, time
from misvo import cli
from misvo.engines.torch import TorchEngine

started, advance = float(sys.argv[1]), TorchEngine.advance

def first(engine):
    TorchEngine.advance = advance
    print(time.time() - started, file=sys.stderr)
    return advance(engine)

TorchEngine.advance = first
sys.argv[1:] = ["steer", "Hello.", "-k", "2", "-n", "1", "-t", "1", "--json"]
cli.main()
"""


def first_token():
    """Seconds from the start of a process to the moment that decoding begins, as the process itself tells."""
    command = [sys.executable, "-c", STEER, str(time.time())]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    ask = [sys.executable, "-m", "misvo.cli", "--help"]
    calls = {
        "help": lambda: seconds(lambda: subprocess.run(ask, capture_output=True, check=True)),
        "steer": first_token,
    }
    report = {name: [call() for _ in range(arguments.rounds)] for name, call in calls.items()}
    for name, values in report.items():
        print(f"{name}: {statistics.median(values):.2f} s (from {min(values):.2f} to {max(values):.2f})")
    write_json(arguments.json, {"arguments": vars(arguments), "seconds": report})


if __name__ == "__main__":
    main()
