"""The update stage (everything but decoding and reward), ours against the paper's text taken literally.

    python benchmarks/update.py --json update.json

Literally means: probabilities of all rollouts, positions and tokens in memory, and K softmaxes per position and step
for the Fisher product. Both start from the same decoded responses and must end in the same vectors. Heads: the embedded
model's (V = 49,152) and a random one of the size of Gemma 3 270M's (V = 262,144, d = 640) on a one-layer body. Peak
memory of each is measured in a process of its own.
"""

import argparse
import json
from dataclasses import replace

from measure import PROMPTS, in_a_process_of_its_own, load, peak_bytes, seconds, write_json

import torch  # isort: skip - measure sets the environment that torch reads
from transformers import LlamaConfig, LlamaForCausalLM

import misvo
from misvo.methods.base import Context, Scores
from misvo.methods.misvo import Misvo, leave_one_out
from misvo.rollouts import Request
from misvo.sampling import Sampler


def literal_update(head, hidden, reference, tokens, u, advantages):
    """One update as the paper's text describes it, with every probability in memory: (K, T, V) in fp32.

    Products with W are in its own precision, as a 16-bit model computes them.
    """
    W, wide = head.weight, torch.float32
    p = torch.softmax((hidden + u).to(W) @ W.T, -1, dtype=wide)  # (K, T, V)
    e = torch.nn.functional.one_hot(tokens, head.vocab_size).to(p)
    gradient = torch.einsum("k,ktv->tv", advantages, e - p).to(W) @ W / len(hidden)
    del p, e
    product = torch.zeros_like(u)
    for t in range(len(u)):
        v = (W @ u[t].to(W)).to(wide)
        for i in range(len(reference)):  # K softmaxes per position and step
            q = torch.softmax(W @ reference[i, t].to(W), -1, dtype=wide)
            product[t] += W.T @ (q * v - q * (q @ v)).to(W) / len(reference)
    return u + 0.1 * (gradient - product)


def random_policy(tokenizer, vocabulary, width):
    torch.manual_seed(0)
    size = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1}
    config = LlamaConfig(**size, num_attention_heads=4, eos_token_id=None, bos_token_id=None)
    policy = misvo.Policy(LlamaForCausalLM(config).eval(), tokenizer, name=f"random, V = {vocabulary:,}")
    policy.head.weight.mul_(20.0)  # laws that are neither flat nor certain
    policy.eos_tokens = torch.tensor([], dtype=torch.long)
    return policy


def stages(policy, rollouts, length):
    """Two decoded steps, and the two ways to make the second update of them."""
    tokens, settings = tuple(policy.encode(PROMPTS[0])), misvo.Settings(rollouts=rollouts, max_new_tokens=length)
    method = Misvo(Context(policy.head, tokens, Sampler(), settings))
    rewards = torch.randn(rollouts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = []
    for step in range(2):
        proposal = method.propose(step)
        keep = replace(proposal.keep, hidden=True)
        request = Request(tokens, 0, step, range(rollouts), length, Sampler(), proposal.intervention, keep)
        batches.append(policy.engine(rollouts).run(request))
        if step == 0:
            method.update(step, batches[0], Scores(rewards))
    u, advantages = method.vectors, leave_one_out(rewards).float()
    (before, after), head = batches, policy.head

    def ours():
        method.update(1, after, Scores(rewards))
        return method.vectors

    def literal():
        return literal_update(head, after.hidden, before.hidden, after.tokens, u, advantages)

    return {"ours": ours, "literal": literal}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--heads", nargs="*", default=["49152", "262144"], help="vocabulary sizes")
    parser.add_argument(
        "--peak", nargs=2, metavar=("HEAD", "WAY"), help="print the peak memory of one, and nothing else"
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    heads = {"49152": load, "262144": lambda: random_policy(load().tokenizer, 262_144, 640)}
    if arguments.peak:
        name, way = arguments.peak
        policy = heads[name]()
        print(json.dumps(peak_bytes(stages(policy, arguments.rollouts, arguments.max_new_tokens)[way])))
        return
    report = {}
    for name in arguments.heads:
        policy, outcome = heads[name](), {}
        calls = stages(policy, arguments.rollouts, arguments.max_new_tokens)
        times = {way: seconds(lambda: outcome.update({way: calls[way]()})) for way in ("ours", "literal")}  # noqa: B023
        size = ["--rollouts", arguments.rollouts, "--max-new-tokens", arguments.max_new_tokens]
        peaks = {way: in_a_process_of_its_own(__file__, "--peak", name, way, *size) for way in times}
        error = ((outcome["ours"] - outcome["literal"]).norm() / outcome["literal"].norm()).item()
        report[name] = {"seconds": times, "peak": peaks, "relative_difference": error}
        ratio, lean = times["literal"] / times["ours"], peaks["literal"] / max(1, peaks["ours"])
        print(f"V = {name}: ours {times['ours']:.3f} s, {peaks['ours'] / 2**20:.0f} MiB; ", end="")
        print(f"literal {times['literal']:.2f} s, {peaks['literal'] / 2**20:.0f} MiB; ", end="")
        print(f"{ratio:.0f} times the time, {lean:.0f} times the memory; results differ by {error:.1e}", flush=True)
    write_json(arguments.json, {"arguments": vars(arguments), "heads": report})


if __name__ == "__main__":
    main()
