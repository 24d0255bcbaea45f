"""A task of lm-eval with steered responses beside the model's own.

    pip install 'misvo[eval]'
    python examples/lm_eval_task.py

On lm-eval's command line, with any of its generation tasks:

    python -m misvo.integrations.lm_eval run --model misvo --tasks TASK --model_args reward=SPEC,rollouts=8
"""

import json
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import misvo
from misvo.integrations.lm_eval import MisvoLM

QUESTIONS = [
    "Name a colour of the sky.",
    "Which animal says moo?",
    "What do bees make?",
    "Name a season.",
    "What is ice?",
]
TASK = """
task: five_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: ""
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def main(folder: Path) -> dict[str, list[str]]:
    """The texts of both models, in the order of the questions."""
    rows = folder / "questions.jsonl"
    rows.write_text("\n".join(json.dumps({"question": question}) for question in QUESTIONS))
    (folder / "five_questions.yaml").write_text(TASK.format(file=rows))
    policy, tasks = (
        misvo.Policy.from_pretrained("smollm2-135m"),
        TaskManager(include_path=str(folder), include_defaults=False),
    )
    models = {"plain": MisvoLM(policy, batch_size=5), "steered": MisvoLM(policy, "words:3-8", rollouts=4, steps=2)}
    asked = {"tasks": ["five_questions"], "task_manager": tasks, "apply_chat_template": True, "bootstrap_iters": 0}
    texts = {}
    for name, model in models.items():
        told = lm_eval.simple_evaluate(model=model, **asked)
        samples = sorted(told["samples"]["five_questions"], key=lambda sample: sample["doc_id"])
        texts[name] = [sample["resps"][0][0] for sample in samples]
    return texts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        texts = main(Path(folder))
    for question, plain, steered in zip(QUESTIONS, texts["plain"], texts["steered"], strict=True):
        print(f"{question}\n  plain:   {plain!r}\n  steered: {steered!r}")
