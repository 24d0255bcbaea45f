"""Prompts of every kind: what the model reads, written by hand, and what a reward sees."""

import json

import pytest
from conftest import CHAT, letter_reward, make_model, make_policy, make_tokenizer
from shell import run_shell
from typer.testing import CliRunner

import misvo
from misvo import prompts

QUICK = {"rollouts": 3, "steps": 2, "max_new_tokens": 5, "preset": "paper"}
USER = {"role": "user", "content": "a b"}


def ids_of(words):
    return make_tokenizer().convert_tokens_to_ids(words.split())


def refusal(call, *args, **options) -> str:
    with pytest.raises(misvo.MisvoError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


class Witness:
    """A reward that keeps what it was shown."""

    def __init__(self):
        self.prompts, self.completions = [], []

    def __call__(self, prompts, completions, **_):
        self.prompts += prompts
        self.completions += completions
        return letter_reward([prompts_text(completion) for completion in completions])


def prompts_text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def tokens_of(result):
    return [candidate.tokens for candidate in result.candidates]


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_are_read_as_they_are(chat):
    policy, ids = make_policy(chat=chat), ids_of("<s> a b w1")
    reward = Witness()
    result = misvo.steer(policy, ids, reward, **QUICK)
    assert result.prompt_ids == ids == policy.encode(ids)
    assert set(reward.prompts) == {"a b w1"} and result.prompt == "a b w1"  # special tokens are no text
    assert reward.completions == [candidate.text for candidate in result.candidates]
    plain = make_policy(chat=False)
    assert tokens_of(result)[:3] == tokens_of(misvo.steer(plain, "<s> a b w1", letter_reward, **QUICK))[:3]


def test_a_run_on_token_ids_can_be_saved_scored_again_and_repeated(tmp_path):
    policy, ids = make_policy(), ids_of("<s> a b")
    result = misvo.steer(policy, ids, letter_reward, **QUICK)
    result.save(tmp_path / "run")
    again, reward = misvo.Result.load(tmp_path / "run"), Witness()
    assert (again.prompt, again.prompt_ids) == ("a b", ids)
    misvo.rescore(tmp_path / "run", reward)
    assert set(reward.prompts) == {"a b"}
    repeated = misvo.steer(policy, again.prompt_ids, letter_reward, settings=again.settings)
    assert tokens_of(repeated) == tokens_of(result)
    only_special = misvo.steer(policy, ids_of("<s>"), letter_reward, **QUICK)
    only_special.save(tmp_path / "special")
    assert misvo.Result.load(tmp_path / "special").prompt == ""


def test_the_prompt_ids_of_text_are_what_the_model_read():
    result = misvo.steer(make_policy(chat=True), "a b", letter_reward, **QUICK)
    assert result.prompt == "a b" and result.prompt_ids == ids_of("<user> a b <assistant>")
    assert result.to_dict()["prompt_ids"] == result.prompt_ids


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([1, 61], "holds the token id 61, but LlamaForCausalLM has 61 tokens"),
        ([1, -1], "holds the token id -1: token ids are 0 or above"),
        ([1, 2.0], "or a list of token ids"),
        ([True, False], "or a list of token ids"),
        ((1, 2), "or a list of token ids, not tuple"),
        ([USER, {"role": "assistant", "content": " "}], "the last message is the assistant's and empty"),
        ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "a part of the type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], 'written as {"type": "text", "text": ...}'),
        ([{"role": "user", "content": ["a"]}], "a prompt is a string or a list of messages"),
        ([{"role": "user", "content": None}], "a prompt is a string or a list of messages"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "the prompt is empty"),
    ],
)
def test_what_is_no_prompt(prompt, says):
    policy = make_policy(chat=True)
    policy.name = "LlamaForCausalLM"
    assert says in refusal(misvo.steer, policy, prompt, letter_reward, **QUICK)


def test_an_answer_that_the_prompt_begins_is_continued():
    """TRL shows the whole answer, and the prompt without its beginning."""
    policy, reward = make_policy(chat=True), Witness()
    chat = [USER, {"role": "assistant", "content": "c d"}]
    result = misvo.steer(policy, chat, reward, **QUICK)
    assert result.prompt_ids == ids_of("<user> a b <assistant> c d")
    assert reward.prompts == [[USER]] * 6
    whole = [[{"role": "assistant", "content": "c d" + candidate.text}] for candidate in result.candidates]
    assert reward.completions == whole
    assert result.prompt == chat == [USER, {"role": "assistant", "content": "c d"}]  # nothing of it was taken away
    ids = misvo.steer(policy, ids_of("<user> a b <assistant> c d"), letter_reward, **QUICK)
    assert tokens_of(result)[:3] == tokens_of(ids)[:3]


def test_smollm2_goes_on_with_its_answer(smollm2):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    begun = [*chat, {"role": "assistant", "content": "The capital of France is"}]
    assert smollm2.encode(begun) == smollm2.encode(chat) + smollm2.encode("The capital of France is", raw=True)
    assert smollm2.generate(begun, max_new_tokens=2, temperature=0.01).startswith(" Paris")


