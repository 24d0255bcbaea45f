"""Vectors from a real server in `generate` of transformers, and the control of AISteer360 that is made of them.

AISteer360 itself cannot be installed here (it wants transformers below 5): its two base classes are written after its
source below. What they cannot show is that its pipeline calls the control as they say.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import letter_reward, make_policy
from serving import served

import misvo

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT, OPTIONS = "a b c", {"rollouts": 4, "steps": 3, "max_new_tokens": 6, "seed": 5}


@dataclass
class BaseArgs:
    @classmethod
    def validate(cls, **arguments):
        return cls(**arguments)


class OutputControl:
    Args: type

    def __init__(self, **arguments):
        self.args = self.Args.validate(**arguments)
        for one in fields(self.args):
            setattr(self, one.name, getattr(self.args, one.name))


@pytest.fixture
def control(monkeypatch):
    """The example with `Misvo` and `SteeredLogits`, imported as in the folder that it stands in."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, thing in (("core.base_args", BaseArgs), ("output_control.base", OutputControl)):
        module = ModuleType(f"aisteer360.algorithms.{name}")
        setattr(module, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    import aisteer360_control

    yield aisteer360_control
    for name in ("aisteer360_control", "vectors_in_generate"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def server(policy):
    with served(policy, {"letters": letter_reward}) as server:
        yield server.url


def greedy(policy, ids, vectors, strength, length):
    """Tokens of the largest entry of W(h + strength · u), one forward pass after another, in float64."""
    weight = policy.model.get_output_embeddings().weight.double()
    made = []
    for position in range(length):
        with torch.no_grad():
            out = policy.model(torch.tensor([[*ids, *made]]), output_hidden_states=True)
        moved = out.hidden_states[-1][0, -1].double() + strength * vectors[position].double()
        made.append(int((weight @ moved).argmax()))
        if made[-1] in policy.ends:
            break
    return made


@pytest.mark.parametrize(("preset", "length"), [("auto", 9), ("paper", 6)])
def test_generate_samples_from_the_steered_model(policy, server, control, preset, length):
    ids = policy.encode(PROMPT)
    result = misvo.steer(policy, PROMPT, letter_reward, preset=preset, raw=True, **OPTIONS)
    steering = control.learn(server, policy.tokenizer, ids, "letters", preset=preset, **OPTIONS)
    assert steering[0].equal(result.steering.vectors) and steering[1] == (preset == "auto")
    strength = 40.0 / steering[0].norm().item()  # far enough for another text
    processor = control.SteeredLogits(policy.model, len(ids), [steering], strength)
    tokens = policy.model.generate(
        torch.tensor([ids]), max_new_tokens=length, do_sample=False, logits_processor=[processor]
    )
    vectors = result.steering.at(length)  # beyond T, a shared vector goes on
    expected = greedy(policy, ids, vectors, strength, length)
    assert tokens[0, len(ids) :].tolist() == expected != greedy(policy, ids, vectors, 0.0, length)


def test_positions_and_prompts_of_a_batch(policy, control):
    torch.manual_seed(0)
    width = policy.head.hidden_size
    own, shared = (torch.randn(2, width), False), (torch.randn(2, width), True)
    processor = control.SteeredLogits(policy.model, 3, [own, shared], 0.5)
    weight = policy.model.get_output_embeddings().weight.double()
    for position, one, other in ((0, own[0][0], shared[0][0]), (1, own[0][1], shared[0][1]), (2, None, shared[0][1])):
        got = processor(torch.zeros(4, 3 + position, dtype=torch.long), torch.zeros(4, len(weight)))
        for row, u in enumerate((one, one, other, other)):  # two rows for each prompt
            shift = torch.zeros(len(weight)) if u is None else 0.5 * (weight @ u.double()).float()
            torch.testing.assert_close(got[row], shift, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="not its own"):
        control.SteeredLogits(policy.model, 3, [(torch.zeros(2, width + 1), True)])


def test_the_control(policy, server, control):
    made = control.Misvo(reward="letters", server=server, options=OPTIONS)
    assert made.strength == 1.0 and made.steer(policy.model, tokenizer=policy.tokenizer) is policy.model
    ids = policy.encode(PROMPT)
    padded, mask = torch.tensor([[0, 0, *ids], [*ids[:2], *ids]]), torch.ones(2, len(ids) + 2, dtype=torch.long)
    mask[0, :2] = 0
    (processor,) = made.get_logits_processors(padded, None, attention_mask=mask, max_new_tokens=6)
    result = misvo.steer(policy, PROMPT, letter_reward, raw=True, **OPTIONS)
    assert processor.steerings[0][0].equal(result.steering.vectors) and processor.prompt_length == len(ids) + 2
    assert not processor.steerings[1][0].equal(result.steering.vectors)  # another prompt has its own
    tokens = made.generate(
        torch.tensor([ids]), None, {"strength": 0.0}, policy.model, max_new_tokens=5, do_sample=False
    )
    plain = policy.model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
    assert tokens.equal(plain) and len(made.learned) == 2


def test_what_is_refused(server, control):
    policy = make_policy()
    made = control.Misvo(reward="no such reward", server=server)
    made.steer(policy.model, tokenizer=policy.tokenizer)
    with pytest.raises(RuntimeError, match="says 400"):
        made.get_logits_processors(torch.tensor([policy.encode(PROMPT)]), None)
    odd = [*policy.encode(PROMPT), policy.tokenizer.pad_token_id + 10_000]  # a token without a text
    with pytest.raises(ValueError, match="no text has exactly these tokens"):
        control.learn(server, policy.tokenizer, odd, "letters")
    granite = make_policy("granite")
    with pytest.raises(ValueError, match="scales or caps"):
        made.steer(granite.model, tokenizer=granite.tokenizer)
