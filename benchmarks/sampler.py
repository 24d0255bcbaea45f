"""What the race costs: decoding with it against decoding with an inverse CDF, the usual way to draw a token.

    OMP_NUM_THREADS=1 python benchmarks/sampler.py

Plain sampling of K rows, the whole law and top-p 0.95, each way in turn, `--rounds` times. Told is CPU time, which
other processes disturb less than the clock, of drawing alone and of all the rest, which is the same work both ways;
medians over rounds. The inverse CDF sums √V blocks and then one block in fp64, as quick as we know to make it.
"""

import argparse
import statistics
import time
from contextlib import contextmanager

from measure import PROMPTS, load, write_json

import torch  # isort: skip - measure sets the environment that torch reads

from misvo.rollouts import Request
from misvo.sampling import Sampler

LAWS = {"whole law": Sampler(), "top-p 0.95": Sampler(top_p=0.95)}
RACE = Sampler.draw


def inverse_cdf(weights, uniforms):
    """The index at which the running sum of each row (B, V) first exceeds its uniform share of the total, (B,)."""
    rows, size = weights.shape
    block = 1 << (size.bit_length() + 1) // 2
    whole = size // block * block
    sums = weights[:, :whole].view(rows, -1, block).sum(-1).double()
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True).double()], -1)
    ends = sums.cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    chosen = _first_above(ends, target)  # (B, 1)
    places = chosen * block + torch.arange(block)
    inside = torch.where(places < size, weights.gather(-1, places.clamp(max=size - 1)).double(), 0.0).cumsum(-1)
    return (chosen * block + _first_above(inside, target - (ends - sums).gather(-1, chosen))).squeeze(-1)


def _first_above(ends, target):
    """Rounding may not push it past the last positive weight."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def by_inverse_cdf(sampler, probs, keys, within=None):
    """`Sampler.draw` for plain sampling, with one uniform number of each key."""
    assert within is None
    uniforms = ((keys >> 11) & (2**53 - 1)).double() * 2.0**-53
    if sampler.samples_whole_law:
        return inverse_cdf(probs, uniforms), None
    law = sampler.truncation.law(probs)
    return inverse_cdf(law, uniforms), law


@contextmanager
def drawing(way, clock):
    """Sampling draws this way, and adds the CPU time of it to a list."""

    def draw(*arguments):
        started = time.process_time()
        drawn = way(*arguments)
        clock.append(time.process_time() - started)
        return drawn

    Sampler.draw = draw
    try:
        yield
    finally:
        Sampler.draw = RACE


def measure(policy, sampler, way, rows, tokens):
    """CPU seconds of decoding, and of drawing alone."""
    request = Request(tuple(policy.encode(PROMPTS[0])), 0, 0, range(rows), tokens, sampler)
    engine, clock = policy.engine(rows), []
    with drawing(way, clock):
        started = time.process_time()
        engine.run(request)
        return time.process_time() - started, sum(clock)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    policy, report = load(), {}
    print("instructions:", torch.backends.cpu.get_cpu_capability(), flush=True)
    for name, sampler in LAWS.items():
        measure(policy, sampler, RACE, given.rows, 4)  # warms up
        ways = {"race": RACE, "inverse CDF": by_inverse_cdf}
        rounds = [
            {way: measure(policy, sampler, draw, given.rows, given.tokens) for way, draw in ways.items()}
            for _ in range(given.rounds)
        ]
        alone = {way: statistics.median([1000 * one[way][1] / given.tokens for one in rounds]) for way in ways}
        rest = statistics.median(
            [1000 * (all_ - drawn) / given.tokens for one in rounds for all_, drawn in one.values()]
        )
        ratio = (rest + alone["race"]) / (rest + alone["inverse CDF"])
        report[name] = {"ratio": ratio, "milliseconds a token": {**alone, "all the rest": rest}}
        print(
            f"{name}: drawing takes {alone['race']:.2f} ms a token by the race and {alone['inverse CDF']:.2f} by an "
            f"inverse CDF, all the rest {rest:.1f}: with the race decoding takes {ratio:.3f} of the CPU time",
            flush=True,
        )
    write_json(given.json, report)


if __name__ == "__main__":
    main()
