"""Rollouts that continue a prefix: the same states, records and random numbers as rows that were decoded in one go."""

import dataclasses

import pytest
import torch
from conftest import ARCHITECTURES, SHAPE, VOCAB, make_policy
from tolerances import room, rounding

from misvo.engines.torch import TorchEngine
from misvo.interventions import Noise, Vectors
from misvo.linear import pack
from misvo.model import Model
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler
from misvo.tie import TIES

PROMPT, LENGTH, CUT, ROWS = (5, 6, 7, 8), 12, 3, 8
# PyTorch's activations take the last numbers of an array, beyond pairs of whole vectors, by another routine, which may
# round otherwise. Sizes of real models leave none over; that of these, on a CPU with AVX-512, does.
NO_TAILS = SHAPE["intermediate_size"] % (2 * (16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8)) == 0
RECORDS = ("kl", "logprobs", "ref_logprobs", "score_rows", "hidden", "changed", "log_ratios")


def whole_request(policy, **changes):
    free = 0.3 * torch.randn(1, policy.head.hidden_size, generator=torch.Generator().manual_seed(1))
    return Request(
        PROMPT,
        seed=3,
        step=1,
        rollouts=range(ROWS),
        max_new_tokens=LENGTH,
        sampler=Sampler(temperature=0.8, top_p=0.9),
        intervention=Vectors(free, TIES["shared"](LENGTH)),
        keep=Keep(scores=True, hidden=True),
        anchored=True,
        **changes,
    )


def in_two(engine, request):
    """Decoded to a cut, and on from there; the rows that went on, and the second half of the request."""
    first = engine.run(dataclasses.replace(request, max_new_tokens=CUT, resumable=True))
    going_on = torch.nonzero(~first.ended)[:, 0]
    beginnings = tuple(tuple(first.tokens[row].tolist()) for row in going_on.tolist())
    rest = dataclasses.replace(request, rollouts=going_on.tolist(), beginnings=beginnings)
    second = engine.run(rest)
    return first, going_on, second


def by_reading(request, tokens, record):
    """A record of rows with these tokens (K, T), from a model that reads them at once, as a function of that model."""
    sampler, lengths = request.sampler, [len(row) for row in tokens]

    @torch.no_grad()
    def compute(model):
        body, head = model.base_model, Model(model).head
        rows = []
        for number, row in zip(request.rollouts, tokens, strict=True):
            ids = torch.tensor([[*request.prompt, *row]])
            states = body(input_ids=ids).last_hidden_state[0, len(request.prompt) - 1 : -1]
            u = [request.intervention.at(torch.tensor([number]), t, states)[0] for t in range(len(row))]
            reference = (head.logits(states) / sampler.temperature).log_softmax(-1)
            steered = (head.logits(states) + head.shift(torch.stack(u).to(states))) / sampler.temperature
            steered, chosen = steered.log_softmax(-1), torch.tensor(row)[:, None]
            rows.append(
                {
                    "hidden": states,
                    "kl": (steered.exp() * (steered - reference)).sum(-1),
                    "logprobs": steered.gather(-1, chosen)[:, 0],
                    "ref_logprobs": reference.gather(-1, chosen)[:, 0],
                }[record]
            )
        return torch.cat(rows)

    assert max(lengths) <= request.max_new_tokens
    return compute


