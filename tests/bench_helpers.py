"""What the tests of sweeps share: a tiny checkpoint on disk, a config for it, and rows without their clocks."""

import json
from pathlib import Path

from conftest import make_model, make_tokenizer

from misvo.bench import config as configs

CLOCKS = ("seconds", "peak_memory")  # what may differ between two runs of the same sweep
REWARD = """
def letters(completions, **_):
    return [sum(0.3 * (ord(w[-1]) % 7) for w in text.split()) - 0.1 * len(text.split()) for text in completions]

def fails_on_b(prompts, completions, **_):
    if prompts[0] == "b":
        raise RuntimeError("no letters today")
    return letters(completions)
"""
PROMPTS = ["a", "b", "c d", "e f g", "h"]


def make_world(folder: Path) -> Path:
    """A model, a tokenizer, a reward and prompts in one folder."""
    make_model("llama").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": f"p{n}", "prompt": p}) + "\n" for n, p in enumerate(PROMPTS))
    )
    return folder


def raw_config(
    world: Path, reward="letters", methods=("misvo", "best-of-n", "aisp"), seeds=(1, 2), batch=1, **settings
) -> dict:
    """A sweep of one tiny model; a batch of one prompt is the same to the last bit wherever it runs."""
    shared = {"preset": "paper", "rollouts": 4, "steps": 3, "max_new_tokens": 10, "learning_rate": 0.5, **settings}
    return {
        "name": "tiny",
        "seeds": list(seeds),
        "encoder": "none",
        "save_vectors": True,
        "prompts_per_batch": batch,
        "settings": shared,
        "models": [{"path": str(world / "model"), "label": "tiny"}],
        "tasks": [{"name": "prompts", "data": str(world / "prompts.jsonl"), "reward": f"{world}/reward.py:{reward}"}],
        "methods": [{"method": method} for method in methods],
    }


def make_config(world: Path, **options):
    return configs.from_dict(raw_config(world, **options))


def to_toml(raw: dict) -> str:
    """Enough of TOML for these configs: JSON's scalars and lists are TOML's."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in raw.items() if not isinstance(value, dict | list)]
    lines += [f"{key} = {json.dumps(value)}" for key, value in raw.items() if key == "seeds"]
    lines += ["[settings]", *(f"{key} = {json.dumps(value)}" for key, value in raw["settings"].items())]
    for table in ("models", "tasks", "methods"):
        for entry in raw[table]:
            lines += [f"[[{table}]]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    return "\n".join(lines) + "\n"


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def content(folder: Path) -> dict:
    """Rows, responses and vectors of a run, whatever the order they were written in, without clocks."""
    rows = {}
    for row in read_lines(folder / "rows.jsonl"):
        key = json.dumps([row["model"], row["task"], row["prompt"], row["method"], row["seed"]])
        assert key not in rows, f"{key} was written twice"
        rows[key] = {name: value for name, value in row.items() if name not in (*CLOCKS, "candidates_end")}
    candidates = sorted((folder / "candidates.jsonl").read_text().splitlines())
    vectors = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("vectors/*/*.safetensors"))}
    return {"rows": rows, "candidates": candidates, "vectors": vectors}
