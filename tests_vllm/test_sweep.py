"""`engine = "vllm"` in a sweep: on two Ray actors, one of them killed, the responses are those of transformers."""

import json
import os
import signal

import pytest
import ray  # noqa: F401  (without it there is nothing to test)
from conftest import save_tiny

from misvo.bench import config as configs
from misvo.bench import sweep
from misvo.bench.pool import RayPool
from misvo.errors import MisvoError

PROMPTS = ["a", "b", "c d", "e f g", "h"]
REWARD = """
def letters(completions, **_):
    return [sum(0.3 * (ord(w[-1]) % 7) for w in text.split()) - 0.1 * len(text.split()) for text in completions]
"""


def config(world, **model):
    (world / "reward.py").write_text(REWARD)
    (world / "prompts.jsonl").write_text("".join(f'{{"id": "p{n}", "prompt": "{p}"}}\n' for n, p in enumerate(PROMPTS)))
    methods = [{"method": name} for name in ("misvo", "best-of-n", "aisp", "re-control")] + [{"preset": "auto"}]
    return configs.from_dict(
        {
            "seeds": [1],
            "encoder": "none",
            "prompts_per_batch": 2,
            "settings": {"preset": "paper", "rollouts": 4, "steps": 3, "max_new_tokens": 12},
            "models": [{"path": str(world / "model"), "label": "tiny", **model}],
            "tasks": [
                {"name": "prompts", "data": str(world / "prompts.jsonl"), "reward": f"{world}/reward.py:letters"}
            ],
            "methods": methods,
        }
    )


def candidates(folder):
    keys = ("method", "prompt", "step", "rollout")
    lines = map(json.loads, (folder / "candidates.jsonl").read_text().splitlines())
    return {tuple(one[key] for key in keys): one["text"] for one in lines}


def test_two_actors_one_of_them_killed(tmp_path):
    class Sabotaged(RayPool):
        def run(self, chunks, on_step):
            before = self.pids()
            for count, item in enumerate(super().run(chunks, on_step)):
                if count == 2:
                    os.kill(before[0], signal.SIGKILL)
                yield item
            self.lost = before[0] not in self.pids()

    save_tiny("llama", tmp_path / "model")
    options = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
    pool = Sabotaged(workers=2, num_cpus=2, object_store_memory=100 << 20)
    done = sweep.run(config(tmp_path, engine="vllm", engine_options=options), tmp_path / "vllm", pool=pool)
    assert pool.lost and done.rows == done.fresh == 5 * 5 and not done.failed
    sweep.run(config(tmp_path), tmp_path / "torch")
    ours, theirs = candidates(tmp_path / "vllm"), candidates(tmp_path / "torch")
    assert ours.keys() == theirs.keys() and len(ours) == 5 * 5 * 3 * 4
    differing = [key for key in ours if ours[key] != theirs[key]]
    assert len(differing) <= 12, f"{len(differing)} of {len(ours)} responses differ"  # one near tie changes a run


def test_options_of_engines(tmp_path):
    with pytest.raises(MisvoError, match="unknown engine 'vlm'"):
        config(tmp_path, engine="vlm")
    with pytest.raises(MisvoError, match='goes with engine = "vllm"'):
        config(tmp_path, engine_options={"max_model_len": 64})
