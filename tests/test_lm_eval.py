"""`MisvoLM` in lm-eval itself: five examples of a generation task, and log-likelihoods that steering leaves alone."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from conftest import make_policy

import misvo

lm_eval = pytest.importorskip("lm_eval", reason="needs pip install 'misvo[eval]'")

from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from misvo.integrations.lm_eval import MisvoLM  # noqa: E402

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
WRITES = (
    COMMON
    + """
task: five
output_type: generate_until
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: [{until}], max_gen_toks: {tokens}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
repeats: {repeats}
"""
)
CHOOSES = (
    COMMON
    + """
task: choice
output_type: multiple_choice
doc_to_choice: ["e", "f g"]
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
)
TINY = ["a b c", "c d", "e f g", "h", "i j"]
REAL = ["Name a colour.", "Why sleep?", "Say hello.", "What is rain?", "Name a tree."]
SIZES = {"rollouts": 4, "steps": 2}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Write a task of five examples; gives what `simple_evaluate` needs beside a model."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def make(text=WRITES, prompts=TINY, until='"z"', tokens=6, repeats=1):
        rows = [{"q": prompt, "a": f"x{index}"} for index, prompt in enumerate(prompts)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        made = text.format(file=tmp_path / "rows.jsonl", until=until, tokens=tokens, repeats=repeats)
        (tmp_path / "task.yaml").write_text(made)
        name = "five" if text is WRITES else "choice"
        return {
            "tasks": [name],
            "task_manager": TaskManager(include_path=str(tmp_path), include_defaults=False),
            "bootstrap_iters": 0,
        }

    return make


def responses(told):
    samples = sorted(told["samples"]["five"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0] for sample in samples]


def last_letters(completions, **_):
    return [sum(ord(word[-1]) % 7 for word in text.split()) / 10 for text in completions]


def test_it_goes_by_its_name():
    assert get_model("misvo") is MisvoLM
    told = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    entry = told["project"]["entry-points"]["lm_eval.models"]["misvo"]
    assert EntryPoint("misvo", entry, "lm_eval.models").load() is MisvoLM


def test_responses_are_those_of_steer(tasks):
    policy = make_policy()
    told = lm_eval.simple_evaluate(model=MisvoLM(policy, last_letters, **SIZES), **tasks())
    options = {**SIZES, "max_new_tokens": 6, "stop": ("z",)}
    alone = [misvo.steer(policy, policy.tokenizer(p)["input_ids"], last_letters, **options) for p in TINY]
    assert responses(told) == [[result.text.split("z")[0]] for result in alone]
    assert any(result.best.step > 0 for result in alone)  # it was steered, not only sampled


@pytest.mark.slow  # examples/lm_eval_task.py does as much in CI, without the comparison
def test_five_examples_on_smollm2(tasks):
    """Through lm-eval's own loading of models by name, with its chat template, on a real model."""
    arguments = "pretrained=smollm2-135m,reward=words:3-6,rollouts=4,steps=2,batch_size=5"
    asked = tasks(prompts=REAL, until='"\\n\\n"', tokens=10)
    told = lm_eval.simple_evaluate(model="misvo", model_args=arguments, apply_chat_template=True, **asked)
    texts = [text for (text,) in responses(told)]
    assert len(texts) == 5 and all(text.strip() for text in texts)
    config = told["config"]["misvo"]
    assert config["reward"] == "words:3-6" and config["oracle"] is False and "not steered" in config["loglikelihoods"]
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    options = {**SIZES, "max_new_tokens": 10, "stop": ("\n\n",)}
    assert texts[0] == misvo.steer(policy, REAL[0], "words:3-6", **options).text


def test_repeated_requests_have_other_seeds(tasks):
    policy = make_policy()
    told = lm_eval.simple_evaluate(model=MisvoLM(policy, last_letters, **SIZES), **tasks(repeats=2))
    pairs = responses(told)
    options = {**SIZES, "max_new_tokens": 6, "stop": ("z",), "seed": 1}
    second = [misvo.steer(policy, policy.tokenizer(p)["input_ids"], last_letters, **options).text for p in TINY]
    assert [pair[1] for pair in pairs] == second
    assert any(first != other for first, other in pairs)


def test_log_likelihoods_are_those_of_the_model(tasks):
    policy = make_policy()
    steered = lm_eval.simple_evaluate(model=MisvoLM(policy, last_letters), **tasks(CHOOSES))
    plain = HFLM(pretrained=make_policy().model, tokenizer=policy.tokenizer)
    plain = lm_eval.simple_evaluate(model=plain, **tasks(CHOOSES))
    assert steered["samples"]["choice"][0]["resps"] == plain["samples"]["choice"][0]["resps"]


def test_without_a_reward_it_is_the_model_of_lm_eval(tasks):
    policy = make_policy()
    own = lm_eval.simple_evaluate(model=MisvoLM(policy), **tasks())
    plain = HFLM(pretrained=policy.model, tokenizer=policy.tokenizer)
    assert responses(own) == responses(lm_eval.simple_evaluate(model=plain, **tasks()))


def test_columns_come_from_the_documents(tasks):
    seen = set()

    def knows(completions, a, **_):
        seen.update(a)
        return last_letters(completions)

    with pytest.raises(misvo.MisvoError, match="oracle=true"):
        MisvoLM(make_policy(), knows, columns="a")
    model = MisvoLM(make_policy(), knows, columns="a", oracle=True, **SIZES)
    told = lm_eval.simple_evaluate(model=model, **tasks())
    assert seen == {f"x{index}" for index in range(5)}
    assert model.get_model_info()["misvo"]["oracle"] is True and len(responses(told)) == 5
    with pytest.raises(misvo.MisvoError, match="no field 'b'"):
        lm_eval.simple_evaluate(model=MisvoLM(make_policy(), knows, columns="b", oracle=False), **tasks())


def test_what_is_wrong_is_said_before_a_model_loads():
    with pytest.raises(misvo.MisvoError, match="rolouts"):
        MisvoLM("no such model", "sentiment", rolouts=3)
    with pytest.raises(misvo.MisvoError, match="no such reward"):
        MisvoLM("no such model", "no such reward")


@pytest.mark.slow  # lm-eval reads the names of its thousands of tasks
def test_the_command_line_knows_it():
    shown = subprocess.run(
        [sys.executable, "-m", "misvo.integrations.lm_eval", "run", "--model", "misvo", "--tasks", "nothing_like_it"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = shown.stdout + shown.stderr
    assert "nothing_like_it" in said and "no model for this name" not in said
