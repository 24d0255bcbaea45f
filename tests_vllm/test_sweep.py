"""`engine = "vllm"` in a sweep: on two Ray actors, one of them killed, the responses are those of transformers."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray  # noqa: F401  (without it there is nothing to test)
from conftest import save_tiny

from misvo.bench import config as configs
from misvo.bench import sweep
from misvo.bench.pool import RayPool
from misvo.errors import MisvoError

QUICK = Path(__file__).parent.parent / "configs" / "quick.toml"  # three prompts of its first task, four methods


def quick(folder, **model):
    """A part of the sweep of configs/quick.toml, with one seed on a tiny model."""
    config = configs.read(QUICK)
    part = {"seeds": (42,), "tasks": config.tasks[:1], "methods": config.methods[:4], "encoder": "none"}
    return replace(config, models=(configs.Model(str(folder), "tiny", **model),), **part)


def candidates(folder):
    keys = ("task", "method", "prompt", "step", "rollout")
    lines = map(json.loads, (folder / "candidates.jsonl").read_text().splitlines())
    return {tuple(one[key] for key in keys): one["text"] for one in lines}


def test_two_actors_one_of_them_killed(tmp_path):
    class Sabotaged(RayPool):
        def run(self, chunks, on_step):
            before = self.pids()
            for count, item in enumerate(super().run(chunks, on_step)):
                if count == 0:
                    os.kill(before[0], signal.SIGKILL)
                yield item
            self.lost = before[0] not in self.pids()

    folder = save_tiny("llama", tmp_path / "model")
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    pool = Sabotaged(workers=2, num_cpus=2, object_store_memory=100 << 20)
    ours = quick(folder, engine="vllm", engine_options=options)
    done = sweep.run(ours, tmp_path / "vllm", pool=pool)
    assert pool.lost and done.rows == done.fresh == 3 * 4 and not done.failed
    sweep.run(quick(folder), tmp_path / "torch")
    ours, theirs = candidates(tmp_path / "vllm"), candidates(tmp_path / "torch")
    assert ours.keys() == theirs.keys() and len(ours) == done.rows * 4 * 8
    differing = [key for key in ours if ours[key] != theirs[key]]
    assert len(differing) <= 32, f"{len(differing)} of {len(ours)} responses differ"  # a near tie changes a run of 32


def test_options_of_engines():
    raw = {"tasks": [{"name": "humaneval"}], "methods": [{"method": "misvo"}]}
    with pytest.raises(MisvoError, match="unknown engine 'vlm'"):
        configs.from_dict({**raw, "models": [{"path": "smollm2-135m", "engine": "vlm"}]})
    with pytest.raises(MisvoError, match='goes with engine = "vllm"'):
        configs.from_dict({**raw, "models": [{"path": "smollm2-135m", "engine_options": {"max_model_len": 64}}]})
