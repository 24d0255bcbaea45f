"""Every record of every draw, recomputed by teacher forcing, however vLLM schedules the rows."""

import copy
import dataclasses
import os

import pytest
import torch
from checker import check
from jobs import noise, request, several, vectors

import misvo
from misvo.engines import vllm_rows, vllm_runners
from misvo.interventions import Climb
from misvo.rollouts import Keep
from misvo.sampling import Sampler
from misvo.tie import TIES
from misvo.value import ValueNetwork

# Blocks of the cache hold 32 tokens: rows of the last three ask for another one soon, and that is when vLLM preempts.
PROMPTS = [[5, 6, 7], list(range(8, 37)), list(range(10, 71)), [9, *range(5, 34)]]


@pytest.fixture(scope="module")
def plain(tiny):
    return misvo.Policy.from_pretrained(tiny())


def decode(policy, requests, each_step=lambda number: None):
    """Decode together; gives rollouts in the order of the requests, and what vLLM asked for."""
    engine, done, number = policy.engine(), {}, 0
    policy.host.call("counts")
    tickets = [engine.submit(one) for one in requests]
    while engine.busy:
        done.update(engine.advance())
        number += 1
        each_step(number)
    return [done[ticket] for ticket in tickets], policy.host.call("counts")


def check_all(plain, requests, results):
    found = [check(plain, one, rollouts) for one, rollouts in zip(requests, results, strict=True)]
    draws, ties = sum(one.draws for one in found), sum(one.ties for one in found)
    assert draws == sum(rollouts.drawn for rollouts in results)
    assert ties <= 1 + draws // 500, f"{ties} of {draws} draws were excused as near ties"
    return found


SCHEDULES = {
    "several prompts": {"max_num_seqs": 12},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "preemption": {"num_gpu_blocks_override": 7, "max_model_len": 128, "max_num_seqs": 24},
    "both": {"num_gpu_blocks_override": 7, "max_model_len": 128, "max_num_seqs": 24, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, vllm, tiny, plain):
    policy = vllm(tiny(), **SCHEDULES[schedule])
    preempted = count_preemptions(policy)
    requests = several(policy, PROMPTS)
    results, counts = decode(policy, requests)
    check_all(plain, requests, results)
    assert counts["drawn"] == sum(int(rollouts.lengths.sum()) for rollouts in results)
    lengths = torch.cat([rollouts.lengths for rollouts in results])
    assert len(lengths.unique()) > 5  # rows really end early, each at its own place
    assert bool(preempted) == ("num_gpu_blocks_override" in SCHEDULES[schedule])


def count_preemptions(policy) -> list:
    """A list that grows by a request whenever vLLM preempts one."""
    scheduler, preempted = policy.host.vllm.engine_core.engine_core.scheduler, []
    plainly = scheduler._preempt_request

    def noting(request, *rest, **named):
        preempted.append(request.request_id)
        return plainly(request, *rest, **named)

    scheduler._preempt_request = noting
    return preempted


@pytest.fixture
def ahead(vllm, tiny, monkeypatch):
    """vLLM a step ahead of what it knows, with little memory: it throws tokens away and asks for them again."""
    from vllm.platforms import cpu

    settle = cpu.CpuPlatform.check_and_update_config.__func__

    def asynchronous(cls, config):  # on a CPU vLLM turns it off; nothing that is used here needs that
        settle(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(cpu.CpuPlatform, "check_and_update_config", classmethod(asynchronous))
    vllm.close()
    policy = vllm(tiny(), **SCHEDULES["preemption"], max_num_batched_tokens=64, async_scheduling=True)
    assert policy.host.vllm.vllm_config.scheduler_config.async_scheduling
    yield policy
    vllm.close()


def resetting(policy, resets):
    def reset(number):
        if number in (6, 9, 15, 22):
            resets.append(policy.host.vllm.reset_prefix_cache(reset_running_requests=True))

    return reset


def test_asynchronous_scheduling_with_preemptions_and_cache_resets(ahead, plain):
    preempted, requests, resets = count_preemptions(ahead), several(ahead, PROMPTS), []
    results, counts = decode(ahead, requests, resetting(ahead, resets))
    check_all(plain, requests, results)
    assert preempted and any(resets) and counts["again"] > 0 and counts["late"] > 0


def test_requests_of_others_are_not_touched(vllm, tiny, plain):
    from vllm import SamplingParams

    policy = vllm(tiny())
    engine, other = policy.host.vllm, {"prompt_token_ids": [9, 8, 7, 6, 5]}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False, logprobs=3)

    def finish(outputs):
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]

    engine.add_request("alone", other, params)
    (alone,) = finish([])
    requests, outputs = several(policy, PROMPTS[:2]), []
    ours = policy.engine()
    tickets, done = [ours.submit(one) for one in requests], {}
    engine.add_request("in company", other, params)
    step = engine.step

    def noting():
        found = step()
        outputs.extend(output for output in found if output.request_id == "in company" and output.finished)
        return found

    engine.step = noting
    try:
        while ours.busy:
            done.update(ours.advance())
    finally:
        engine.step = step
    (together,) = finish(outputs)
    check_all(plain, requests, [done[ticket] for ticket in tickets])
    assert together[0] == alone[0]
    for before, after in zip(alone[1], together[1], strict=True):  # the laws, too, are the model's own
        assert {token: round(one.logprob, 3) for token, one in before.items()} == {
            token: round(one.logprob, 3) for token, one in after.items()
        }


