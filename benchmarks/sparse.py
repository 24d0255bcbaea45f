"""Rewards made of parts: three words that a model rarely says, and a length. Methods at equal samples.

    python benchmarks/sparse.py [--methods auto particles] [--seed 1]

Prints, over four prompts, the mean reward of all responses and the best one, the nats per token of the last step and
the CPU seconds. Two cores are enough; a method takes about two minutes.
"""

import argparse
import statistics
import time

from misvo.threads import use_free_cores

use_free_cores()

import misvo

CASES = {
    "Give me one tip for sleeping better.": "dark,warm,friend",
    "Describe a good friend.": "honest,laugh,time",
    "Why do people travel?": "ocean,music,friend",
    "Tell me about dogs.": "love,water,child",
}
METHODS: dict[str, dict] = {
    "best-of-n": {"method": "best-of-n"},
    "auto": {},
    "particles": {"method": "particles"},
    "particles, half of the rows count": {"method": "particles", "target_ess": 8.0},
    "the same, blocks of 4": {"method": "particles", "target_ess": 8.0, "block": 4},
    "the same, blocks of 16": {"method": "particles", "target_ess": 8.0, "block": 16},
    "the same, steered": {"method": "particles", "target_ess": 8.0, "proposal": "steered"},
    "particles, λ = 0.1": {"method": "particles", "penalty": 0.1},
    "particles, learned value": {"method": "particles", "potential": "value"},
    "blockwise": {"method": "blockwise"},
}
SIZES = {"rollouts": 16, "steps": 6, "max_new_tokens": 48}


def measure(policy, options: dict, seed: int) -> str:
    started = time.process_time()
    settings = misvo.Settings.from_preset(**SIZES, seed=seed, **options)
    with misvo.Session(policy) as session:
        handles = [
            session.add(prompt, misvo.rewards.load(f"contains:{words} + words:20-40"), settings)
            for prompt, words in CASES.items()
        ]
        while session.busy:
            session.step()
    results = [handle.result for handle in handles]
    mean = statistics.mean(c.reward for result in results for c in result.candidates) - 1
    best = statistics.mean(result.highest.reward for result in results) - 1
    nats = statistics.mean(sum(r.trace[-1]["kl_per_position"]) / SIZES["max_new_tokens"] for r in results)
    return f"{mean:.3f} | {best:.2f} | {nats:.3f} | {time.process_time() - started:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    print("| method | mean | best | nats/token | CPU s |\n|---|---|---|---|---|")
    for name in given.methods:
        print(f"| {name} | {measure(policy, METHODS[name], given.seed)} |", flush=True)


if __name__ == "__main__":
    main()
