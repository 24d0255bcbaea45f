"""LoRA against models whose weights were changed by hand: states, gradients, KLs; and a model that stays as it was."""

import copy
import json
import sys

import pytest
import torch
from bench_helpers import make_world, raw_config, read_lines
from conftest import ARCHITECTURES, ENDS, letter_reward, make_model, make_policy, make_tokenizer
from fakes import FakeEngine, FakePolicy
from memory import allocated_bytes
from tolerances import assert_near, room
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, TopPLogitsWarper
from typer.testing import CliRunner

import misvo
from misvo import cli, linear
from misvo.adapter import Adapter, AdapterForm, Pair
from misvo.bench import config as configs
from misvo.bench import profile, report, sweep
from misvo.footprint import Shape, run_bytes
from misvo.int8 import quantize
from misvo.methods.base import Context, Scores
from misvo.methods.lora import Lora
from misvo.rollouts import Keep, Request, Rollouts
from misvo.sampling import RandomStream, Sampler
from misvo.session import Session
from misvo.settings import Settings
from misvo.story import story

PROMPT, K, T = (5, 9, 7, 12, 6, 30, 8, 11, 10, 5), 5, 7  # longer than the window of the sliding layers
FORM = AdapterForm(rank=3, alpha=5.0)
SIZES = {"method": "lora", "rollouts": 4, "steps": 3, "max_new_tokens": 6}
HELD_BACK = Sampler(0.8, top_k=20, min_p=0.02, min_new_tokens=4, ends=tuple(ENDS))


@pytest.fixture
def all_fp64(monkeypatch):
    """transformers makes norms and some attention in fp32, whatever the precision of the model: here it does not."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr("misvo.linear._onednn_serves", lambda x, weight: False)


def fp64(architecture):
    return misvo.Policy(make_model(architecture).double(), make_tokenizer())


def some_adapter(policy, size=0.3, form=FORM):
    """An adapter whose B is not zero."""
    generator, fresh = torch.Generator().manual_seed(3), policy.adapted(form).fresh(0, PROMPT)
    ups = {name: size * torch.randn(pair.up.shape, generator=generator) for name, pair in fresh.pairs.items()}
    return Adapter(form, {name: Pair(pair.down, ups[name].to(pair.up)) for name, pair in fresh.pairs.items()})


def merged(model, adapter):
    """The model in fp64 with W + (α/r)·BA in the place of W: neither peft nor a shared tensor."""
    changed = copy.deepcopy(model).double()
    for name, pair in adapter.pairs.items():
        layer = changed.get_submodule(name)
        product = adapter.form.alpha / adapter.form.rank * pair.up.double() @ pair.down.double()
        layer.weight.data += product.T if type(layer).__name__ == "Conv1D" else product
    return changed


@torch.no_grad()
def hidden_of(model, tokens, prompt=PROMPT):
    """The states that a response was drawn from, (T, d), by one call on its own."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]


