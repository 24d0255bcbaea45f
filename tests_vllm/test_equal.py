"""The same tokens and the same vectors as the engine on transformers, up to near ties of the last digits."""

import pytest
import torch
from jobs import request, vectors

import misvo
from misvo.far import Far

SENTENCE = "Write one sentence about the sea."
NUMBERS = 5e-4  # as in the checker


def compare(expected, got):
    """Rows that differ, of all; where they agree, records do too."""
    same = (expected.tokens == got.tokens).all(1)
    for name in ("logprobs", "ref_logprobs", "kl", "score_rows", "squares"):
        a, b = getattr(expected, name), getattr(got, name)
        assert (a is None) == (b is None)
        if a is not None:
            scale = max(1.0, a.abs().max().item())
            assert ((a - b).abs()[same].max() if same.any() else 0) <= NUMBERS * scale, name
    assert torch.equal(expected.ended[same], got.ended[same])
    return int((~same).sum()), len(same)


def test_smollm2_draws_the_same_tokens(vllm):
    plain = misvo.Policy.from_pretrained("smollm2-135m")
    policy = vllm("smollm2-135m", max_model_len=512, kv_cache_memory_bytes=256 << 20)
    assert policy.own_sampler == plain.own_sampler and policy.ends == plain.ends
    assert policy.head.fingerprint == plain.head.fingerprint and torch.equal(policy.head.weight, plain.head.weight)
    assert policy.encode(SENTENCE) == plain.encode(SENTENCE)
    differing = rows = 0
    for seed, size in ((0, 0.0), (1, 0.3), (2, 2.0)):
        how = vectors(policy, 24, size=size) if size else None
        one = request(policy, policy.encode(SENTENCE), rollouts=8, length=24, seed=seed, how=how)
        off, count = compare(plain.engine().run(one), policy.engine().run(one))
        differing, rows = differing + off, rows + count
    assert differing <= 1, f"{differing} of {rows} rows differ"  # room for one near tie


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "granite", "cohere"])
def test_architectures_draw_the_same_tokens(architecture, vllm, tiny):
    plain, policy = misvo.Policy.from_pretrained(tiny(architecture)), vllm(tiny(architecture))
    assert policy.head.fingerprint == plain.head.fingerprint and policy.head.scale == plain.head.scale
    assert policy.ends == plain.ends
    differing = 0
    for seed in range(4):
        one = request(policy, [5, 6, 7 + seed], rollouts=16, length=40, seed=seed, how=vectors(policy, 40, size=0.5))
        differing += compare(plain.engine().run(one), policy.engine().run(one))[0]
    assert differing <= 1


def letters(completions, **_):
    """A deterministic reward with a spread."""
    return [sum(0.3 * (ord(word[-1]) % 7) for word in text.split()) - 0.1 * len(text) ** 0.5 for text in completions]


WHOLE = {
    "paper": {"preset": "paper", "penalty": 0.5, "learning_rate": 20.0},
    "auto": {"preset": "auto"},
    "sequence-kl": {"preset": "paper", "cost": "sequence-kl", "tie": "smooth", "learning_rate": 5.0},
    "proximal": {"preset": "paper", "cost": "prefix-fisher", "step": "proximal", "learning_rate": 20.0},
    "aisp": {"method": "aisp", "sigma2": 0.02},
    "re-control": {"method": "re-control", "value_steps": 2},
    "best-of-n": {"method": "best-of-n"},
    "particles": {"method": "particles"},
    "blockwise": {"method": "blockwise", "rollouts": 8},
}


def steer(policy, prompt, **options):
    sizes = {"rollouts": 6, "steps": 4, "max_new_tokens": 20, "seed": 7, "kl_ref": True}
    return misvo.steer(policy, prompt, letters, progress=False, **{**sizes, **options})


