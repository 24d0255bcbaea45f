"""What runs in vLLM's worker and needs no vLLM: rows that are asked for in any order, twice and too late, and whose
rows are whose in batches of both of its model runners."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_policy

from misvo.engines.vllm_rows import Ask, LawRows
from misvo.engines.vllm_runners import RunnerV1, RunnerV2, runner_of
from misvo.errors import MisvoError
from misvo.interventions import Vectors
from misvo.rollouts import Keep, Request
from misvo.sampling import Sampler


@pytest.fixture(scope="module")
def policy():
    return make_policy()


def make_request(policy, prompt=(5, 6, 7), rollouts=4, length=12, **options):
    generator = torch.Generator().manual_seed(1)
    how = Vectors.by_position(0.3 * torch.randn(length, policy.head.hidden_size, generator=generator))
    keep = Keep(scores=True, fisher="steered", hidden=True)
    return Request(prompt, 0, 1, range(rollouts), length, Sampler(), how, keep, **options)


class Body:
    """Stands for vLLM: has every row's tokens, and makes states of them by transformers."""

    def __init__(self, policy, request):
        self.policy, self.request = policy, request
        self.rows = [[*request.prompt, *request.beginning(row)] for row in range(len(request.rollouts))]

    @torch.no_grad()
    def states(self, rows):
        return torch.cat(
            [self.policy.body(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[:, -1] for row in rows]
        )


def play(policy, request, choose):
    """Decode with rows in any order: `choose(step, alive)` names the rows of a step."""
    law, body = LawRows(policy.head, policy.ends, policy.decode), Body(policy, request)
    law.open("job", request)
    alive, step = set(range(len(body.rows))), 0
    most = len(request.prompt) + request.max_new_tokens
    while alive:
        rows = choose(step, sorted(alive))
        asks = [Ask(place, "job", row, len(body.rows[row])) for place, row in enumerate(rows)]
        tokens = law.draw(body.states([body.rows[row] for row in rows]), asks).tolist()
        for row, token in zip(rows, tokens, strict=True):
            body.rows[row].append(token)
            if token in policy.ends or len(body.rows[row]) == most:
                alive.discard(row)
        step += 1
    return law, body, law.take("job").rollouts


def test_any_order_gives_what_the_other_engine_gives(policy):
    request = make_request(policy)
    expected = policy.engine().run(request)
    generator = np.random.default_rng(0)

    def some(step, alive):
        return generator.permutation(alive)[: 1 + step % len(alive)].tolist()

    law, body, got = play(policy, request, some)
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.ended, expected.ended)
    assert [row[3:] for row in body.rows] == got.responses()
    for name in ("kl", "logprobs", "score_rows", "mean_probs", "fisher_rows", "hidden"):
        assert torch.allclose(getattr(got, name), getattr(expected, name), atol=2e-5), name
    assert law.counts.drawn == int(got.lengths.sum()) and not law.counts.again


def test_what_is_asked_again_is_answered_and_not_counted_again(policy):
    request = make_request(policy)
    expected = policy.engine().run(request)
    law, body = LawRows(policy.head, policy.ends, policy.decode), Body(policy, request)
    law.open("job", request)
    for row in range(4):
        while True:
            ask = Ask(0, "job", row, len(body.rows[row]))
            token = law.draw(body.states([body.rows[row]]), [ask]).item()
            again = law.draw(body.states([body.rows[row]]), [ask]).item()  # vLLM has thrown it away
            assert again == token
            body.rows[row].append(token)
            if token in policy.ends or len(body.rows[row]) == 15:
                break
        late = law.draw(body.states([body.rows[row]]), [Ask(0, "job", row, len(body.rows[row]))]).item()
        assert late in policy.ends
    got = law.take("job").rollouts
    assert law.counts.again == law.counts.drawn == int(got.lengths.sum()) and law.counts.late == 4
    assert torch.allclose(got.mean_probs, expected.mean_probs, atol=2e-6) and torch.equal(got.tokens, expected.tokens)
    unknown = law.draw(body.states([body.rows[0]]), [Ask(0, "job", 0, 4)])  # a job that was taken
    assert unknown.item() in policy.ends


def test_rows_that_go_on_from_beginnings(policy):
    whole = policy.engine().run(make_request(policy, rollouts=16))
    alive = [row for row in range(16) if whole.lengths[row] > 2]
    beginnings = tuple(tuple(whole.tokens[row, :2].tolist()) for row in alive)
    request = replace(make_request(policy), rollouts=alive, beginnings=beginnings)
    _, _, got = play(policy, request, lambda step, rows: rows)
    assert alive and torch.equal(got.tokens, whole.tokens[alive]) and not got.kl[:, :2].any()


