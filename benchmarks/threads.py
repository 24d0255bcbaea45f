"""How OpenMP's threads should wait: tokens per second by rows and by policy, on a quiet machine and beside a busy one.

    python benchmarks/threads.py --json threads.json

Each policy is a process of its own, because OpenMP reads it at the start. `passive` never spins, `default` spins for
long, `spin N` turns N times before it sleeps, `free cores` is what the command line does (misvo/threads.py). All are
run in turn, `--rounds` times, alone and beside one process that keeps a core busy; told is the median, and its ratio to
the best of its column.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager

from misvo.threads import SETTINGS

FREE = "free cores"
POLICIES = {
    FREE: {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "default": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    **{f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in (1000, 5000, 20_000, 100_000)},
}


def work(rows, tokens, choose):
    """Tokens per second of plain sampling for each number of rows; runs in the process of one policy."""
    if choose:
        from misvo.threads import use_free_cores

        use_free_cores()
    import torch  # noqa: F401 - first of all: it reads the policy of this process, which `measure` would choose

    from measure import PROMPTS, load, seconds  # isort: skip

    from misvo.rollouts import Request

    policy, speeds = load(), {}
    prompt = tuple(policy.encode(PROMPTS[0]))
    for count in rows:
        for length in (2, tokens):  # the first one warms up
            request, engine = Request(prompt, 0, 0, range(count), length), policy.engine(count)
            speeds[count] = count * length / seconds(lambda: engine.run(request))  # noqa: B023
    print(json.dumps(speeds))


@contextmanager
def company(busy):
    """Beside one process that keeps a core busy, or alone."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def run(name, arguments):
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [
        sys.executable,
        __file__,
        "--work",
        "--tokens",
        str(arguments.tokens),
        "--rows",
        *map(str, arguments.rows),
        *(["--choose"] if name == FREE else []),
    ]
    done = subprocess.run(command, env={**environment, **POLICIES[name]}, capture_output=True, text=True, check=True)
    return {int(rows): speed for rows, speed in json.loads(done.stdout.splitlines()[-1]).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--choose", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.rows, arguments.tokens, arguments.choose)
    speeds = {}  # (busy, policy, rows) -> tokens per second of each round
    for busy in (False, True):
        for number in range(arguments.rounds):
            for name in arguments.policies:
                with company(busy):
                    for rows, speed in run(name, arguments).items():
                        speeds.setdefault((busy, name, rows), []).append(speed)
                print(f"round {number + 1}, {'busy' if busy else 'idle'}, {name}: done", file=sys.stderr, flush=True)
    middle = {place: statistics.median(values) for place, values in speeds.items()}
    columns = [(busy, rows) for busy in (False, True) for rows in arguments.rows]
    print("| policy | " + " | ".join(f"{rows} rows, {'busy' if busy else 'idle'}" for busy, rows in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in arguments.policies:
        cells = []
        for busy, rows in columns:
            best = max(middle[busy, other, rows] for other in arguments.policies)
            cells.append(f"{middle[busy, name, rows]:.0f} ({middle[busy, name, rows] / best:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    if arguments.json:
        from measure import write_json

        write_json(
            arguments.json, {f"{name}, {rows} rows, busy={busy}": value for (busy, name, rows), value in speeds.items()}
        )


if __name__ == "__main__":
    main()
