"""vLLM in a process of its own: the same records, and one sentence when it dies. Nobody waits for the dead."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from checker import check
from jobs import request, several

import misvo
from misvo.interventions import Noise, Vectors
from misvo.rollouts import Keep
from misvo.tie import TIES

PROMPTS = [[5, 6, 7], list(range(8, 37)), list(range(10, 71))]


@pytest.fixture(scope="module")
def apart(tiny):
    gc.collect()
    policy = misvo.Policy.from_pretrained(tiny(), engine="vllm", own_process=True, max_model_len=256)
    yield policy
    policy.close()


def counting(completions, **_):
    return [len(text) % 7 for text in completions]


def test_records_of_a_worker_in_its_own_process(apart, tiny):
    assert apart.host.pids() and os.getpid() not in apart.host.pids()
    requests, engine, done = several(apart, PROMPTS), apart.engine(), {}
    tickets = [engine.submit(one) for one in requests]
    while engine.busy:
        done.update(engine.advance())
    plain = misvo.Policy.from_pretrained(tiny())
    for one, ticket in zip(requests, tickets, strict=True):
        check(plain, one, done[ticket])


def test_whole_runs_in_its_own_process(apart, tiny):
    plain = misvo.Policy.from_pretrained(tiny())
    options = {"rollouts": 6, "steps": 3, "max_new_tokens": 16, "kl_ref": True, "progress": False}
    here, there = (misvo.steer(policy, "a b", counting, **options) for policy in (plain, apart))
    assert [one.tokens for one in here.candidates] == [one.tokens for one in there.candidates]
    assert (here.steering.vectors - there.steering.vectors).norm() <= 1e-3 * here.steering.vectors.norm()


def test_a_request_that_vllm_rejects_is_one_sentence_and_others_go_on(apart):
    engine = apart.engine()
    good = engine.submit(request(apart, [5, 6, 7], rollouts=2, length=8))
    with pytest.raises(misvo.MisvoError, match="vLLM does not take this request"):
        engine.submit(request(apart, [5, 6, 1000], rollouts=2, length=8))  # there is no such token
    with pytest.raises(misvo.MisvoError, match="context of 256 tokens"):  # which vLLM itself would cut short
        engine.submit(request(apart, range(5, 90), rollouts=2, length=400))
    done = {}
    while engine.busy:
        done.update(engine.advance())
    assert list(done) == [good]
    with pytest.raises(misvo.MisvoError, match="context of 256 tokens"):  # what a user sees, before any work
        misvo.steer(apart, "a b", counting, max_new_tokens=400)


def test_steering_that_is_no_number_ends_in_a_sentence_and_vllm_lives(apart):
    engine, pids = apart.engine(), apart.host.pids()
    huge = torch.full((8, apart.head.hidden_size), 3e38)
    with pytest.raises(misvo.MisvoError, match="no longer numbers"):  # known before anything is decoded
        engine.submit(request(apart, [5, 6, 7], length=8, keep=Keep(), how=Vectors.by_position(huge)))
    noise = Noise(huge, TIES["position"](8), seed=0, prompt=(5, 6, 7), step=0, sigma2=0.5, window=8)
    engine.submit(request(apart, [5, 6, 7], length=8, keep=Keep(), how=noise))
    with pytest.raises(misvo.MisvoError, match="no longer numbers"):  # found out in the worker
        while engine.busy:
            engine.advance()
    engine.close()
    assert apart.host.pids() == pids and apart.generate("a b", max_new_tokens=4) is not None


def kill_soon(pids, seconds):
    def kill():
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_a_worker_that_is_killed_is_one_error_and_the_next_call_starts_it_again(apart):
    before, seen = apart.host.pids(), []
    *scheduling, worker = before
    assert len(scheduling) == 1

    def slow(completions, **_):
        seen.append(len(completions))
        if len(seen) == 2:
            kill_soon([worker], 0.0).join()
        return [float(len(text) % 7) for text in completions]

    with pytest.raises(misvo.MisvoError, match="vLLM has died") as caught:
        misvo.steer_many(apart, ["a b", "c d"], slow, rollouts=4, steps=50, max_new_tokens=16, progress=False)
    assert len(caught.value.results) == 2 and any(result.trace for result in caught.value.results)
    assert "\n" not in str(caught.value)
    again = misvo.steer(apart, "a b", counting, rollouts=4, steps=2, max_new_tokens=8, progress=False)
    assert len(again.trace) == 2 and apart.host.pids() and not set(apart.host.pids()) & set(before)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_is_waited_for(apart):
    """While tokens are awaited, and while an answer to a call is; with its scheduler, and alone."""
    engine, pids = apart.engine(), apart.host.pids()
    engine.submit(request(apart, [5, 6, 7], rollouts=8, length=200, keep=Keep()))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that it surely waits
    thread = kill_soon(pids, 1.0)
    with pytest.raises(misvo.MisvoError, match="vLLM has died"):
        while engine.busy:
            engine.advance()
    thread.join()
    with pytest.raises(misvo.MisvoError, match="vLLM has died"):  # and at once from then on
        engine.submit(request(apart, [5, 6, 7]))
    engine.close()
    host = apart.host  # another one
    *_, worker = host.pids()
    os.kill(worker, signal.SIGSTOP)
    thread = kill_soon([worker], 1.0)
    with pytest.raises(misvo.MisvoError, match="vLLM has died"):
        host.call("counts")
    thread.join()


DRIVER = """
import os, signal, sys, misvo
if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained(sys.argv[1], engine="vllm", own_process=True, max_model_len=256)
    print("PID", *policy.host.pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_vllm_ends_with_whoever_started_it(tiny, tmp_path):
    """Its worker, which has the memory, at once; its scheduler notices that, and lets its queues run dry."""
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), tiny()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        line = next(line for line in driver.stdout if line.startswith("PID"))
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 2
    deadline = time.monotonic() + 90
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "vLLM is an orphan"
        time.sleep(0.5)


INTERRUPTED = """
import sys, misvo
if __name__ == "__main__":
    options = {"engine": "vllm", "own_process": True, "max_model_len": 256}
    try:
        misvo.Policy.from_pretrained(sys.argv[1], **options)
    except KeyboardInterrupt:
        print("STOPPED", flush=True)
    policy = misvo.Policy.from_pretrained(sys.argv[1], **options)

    def reward(completions, **_):
        return [float(len(text) % 7) for text in completions]

    def on_step(index, row):
        if row["step"] == 2:
            print("STEERS", flush=True)

    try:
        misvo.steer(policy, "a b", reward, rollouts=4, steps=100000, max_new_tokens=16, on_step=on_step)
    except KeyboardInterrupt as interrupt:
        print("KEPT", len(interrupt.result.trace), flush=True)
"""


def test_ctrl_c_while_it_loads_and_while_it_decodes(tiny, tmp_path):
    """All processes of a terminal hear it, those of vLLM too. Loading ends; what was steered until then is kept."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, str(tmp_path / "interrupted.py"), tiny()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        said = iter(driver.stdout.readline, "")
        while len(psutil.Process(driver.pid).children()) < 2:  # a tracker of Python's own, and vLLM
            time.sleep(0.5)
        time.sleep(2)
        os.killpg(driver.pid, signal.SIGINT)
        assert any(line == "STOPPED\n" for line in said)
        assert any(line == "STEERS\n" for line in said)
        os.killpg(driver.pid, signal.SIGINT)
        (kept,) = [int(line.split()[1]) for line in said if line.startswith("KEPT")]
    assert kept >= 3
