"""What the code verifier costs: scoring 16 answers against starting 16 bare Python processes, in one run.

    python benchmarks/verifier.py [--answers 16] [--repeats 15] [--workers N]

The yardstick is `python -I -S -c pass` once for each answer, as many at a time as the verifier has workers, plus the
programs' own time: the same functions called on the same inputs in this process, shared among the workers. The median
ratio is to stay below 1.5. Standard library only; no data is needed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from misvo.rewards.code import CodeReward, mbpp_plus_columns
from misvo.sandbox.codec import decode, loads

SOLUTION = """
def primes(n):
    found = []
    for k in range(2, n):
        if all(k % p for p in found if p * p <= k):
            found.append(k)
    return found
"""
RECORD = {
    "task_id": "benchmark",
    "prompt": "Write a function to list the primes below n.",
    "entry_point": "primes",
    "canonical_solution": SOLUTION,
    "base_input": [[10]],
    "plus_input": [[n] for n in range(100)],
    "atol": 0,
    "assertion": "assert primes(10) == [2, 3, 5, 7]",
}


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def start_bare(count, workers):
    def start(_):
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(start, range(count)))


def run_here(sources, calls):
    """The programs' own work, without any process or wall around it."""
    for source in sources:
        scope = {}
        exec(compile(source, "<answer>", "exec"), scope)
        for arguments in calls:
            scope["primes"](*arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, default=None)
    options = parser.parse_args()
    reward = CodeReward(workers=options.workers)
    workers = reward.sandbox.workers
    columns = mbpp_plus_columns(RECORD)
    calls = [decode(tree) for tree in loads(columns["calls"])]

    def score(sources):
        rows = {name: [value] * len(sources) for name, value in columns.items()}
        scores = reward(prompts=["?"] * len(sources), completions=sources, **rows)
        assert scores == [1.0] * len(sources), scores

    score([SOLUTION])  # the task's expected values, once
    rows = []
    for repeat in range(options.repeats):
        # Programs that are all different, or they would be scored once.
        sources = [f"{SOLUTION}# answer {repeat} {index}\n" for index in range(options.answers)]
        sources = [source.replace("found", f"found_{repeat}_{index}") for index, source in enumerate(sources)]
        bare = timed(lambda: start_bare(options.answers, workers))
        own = timed(lambda sources=sources: run_here(sources, calls)) / workers
        rows.append((timed(lambda sources=sources: score(sources)), bare, own))
    ratios = [verify / (bare + own) for verify, bare, own in rows]
    verify, bare, own = (statistics.median(column) * 1000 for column in zip(*rows, strict=True))
    result = {
        "answers": options.answers,
        "workers": workers,
        "scoring_ms": round(verify, 1),
        "bare_python_ms": round(bare, 1),
        "programs_own_ms": round(own, 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_worst": round(max(ratios), 2),
        "plan": reward.sandbox.report["plan"],
        "bubblewrap": reward.sandbox.report["bubblewrap"],
    }
    print(json.dumps(result))
    reward.close()
    return 0 if result["ratio"] < 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
