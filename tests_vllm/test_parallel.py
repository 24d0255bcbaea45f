"""Tensor parallelism: two ranks, with half of the head each, draw what one rank draws and record what it records.

The tiny vocabulary of 97 is split into 64 and 33 tokens, so that nothing fits by chance.
"""

import gc
import os
import signal

import pytest
import torch
from checker import check
from jobs import noise, request, several, vectors

import misvo
from misvo.interventions import Climb
from misvo.rollouts import Keep
from misvo.sampling import Sampler
from misvo.tie import TIES
from misvo.value import ValueNetwork

PROMPTS = [[5, 6, 7], list(range(8, 37)), list(range(10, 71)), [9, *range(5, 34)]]
CROWDED = {"num_gpu_blocks_override": 7, "max_model_len": 128, "max_num_seqs": 24, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def plain(tiny):
    return misvo.Policy.from_pretrained(tiny())


@pytest.fixture(scope="module")
def parallel(vllm, tiny):
    """Little memory, so that rows are preempted and prompts are read in chunks."""
    vllm.close()
    gc.collect()
    policy = misvo.Policy.from_pretrained(tiny(), engine="vllm", own_process=False, tensor_parallel_size=2, **CROWDED)
    yield policy
    policy.close()


def both(plain, parallel, requests):
    """Check all records against plain forward passes; gives how many rows are not the other engine's, and all."""
    got = parallel.engine().run_many(requests)
    found = [check(plain, one, rollouts) for one, rollouts in zip(requests, got, strict=True)]
    assert sum(one.ties for one in found) <= 1 + sum(one.draws for one in found) // 500
    expected = plain.engine().run_many(requests)
    same = [(a.tokens == b.tokens).all(1) for a, b in zip(expected, got, strict=True)]
    return int((~torch.cat(same)).sum()), sum(map(len, same))


def test_two_ranks_have_the_whole_head_between_them(plain, parallel):
    assert len(parallel.host.pids()) == 2 and os.getpid() not in parallel.host.pids()
    assert torch.equal(parallel.head.weight, plain.head.weight) and parallel.head.scale == plain.head.scale
    rollouts = parallel.engine().run(request(parallel, PROMPTS[0]))
    assert rollouts.mean_probs.run(_columns) == [64, 33]  # neither has the other's


def _columns(head, rollouts):
    own = torch.tensor([[float(rollouts.mean_probs.shape[1])]])
    return head._gather(own)[0].int().tolist()


def test_records_are_those_of_teacher_forcing_and_tokens_those_of_one_rank(plain, parallel):
    torch.manual_seed(0)
    network = ValueNetwork(parallel.head.hidden_size).requires_grad_(False).eval()
    smooth = Keep(scores=True, fisher="reference", pool=TIES["smooth"](24).pool, hidden=True)
    requests = several(parallel, PROMPTS)
    requests += [
        request(parallel, PROMPTS[0], keep=smooth, how=vectors(parallel, 24, "smooth")),
        request(parallel, PROMPTS[1], sampler=Sampler(temperature=0.8, top_p=0.9), how=vectors(parallel, 24)),
        request(parallel, PROMPTS[1], sampler=Sampler(greedy=True), how=vectors(parallel, 24)),
        request(parallel, PROMPTS[2], keep=Keep(), how=noise(parallel, PROMPTS[2], 24)),
        request(parallel, PROMPTS[3], keep=Keep(hidden=True), how=Climb(network, 3, 20.0)),
    ]
    differing, rows = both(plain, parallel, requests)
    assert differing <= 2, f"{differing} of {rows} rows differ"  # near ties


def letters(completions, **_):
    return [sum(0.3 * (ord(word[-1]) % 7) for word in text.split()) - 0.1 * len(text) ** 0.5 for text in completions]


@pytest.mark.parametrize("name", ["paper", "auto"])
def test_whole_runs(name, plain, parallel):
    own = {"paper": {"penalty": 0.5, "learning_rate": 20.0}, "auto": {}}[name]
    options = {"preset": name, "rollouts": 6, "steps": 4, "max_new_tokens": 20, "seed": 7, "kl_ref": True, **own}
    one, two = (misvo.steer(policy, "a b c", letters, progress=False, **options) for policy in (plain, parallel))
    assert [a.tokens for a in one.candidates] == [b.tokens for b in two.candidates]
    vectors_of_one = one.steering.vectors
    assert vectors_of_one.norm() > 0
    assert (vectors_of_one - two.steering.vectors).norm() <= 1e-3 * vectors_of_one.norm()
    assert two.kl_ref.total == pytest.approx(one.kl_ref.total, rel=2e-3, abs=1e-5)


def test_a_rank_that_fails_alone_is_one_error_and_nobody_waits_for_the_other(parallel):
    """The last test of this file: vLLM is gone afterwards."""

    def give_up(*_):
        raise TimeoutError("this took more than two minutes")

    rollouts = parallel.engine().run(request(parallel, PROMPTS[0]))
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    try:
        with pytest.raises(misvo.MisvoError, match="vLLM has died") as caught:
            rollouts.mean_probs.run(_second_rank_fails)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "\n" not in str(caught.value)


def _second_rank_fails(head, rollouts):
    if head.part.start:
        raise RuntimeError("no memory")
    return head.project(torch.zeros(1, head.vocab_size))
