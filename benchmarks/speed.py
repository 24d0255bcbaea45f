"""Steering against its competitors: time, tokens per second and peak memory, in one process, in turn.

    python benchmarks/speed.py --rounds 3 --json speed.json

Competitors, all with the same prompts, K rows a step, N steps and T tokens a row (ends of text are ignored, so that
all do the same work): plain sampling with our engine; `generate` of transformers with K rows a call; MISVO as printed
in the paper (`paper`) and untuned (`auto`); MISVO under top-p; AISP; MISVO for eight prompts at once (`many`), whose
figures are per prompt. `literal` is the update stage written as the paper describes it: K×T×V probabilities, and K
softmaxes per position and step for the Fisher product; it is compared with our update stage.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import misvo

PROMPTS = [
    f"{topic} I have tried a few things already and I would like to hear what you would do, step by step, and why."
    for topic in (
        "My flatmate plays the drums at night and I have an exam next week.",
        "My sourdough bread comes out flat and dense every single time I bake it.",
        "I want to start running but my knees hurt after the first kilometre.",
        "The tomatoes on my balcony have yellow leaves and brown spots since last week.",
        "My old laptop takes ten minutes to start and the fan is always loud.",
        "I have to give a speech at my sister's wedding and I am terribly nervous.",
        "Our team meetings take two hours and nobody remembers what was decided.",
        "I would like to learn Spanish before a trip in three months from now.",
    )
]


def memory(field):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def measured(call):
    """Seconds of a call, and its peak memory above what was held before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory("VmRSS"), time.perf_counter()
    outcome = call()
    return time.perf_counter() - started, memory("VmHWM") - before, outcome


def hugging_face(policy, prompt, arguments):
    ids = torch.tensor([policy.encode(prompt)])
    for step in range(arguments.steps):
        torch.manual_seed(step)
        policy.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=arguments.rollouts,
            min_new_tokens=arguments.max_new_tokens,
            max_new_tokens=arguments.max_new_tokens,
        )


def literal_update(head, hidden, reference, tokens, u, advantages):
    """One update as the paper's text describes it, with every probability in memory: (K, T, V)."""
    W = head.weight
    p = torch.softmax(hidden @ W.T + u @ W.T, -1)  # (K, T, V)
    e = torch.nn.functional.one_hot(tokens, head.vocab_size).to(p)
    gradient = torch.einsum("k,ktv->tv", advantages, e - p) @ W / len(hidden)
    del p, e
    product = torch.zeros_like(u)
    for t in range(len(u)):
        v = W @ u[t]
        for i in range(len(reference)):  # K softmaxes per position and step
            q = torch.softmax(W @ reference[i, t], -1)
            product[t] += W.T @ (q * v - q * (q @ v)) / len(reference)
    return u + 0.1 * (gradient - product)


def compare_updates(policy, arguments):
    """Our update stage and the literal one on the same data; returns seconds and peak bytes of each."""
    from misvo.decoding import Engine, Request
    from misvo.methods.misvo import Misvo
    from misvo.sampling import RandomStream, Sampler

    settings = misvo.Settings(rollouts=arguments.rollouts, max_new_tokens=arguments.max_new_tokens, steps=2)
    prefix = policy.prefill(policy.encode(PROMPTS[0]), arguments.max_new_tokens)
    stream = RandomStream(0, prefix.tokens)
    method = Misvo(policy.head, stream, Sampler(), settings)
    rewards = torch.randn(arguments.rollouts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = []
    for step in range(2):
        engine = Engine(policy, arguments.rollouts, Sampler())
        options = method.propose(step) | {"keep_hidden": True}
        size = (range(arguments.rollouts), arguments.max_new_tokens)
        batches.append(engine.submit(Request(prefix, stream, step, *size, **options)))
        while engine.busy:
            engine.advance()
        u = method.vectors
        ours = measured(lambda: method.update(step, batches[-1], rewards))  # noqa: B023
    advantages = ((rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)).float()
    literal = measured(
        lambda: literal_update(policy.head, batches[1].hidden, batches[0].hidden, batches[1].tokens, u, advantages)
    )
    error = ((literal[2] - method.vectors).norm() / literal[2].norm()).item()
    return {"ours": ours[:2], "literal": literal[:2], "relative_difference": error}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    policy.eos_tokens = torch.tensor([], dtype=torch.long)
    size = {"rollouts": arguments.rollouts, "steps": arguments.steps, "max_new_tokens": arguments.max_new_tokens}
    one = {**size, "max_rows": arguments.rollouts}

    def steer(**options):
        return lambda prompt: misvo.steer(policy, prompt, len, **{**one, **options})

    competitors = {
        "sampling": steer(method="best-of-n"),
        "sampling top-p": steer(method="best-of-n", top_p=0.95),
        "generate": lambda prompt: hugging_face(policy, prompt, arguments),
        "misvo paper": steer(),
        "misvo paper top-p": steer(top_p=0.95),
        "misvo auto": steer(preset="auto"),
        "aisp": steer(method="aisp"),
    }
    times = {name: [] for name in [*competitors, "many"]}
    peaks = {name: [] for name in times}
    for round_number in range(arguments.rounds + 1):  # the first round warms up
        prompt = PROMPTS[round_number % len(PROMPTS)]
        for name, call in competitors.items():
            seconds, peak, _ = measured(lambda: call(prompt))  # noqa: B023
            times[name].append(seconds)
            peaks[name].append(peak)
        if round_number <= 1 or round_number == arguments.rounds:
            many = PROMPTS[: arguments.prompts]
            seconds, peak, _ = measured(lambda: misvo.steer_many(policy, many, len, **size))  # noqa: B023
            times["many"].append(seconds / len(many))
            peaks["many"].append(peak)
        print(f"round {round_number}", {name: round(values[-1], 2) for name, values in times.items()}, flush=True)
    tokens = arguments.rollouts * arguments.steps * arguments.max_new_tokens
    base = statistics.median(times["sampling"][1:])
    print(f"\n{'':20}{'median s':>10}{'spread':>8}{'tok/s':>8}{'/sampling':>11}{'/generate':>11}{'peak MiB':>10}")
    rows = {}
    for name, values in times.items():
        middle, spread = statistics.median(values[1:]), max(values[1:]) - min(values[1:])
        ratios = middle / base, middle / statistics.median(times["generate"][1:])
        rows[name] = {"median": middle, "values": values, "peak": statistics.median(peaks[name][1:])}
        print(
            f"{name:20}{middle:10.2f}{spread:8.2f}{tokens / middle:8.0f}{ratios[0]:11.3f}{ratios[1]:11.3f}"
            f"{rows[name]['peak'] / 2**20:10.0f}"
        )
    under = rows["misvo paper top-p"]["median"] / rows["sampling top-p"]["median"]
    print(f"under top-p, misvo / sampling: {under:.3f}")
    update = compare_updates(policy, arguments)
    print(
        f"update: ours {update['ours'][0]:.3f} s, {update['ours'][1] / 2**20:.0f} MiB; "
        f"literal {update['literal'][0]:.3f} s, {update['literal'][1] / 2**20:.0f} MiB; "
        f"{update['literal'][0] / update['ours'][0]:.1f} times the time, "
        f"{update['literal'][1] / max(1, update['ours'][1]):.1f} times the memory; "
        f"relative difference of the results {update['relative_difference']:.1e}"
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"arguments": vars(arguments), "rows": rows, "update": update}, file, indent=2)


if __name__ == "__main__":
    main()