def test_a_position_that_was_skipped_and_a_job_that_is_not_over(policy):
    law, body = LawRows(policy.head, policy.ends, policy.decode), Body(policy, make_request(policy))
    law.open("skipped", make_request(policy))
    law.draw(body.states([body.rows[0]]), [Ask(0, "skipped", 0, 7)])
    with pytest.raises(MisvoError, match="skipped from position 0 to 4"):
        law.take("skipped")
    law.open("early", make_request(policy))
    with pytest.raises(MisvoError, match="ended 4 rows before"):
        law.take("early")


def test_a_step_without_memory_ends_its_jobs_and_of_several_ranks_the_rank(policy, monkeypatch):
    """Alone, the worker lives on and its jobs hear of it. Where others wait for it, a rank must not go on."""

    def no_memory(groups, hidden):
        raise torch.OutOfMemoryError("no memory left")

    for split in (False, True):
        monkeypatch.setattr(policy.head, "split", split, raising=False)
        law, body = LawRows(policy.head, policy.ends, policy.decode), Body(policy, make_request(policy))
        monkeypatch.setattr(law._steps, "draw", no_memory)
        law.open("job", make_request(policy))
        if split:
            with pytest.raises(RuntimeError, match="no memory left"):
                law.draw(body.states([body.rows[0]]), [Ask(0, "job", 0, 3)])
        else:
            assert law.draw(body.states([body.rows[0]]), [Ask(0, "job", 0, 3)]).item() in policy.ends
            with pytest.raises(MisvoError, match="no memory left"):
                law.take("job")


def params(job=None, rollout=0):
    return types.SimpleNamespace(extra_args=None if job is None else {"misvo": [job, rollout]})


def test_rows_of_the_first_runner():
    requests = {"a": params("j", 2), "b": params(), "c": params("j", 0), "d": params("k", 1)}
    batch = types.SimpleNamespace(num_reqs=4, req_ids=list(requests))
    runner = types.SimpleNamespace(
        input_batch=batch,
        requests={name: types.SimpleNamespace(sampling_params=one) for name, one in requests.items()},
        discard_request_mask=types.SimpleNamespace(np=np.array([False, False, True, False])),  # c is a chunk
        optimistic_seq_lens_cpu=torch.tensor([9, 4, 6, 12]),
    )
    reader = runner_of(runner)
    assert isinstance(reader, RunnerV1)
    assert reader.asks(4) == [Ask(0, "j", 2, 9), Ask(3, "k", 1, 12)]
    assert reader.asks(3) == []  # not the rows of this batch


def test_rows_of_the_second_runner():
    """Slots are recycled, and a preempted request comes back to another one with its response as a prefill."""
    seen = []

    class Sampler:
        def add_request(self, slot, sampling_params):
            seen.append(slot)
            return "added"

    class Runner:
        def __init__(self):
            self.sampler = Sampler()

        def sample(self, hidden_states, input_batch, grammar_output):
            return reader.asks(len(hidden_states))

    def batch(slots, computed, scheduled, prefill, drafts=0):
        arrays = {"num_computed_tokens_np": computed, "num_scheduled_tokens": scheduled, "prefill_len_np": prefill}
        arrays = {name: np.array(value) for name, value in arrays.items()}
        slots = np.array(slots)
        return types.SimpleNamespace(num_reqs=len(slots), idx_mapping_np=slots, num_draft_tokens=drafts, **arrays)

    runner = Runner()
    reader = runner_of(runner)
    assert isinstance(reader, RunnerV2)
    assert runner.sampler.add_request(5, params("j", 0)) == "added"
    runner.sampler.add_request(2, params("j", 1))
    runner.sampler.add_request(7, params())
    assert seen == [5, 2, 7]
    # slot 5 decodes, 2 reads a chunk of its prompt, 7 is somebody else's
    asks = runner.sample(torch.zeros(3, 4), batch([7, 5, 2], [3, 10, 0], [1, 1, 8], [3, 9, 20]), None)
    assert asks == [Ask(1, "j", 0, 11)]
    # 2 ends its prompt; 5 was preempted and comes back to 0, with 11 tokens to read in two chunks
    runner.sampler.add_request(0, params("j", 0))
    runner.sampler.add_request(5, params())
    asks = runner.sample(torch.zeros(3, 4), batch([2, 0, 5], [8, 0, 4], [12, 6, 1], [20, 11, 4]), None)
    assert asks == [Ask(0, "j", 1, 20)]
    asks = runner.sample(torch.zeros(1, 4), batch([0], [6], [5], [11]), None)
    assert asks == [Ask(0, "j", 0, 11)]
    assert reader.asks(1) == []  # outside of sampling: log-probabilities of a prompt
    assert runner.sample(torch.zeros(1, 4), batch([0], [6], [5], [11], drafts=2), None) == []
