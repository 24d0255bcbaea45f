"""How good can one vector be? Directions from samples of the reference policy, tried at a fixed number of nats.

    python benchmarks/direction.py --data PROMPTS.jsonl --row 0 --json direction.json

Draws responses of the reference policy, makes the natural direction (F + δI)⁻¹g of some of them with credit from
prefixes (`misvo.credit`), scales it so that its exact KL at their prefixes is `--nats`, and samples the steered policy.
Asked is what limits the gain: the noise of the gradient (`--samples`), where the nats are spent (`--windows`: only the
first so many positions are steered), or that the gradient is the reference's and not the steered policy's (`again`:
a second direction from responses of the first one, alone and summed with the first).
"""

import argparse
import json
import statistics
from pathlib import Path

from measure import write_json

import torch  # isort: skip - measure sets the environment that torch reads

import misvo
from misvo import credit
from misvo.cost import mean_score
from misvo.fisher import Fisher
from misvo.head import centred, softmax, token_kl
from misvo.interventions import Vectors
from misvo.metrics import diversity
from misvo.rewards import as_reward, score
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.tie import Tie, shared
from misvo.updates import natural_vectors

LENGTH, PREFIXES, DAMPING = 64, 256, 0.1
REWARDS = {"sentiment": "sentiment", "similarity": "similarity:cats and dogs", "reading ease": "reading-ease"}


class Study:
    def __init__(self, policy, prompt):
        self.policy, self.prompt, self.head = policy, prompt, policy.head
        self.tokens = tuple(policy.encode(prompt))

    def sample(self, count, step, u=None, window=LENGTH):
        """Rollouts under u at the first `window` positions; with mean law and expected rows where u is None."""
        tie = windowed(window)
        request = Request(
            prompt=self.tokens,
            seed=7,
            step=step,
            rollouts=range(count),
            max_new_tokens=LENGTH,
            sampler=Sampler(top_p=0.95),
            intervention=None if u is None else Vectors(u[:1], shared(window)),
            keep=Keep(scores=True, fisher="steered" if u is None else None, pool=tie.pool, hidden=True),
        )
        return self.policy.engine(128).run(request)

    def scores(self, reward, rollouts):
        """Rewards (K,), and those of the beginnings of responses (K, cuts)."""
        responses = rollouts.responses()
        rewards = self.ask(reward, responses)
        table = credit.prefix_rewards(responses, rewards, LENGTH, lambda prefixes: self.ask(reward, prefixes))
        return torch.tensor(rewards, dtype=torch.float64), table

    def ask(self, reward, responses):
        return list(score(reward, self.prompt, [self.policy.decode(row) for row in responses], responses, {}))

    def gradient(self, rollouts, rewards, table, count, window=LENGTH):
        """g of one vector for the first `window` positions, from the first `count` rollouts, (1, d)."""
        weights = torch.zeros(len(rewards), LENGTH, dtype=torch.float64)
        weights[:count] = credit.Critic(LENGTH).advantages(table[:count], rewards[:count]) * len(rewards) / count
        return windowed(window).gather(mean_score(self.head, rollouts, weights, temperature=1.0))

    def scaled(self, direction, rollouts, nats, window=LENGTH):
        """The vector along a direction whose exact KL at the visited prefixes is so many nats a response."""
        alive = rollouts.alive.clone()
        alive[:, window:] = False
        places = torch.nonzero(alive)
        picks = places[torch.linspace(0, len(places) - 1, PREFIXES).long()]
        logits, shift = centred(self.head.logits(rollouts.hidden[picks[:, 0], picks[:, 1]])), self.head.shift(direction)
        _, reference = softmax(logits)
        share, low, high = len(places) / len(rollouts.tokens) / PREFIXES, 0.0, 16.0
        for _ in range(16):
            middle = (low + high) / 2
            probs, partition = softmax(logits + middle * shift)
            within = share * token_kl(reference, partition, probs, middle * shift[0]).sum() <= nats
            low, high = (middle, high) if within else (low, middle)
        return low * direction


def windowed(window):
    basis = torch.zeros(LENGTH, 1)
    basis[:window] = 1.0
    return Tie(LENGTH, basis)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="JSON lines with a field `history`")
    parser.add_argument("--row", type=int, default=0)
    parser.add_argument("--rewards", nargs="*", default=list(REWARDS))
    parser.add_argument("--samples", type=int, nargs="*", default=[48, 192])
    parser.add_argument("--windows", type=int, nargs="*", default=[16, 32])
    parser.add_argument("--nats", type=float, default=8.0)
    parser.add_argument("--test", type=int, default=96, help="responses that a direction is judged by")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    study = Study(policy, json.loads(Path(arguments.data).read_text().splitlines()[arguments.row])["history"])
    most, report = max(arguments.samples), []
    plain = study.sample(most, step=0)
    products = {LENGTH: Fisher(study.head, plain.mean_probs, plain.fisher_rows, tie=windowed(LENGTH)).product}
    for window in arguments.windows:  # the law pooled over fewer positions has to be collected anew
        other = study.sample(most, step=0, window=window)
        products[window] = Fisher(study.head, other.mean_probs, other.fisher_rows, tie=windowed(window)).product

    def judge(name, label, reward, baseline, gradient, near, window=LENGTH):
        direction = natural_vectors(gradient, products[window], DAMPING, 1.0)
        u = study.scaled(direction, near, arguments.nats, window)
        steered = study.sample(arguments.test, 1, u, window)
        responses = steered.responses()
        rewards = study.ask(reward, responses)
        row = {"reward": name, "direction": label, "mean": statistics.mean(rewards), "best": max(rewards)}
        row["gain"] = (row["mean"] - baseline.mean().item()) / baseline.std().item()
        row["nats"] = steered.kl.sum().item() / len(responses)
        row["diversity"] = statistics.mean(diversity(policy.decode(tokens)) for tokens in responses)
        report.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        return u

    for name in arguments.rewards:
        reward = as_reward(REWARDS[name])
        rewards, table = study.scores(reward, plain)
        for count in arguments.samples:
            first = study.gradient(plain, rewards, table, count)
            u = judge(name, f"{count} samples", reward, rewards, first, plain)
        for window in arguments.windows:
            gradient = study.gradient(plain, rewards, table, most, window)
            judge(name, f"{most} samples, first {window} positions", reward, rewards, gradient, plain, window)
        again = study.sample(most, 2, u)
        second = study.gradient(again, *study.scores(reward, again), most)
        judge(name, f"{most} samples of the steered policy", reward, rewards, second, again)
        judge(name, "both", reward, rewards, first + second, again)
    write_json(arguments.json, {"arguments": vars(arguments), "rows": report})


if __name__ == "__main__":
    main()
