"""The one number that is fitted before the paper's tables are made here: the unit of the reward.

    python benchmarks/unit.py preference:taste --tries taste-unit.jsonl

The paper's η and λ are in units of its reward model. A reward of another unit is multiplied by a factor, so that
unregularised steering (the paper's η, no penalty) ends where the paper's ended: KL_ref of 162 nats in up to 512 tokens,
0.32 a token. The factor is searched on prompts of misvo's own, which no table uses: KL grows about as its square, so
each try goes along the line through the last two in logarithms, and stays between what was too little and too much.

Every try is a line of the file and is printed; the same command goes on behind the lines that are there. The last
lines are what a config needs: the reward with its factor, and AISP's λ, a tenth of the spread of the reference's
rewards.
"""

import argparse
import json
import math
from pathlib import Path

from misvo.threads import use_free_cores

use_free_cores()  # before torch is imported

import misvo
from misvo.metrics import spread
from misvo.rewards.specs import terms
from misvo.tasks.prompts import OWN

NATS = 162.2 / 512  # a token; the paper's Table 3, unregularised, over its longest response
EXPONENT = 2.0  # of the KL of small steps, before two tries tell another
WIDEST = 30.0  # a try is at most so many times the one before


def scaled(spec: str, factor: float) -> str:
    """A reward's spec with each weight of its sum times a factor."""
    text = ""
    for weight, term in terms(spec):
        sign = "-" if weight < 0 else "+"
        text += (f" {sign} " if text else "-" if weight < 0 else "") + f"{abs(weight) * factor:.4g}*{term}"
    return text


def next_factor(tries: list[tuple[float, float]], target: float) -> float:
    """The factor to try after these pairs of a factor and its nats a token, to three digits."""
    (factor, nats), exponent = tries[-1], EXPONENT
    if len(tries) > 1 and all(value > 0 for _, value in tries[-2:]):
        (f0, n0), (f1, n1) = tries[-2:]
        slope = math.log(n1 / n0) / math.log(f1 / f0)
        exponent = min(max(slope, 0.5), 4.0)  # two tries that lie close say little about the slope
    step = math.log(target / nats) / exponent if nats > 0 else math.inf
    step = min(max(step, -math.log(WIDEST)), math.log(WIDEST))
    chosen = factor * math.exp(step)
    low = max((f for f, n in tries if n < target), default=0.0)
    high = min((f for f, n in tries if n >= target), default=math.inf)
    if low < high and not low < chosen < high:
        chosen = math.sqrt(low * high)
    return float(f"{chosen:.3g}")


def attempt(policy, spec: str, factor: float, arguments) -> dict:
    """One run of unregularised steering: KL_ref in nats a token, and the spread of the reference's rewards."""
    settings = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.max_new_tokens}
    results = misvo.steer_many(
        policy,
        list(OWN[: arguments.prompts]),
        scaled(spec, factor),
        preset="paper",
        cost="none",
        top_p=arguments.top_p,
        seed=arguments.seed,
        kl_ref=True,
        progress=False,
        **settings,
    )
    nats = [result.kl_ref.total / arguments.max_new_tokens for result in results]
    spreads = [spread(c.reward for c in result.candidates if c.step == 0).std for result in results]
    return {
        "factor": factor,
        "nats": sum(nats) / len(nats),
        "by_prompt": nats,
        "spread": sum(spreads) / len(spreads),
        "first_mean": sum(result.trace[0]["mean"] for result in results) / len(results),
        "last_mean": sum(result.trace[-1]["mean"] for result in results) / len(results),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reward", help="a spec, such as preference:taste")
    parser.add_argument("--tries", required=True, help="the file of tries, one a line")
    parser.add_argument("--first", type=float, default=10.0, help="the factor to begin with")
    parser.add_argument("--nats", type=float, default=NATS, help="a token")
    parser.add_argument("--within", type=float, default=0.1, help="share of it that is near enough")
    parser.add_argument("--most", type=int, default=8, help="tries")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    sizes = ("reward", "model", "prompts", "rollouts", "steps", "max_new_tokens", "top_p", "seed")
    setting = {name: getattr(arguments, name) for name in sizes}
    path, tries = Path(arguments.tries), []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        one = json.loads(line)
        if one["setting"] != setting:
            raise SystemExit(f"{path} holds tries of another reward or size: give another file.")
        tries.append(one)
    policy = misvo.Policy.from_pretrained(arguments.model)
    while not tries or abs(tries[-1]["nats"] / arguments.nats - 1) > arguments.within:
        if len(tries) == arguments.most:
            raise SystemExit(f"{len(tries)} tries did not come within {arguments.within:.0%} of {arguments.nats:.3f}.")
        known = [(one["factor"], one["nats"]) for one in tries]
        factor = next_factor(known, arguments.nats) if known else arguments.first
        one = {**attempt(policy, arguments.reward, factor, arguments), "setting": setting}
        tries.append(one)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(one) + "\n")
        print(f"factor {factor:g}: {one['nats']:.4f} nats a token, spread {one['spread']:.3f}", flush=True)
    last = tries[-1]
    print(f'reward = "{scaled(arguments.reward, last["factor"])}" # {last["nats"]:.3f} nats a token')
    print(f"penalty = {0.1 * last['spread']:.2g} # of AISP: a tenth of the reference's spread, {last['spread']:.3f}")


if __name__ == "__main__":
    main()
