"""examples/ray_serve.py: two replicas, one of them killed by its process id in mid-load, and no request lost."""

import importlib.util
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from conftest import make_model, make_policy, make_tokenizer

import misvo

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_serve.py"


def replicas() -> set[int]:
    """The process ids of Serve's replicas that this test started."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica" in " ".join(child.cmdline()):
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_killed_replica_loses_no_request(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="Ray Serve needs pip install 'ray[serve]'")
    ray, serve = pytest.importorskip("ray"), pytest.importorskip("ray.serve")
    make_model("llama").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for check in ("READY", "HEALTH"):  # a busy machine takes longer than Serve waits for its proxy
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "90")
    monkeypatch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", 240)
    root = str(Path(__file__).parent.parent)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        app = example.application(str(tmp_path / "tiny"), {"brief": "length:3"}, replicas=2, cpus=0.5)
        serve.run(app)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=8, timeout=60)
        killed = []

        def ask(seed):
            return (
                client.completions.create(
                    model="tiny",
                    prompt="a b c",
                    seed=seed,
                    max_tokens=8,
                    extra_body={"misvo": {"reward": "brief", "rollouts": 3, "steps": 4}},
                )
                .choices[0]
                .text
            )

        def kill():
            time.sleep(1.0)
            killed.append(min(replicas()))
            os.kill(killed[0], signal.SIGKILL)

        before = replicas()
        assert len(before) == 2
        expected = ask(0)
        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(ask, [seed % 10 for seed in range(120)]))
        killer.join()
        assert killed and killed[0] in before and len(texts) == 120
        assert texts[0] == expected and all(texts[i] == texts[i % 10] for i in range(120))
        how = {"rollouts": 3, "steps": 4, "max_new_tokens": 8, "seed": 0, "raw": True}
        assert expected == misvo.steer(make_policy(), "a b c", "length:3", **how).text
        end = time.monotonic() + 120
        while len(replicas() - {killed[0]}) < 2:  # another one takes its place
            assert time.monotonic() < end
            time.sleep(0.5)
        assert ask(0) == expected
    finally:
        serve.shutdown()
        ray.shutdown()