def test_parts_of_text_are_lines():
    policy, reward = make_policy(chat=True), Witness()
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    result = misvo.steer(policy, [{"role": "user", "content": parts}], reward, **QUICK)
    assert result.prompt_ids == ids_of("<user> a b c <assistant>")
    assert reward.prompts[0] == result.prompt == [{"role": "user", "content": "a b\nc"}]
    begun = [USER, {"role": "assistant", "content": parts[:1]}]
    assert policy.encode(begun) == ids_of("<user> a b <assistant> a b")
    assert prompts.to_reward(begun, ["c"]) == ([USER], [[{"role": "assistant", "content": "a bc"}]])


THINKING = CHAT + "{% if enable_thinking is defined and not enable_thinking %} w1{% endif %}"


def thinking_policy():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    return misvo.Policy(make_model("llama"), tokenizer)


def test_the_template_is_told_and_the_result_says_so(tmp_path):
    policy, told = thinking_policy(), {"enable_thinking": False}
    result = misvo.steer(policy, "a b", letter_reward, chat_template_kwargs=told, **QUICK)
    assert result.prompt_ids == ids_of("<user> a b <assistant> w1")
    assert policy.encode("a b") == ids_of("<user> a b <assistant>")
    assert policy.encode([USER], chat_template_kwargs={"enable_thinking": True}) == ids_of("<user> a b <assistant>")
    result.save(tmp_path)
    again = misvo.Result.load(tmp_path)
    assert again.settings == result.settings and again.settings.chat_template_kwargs == told
    assert again.settings != misvo.Settings.from_preset(**QUICK)
    texts = policy.generate("a b", samples=4, max_new_tokens=6, chat_template_kwargs=told)
    assert texts == policy.generate(ids_of("<user> a b <assistant> w1"), samples=4, max_new_tokens=6)
    two = misvo.steer_many(policy, ["a b", [USER]], Witness(), chat_template_kwargs=told, **QUICK)
    assert [r.prompt_ids for r in two] == [result.prompt_ids] * 2


def test_a_raw_prompt_meets_no_template():
    policy = make_policy(chat=True)
    result = misvo.steer(policy, "a b", letter_reward, raw=True, **QUICK)
    assert result.prompt_ids == ids_of("a b") == policy.encode("a b", raw=True) and result.settings.raw
    plain = make_policy(chat=False)
    assert tokens_of(result)[:3] == tokens_of(misvo.steer(plain, "a b", letter_reward, **QUICK))[:3]
    assert policy.generate("a b", samples=4, max_new_tokens=6, raw=True) == plain.generate(
        "a b", samples=4, max_new_tokens=6
    )


def test_a_value_network_is_fitted_on_such_prompts_too():
    policy, reward, begun = thinking_policy(), Witness(), [USER, {"role": "assistant", "content": "c"}]
    network = misvo.train_value(policy, [ids_of("a b"), begun], reward, rollouts=2, max_new_tokens=4)
    assert reward.prompts == ["a b"] * 2 + [[USER]] * 2 and network.budget["prompts"] == 2
    assert all(completion[0]["content"].startswith("c") for completion in reward.completions[2:])


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([USER], {"raw": True}, "raw=True uses no chat template: give the prompt as a string"),
        ("a", {"raw": True, "chat_template_kwargs": {"x": 1}}, "leave chat_template_kwargs out, or raw"),
        ([1, 2], {"chat_template_kwargs": {"x": 1}}, "token ids go to the model as they are"),
        ("a", {"chat_template_kwargs": {"tokenize": False}}, "may not hold 'tokenize'"),
        ("a", {"chat_template_kwargs": {"x": object()}}, "plain data, which can be saved as JSON"),
        ("a", {"chat_template_kwargs": "enable_thinking"}, "must be a dict of what the chat template knows"),
    ],
)
def test_options_that_do_not_go_together(prompt, options, says):
    policy = make_policy(chat=True)
    assert says in refusal(misvo.steer, policy, prompt, letter_reward, **QUICK, **options)
    assert says in refusal(policy.generate, prompt, max_new_tokens=2, **options)


def test_a_template_that_refuses_and_one_that_is_not_there():
    assert "this model has no chat template: leave chat_template_kwargs out" in refusal(
        make_policy().encode, "a", chat_template_kwargs={"x": 1}
    )
    policy = make_policy(chat=True)
    policy.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert refusal(policy.encode, "a") == "the chat template of this model refuses the prompt: roles must alternate."


def test_the_command_line_has_both(monkeypatch):
    from misvo import cli, commands

    seen = []
    monkeypatch.setattr(commands, "steer", lambda prompt, reward, model, load, settings, *_: seen.append(settings))
    told = ["--chat-template-kwargs", json.dumps({"enable_thinking": False})]
    for arguments in (told, ["--raw"], []):
        assert CliRunner().invoke(cli.app, ["steer", "a", *arguments]).exit_code == 0
    assert [(s.raw, s.chat_template_kwargs) for s in seen] == [
        (False, {"enable_thinking": False}),
        (True, None),
        (False, None),
    ]
    for wrong in ("{", "[1]"):
        done = run_shell("steer", "a", "--chat-template-kwargs", wrong)
        assert done.returncode == 2 and "JSON object" in done.stderr and "Traceback" not in done.stderr