SAMPLERS = {
    "temperature": Sampler(temperature=0.6),
    "top-p": Sampler(temperature=0.8, top_p=0.9),
    "top-k": Sampler(top_k=12),
    "min-p": Sampler(min_p=0.05),
    "greedy": Sampler(greedy=True),
    "held ends": Sampler(min_new_tokens=9, ends=(2, 3, 80, 81, 82, 83, 84, 85)),
}


def test_samplers_side_by_side(vllm, tiny, plain):
    policy = vllm(tiny())
    requests = [
        request(policy, PROMPTS[index % 3], sampler=sampler, seed=index, how=vectors(policy, 24))
        for index, sampler in enumerate(SAMPLERS.values())
    ]
    results, _ = decode(policy, requests)
    check_all(plain, requests, results)
    assert results[-1].lengths.min() > 9


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("law", ["steered", "reference"])
def test_ties_and_laws(tie, law, vllm, tiny, plain):
    policy = vllm(tiny())
    pool = TIES[tie](24).pool
    keep = Keep(scores=True, fisher=law, pool=pool, hidden=True)
    requests = [
        request(policy, prompt, seed=3, step=2, keep=keep, sampler=sampler, how=vectors(policy, 24, tie))
        for prompt, sampler in zip(PROMPTS[:2], (Sampler(), Sampler(temperature=0.7, top_p=0.95)), strict=True)
    ]
    check_all(plain, requests, decode(policy, requests)[0])


def test_laws_in_half_precision(vllm, tiny, plain):
    policy = vllm(tiny())
    one = request(policy, PROMPTS[0], keep=Keep(scores=True, fisher="steered", law_dtype=torch.bfloat16))
    (rollouts,), _ = decode(policy, [one])
    with pytest.raises(AssertionError, match="mean law"):  # which is not exact
        check(plain, one, rollouts)
    (exact,), _ = decode(policy, [request(policy, PROMPTS[0])])
    rounded, whole = rollouts.mean_probs.run(_mean_probs), exact.mean_probs.run(_mean_probs)
    assert rounded.dtype == torch.bfloat16 and (rounded.float() - whole).abs().max() <= 6 * 2**-9 * whole.max()


def _mean_probs(_, rollouts):
    return rollouts.mean_probs


@pytest.mark.parametrize("tie", TIES)
def test_noise_of_aisp_though_rows_are_preempted(tie, vllm, tiny, plain):
    policy = vllm(tiny(), **SCHEDULES["preemption"])
    preempted = count_preemptions(policy)
    requests = [
        request(policy, prompt, rollouts=8, length=40, step=1, keep=Keep(), how=noise(policy, prompt, 40, tie))
        for prompt in PROMPTS
    ]
    check_all(plain, requests, decode(policy, requests)[0])
    assert preempted


def test_value_network_of_re_control(vllm, tiny, plain):
    policy = vllm(tiny())
    torch.manual_seed(0)
    network = ValueNetwork(policy.head.hidden_size).requires_grad_(False).eval()
    requests = [request(policy, prompt, keep=Keep(hidden=True), how=Climb(network, 3, 20.0)) for prompt in PROMPTS[:2]]
    results, _ = decode(policy, requests)
    check_all(plain, requests, results)
    assert results[0].kl.sum() > 0.01  # it moves the model


