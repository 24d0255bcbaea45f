"""How many rows decode at once within a given memory: by hand, by what torch counts, and by method."""

import pytest
import torch
from conftest import letter_reward, make_tokenizer
from memory import allocated_bytes
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import misvo

V, D, LAYERS, HEADS, K, T, PROMPT = 20_000, 32, 6, 4, 64, 8, "a b c d"
SHAPE = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}


def make_policy(sliding=False, **changes):
    torch.manual_seed(0)
    if sliding:
        kinds = {"sliding_window": 1000, "layer_types": ["sliding_attention"] * LAYERS}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, **changes}, **kinds))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    policy = misvo.Policy(model.eval(), make_tokenizer())
    policy.eos_tokens = torch.tensor([], dtype=torch.long)  # responses of full length
    return policy


def rows_at_once(policy, prompts=(PROMPT,), **options):
    """The most rows that the body was given, in a run."""
    step, seen = policy.body_step, []
    policy.body_step = lambda tokens, *rest: seen.append(len(tokens)) or step(tokens, *rest)
    misvo.steer_many(
        policy,
        list(prompts),
        letter_reward,
        **{"rollouts": K, "max_new_tokens": T, "steps": 2, **options},
        preset="paper",
    )
    policy.body_step = step
    return max(seen)


def by_hand(memory, mean_laws, shifts, states, prompts=1, rollouts=K):
    """The most rows whose keys, values, logits and laws fit beside what prompts keep, everything in fp32."""
    for rows in range(256, 0, -1):
        open_prompts = min(prompts, 2 * max(1, rows // rollouts))
        kept = open_prompts * ((mean_laws + shifts) * V + states * rollouts * T * D)
        columns = -(-T // 16) * 16 + (-2 - D // HEADS) % 16  # the prompt is kept once; see misvo.row_layer
        caches = LAYERS * 2 * D * (rows * columns + open_prompts * 4)
        waiting = max(rows * V, min(2 * 2**20, rows * T * V))  # laws are collected in 8 MiB or more
        race = 16 * min(2**15, rows * V)  # 64 bytes a token
        if 4 * (kept + caches + rows * V + waiting + race) <= memory:
            return rows
    return 1


# What each keeps of a prompt: mean laws, positions whose Wu is at hand, sets of states.
KEPT = {
    "best-of-n": ({"method": "best-of-n"}, 0, 0, 0),
    "paper": ({}, T, 8, 2),
    "bfloat16": ({"law_dtype": "bfloat16"}, T / 2, 8, 2),
    "shared": ({"tie": "shared"}, 1, 1, 2),
    "no cost": ({"cost": "none"}, 0, 8, 1),
}


@pytest.mark.parametrize("memory", [12_000_000, 13_000_000])
@pytest.mark.parametrize("name", KEPT)
def test_the_number_is_the_one_that_is_computed_by_hand(name, memory):
    options, *kept = KEPT[name]
    expected = by_hand(memory, *kept)
    assert 10 < expected < K
    assert rows_at_once(make_policy(), **options, memory=f"{memory}B") == expected


def test_many_prompts_keep_what_each_of_them_keeps():
    prompts = [f"{letter} b c d" for letter in "abcdef"]
    expected = by_hand(20_000_000, T, 8, 2, prompts=6, rollouts=8)
    alone = by_hand(20_000_000, T, 8, 2, prompts=1, rollouts=8)
    assert 16 < expected < alone
    # Steps of eight rows enter whole.
    assert rows_at_once(make_policy(), prompts, rollouts=8, memory="20MB") == expected // 8 * 8


def test_best_of_n_and_tied_runs_get_more_rows_than_the_paper():
    rows = {name: rows_at_once(make_policy(), **KEPT[name][0], memory="14MB") for name in KEPT}
    assert rows["paper"] < rows["bfloat16"] < rows["shared"] <= rows["best-of-n"]


@pytest.mark.parametrize("sliding", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "sliding"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "best-of-n"},
        pytest.param({"method": "best-of-n", "top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
        {"tie": "shared"},
        pytest.param({"method": "aisp"}, marks=pytest.mark.slow),
        pytest.param({"kl_ref": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_stays_within_its_memory(sliding, options):
    """As torch counts it; and it does not leave much of it unused."""
    policy, memory = make_policy(sliding), 16_000_000
    run = {"rollouts": 24, "max_new_tokens": 48, "steps": 2, **options, "memory": f"{memory}B"}
    misvo.steer(policy, PROMPT, letter_reward, **{**run, "max_new_tokens": 2}, preset="paper")
    peak = allocated_bytes(lambda: misvo.steer(policy, PROMPT, letter_reward, **run, preset="paper"))
    assert 0.5 * memory < peak < 1.05 * memory


def test_a_prompt_is_kept_once_and_a_layer_that_copies_itself_takes_one_layer_more():
    """Rows that begin at one column hold their own tokens; others the prompt too, and sliding layers among them copy
    themselves for every token, one by one."""
    token, few, long = 4 * 2 * D, 70, "a " * 60  # bytes of a token in one layer; words, so that caches are most of it
    aligned = 112 + 6  # columns of 100 tokens where rows begin at one column: a multiple of 16, and (-2 - 8) % 16
    settings = misvo.Settings(method="best-of-n", rollouts=200, max_new_tokens=100, memory="15MB")
    for sliding, kind, held in ((False, "sdpa", aligned), (True, "sdpa", aligned), (True, "eager", 160)):
        policy = make_policy(sliding, vocab_size=few)
        policy.model.set_attn_implementation(kind)
        rows = policy.rows_that_fit(policy.prefill(policy.encode(long), 100), settings)
        layers = LAYERS + 1 if sliding and kind == "eager" else LAYERS
        left = 15e6 - 60 * LAYERS * token  # the prompt
        assert rows == pytest.approx(left / (layers * held * token + 4 * few * (1 + 100) + 64 * few), abs=1)


def test_never_more_than_256_rows_and_never_less_than_one():
    policy = make_policy(vocab_size=70)
    assert rows_at_once(policy, method="best-of-n", steps=5, memory="8GB") == 256
    assert rows_at_once(policy, method="best-of-n", rollouts=2, steps=1, memory="1kB") == 1
