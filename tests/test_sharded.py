"""A head that is split over two processes makes the products of the whole one, and both processes draw one token."""

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

from misvo.fisher import Fisher
from misvo.head import Head
from misvo.interventions import Noise, Vectors
from misvo.law_step import Group, LawStep
from misvo.race import Entries
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.sharded import ShardedHead
from misvo.tie import TIES

V, D, T, K, WIDTH = 83, 24, 6, 5, 42  # the second rank has 41 rows
TOKENS = torch.tensor([[0, WIDTH - 1, WIDTH], [V - 1, 7, 50]])
RECORDS = ("tokens", "kl", "logprobs", "ref_logprobs", "score_rows", "fisher_rows", "squares", "changed")


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_head(dtype=torch.float32):
    return Head(numbers(0, V, D).to(dtype), numbers(1, V).to(dtype), scale=0.7)


def part_of(head, rank):
    rows = slice(rank * WIDTH, min((rank + 1) * WIDTH, V))
    return Head(head.weight[rows], head.bias[rows], head.scale)


def requests():
    """Every kind of law, shift and record that decoding makes."""
    everything = Keep(scores=True, fisher="steered", hidden=True)
    smooth = TIES["smooth"](T)
    vectors = Vectors.by_position(numbers(5, T, D))
    free, centre = numbers(3, smooth.size, D), numbers(4, T, D)
    noise = Noise(centre, TIES["position"](T), seed=0, prompt=(1,), step=1, sigma2=0.1, window=T - 1)
    pooled = Keep(scores=True, fisher="reference", pool=smooth.pool)
    return {
        "reference": Request((1,), 0, 0, range(K), T, keep=everything),
        "vectors": Request((1,), 0, 1, range(K), T, intervention=vectors, keep=everything),
        "tied": Request((1,), 0, 1, range(K), T, intervention=Vectors(free, smooth), keep=pooled),
        "top-p": Request((1,), 0, 2, range(K), T, Sampler(0.8, 0.7), Vectors(free, smooth), everything),
        "noise": Request((1,), 0, 1, range(K), T, intervention=noise),
    }


def found_by(head):
    """All products of a head, a run of the law step for each request, and Fisher products of what that kept."""
    hidden, u, law = numbers(6, K, D), numbers(7, T, D), torch.softmax(3 * numbers(8, T, V), -1)
    few = Entries.where((law > 0.02).numpy(), law)
    one_side = few.only(few.tokens < WIDTH // 2)  # the other rank has nothing of it
    found = {
        "logits": head.logits(hidden),
        "shift": head.shift(u),
        "project": head.project(law),
        "moment": head.part_moment(law[0, head.part]),
        "entries": head.project_entries(few),
        "entries of one rank": head.project_entries(one_side),
        "rows": head.rows(TOKENS),
        "longest_row": torch.tensor(head.longest_row),
    }
    for name, request in requests().items():
        steps = LawStep(head)
        job = steps.open(request)
        for position in range(T):
            steps.draw([Group(job, torch.arange(K), position)], numbers(10 + position, K, D))
        steps.flush()
        kept = {record: getattr(job.rollouts, record) for record in RECORDS}
        found |= {f"{record} of {name}": value for record, value in kept.items() if value is not None}
        if request.keep.fisher:
            tie = TIES["smooth"](T) if request.keep.pool is not None else None
            fisher = Fisher(head, job.rollouts.mean_probs, job.rollouts.fisher_rows, 0.8, tie)
            found[f"Fisher product of {name}"] = fisher.product(numbers(9, tie.size if tie else T, D))
            found[f"mean law of {name}"] = job.rollouts.mean_probs
    return found


def on_rank(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def gather(part):
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -1)

    def reduce(part):
        part = part.contiguous()
        dist.all_reduce(part)
        return part

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        head = ShardedHead(part_of(whole_head(dtype), rank), rank, WIDTH, V, gather, reduce)
        found |= {(str(dtype), name): value.numpy() for name, value in found_by(head).items()}
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=on_rank, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_split_head_does_what_the_whole_one_does(both, dtype):
    for name, expected in found_by(whole_head(dtype)).items():
        for rank in range(2):
            got, here = torch.from_numpy(both[rank][str(dtype), name]).double(), expected.double()
            if name.startswith("mean law"):  # of which each has its own columns, and no others
                here = here[:, rank * WIDTH : (rank + 1) * WIDTH]
            assert got.shape == here.shape, name
            # sums of up to V products of numbers below 10, in another order: a few units of fp32
            allowed = 1e-5 * max(1.0, here.abs().max().item())
            assert torch.allclose(got, here, rtol=1e-5, atol=allowed), (name, rank)


def test_both_ranks_have_the_same_bits(both):
    for name in both[0]:
        if not name[1].startswith("mean law"):
            assert (both[0][name] == both[1][name]).all(), name


def test_of_no_rows_nothing_is_exchanged():
    """vLLM's ranks divide by the size of what they gather in shared memory, on CPUs with AVX-512."""

    def refuses(x):
        raise AssertionError(f"{tuple(x.shape)} was sent")

    head = ShardedHead(part_of(whole_head(), 0), 0, WIDTH, V, refuses, refuses)
    none = torch.zeros(0, D)
    assert head.logits(none).shape == head.shift(none).shape == (0, V)
    assert head.project(torch.zeros(0, V)).shape == head.rows(torch.zeros(0, dtype=torch.long)).shape == (0, D)
    assert head.part_sums(torch.zeros(0, WIDTH)).shape == (0, 1)
