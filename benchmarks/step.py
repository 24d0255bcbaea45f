"""Where a decoding step goes: products, attention, element-wise operations, cache moves, sampling, Python, waiting.

    python benchmarks/step.py --json step.json --picture docs/step.png

For each number of rows, the same request decodes some tokens without a profiler, which says how long a step takes by
the clock (`whole`) and for how long of it the thread that leads it was asleep (`waiting`: the clock less the CPU time
of that thread; threads that spin while they wait are not asleep). Then it decodes as many with torch's profiler, whose
times of operators, each less those of the operators that it calls, are added up by class. What is in no operator is
Python. These must add up to the profiled steps, or the script stops. The profiler costs something for every operator,
which falls to whoever called it: what the profiled steps took longer is taken off there, in equal parts for each call.

Beside it stand two floors, at rates that are measured in the same run. `products alone` are the linear layers of the
body and the head, one after another, on as many rows. `roofline` is the larger of FLOPs / (what one large product
reaches) and bytes / (what one large sum reads), with every weight, the prompt's cache and each row's own read once.
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass

from measure import PROMPTS, load, seconds, write_json

import torch  # isort: skip - measure sets the environment that torch reads
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import misvo.cache
from misvo import decoder_step
from misvo.footprint import Shape
from misvo.law_step import LawStep
from misvo.linear import linear
from misvo.rollouts import Request
from misvo.row_layer import RowLayer

CLASSES = ("products", "head", "attention", "element-wise", "cache moves", "sampling", "Python", "waiting")
PRODUCTS = {
    "mkldnn::_linear_pointwise",
    "aten::linear",
    "aten::addmm",
    "aten::mm",
    "aten::matmul",
    "aten::mkldnn_linear",
}
MARK = "step.py: "  # before the names of what this script marks in a profile
STEP = MARK + "step"
WARM = 2  # steps that do not count: the rows join, and memory is touched for the first time


@dataclass
class Split:
    """A decoding step of so many rows, in milliseconds, and the floors under it."""

    rows: int
    whole: float  # by the clock, without a profiler
    busy: float  # the same, CPU time of the thread that leads it
    parts: dict[str, float]  # by class; they add up to `whole` but for `left`
    left: float
    profiled: float  # by the clock, under the profiler
    operators: float  # calls of operators
    all_threads: float  # CPU time of the process: more than `whole` where several threads work or spin
    products_alone: float
    products_busy: float  # the same, CPU time of the thread that leads them
    roofline: float


def marked(name, call):
    def run(*args, **kwargs):
        with record_function(MARK + name):
            return call(*args, **kwargs)

    return run


def mark_places(policy):
    """Mark what is cache, attention and sampling, whatever operators these are made of."""
    Cache.update, RowLayer.write = marked("cache moves", Cache.update), marked("cache moves", RowLayer.write)
    for name in ("join", "select", "trim", "take"):
        setattr(misvo.cache, name, marked("cache moves", getattr(misvo.cache, name)))
    attention = policy.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[attention] = marked("attention", ALL_ATTENTION_FUNCTIONS[attention])
    decoder_step.attend = marked("attention", decoder_step.attend)  # of steps that are written out
    LawStep.draw = marked("sampling", LawStep.draw)


def add_up(event, place, times, calls):
    """Add the times of an operator and of all that it calls to their classes, and how many calls each class made."""
    if event.name.startswith(MARK):
        kind, place = "Python", event.name.removeprefix(MARK)
    elif event.name in PRODUCTS or place in ("products", "head"):
        kind = place = "head" if place in ("sampling", "head") else "products" if place == "step" else place
    else:
        kind = "element-wise" if place == "step" else place
    times[kind] += event.self_cpu_time_total / 1000
    calls[kind] += len(event.cpu_children)
    for child in event.cpu_children:
        add_up(child, place, times, calls)


def clocks(call):
    """Milliseconds of a call by the clock, of the CPU time of this thread, and of that of all threads."""
    before = [clock() for clock in (time.perf_counter, time.thread_time, time.process_time)]
    call()
    after = [clock() for clock in (time.perf_counter, time.thread_time, time.process_time)]
    return [1000 * (end - start) for start, end in zip(before, after, strict=True)]


def split(policy, prompt, rows, tokens, rates) -> Split:
    engine = policy.engine(rows)
    engine.submit(Request(prompt, 0, 0, range(rows), WARM + 2 * tokens + 1))
    for _ in range(WARM):
        engine.advance()
    whole, busy, all_threads = (total / tokens for total in clocks(lambda: advance(engine, tokens)))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        profiled, profiled_busy, _ = (total / tokens for total in clocks(lambda: advance(engine, tokens)))
    steps = [event for event in recorded.events() if event.name == STEP]
    times, calls = Counter(), Counter()
    for event in steps:
        add_up(event, "step", times, calls)
    total = sum(event.cpu_time_total for event in steps) / 1000
    if len(steps) != tokens or abs(sum(times.values()) - total) > 1e-3 * total:
        raise SystemExit(f"the operators of {len(steps)} steps take {sum(times.values())} ms of {total} ms.")
    cost = max(0.0, profiled_busy - busy) * tokens / max(1, calls.total())  # of the profiler, for each call
    asleep = (profiled - profiled_busy) * tokens  # somewhere in the classes
    awake = {kind: times[kind] - cost * calls[kind] for kind in times}
    share = 1 - asleep / sum(awake.values())
    parts = {kind: share * awake.get(kind, 0.0) / tokens for kind in CLASSES} | {"waiting": whole - busy}
    left = whole - sum(parts.values())
    alone, floor = products_alone(policy, rows, tokens), roofline(policy, len(prompt), rows, tokens, rates)
    return Split(rows, whole, busy, parts, left, profiled, calls.total() / tokens, all_threads, *alone, floor)


def advance(engine, tokens):
    for _ in range(tokens):
        with record_function(STEP):
            engine.advance()


def linears(policy):
    return [layer for layer in policy.body.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def products_alone(policy, rows, tokens) -> list[float]:
    """Milliseconds of all products of a step, with the step's own layers in their order, by the clock and of the CPU
    time of this thread: medians of several times."""
    layers, head = linears(policy), policy.head
    inputs = {layer.in_features: torch.rand(rows, 1, layer.in_features) for layer in layers}
    hidden = torch.rand(rows, head.hidden_size)

    def all_products():
        for layer in layers:
            layer(inputs[layer.in_features])
        head.logits(hidden)

    all_products()
    measured = [clocks(all_products)[:2] for _ in range(tokens)]
    return [statistics.median(times) for times in zip(*measured, strict=True)]


@torch.no_grad()
def measured_rates() -> dict[str, float]:
    """What this machine reaches at its best: FLOPs a second in a product, bytes a second that a sum reads."""
    side, numbers = 1536, torch.ones(2**26)  # 256 MiB: more than caches hold
    square = torch.rand(side, side)
    product = min(seconds(lambda: linear(square, square)) for _ in range(5))
    reading = min(seconds(numbers.sum) for _ in range(5))
    return {"flops": 2 * side**3 / product, "bytes": numbers.nbytes / reading}


def roofline(policy, prompt_tokens, rows, tokens, rates) -> float:
    """Milliseconds that no step can go below at these rates."""
    head, shape = policy.head, Shape.of(policy)
    numbers = sum(layer.in_features * layer.out_features for layer in linears(policy)) + head.weight.numel()
    own = WARM + tokens  # tokens of its own that a row has in the middle of what is measured
    moved = numbers * head.weight.itemsize + shape.cache(prompt_tokens) + rows * shape.cache(own)
    return 1000 * max(2 * rows * numbers / rates["flops"], moved / rates["bytes"])


def counted(rows):
    return f"{rows} row{'s' * (rows != 1)}"


def show(splits, rates):
    print(f"one large product: {rates['flops'] / 1e9:.0f} GFLOP/s; one large sum: {rates['bytes'] / 1e9:.1f} GB/s\n")
    print("| milliseconds a step | " + " | ".join(counted(one.rows) for one in splits) + " |")
    print("|---" * (len(splits) + 1) + "|")
    rows = {kind: [one.parts[kind] for one in splits] for kind in CLASSES}
    rows |= {"left over": [one.left for one in splits], "whole": [one.whole for one in splits]}
    rows |= {"products alone": [one.products_alone for one in splits], "roofline": [one.roofline for one in splits]}
    rows |= {"whole, under the profiler": [one.profiled for one in splits]}
    rows |= {"whole, CPU time of the thread": [one.busy for one in splits]}
    rows |= {"products alone, CPU time of the thread": [one.products_busy for one in splits]}
    rows |= {"whole, CPU time of all threads": [one.all_threads for one in splits]}
    for name, values in rows.items():
        cells = [f"{value:.1f} ({value / one.whole:.2f})" for value, one in zip(values, splits, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("| calls of operators | " + " | ".join(f"{one.operators:.0f}" for one in splits) + " |")


def draw(splits, path):
    """One bar for each number of rows, of its whole; lines at the floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.6 * len(splits)))
    places, starts = range(len(splits)), [0.0] * len(splits)
    for number, kind in enumerate(CLASSES):
        shares = [one.parts[kind] / one.whole for one in splits]
        axes.barh(places, shares, left=starts, label=kind, color=pyplot.get_cmap("tab10")(number), height=0.6)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    for style, name in (("-", "products_alone"), (":", "roofline")):
        floors = [getattr(one, name) / one.whole for one in splits]
        ends = [(place - 0.4, place + 0.4) for place in places]
        axes.vlines(floors, *zip(*ends, strict=True), colors="black", linestyles=style, label=name.replace("_", " "))
    axes.set_yticks(places, [f"{counted(one.rows)}\n{one.whole:.0f} ms" for one in splits])
    axes.invert_yaxis()
    axes.set_xlabel("share of a decoding step")
    axes.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=16, help="steps that are measured, twice")
    parser.add_argument("--prompt-tokens", type=int, default=71)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--as-transformers", action="store_true", help="the body as transformers calls it")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE")
    arguments = parser.parse_args()
    policy = load(arguments.model)
    if arguments.as_transformers:
        policy = policy.with_model(policy.model)
    mark_places(policy)
    words = policy.encode(PROMPTS[0])
    prompt = tuple((words * -(-arguments.prompt_tokens // len(words)))[: arguments.prompt_tokens])
    rates = measured_rates()
    splits = [split(policy, prompt, rows, arguments.tokens, rates) for rows in arguments.rows]
    show(splits, rates)
    write_json(arguments.json, {"arguments": vars(arguments), "rates": rates, "steps": [asdict(one) for one in splits]})
    if arguments.picture:
        draw(splits, arguments.picture)


if __name__ == "__main__":
    main()
