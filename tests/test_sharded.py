"""A head that is split over two processes makes the products of the whole one, and both processes draw one token."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from misvo.head import Head, centred, softmax
from misvo.race import race
from misvo.sampling import RandomStream
from misvo.sharded import ShardedHead

V, D, T, CUT = 83, 24, 6, 40  # parts of different sizes
TOKENS = torch.tensor([[0, CUT - 1, CUT], [V - 1, 7, 50]])


def inputs():
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(V, D, generator=generator), torch.randn(V, generator=generator), scale=0.7)
    hidden, u = torch.randn(5, D, generator=generator), torch.randn(T, D, generator=generator)
    law = torch.softmax(3 * torch.randn(T, V, generator=generator), -1)
    return head, hidden, u, law


def on_rank(rank, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def gather(part):  # parts differ in size, gloo's collective takes equal ones
        padded = torch.zeros(len(part), max(CUT, V - CUT))
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in range(2)]
        dist.all_gather(parts, padded)
        return [one[:, :size] for one, size in zip(parts, (CUT, V - CUT), strict=True)]

    def reduce(part):
        part = part.contiguous()
        dist.all_reduce(part)
        return part

    head, hidden, u, law = inputs()
    rows = slice(0, CUT) if rank == 0 else slice(CUT, V)
    own = Head(head.weight[rows], head.bias[rows], head.scale)
    sharded = ShardedHead(own, rows.start, V, gather, reduce)
    logits = sharded.logits(hidden)
    keys = RandomStream(1, [2]).keys(0, range(5), 1)[:, 0]
    probs, _ = softmax(centred(logits + sharded.shift(u[:5])))
    found = {
        "logits": logits,
        "shift": sharded.shift(u),
        "project": sharded.project(law),
        "rows": sharded.rows(TOKENS),
        "spread": sharded.fisher_spread(law[:, rows], u),
        "tokens": race(probs, keys),
    }
    results.put((rank, {name: value.numpy() for name, value in found.items()}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both():
    import socket

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


def test_products_are_those_of_the_whole_head(both):
    head, hidden, u, law = inputs()
    keys = RandomStream(1, [2]).keys(0, range(5), 1)[:, 0]
    whole = {
        "logits": head.logits(hidden),
        "shift": head.shift(u),
        "project": head.project(law),
        "rows": head.rows(TOKENS),
        "spread": head.project(law * head.shift(u)),
        "tokens": race(softmax(centred(head.logits(hidden) + head.shift(u[:5])))[0], keys),
    }
    for name, expected in whole.items():
        for rank in range(2):
            got = torch.from_numpy(both[rank][name])
            assert got.shape == expected.shape
            # sums of up to V products of numbers below 10, in another order: a few units of fp32
            assert torch.allclose(got.double(), expected.double(), rtol=1e-5, atol=1e-5), (name, rank)


def test_both_ranks_have_the_same_bits(both):
    for name in both[0]:
        assert (both[0][name] == both[1][name]).all(), name
