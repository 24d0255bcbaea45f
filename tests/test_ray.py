"""The same sweep on Ray: two actors on this machine, one of them killed in mid-run, rows equal to a local run."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from bench_helpers import content, make_config, make_world, raw_config, to_toml

from misvo.bench import sweep
from misvo.bench.pool import RayPool
from misvo.errors import MisvoError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed here: pip install 'misvo[bench]'", allow_module_level=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def make_pool(kind):
    return kind(workers=2, num_cpus=2, object_store_memory=100 << 20)


def test_rows_equal_a_local_run_though_an_actor_is_killed(world, tmp_path):
    class Sabotaged(RayPool):
        def run(self, chunks, on_step):
            before = self.pids()
            for count, item in enumerate(super().run(chunks, on_step)):
                if count == 1:
                    os.kill(before[0], signal.SIGKILL)
                yield item
            self.before, self.after = before, self.pids()
            self.address = self._ray.nodes()[0]["NodeManagerAddress"]

    config = make_config(world)
    pool = make_pool(Sabotaged)
    done = sweep.run(config, tmp_path / "ray", pool=pool)
    assert pool.before[0] not in pool.after and pool.before[1] in pool.after  # one was lost and came back
    assert done.rows == done.fresh == 5 * 3 * 2 and not done.failed
    assert pool.address == "127.0.0.1"
    # An actor with one core has one thread. Bits are compared, so the local run is a process with one thread too.
    (tmp_path / "tiny.toml").write_text(to_toml(raw_config(world)))
    command = ["-m", "misvo.cli", "bench", str(tmp_path / "tiny.toml"), "--output", str(tmp_path / "local")]
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert content(tmp_path / "ray") == content(tmp_path / "local")


@pytest.mark.slow
def test_a_chunk_that_kills_every_worker_is_recorded_and_the_run_goes_on(world, tmp_path):
    from misvo.bench import pool as pools

    (world / "deadly.py").write_text(
        "import os, sys\n"
        "def reward(prompts, completions, **_):\n"
        "    if prompts[0] == 'h':\n"
        "        os._exit(1)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    config = make_config(world, methods=("best-of-n",), seeds=(1,))
    entry = config.tasks[0]
    object.__setattr__(entry, "reward", f"{world}/deadly.py:reward")
    before = pools.RESTARTS, pools.TRIES
    pools.RESTARTS, pools.TRIES = 0, 2
    try:
        done = sweep.run(config, tmp_path / "r", pool=make_pool(pools.RayPool))
    finally:
        pools.RESTARTS, pools.TRIES = before
    assert done.rows == 5 and len(done.failed) == 1 and "Actor" in done.failed[0]


def test_more_workers_than_cores_are_refused():
    with pytest.raises(MisvoError, match="2 cores, which is not enough for 5 workers"):
        RayPool(workers=5, num_cpus=2, object_store_memory=100 << 20)
    import ray

    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_model_that_is_split_over_gpus_has_them_all():
    """Ray is told of GPUs that are not there: nothing is loaded on them."""
    ours = {"num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20}
    with pytest.raises(MisvoError, match="has 4 GPUs, which is not enough for 3 workers of 2 GPUs each"):
        RayPool(workers=3, gpus_per_worker=2, **ours)
    pool = RayPool(gpus_per_worker=2, **ours)
    try:
        assert pool.workers == 2 and len(set(pool.pids())) == 2
        assert pool._ray.available_resources().get("GPU", 0) == 0  # each holds two
    finally:
        pool.close()


def test_ray_is_not_imported_without_the_flag():
    code = (
        "import sys\nfrom misvo.bench import commands, config, pool, profile, report, sweep\n"
        "assert 'ray' not in sys.modules and 'datasets' not in sys.modules and 'tensorboard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
