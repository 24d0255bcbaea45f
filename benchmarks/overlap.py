"""A slow reward beside decoding: eight prompts, and a scorer that takes as long as decoding does.

    python benchmarks/overlap.py --json overlap.json

Decoding alone (the reward takes no time) is timed first; then the reward sleeps, for each step of each prompt, its
share of that time. Scored one after the other, the two would take twice as long.
"""

import argparse
import statistics
import time

from measure import PROMPTS, load, seconds, spread, write_json

import misvo


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    policy, prompts = load(), PROMPTS
    size = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.max_new_tokens}

    def run(reward):
        return seconds(lambda: misvo.steer_many(policy, prompts, reward, **size, preset="paper"))

    alone, beside = [], []
    for number in range(arguments.rounds):
        alone.append(run(quick))
        pause = alone[-1] / (len(prompts) * arguments.steps)
        beside.append(run(lambda prompts, completions, **_: time.sleep(pause) or quick(prompts, completions)))  # noqa: B023
        print(f"round {number}: decoding {alone[-1]:.1f} s, with a reward of {pause:.2f} s a step {beside[-1]:.1f} s")
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"total / decoding alone: {ratio:.3f} (spread {spread(beside):.1f} s)")
    write_json(arguments.json, {"arguments": vars(arguments), "alone": alone, "beside": beside, "ratio": ratio})


def quick(prompts, completions, **_):
    return [float(len(text)) for text in completions]


if __name__ == "__main__":
    main()