def test_rows_that_go_on_from_beginnings(vllm, tiny, plain):
    """Forked where others stood, with numbers of their own, through preemptions; and what one go would have given."""
    policy = vllm(tiny(), **SCHEDULES["preemption"])
    preempted = count_preemptions(policy)
    whole = request(
        policy, PROMPTS[1], rollouts=8, length=40, how=vectors(policy, 40), keep=Keep(scores=True, hidden=True)
    )
    first = dataclasses.replace(whole, max_new_tokens=9, resumable=True)
    (begun,), _ = decode(policy, [first])
    check_all(plain, [first], [begun])
    alive = torch.nonzero(~begun.ended)[:, 0].tolist()
    assert len(alive) > 2
    same = dataclasses.replace(
        whole, rollouts=alive, beginnings=tuple(tuple(begun.tokens[row].tolist()) for row in alive)
    )
    source = alive[0]  # all rows go on from one
    forked = dataclasses.replace(same, beginnings=(tuple(begun.tokens[source].tolist()),) * len(alive))
    mixed = dataclasses.replace(same, beginnings=tuple(row[: 3 + n] for n, row in enumerate(same.beginnings)))
    noisy = dataclasses.replace(
        same, intervention=noise(policy, PROMPTS[1], 40), keep=Keep(fisher="steered", hidden=True), anchored=True
    )
    anchored = dataclasses.replace(same, sampler=Sampler(temperature=0.8, top_p=0.9), anchored=True)
    requests = [whole, same, forked, mixed, noisy, anchored]
    results, _ = decode(policy, requests)
    check_all(plain, requests, results)
    assert preempted and torch.equal(results[1].tokens, results[0].tokens[alive])
    assert len({tuple(row) for row in results[2].responses()}) > 1


def test_stop_texts(vllm, tiny, plain):
    policy = vllm(tiny())
    stop = (" a ", " b ", "w1")
    requests = [request(policy, prompt, rollouts=12, stop=stop) for prompt in PROMPTS[:2]]
    results, _ = decode(policy, requests)
    check_all(plain, requests, results)
    ended = [row[-1] for rollouts in results for row in rollouts.responses() if row[-1] not in policy.ends]
    assert any(stop_text in f"{policy.decode([token])}" for token in ended for stop_text in ("w1",))


def test_weights_in_half_precision_have_laws_in_fp32(vllm, tiny):
    """What transformers says of a bf16 model is itself off by a bf16 unit, so laws are made of vLLM's own states."""
    folder = tiny("llama", torch.bfloat16)
    policy = vllm(folder)
    assert policy.head.weight.dtype == torch.bfloat16 and policy.precision == "bfloat16"
    one = request(policy, PROMPTS[0], how=vectors(policy, 24, size=0.01))
    (rollouts,), _ = decode(policy, [one])
    rows, positions = torch.nonzero(rollouts.alive).unbind(1)
    hidden, drawn = rollouts.states(rows, positions), rollouts.tokens[rows, positions]
    logits = policy.head.logits(hidden).double()
    shift = one.intervention.free.double()[positions] @ policy.head.weight.double().T
    steered, reference = (logits + shift).log_softmax(-1), logits.log_softmax(-1)
    picked = torch.arange(len(rows))
    assert (rollouts.logprobs[rows, positions] - steered[picked, drawn]).abs().max() < 1e-5
    assert (rollouts.kl[rows, positions] - (steered.exp() * (steered - reference)).sum(-1)).abs().max() < 1e-6
    # a shift this small would have been lost in a bf16 state, and with it the KL
    assert rollouts.kl[rows, positions].mean() > 1e-6


def cancelled(policy, requests):
    """The same requests, with others that are cancelled on the way."""
    engine, done = policy.engine(), {}
    tickets = [engine.submit(one) for one in requests]
    for number in range(1000):
        if not engine.busy:
            break
        if number % 4 == 0:
            extra = engine.submit(request(policy, [6, 7, 8, number % 50 + 5], rollouts=3))
        elif number % 4 == 2:
            engine.cancel(extra)
        done.update(engine.advance())
    return [done[ticket] for ticket in tickets]


def test_cancelled_neighbours_leave_no_trace(vllm, tiny, plain):
    policy = vllm(tiny(), max_num_seqs=12)
    requests = several(policy, PROMPTS)
    check_all(plain, requests, cancelled(policy, requests))


# The checker must fail on what can go wrong.