def agree(expected, got):
    """Whole runs: where all tokens agree, so do vectors, to a thousandth, and what was measured."""
    rows = [a.tokens == b.tokens for a, b in zip(expected.candidates, got.candidates, strict=True)]
    assert all(rows), f"{rows.count(False)} of {len(rows)} responses differ"
    if expected.steering is not None:
        a, b = expected.steering.vectors, got.steering.vectors
        assert a.norm() > 0 and (a - b).norm() <= 1e-3 * a.norm()
    if expected.kl_ref is not None:
        assert got.kl_ref.total == pytest.approx(expected.kl_ref.total, rel=2e-3, abs=1e-5)
        assert [one.position for one in got.moved][:1] == [one.position for one in expected.moved][:1]
        for a, b in zip(expected.moved[:1], got.moved[:1], strict=True):
            assert [rise[0] for rise in a.tokens] == [rise[0] for rise in b.tokens]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_runs_on_a_tiny_model(name, vllm, tiny):
    plain, policy = misvo.Policy.from_pretrained(tiny()), vllm(tiny())
    agree(steer(plain, "a b c", **WHOLE[name]), steer(policy, "a b c", **WHOLE[name]))


@pytest.mark.parametrize("name", [pytest.param("paper", marks=pytest.mark.slow), "auto"])
def test_whole_runs_on_smollm2(name, vllm):
    plain = misvo.Policy.from_pretrained("smollm2-135m")
    policy = vllm("smollm2-135m", max_model_len=512, kv_cache_memory_bytes=256 << 20)
    own = {"paper": {"learning_rate": 0.5}, "auto": {}}[name]
    options = {"preset": name, "rollouts": 6, "steps": 4, "max_new_tokens": 20, "seed": 7, "kl_ref": True, **own}
    runs = [misvo.steer(one, SENTENCE, letters, progress=False, **options) for one in (plain, policy)]
    agree(*runs)
    assert runs[0].trace[-1]["kl"] > 0.05  # the model was really moved


def test_what_is_large_stays_in_the_worker(vllm, tiny):
    """No message in a whole run of `paper` and of `auto` is larger than K×T×d numbers and what surrounds them."""
    policy = vllm(tiny())
    host, sizes, rpc = policy.host, [], policy.host.vllm.collective_rpc

    def noting(method, args):
        (answer,) = rpc(method, args=args)
        sizes.extend((len(args[0]), len(answer)))
        return [answer]

    K, T, d = 4, 64, policy.head.hidden_size
    host.vllm.collective_rpc = noting
    try:
        for preset in ("paper", "auto"):
            steer(policy, "a b c", preset=preset, rollouts=K, max_new_tokens=T, min_new_tokens=T)
    finally:
        host.vllm.collective_rpc = rpc
    small = 24 * K * T + 6000  # tokens, KLs, log-probabilities; the names of things. T×V numbers would not fit in it
    assert small < T * policy.head.vocab_size * 4
    assert K * T * d * 4 <= max(sizes) <= K * T * d * 4 + small


def test_records_are_dropped_when_nobody_holds_them(vllm, tiny):
    policy = vllm(tiny())
    rollouts = policy.engine().run(request(policy, [5, 6, 7]))
    assert isinstance(rollouts.mean_probs, Far) and isinstance(rollouts.hidden, Far)
    kept = policy.host.vllm.engine_core.engine_core.model_executor.driver_worker.worker.misvo_desk.kept
    assert len(kept) == 2
    del rollouts
    policy.host.call("counts")
    assert not kept


def test_a_reward_that_samples_from_the_policy_itself(vllm, tiny):
    """Two engines on one vLLM, from two threads."""
    policy = vllm(tiny())
    alone = policy.generate("d e f", max_new_tokens=6, seed=3)

    def asks(completions, **_):
        assert policy.generate("d e f", max_new_tokens=6, seed=3) == alone
        return [float(len(text) % 5) for text in completions]

    options = {"rollouts": 4, "steps": 3, "max_new_tokens": 12, "progress": False}
    together = misvo.steer_many(policy, ["a b", "c", "d"], asks, **options)
    apart = [misvo.steer(policy, prompt, asks, **options) for prompt in ("a b", "c", "d")]
    assert [[one.tokens for one in run.candidates] for run in together] == [
        [one.tokens for one in run.candidates] for run in apart
    ]
