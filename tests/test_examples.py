"""Every script of `examples/` runs on the embedded model, and does what it says."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from one_policy import one_policy

EXAMPLES = Path(__file__).parent.parent / "examples"
# Scripts that serve until they are stopped; tests of their own start them (test_remote.py, test_server_ray.py).
SERVERS = {"scorer.py", "ray_serve.py"}
# Needs a package that cannot be installed beside misvo (test_aisteer360.py).
ELSEWHERE = {"aisteer360_control.py"}


def own_reward(seen):
    result = seen["result"]
    assert result.reward == seen["few_long_words"](result.text) and len(result.trace) == 2


def trl_reward(seen):
    for result, row in zip(seen["results"], seen["CAPITALS"], strict=True):
        (again,) = seen["right_and_brief"]([], [result.text], [row["answer"]])
        assert result.reward == again and "share_right" in result.trace[0]["parts"]


def json_by_schema(seen):
    if seen["result"].reward == 1.0:
        assert seen["SCHEMA"]["required"] <= sorted(json.loads(seen["answer"]), reverse=True)
    assert seen["result"].reward > 0


def strengths(seen):
    cheerful, simple, again = seen["cheerful"], seen["simple"], seen["again"]
    assert cheerful.norm > 0 and again.vectors.equal(0.5 * cheerful.vectors + 0.5 * simple.vectors)


def code_with_verifier(seen):
    assert seen["result"].reward in [0.0, *(share / 3 for share in (1, 2, 3))]


def held_out_reward(seen):
    assert len(seen["held_out"]) == 8 and 1 <= seen["held_out"].rank <= 8


def own_model(seen):
    assert seen["result"].reward == len(seen["result"].text)


def chat(seen):
    assert seen["result"].reward == float("?" in seen["result"].text)
    assert 0 < seen["begun"].reward <= 1


def server_client(seen):
    answers = seen["answers"]
    assert answers["plain"] and answers["steered"] == answers["streamed"]


def vectors_in_generate(seen):
    assert len(seen["texts"]) == 2 and all(seen["texts"].values())  # what vectors do to a text: test_aisteer360.py


def lm_eval_task(seen):
    assert len(seen["texts"]["steered"]) == 5 and seen["texts"]["steered"] != seen["texts"]["plain"]


def generate_of_transformers(seen):
    (result,) = seen["steered"].results
    assert seen["tokens"][0, seen["inputs"]["input_ids"].shape[1] :].tolist() == result.best.tokens


def what_steering_does(seen):
    assert seen["strengths"][0.0] == seen["policy"].generate(seen["prompt"], seed=7, max_new_tokens=16)
    assert len(seen["moved"].axes[0].lines) == 4 and len(seen["rewards"].axes[0].lines) == 1


def reproduce_a_table(seen):
    assert seen["done"].rows == 4 and not seen["done"].failed
    assert "misvo" in seen["made"].markdown and "best-of-n" in seen["made"].markdown


def many_prompts(seen):
    lines = [json.loads(line) for line in seen["out"].read_text().splitlines()]
    assert {(line["line"], line["topic"]) for line in lines} == {(0, "sky"), (1, "sea")}
    assert all(line["text"] for line in lines)


CHECKS = {
    function.__name__: function
    for function in (
        own_reward,
        trl_reward,
        json_by_schema,
        many_prompts,
        strengths,
        code_with_verifier,
        held_out_reward,
        own_model,
        chat,
        server_client,
        vectors_in_generate,
        lm_eval_task,
        generate_of_transformers,
        what_steering_does,
        reproduce_a_table,
    )
}


def scripts():
    return sorted(path for path in EXAMPLES.rglob("*.py") if path.name not in SERVERS | ELSEWHERE)


def test_every_example_is_run():
    assert {path.stem for path in scripts()} == set(CHECKS)
    assert {path.name for path in EXAMPLES.rglob("*.py")} >= SERVERS | ELSEWHERE


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.stem)
def test_example(script, smollm2, tmp_path, monkeypatch):
    arguments = []
    if script.stem == "many_prompts":
        rows = [{"prompt": "What is the sky?", "topic": "sky"}, {"prompt": "What is the sea?", "topic": "sea"}]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        arguments = [str(tmp_path / "prompts.jsonl"), str(tmp_path / "results.jsonl")]
    if script.stem == "lm_eval_task":
        pytest.importorskip("lm_eval", reason="needs pip install 'misvo[eval]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with one_policy(smollm2):
        CHECKS[script.stem](runpy.run_path(str(script), run_name="__main__"))
