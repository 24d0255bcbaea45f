"""This version against an older one: the same decoding in both, in turn, as ratios.

    python benchmarks/against.py 7a37996 --rows 1 16 64
    python benchmarks/against.py 7a37996 --rows 16 --prompt-tokens 512 --max-new-tokens 64 --memory
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/against.py 7a37996

The older version is a commit, checked out into a folder of its own for as long as this takes. Both run in the packages
that are installed now, each shape in processes that take turns, so that a change of the machine's speed meets both.
Best-of-n decodes K rows of T tokens behind one prompt, ends of text ignored; `--method misvo` steers for two steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()


def child(arguments):
    """Seconds of each of some runs, and the bytes of tensors that one more takes, of the version on PYTHONPATH."""
    sys.path.insert(0, str(HERE.parent))
    from measure import PROMPTS, allocated_bytes, load, seconds

    import misvo

    policy = load()
    words = policy.encode(PROMPTS[0])
    prompt = (words * -(-arguments.prompt_tokens // len(words)))[: arguments.prompt_tokens]
    policy.encode = lambda *_, **__: prompt
    steps = 1 if arguments.method == "best-of-n" else 2
    size = {"rollouts": arguments.rows[0], "steps": steps, "max_new_tokens": arguments.max_new_tokens}
    if arguments.rows[0] == 1:  # two responses at the least, one after the other
        size |= {"rollouts": 2, "max_rows": 1}

    def run():
        misvo.steer(policy, "Why?", len, **size, method=arguments.method, preset="paper", kl_ref=False)

    run()
    times = [seconds(run) for _ in range(arguments.runs)]
    print(json.dumps([times, allocated_bytes(run) if arguments.memory else 0]))


def in_a_process(tree, rows, arguments):
    command = [sys.executable, HERE, arguments.revision, "--child", "--rows", rows, "--method", arguments.method]
    command += ["--prompt-tokens", arguments.prompt_tokens, "--max-new-tokens", arguments.max_new_tokens]
    command += ["--runs", arguments.runs, *(["--memory"] if arguments.memory else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the older commit")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=71)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--method", default="best-of-n", choices=["best-of-n", "misvo"])
    parser.add_argument("--rounds", type=int, default=2, help="processes of each version")
    parser.add_argument("--runs", type=int, default=3, help="runs of each process, behind one that does not count")
    parser.add_argument("--memory", action="store_true", help="of tensors too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    root = HERE.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "older"
        subprocess.run(["git", "-C", root, "worktree", "add", "--detach", "-q", older, arguments.revision], check=True)
        try:
            for rows in arguments.rows:
                times, memory = {"older": [], "now": []}, {}
                for _ in range(arguments.rounds):
                    for name, tree in (("older", older), ("now", root)):
                        taken, memory[name] = in_a_process(tree, rows, arguments)
                        times[name] += taken
                report(rows, times, memory)
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", older], check=True)


def report(rows, times, memory):
    older, now = (statistics.median(times[name]) for name in ("older", "now"))
    spread = {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in times.items()}
    line = f"{rows} row{'s' * (rows != 1)}: {older:.2f} s ({spread['older']}) → {now:.2f} s ({spread['now']}): "
    line += f"{now / older:.2f} of the time, {older / now:.2f} of the speed"
    if memory["now"]:
        older, now = (memory[name] / 2**20 for name in ("older", "now"))
        line += f"; tensors {older:.0f} → {now:.0f} MiB, {now / older:.2f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
