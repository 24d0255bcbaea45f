"""lm-eval's API client against the server: five examples, plain and steered by what `gen_kwargs` adds to the body."""

import json

import pytest
from conftest import make_policy
from serving import served

from misvo.server import Config

TASK = """
task: five
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["z"], max_gen_toks: 6, temperature: {temperature}{more}}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "more", "rollouts"),
    [(0, "", 1), (0.7, ", seed: 1, misvo: {reward: 'length:2', rollouts: 3, steps: 2}", 6)],
)
def test_five_examples(tmp_path, monkeypatch, temperature, more, rollouts):
    lm_eval = pytest.importorskip("lm_eval", reason="needs pip install 'lm-eval[api]'")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"q": prompt, "a": "e"} for prompt in ("a b c", "c d", "e f g", "h", "i j")]
    (tmp_path / "five.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = TASK.format(file=tmp_path / "five.jsonl", temperature=temperature, more=more)
    (tmp_path / "five.yaml").write_text(task)
    with served(make_policy(chat=True), {}, Config(name="tiny")) as server:
        address = f"{server.url}/v1/chat/completions"
        told = lm_eval.simple_evaluate(
            model="local-chat-completions",
            model_args=f"model=tiny,base_url={address},num_concurrent=2,tokenized_requests=False",
            tasks=["five"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            apply_chat_template=True,
        )
        decoded = server.core.engine.tally.tokens
    samples = told["samples"]["five"]
    assert len(samples) == 5 and all(sample["resps"][0][0] for sample in samples)
    assert decoded >= 5 * rollouts
    if not more:
        policy = make_policy(chat=True)
        first = sorted(samples, key=lambda sample: sample["doc_id"])[0]["resps"][0][0]
        with served(policy, {}, Config(name="tiny")) as again:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "a b c"}], "temperature": 0}
            answer = again.client().chat.completions.create(**asked, max_tokens=6, stop=["z"])
        assert answer.choices[0].message.content == first
