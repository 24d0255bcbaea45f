"""A prompt that is kept once against a copy of it in every row: time and memory of decoding, each way in turn.

    OMP_NUM_THREADS=1 python benchmarks/common_prompt.py

K rows of T tokens behind a prompt of P tokens, `--rounds` times, and one step of best-of-n and of the paper's MISVO for
memory. Told are CPU seconds of decoding without reading the prompt (medians), and the most that torch had allocated at
once above the model.
"""

import argparse
import statistics

from measure import PROMPTS, allocated_bytes, cpu_seconds, load, write_json

import torch  # isort: skip - measure sets the environment that torch reads

import misvo
from misvo.engines import batch
from misvo.rollouts import Request
from misvo.sampling import Sampler

WAYS = {"once": batch.TOGETHER, "copied": 10**9}


def decoding(policy, prompt, rows, tokens):
    """CPU seconds of decoding behind a prompt that was read."""
    engine = policy.engine(rows)
    engine.run(Request(prompt, 0, 0, range(rows), 1, Sampler()))
    return cpu_seconds(lambda: engine.run(Request(prompt, 0, 1, range(rows), tokens, Sampler())))


def memory(policy, prompt, rows, tokens, **options):
    return allocated_bytes(
        lambda: misvo.steer(
            policy, prompt, len, preset="paper", rollouts=rows, steps=1, max_new_tokens=tokens, **options
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    policy, report = load(), {}
    text = " ".join(PROMPTS)
    while len(policy.encode(text)) < max(given.prompt_tokens):
        text += " " + text
    for length in given.prompt_tokens:
        prompt = tuple(policy.encode(text)[:length])
        found = {way: {"seconds": []} for way in WAYS}
        for round_ in range(given.rounds):
            for way, least in WAYS.items():
                batch.TOGETHER = least
                found[way]["seconds"].append(decoding(policy, prompt, given.rows, given.max_new_tokens))
                print(f"{length} tokens, round {round_ + 1}, {way}: {found[way]['seconds'][-1]:.2f} s", flush=True)
        for way, least in WAYS.items():
            batch.TOGETHER = least
            for name, options in {"best-of-n": {"method": "best-of-n"}, "misvo": {}}.items():
                found[way][name] = memory(policy, policy.decode(prompt), given.rows, given.max_new_tokens, **options)
                print(f"{length} tokens, {name}, {way}: {found[way][name] / 2**20:.0f} MiB", flush=True)
        once, copied = found["once"], found["copied"]
        times = statistics.median(once["seconds"]) / statistics.median(copied["seconds"])
        sizes = {name: once[name] / copied[name] for name in ("best-of-n", "misvo")}
        told = ", ".join(f"memory of {name} {ratio:.2f}" for name, ratio in sizes.items())
        print(f"behind {length} tokens, once over copied: time {times:.2f}, {told}", flush=True)
        report[length] = {**found, "time": times, "memory": sizes}
    write_json(given.json, report)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