@torch.no_grad()
def law_of(model, tokens, sampler, prompt=PROMPT):
    """Log-probabilities of all tokens at every position of a response, untruncated, (T, V)."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    logits = logits / sampler.temperature
    for end in sampler.ends:
        logits[: sampler.min_new_tokens, end] = -torch.inf
    return logits.log_softmax(-1)


def decoded(policy, sampler, adapter):
    keep = Keep(scores=True, hidden=True)
    return policy.engine().run(Request(PROMPT, 0, 1, range(K), T, sampler, keep=keep, adapter=adapter))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapted_states_are_those_of_a_model_with_other_weights(architecture, all_fp64):
    policy = fp64(architecture)
    adapter = some_adapter(policy)
    rollouts = decoded(policy, Sampler(), adapter)
    states = policy.adapted(FORM).states(adapter, PROMPT, rollouts)
    other = merged(policy.model, adapter)
    assert 1 < rollouts.lengths.float().mean() < T  # rows end at different places
    for row, tokens in enumerate(rollouts.responses()):
        expected = hidden_of(other, tokens)
        torch.testing.assert_close(states[row, : len(tokens)], expected, rtol=1e-9, atol=1e-9)
        assert (expected - hidden_of(policy.model, tokens)).norm() > 0.1 * expected.norm()
        assert not states[row, len(tokens) :].any()


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.6), Sampler(0.8, top_p=0.8)], ids=["plain", "warm", "top-p"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2", "gptj-bias", "granite"])
def test_the_gradient_is_that_of_finite_differences(architecture, sampler, monkeypatch, all_fp64):
    """Of (1/K) Σ a_i log π(y_i) with the law that tokens were drawn from, top-p by transformers."""
    monkeypatch.setattr("misvo.adapted.LEARN", len(PROMPT) + 2 * T)  # several groups of rows
    policy = fp64(architecture)
    adapter, settings = some_adapter(policy), Settings("lora", rollouts=K, temperature=sampler.temperature)
    rollouts = decoded(policy, sampler, adapter)
    rewards = torch.tensor([0.3, -1.0, 2.0, torch.nan, 0.7], dtype=torch.float64)
    method = Lora(Context(policy.head, PROMPT, sampler, settings, adapted=policy.adapted(FORM)))
    pull = method._pull(rollouts, Scores(rewards))
    gradient = policy.adapted(FORM).gradient(adapter, PROMPT, rollouts, pull)

    others = {i: [rewards[j] for j in (0, 1, 2, 4) if j != i] for i in (0, 1, 2, 4)}
    advantages = {i: rewards[i] - sum(values) / 3 for i, values in others.items()}

    def objective(weights):
        model, total, responses = merged(policy.model, weights), 0.0, rollouts.responses()
        for i, advantage in advantages.items():
            law = law_of(model, responses[i], sampler)
            if sampler.top_p < 1:
                law = TopPLogitsWarper(sampler.top_p)(None, law).log_softmax(-1)
            total += advantage * law[range(len(law)), responses[i]].sum() / 4
        return total.item()

    generator, step = torch.Generator().manual_seed(1), 1e-6
    for _ in range(3):
        direction = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in adapter.tensors]
        ends = [
            objective(adapter.with_tensors([w + s * step * v for w, v in zip(adapter.tensors, direction, strict=True)]))
            for s in (1, -1)
        ]
        slope = sum((g * v).sum().item() for g, v in zip(gradient.tensors, direction, strict=True))
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 0.9), HELD_BACK], ids=["plain", "top-p", "held back"])
def test_kl_and_log_probabilities_are_those_of_full_distributions(sampler):
    policy = make_policy("llama")
    adapter = some_adapter(policy)
    rollouts = decoded(policy, sampler, adapter)
    responses, alive = rollouts.responses(), rollouts.alive

    def exact(figure):
        def compute(model):
            parts = []
            for tokens in responses:
                law, reference = law_of(merged(model, adapter), tokens, sampler), law_of(model, tokens, sampler)
                at = range(len(tokens)), tokens
                apart = torch.where(law.isinf(), 0.0, law.exp() * (law - reference)).sum(-1)
                parts.append({"kl": apart, "logprobs": law[at], "ref_logprobs": reference[at]}[figure])
            return torch.cat(parts)

        return compute

    for figure in ("kl", "logprobs", "ref_logprobs"):
        allowed = room(exact(figure), policy.model)
        expected = exact(figure)(copy.deepcopy(policy.model).double())
        assert 0 < allowed < 1e-3 * expected.norm()
        assert_near(getattr(rollouts, figure)[alive], expected, allowed)
        assert not getattr(rollouts, figure)[~alive].any()
    keys = RandomStream(0, PROMPT).keys(1, range(K), T)
    for row, tokens in enumerate(responses):
        law = law_of(copy.deepcopy(policy.model).double(), tokens, sampler).exp().float()
        drawn, _ = sampler.draw(law, keys[row, : len(tokens)])
        assert torch.equal(rollouts.changed[row, : len(tokens)], drawn != torch.tensor(tokens))
    reference = torch.cat([hidden_of(policy.model, tokens) for tokens in responses])
    torch.testing.assert_close(rollouts.hidden[alive], reference, rtol=1e-4, atol=1e-4)
    assert rollouts.changed.any()


def test_packed_layers_have_the_gradient_of_plain_ones():
    plain, packed = make_policy("llama"), make_policy("llama")
    linear.pack(packed.model.base_model)
    adapter = some_adapter(plain)
    rollouts = decoded(plain, Sampler(), adapter)
    pull = torch.randn(K, T, 32, generator=torch.Generator().manual_seed(0))

    def gradient(model):
        policy = misvo.Policy(model, make_tokenizer())
        own = adapter.with_tensors([w.to(policy.head.dtype) for w in adapter.tensors])
        found = policy.adapted(FORM).gradient(own, PROMPT, rollouts, pull)
        return torch.cat([part.double().flatten() for part in found.tensors])

    allowed = 4 * room(gradient, plain.model)
    assert allowed < 1e-3 * gradient(plain.model).norm()
    assert_near(gradient(packed.model), gradient(copy.deepcopy(plain.model).double()), allowed)


def test_a_layer_of_gpt2_is_adapted_too():
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).double().eval()
    policy = misvo.Policy(model, make_tokenizer())
    adapter = some_adapter(policy)
    rollouts = decoded(policy, Sampler(), adapter)
    states, tokens = policy.adapted(FORM).states(adapter, PROMPT, rollouts), rollouts.responses()[0]
    expected = hidden_of(merged(policy.model, adapter), tokens)
    torch.testing.assert_close(states[0, : len(tokens)], expected, rtol=1e-9, atol=1e-9)


def test_the_first_step_is_the_model_itself_and_seeds_differ(policy):
    runs = [misvo.steer(policy, "a b c", letter_reward, **SIZES, seed=seed) for seed in (0, 0, 1)]
    plain = misvo.steer(policy, "a b c", letter_reward, **{**SIZES, "method": "best-of-n"}, seed=0)

    def tokens(result, *steps):
        return [candidate.tokens for candidate in result.candidates if candidate.step in steps]

    assert tokens(runs[0], 0) == tokens(plain, 0) and tokens(runs[0], 1, 2) != tokens(plain, 1, 2)
    assert [c.tokens for c in runs[0].candidates] == [c.tokens for c in runs[1].candidates]
    assert tokens(runs[0], 0) != tokens(runs[2], 0)
    assert runs[0].trace[0]["kl"] == 0 and all(row["kl"] > 0 for row in runs[0].trace[1:])
    first = [policy.adapted(FORM).fresh(seed, PROMPT).tensors[0] for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1]) and not torch.allclose(first[0], first[2])


def test_prompts_together_are_as_alone(policy):
    prompts, options = ["a b c", "d e f g h", "i"], {**SIZES, "lora_learning_rate": 0.02}
    together = misvo.steer_many(policy, prompts, letter_reward, **options)
    for prompt, result in zip(prompts, together, strict=True):
        alone = misvo.steer(policy, prompt, letter_reward, **options)
        assert [c.tokens for c in result.candidates] == [c.tokens for c in alone.candidates]
        assert [row["norm"] for row in result.trace] == pytest.approx([row["norm"] for row in alone.trace], rel=1e-4)
    assert together[0].trace[-1]["norm"] != together[1].trace[-1]["norm"] > 0


def test_rows_may_come_one_after_another(policy):
    runs = [misvo.steer(policy, "a b c", letter_reward, **SIZES, max_rows=rows) for rows in (None, 3)]
    assert [c.tokens for c in runs[0].candidates] == [c.tokens for c in runs[1].candidates]


def contents(model):
    """All that a model is made of: modules, flags, hooks, and the bytes of every tensor."""
    found = []
    for name, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **vars(module)}
        tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
        hooks = [len(value) for key, value in vars(module).items() if "hooks" in key]
        found.append((name, type(module), module.training, hooks, sorted(vars(module))))
        for key, tensor in sorted(tensors.items()):
            dense = tensor.to_dense() if tensor.layout is torch._mkldnn else tensor
            data = dense.detach().numpy().tobytes()
            found.append((name, key, id(tensor), data, tensor.requires_grad, tensor.grad is None, tensor._version))
    return found


def failing(kind, call=2):
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == call:
            raise kind("now")
        return letter_reward(completions)

    return reward


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", [None, RuntimeError, KeyboardInterrupt])
def test_the_model_is_as_it_was(packed, end):
    policy = make_policy("llama-tied")
    if packed:
        linear.pack(policy.model.base_model)
    before, random = contents(policy.model), torch.get_rng_state()
    if end is None:
        misvo.steer(policy, "a b c", letter_reward, **SIZES)
    else:
        with pytest.raises(KeyboardInterrupt if end is KeyboardInterrupt else misvo.MisvoError) as caught:
            misvo.steer(policy, "a b c", failing(end), **SIZES)
        assert len(caught.value.result.trace) == 1
    assert contents(policy.model) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_an_interrupt_between_a_gradient_and_its_end_leaves_nothing(policy, monkeypatch):
    before = contents(policy.model)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("torch.autograd.grad", interrupted)
        with pytest.raises(KeyboardInterrupt):
            misvo.steer(policy, "a b c", letter_reward, **SIZES)
    assert contents(policy.model) == before
    again, fresh = (misvo.steer(p, "a b c", letter_reward, **SIZES) for p in (policy, make_policy()))
    assert [c.tokens for c in again.candidates] == [c.tokens for c in fresh.candidates]


def e_words(completions, **_):
    return [sum(word in "abcdefg" for word in text.split()) / 10 for text in completions]


def test_the_reward_rises_and_a_budget_holds(policy):
    """On a tiny model; for a real one see below."""
    options = {**SIZES, "rollouts": 16, "steps": 12, "max_new_tokens": 10, "lora_learning_rate": 0.02}
    free = misvo.steer(policy, "a b c", e_words, preset="paper", **options)
    held = misvo.steer(policy, "a b c", e_words, preset="paper", kl_budget=4.0, **options)
    first, last = free.trace[0]["mean"], [sum(r["mean"] for r in run.trace[-4:]) / 4 for run in (free, held)]
    assert 1.5 * first < last[1] < last[0] / 2
    nats = [sum(row["kl"] for row in run.trace[-4:]) / 4 for run in (free, held)]
    assert nats[0] > 20 and 2 < nats[1] < 4.4
    assert any(row["shrunk"] < 1 for row in held.trace)


def test_a_budget_foresees_the_exact_kl(policy):
    """What it says of the shrunk adapter is the KL of the changed weights on the responses that it looked at."""
    from misvo.adapter_budget import AdapterBudget

    adapter, sampler = some_adapter(policy, 0.5), Sampler(0.9)
    rollouts = decoded(policy, sampler, None)  # no KL yet, so nothing to correct by
    budget = AdapterBudget(policy.head, 1.0, sampler, adapted=policy.adapted(FORM), prompt=PROMPT)
    factor = budget.shrink(rollouts, adapter)
    responses = [rollouts.responses()[row] for row in (0, 1, 3, 4)]

    def nats(factor):
        scaled = [w * (factor if i % 2 else 1) for i, w in enumerate(adapter.tensors)]
        changed, own = merged(policy.model, adapter.with_tensors(scaled)), copy.deepcopy(policy.model).double()
        laws = [(law_of(changed, row, sampler), law_of(own, row, sampler)) for row in responses]
        return sum((law.exp() * (law - reference)).sum().item() for law, reference in laws) / len(laws)

    assert 0 < factor < 1 < nats(1.0)
    assert budget.predicted == pytest.approx(nats(factor), rel=1e-3) and 0.97 < nats(factor) <= 1.001


def test_kl_ref_is_measured_on_the_first_responses(policy):
    options = {**SIZES, "lora_learning_rate": 0.02, "temperature": 0.9, "lora_rank": 3, "lora_alpha": 5.0}
    kept = []

    class Watched(Lora):
        def update(self, *arguments):
            told = super().update(*arguments)
            kept.append(self.adapter)
            return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(misvo.run.METHODS, "lora", Watched)
        result = misvo.steer(policy, "a b c", letter_reward, kl_ref=True, preset="paper", **options)
    sampler, total, prompt = Sampler(0.9), 0.0, result.prompt_ids
    for candidate in result.candidates[:4]:
        law = law_of(merged(policy.model, kept[-1]), candidate.tokens, sampler, prompt)
        reference = law_of(copy.deepcopy(policy.model).double(), candidate.tokens, sampler, prompt)
        total += (law.exp() * (law - reference)).sum().item() / 4
    assert total > 0.01 and result.kl_ref.total == pytest.approx(total, rel=1e-3)
    assert result.moved and result.moved[0].tokens


def test_equal_rewards_change_nothing(policy):
    result = misvo.steer(policy, "a b c", lambda completions, **_: [1.0] * len(completions), **SIZES)
    assert [row["norm"] for row in result.trace] == [0.0, 0.0, 0.0]
    assert all("nothing is learned" in row["note"] for row in result.trace)


def test_targets_choose_layers(policy):
    form = AdapterForm(targets=("q_proj", "mlp.down_proj"))
    names = list(policy.adapted(form).fresh(0, PROMPT).pairs)
    expected = [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert names == expected
    every = policy.adapted(AdapterForm()).fresh(0, PROMPT).pairs
    linears = [n for n, m in policy.model.base_model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert sorted(every) == sorted(f"model.{name}" for name in linears)


def test_pictures_are_not_adapted():
    names = list(make_policy("gemma3-multimodal").adapted(FORM).fresh(0, PROMPT).pairs)
    assert len(names) == 14 and not any("vision" in name for name in names)


def test_what_cannot_be_adapted_is_refused_in_a_sentence(policy, monkeypatch):
    def refusal(policy, **options):
        with pytest.raises(misvo.MisvoError) as caught:
            misvo.steer(policy, "a b", letter_reward, **SIZES, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    rounded, compiled = make_policy(), make_policy()
    quantize(rounded.model.base_model, "int8")
    compiled.model.base_model.compile(dynamic=True)
    assert refusal(rounded) == "int8 layers have no gradient: load the model without quantize='int8' for method='lora'."
    assert "without compile=True" in refusal(compiled)
    assert "'nowhere', but the linear layers of this model are down_proj, gate_proj" in refusal(
        policy, lora_targets=("nowhere",)
    )
    elsewhere = "this engine cannot decode with adapters: method='lora' runs on the one of transformers."
    assert refusal(FakePolicy()) == elsewhere
    settings = Settings.from_preset(**SIZES)
    with pytest.raises(misvo.MisvoError, match="cannot decode with adapters"):
        Session(policy, engine=FakeEngine(policy.head)).add("a b", letter_reward, settings)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert refusal(policy) == "method='lora' needs peft: pip install 'misvo[lora]'"


def test_the_plain_engine_refuses_adapters(policy):
    from misvo.engines.torch import TorchEngine

    with pytest.raises(misvo.MisvoError, match="AdaptingEngine"):
        TorchEngine(policy).run(Request(PROMPT, 0, 0, range(2), 3, adapter=some_adapter(policy)))


def test_a_sweep_a_profile_and_a_report_know_it(tmp_path):
    world = make_world(tmp_path)
    raw = raw_config(world, methods=("best-of-n", "lora"), seeds=(1,), kl_ref=True)
    raw["tasks"][0]["prompts"] = 2
    sweep.run(configs.from_dict(raw), tmp_path / "run")
    rows = {row["method"]: row for row in read_lines(tmp_path / "run" / "rows.jsonl")}
    alone = misvo.steer(
        misvo.Policy.from_pretrained(world / "model"),
        rows["lora"]["prompt_text"],
        letter_reward,
        preset="paper",
        method="lora",
        rollouts=4,
        steps=3,
        max_new_tokens=10,
        seed=1,
        kl_ref=True,
    )
    assert rows["lora"]["norm"] == pytest.approx(alone.trace[-1]["norm"], rel=1e-3) and alone.trace[-1]["norm"] > 0
    assert rows["lora"]["kl_ref"] == pytest.approx(alone.kl_ref.total, rel=1e-3) and rows["lora"]["vectors"] is None
    assert rows["best-of-n"]["kl"] == 0 < rows["lora"]["kl"] == pytest.approx(alone.trace[-1]["kl"], rel=1e-3)
    adapter = misvo.Policy.from_pretrained(world / "model").adapted(AdapterForm()).fresh(0, (1,))
    assert rows["lora"]["state_bytes"] == sum(tensor.nbytes for tensor in adapter.tensors) > 0
    measured = profile.run(configs.from_dict({**raw, "warmup": 0}), prompts=1)
    assert [entry["method"] for entry in measured["methods"]] == ["best-of-n", "lora"]
    made = report.make([tmp_path / "run"], tmp_path / "report")
    assert [row[1] for row in made.figures["prompts"]["rows"]] == ["BoN (N=12)", "LoRA"]


def test_the_command_line_trains_adapters(tmp_path):
    world = make_world(tmp_path)
    sizes = ["-k", "4", "-n", "3", "-t", "6", "--lora-rank", "2", "--lora-targets", "q_proj", "--seed", "3"]
    given = ["steer", "a b", "--model", f"{world}/model", "--reward", f"{world}/reward.py:letters", "--json"]
    ran = CliRunner().invoke(cli.app, [*given, "--method", "lora", *sizes])
    assert ran.exit_code == 0, ran.output
    said = json.loads(ran.stdout)
    options = {**SIZES, "lora_rank": 2, "lora_targets": "q_proj", "seed": 3}
    alone = misvo.steer(misvo.Policy.from_pretrained(world / "model"), "a b", letter_reward, **options)
    assert said["settings"]["lora_targets"] == ["q_proj"] and alone.settings.lora_targets == ("q_proj",)
    assert [c["tokens"] for c in said["candidates"]] == [c.tokens for c in alone.candidates]
    assert any("rose from" in line or "went from" in line for line in story(alone))
    listed = CliRunner().invoke(cli.app, ["list", "methods"])
    assert "lora" in listed.stdout and "low-rank adapters" in listed.stdout


def test_the_footprint_of_a_gradient_is_what_torch_counts():
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4}
    policy = misvo.Policy(LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes)).eval(), make_tokenizer())
    settings, length = Settings("lora", rollouts=4, max_new_tokens=64), 64
    adapted = policy.adapted(AdapterForm())
    adapter, tokens = adapted.fresh(0, PROMPT), torch.full((4, length), 7)
    rollouts = Rollouts(tokens, torch.full((4,), length), *(torch.zeros(4, length) for _ in range(3)))
    counted = allocated_bytes(lambda: adapted.gradient(adapter, PROMPT, rollouts, torch.ones(4, length, 64)))
    shape = Shape.of(policy)
    assert shape.linear == 4 * (4 * 128 + 3 * 224)
    foreseen = run_bytes(shape, settings, len(PROMPT))["gradient"]
    assert 0.8 * counted < foreseen < 2 * counted
    plain = run_bytes(shape, Settings("best-of-n", rollouts=4, max_new_tokens=64), len(PROMPT))
    assert sum(plain.values()) + foreseen < sum(run_bytes(shape, settings, len(PROMPT)).values()) * 1.5


@pytest.mark.slow
def test_a_real_model_learns(smollm2):
    """Means of eight responses are noisy, so two prompts and the last two of four steps speak together."""
    prompts = ["Tell me about your weekend in the mountains.", "How do I keep my bicycle in good order?"]
    sizes = {"rollouts": 8, "steps": 4, "max_new_tokens": 24, "seed": 3}
    results = misvo.steer_many(smollm2, prompts, misvo.rewards.load("sentiment"), method="lora", **sizes)
    first, last = (sum(r.trace[i]["mean"] for r in results for i in steps) / len(steps) / 2 for steps in ([0], [2, 3]))
    assert last > first + 0.1
    for result in results:
        assert (
            0 < result.trace[-1]["kl"] < 2 * 0.1 * 24
        )  # the budget of the preset, and what eight responses miss it by