@pytest.fixture(scope="module")
def right(vllm, tiny, plain):
    policy = vllm(tiny())
    keep = Keep(scores=True, fisher="steered", hidden=True)
    one = request(policy, PROMPTS[1], rollouts=4, keep=keep, how=vectors(policy, 24))
    (rollouts,), _ = decode(policy, [one])
    mean, rows = rollouts.mean_probs.run(_mean_probs), rollouts.mean_probs.run(_fisher_rows)
    places = torch.nonzero(rollouts.alive).unbind(1)
    hidden = torch.zeros(*rollouts.tokens.shape, policy.head.hidden_size)
    hidden[places] = rollouts.states(*places)
    whole = dataclasses.replace(rollouts, mean_probs=mean, fisher_rows=rows, hidden=hidden)
    check(plain, one, whole)
    return one, whole


def _fisher_rows(_, rollouts):
    return rollouts.fisher_rows


def swapped(one, rollouts):
    for name in ("tokens", "lengths", "ended", "kl", "logprobs", "ref_logprobs", "changed", "score_rows", "hidden"):
        value = getattr(rollouts, name)
        setattr(rollouts, name, value[[1, 0, 2, 3]])
    return one


def one_position_off(one, rollouts):
    return dataclasses.replace(one, intervention=type(one.intervention).by_position(one.intervention.free.roll(1, 0)))


def counted_twice(one, rollouts):
    rollouts.mean_probs[2] *= 1.25
    return one


def other_step(one, rollouts):
    return dataclasses.replace(one, step=one.step + 1)


def stale_state(one, rollouts):
    rollouts.hidden[0, 1] = rollouts.hidden[0, 0]
    return one


def kl_at_the_wrong_place(one, rollouts):
    rollouts.kl[:] = rollouts.kl.roll(1, 1)
    return one


def goes_on_behind_the_end(one, rollouts):
    short = rollouts.lengths.argmin()
    rollouts.logprobs[short, rollouts.lengths[short]] = -1.0
    return one


def score_of_the_reference(one, rollouts):
    rollouts.score_rows[1, 0] = rollouts.score_rows[1, 1]
    return one


BUGS = [swapped, one_position_off, counted_twice, other_step, stale_state, kl_at_the_wrong_place]
BUGS += [goes_on_behind_the_end, score_of_the_reference]


@pytest.mark.parametrize("bug", BUGS)
def test_the_checker_fails_on_planted_bugs(bug, right, plain):
    one, rollouts = copy.deepcopy(right)
    one = bug(one, rollouts)
    with pytest.raises(AssertionError):
        check(plain, one, rollouts)


def test_the_checker_fails_where_a_token_that_is_asked_for_again_is_drawn_again(ahead, plain, monkeypatch):
    position = vllm_rows._Open.position

    def forgetting(opened, ask):
        opened.drawn[ask.rollout] = position(opened, ask)
        opened.over[ask.rollout] = False
        return position(opened, ask)

    monkeypatch.setattr(vllm_rows._Open, "position", forgetting)
    requests = several(ahead, PROMPTS)
    with pytest.raises((AssertionError, misvo.MisvoError)):
        check_all(plain, requests, decode(ahead, requests, resetting(ahead, []))[0])


def test_the_checker_fails_where_chunks_of_a_prefill_are_taken_for_rows(vllm, tiny, plain, monkeypatch):
    policy = vllm(tiny(), **SCHEDULES["both"])
    reader = type(_desk(policy).runner)
    asks = reader.asks

    def with_chunks(self, rows):
        if isinstance(self, vllm_runners.RunnerV1):
            self.runner.discard_request_mask.np[:] = False
        elif self.batch is not None:
            self.batch = dataclasses.replace(self.batch, prefill_len_np=0 * self.batch.prefill_len_np)
        return asks(self, rows)

    monkeypatch.setattr(reader, "asks", with_chunks)
    requests = several(policy, PROMPTS)
    with pytest.raises((AssertionError, misvo.MisvoError)):
        check_all(plain, requests, decode(policy, requests)[0])
    vllm.close()


def _desk(policy):
    """Misvo's part of a worker that runs in this process."""
    return policy.host.vllm.engine_core.engine_core.model_executor.driver_worker.worker.misvo_desk


def test_the_runner_is_the_one_that_was_chosen(vllm, tiny):
    second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    assert isinstance(_desk(vllm(tiny())).runner, vllm_runners.RunnerV2 if second else vllm_runners.RunnerV1)