def same(policy, request, one, other, exactly=False):
    """Records of two ways to decode the same tokens."""
    assert one.tokens.tolist() == other.tokens.tolist() and one.lengths.tolist() == other.lengths.tolist()
    assert one.ended.tolist() == other.ended.tolist()
    for name in ("changed", *(RECORDS if exactly else ())):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("hidden", "kl", "logprobs", "ref_logprobs"):
        a, b = (getattr(rollouts, name)[rollouts.alive] for rollouts in (one, other))
        allowed = room(by_reading(request, one.responses(), name), policy.model)
        # beside what states bring, a law's own sums over the vocabulary round; logits are of a size around 10
        own = 0.0 if name == "hidden" else rounding(torch.float32, VOCAB, 10.0) * len(a) ** 0.5
        assert (a - b).norm() <= 2 * (allowed + own), name  # each may be off by that


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kept", [True, False])
def test_continued_rows_are_those_of_one_go(architecture, kept):
    """Whether the engine kept what it read of them or has to read it again. Packed, as models that are loaded by name:
    on some CPUs products by MKL, which other models have, round a row otherwise where fewer stand beside it."""
    policy = make_policy(architecture)
    pack(policy.body)
    request = whole_request(policy)
    expected = TorchEngine(policy, 8).run(request)
    assert int(expected.ended.sum()) > 0 and int((expected.lengths > CUT).sum()) > 1  # some end, some go on
    engine = TorchEngine(policy, 8)
    if not kept:
        engine._stems.keep = lambda *_: None
    first, going_on, second = in_two(engine, request)
    assert second.drawn == int((second.lengths - CUT).sum()) and first.drawn == int(first.lengths.sum())
    assert not second.kl[:, :CUT].any() and not second.hidden[:, :CUT].any()  # nothing is recorded of a beginning
    merged = first.widened(LENGTH).continued(second, going_on, CUT)
    aligned = kept and policy.aligned_head(policy.prefill(PROMPT, 1)) is not None
    same(make_policy(architecture), request, merged, expected, exactly=aligned and NO_TAILS)
    assert merged.drawn == expected.drawn == int(expected.lengths.sum())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_forks_beside_other_rows_and_under_any_row_limit(architecture):
    """Two rows go on from one, beside another prompt, three rows at a time."""
    policy = make_policy(architecture)
    request = whole_request(policy)
    engine = TorchEngine(policy, 3)
    first = engine.run(dataclasses.replace(request, max_new_tokens=CUT, resumable=True))
    alive = torch.nonzero(~first.ended)[:, 0].tolist()
    assert len(alive) > 1
    parents = [alive[row % 2] for row in (0, 1, 0, 0, 1, 1, 1, 0)]
    beginnings = tuple(tuple(first.tokens[parent].tolist()) for parent in parents)
    fork = dataclasses.replace(request, beginnings=beginnings)
    other = dataclasses.replace(request, prompt=(9, 10, 11, 12, 13, 14, 15), rollouts=range(2))
    forked, mates = engine.run_many([fork, other])
    # Each alone, on an engine that kept nothing
    for row in range(ROWS):
        alone = dataclasses.replace(fork, rollouts=[row], beginnings=(beginnings[row],))
        single = TorchEngine(policy, 8).run(alone)
        assert forked.tokens[row].tolist() == single.tokens[0].tolist()
        own = room(by_reading(alone, single.responses(), "kl"), policy.model)
        assert (forked.kl[row] - single.kl[0])[CUT:].norm() <= 2 * own
    assert mates.tokens.tolist() == TorchEngine(policy, 8).run(other).tokens.tolist()
    assert len({tuple(row) for row in forked.responses()}) > 2  # rows that share a parent go ways of their own


def test_noise_has_the_same_address_behind_a_beginning():
    policy = make_policy("llama")
    width = policy.head.hidden_size
    noise = Noise(torch.zeros(LENGTH, width), TIES["position"](LENGTH), 3, PROMPT, 1, 0.5, LENGTH)
    request = dataclasses.replace(whole_request(policy), intervention=noise, sampler=Sampler(0.8))
    expected = TorchEngine(policy, 8).run(request)
    first, going_on, second = in_two(TorchEngine(policy, 8), request)
    same(policy, request, first.widened(LENGTH).continued(second, going_on, CUT), expected, exactly=True)
    assert going_on.tolist() != list(range(ROWS))  # so that numbers of rollouts are not those of rows


def test_what_was_kept_is_let_go():
    policy = make_policy("llama")
    engine, request = TorchEngine(policy, 8), whole_request(policy)
    engine.run(dataclasses.replace(request, max_new_tokens=CUT, resumable=True))
    assert len(engine._stems) > 0 and engine.room(request)  # nothing decodes
    other = engine.submit(dataclasses.replace(request, prompt=(9, 10), rollouts=range(4)))
    fits = dataclasses.replace(request, rollouts=range(4))
    assert not engine.room(fits)  # rows that are kept are rows
    engine.forget(PROMPT)
    assert len(engine._stems) == 0 and engine.room(fits)
    engine.cancel(other)
    in_two(engine, request)
    assert len(engine._stems) == 0  # a request that continues takes what was kept for it


@pytest.mark.parametrize("sampler", [Sampler(0.8, 0.9), Sampler(1.0), Sampler(0.7, top_k=5), Sampler(1.0, min_p=0.1)])
def test_anchored_laws_are_cut_where_the_reference_is_cut(sampler):
    """Against laws made from the states by the sampler's definition: the whole softmax, cut and normalised."""
    policy = make_policy("llama")
    free = torch.randn(1, policy.head.hidden_size, generator=torch.Generator().manual_seed(1))
    vectors = Vectors(free, TIES["shared"](LENGTH))
    request = dataclasses.replace(whole_request(policy), sampler=sampler, intervention=vectors)
    rollouts = TorchEngine(policy, 8).run(request)
    u = free[0].double()
    weight = policy.head.weight.double()
    outside = 0
    for row, length in enumerate(rollouts.lengths.tolist()):
        for position in range(length):
            state, token = rollouts.hidden[row, position].double(), int(rollouts.tokens[row, position])
            before, after = (torch.softmax(weight @ (state + move) / sampler.temperature, 0) for move in (0 * u, u))
            cut = sampler.truncation.law(before[None])[0]
            anchored = torch.where(cut > 0, after, 0.0)
            expected = (cut[token].log() - (anchored / anchored.sum())[token].log()).item()
            own = sampler.truncation.law(after[None])[0]
            outside += int(((own > 0) & (cut == 0)).any())
            assert cut[token] > 0
            size = (weight.abs() @ state.abs()).max().item() / sampler.temperature
            found = rollouts.log_ratios[row, position].item()
            assert abs(found - expected) <= 4 * rounding(torch.float32, 64) * size
    assert outside > 0 or sampler.samples_whole_law  # steering would have brought tokens in that the reference cuts off
