"""Finished vectors on an unmodified server: named steerings, the text that misvo itself gives, and nothing else."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch

import misvo
from misvo import embedded, exported
from misvo.tie import TIES

PROMPT = "Write one sentence about the sea."
LENGTH = 24


def steering(policy, tie, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tied = TIES[tie](LENGTH)
    scale = size / policy.head.weight[:2048].norm(dim=-1).mean().item()
    free = torch.randn(tied.size, policy.head.hidden_size, generator=generator) * scale
    return misvo.Steering(tied.spread(free).contiguous(), policy.head.fingerprint, tie, {"model": "smollm2-135m"})


@pytest.fixture(scope="module")
def plain():
    return misvo.Policy.from_pretrained("smollm2-135m")


@pytest.fixture(scope="module")
def shelf(plain, tmp_path_factory):
    """A folder of exported steerings, made by the command; and the steerings."""
    folder = tmp_path_factory.mktemp("shelf")
    made = {"shared": steering(plain, "shared", 3.0), "each.one": steering(plain, "position", 4.0)}
    for name, one in made.items():
        one.save_pretrained(folder / "saved" / name)
        command = [sys.executable, "-m", "misvo.cli", "export", str(folder / "saved" / name)]
        subprocess.run([*command, "--vllm", str(folder / "named" / name)], check=True, capture_output=True)
    return folder / "named", made


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model", str(embedded.model_folder("smollm2-135m")), "--served-model-name", "m", "--port", str(port)]
    arguments += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    arguments += ["--block-size", "32", "--logits-processors", "misvo.engines.vllm_serving:SteeringProcessor"]
    variables = {"MISVO_STEERINGS": str(shelf[0]), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**os.environ, **variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def wait():
        for _ in range(900):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            except OSError:
                time.sleep(0.5)
        raise AssertionError(log.read_text()[-4000:])

    try:
        wait()
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def complete(url, tokens, **more):
    body = {"model": "m", "prompt": tokens, "max_tokens": LENGTH, "temperature": 0, **more}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]


def refused(url, tokens, **xargs) -> str:
    with pytest.raises(urllib.error.HTTPError) as caught:
        complete(url, tokens, vllm_xargs=xargs)
    assert caught.value.code == 400
    return caught.value.read().decode()


def test_the_text_is_that_of_misvo_itself(server, shelf, plain):
    tokens, told = plain.encode(PROMPT), set()
    how = {"max_new_tokens": LENGTH, "temperature": 1.0, "top_p": 1.0, "top_k": 1}  # the most probable token
    unsteered = plain.generate(PROMPT, **how)
    for name, one in shelf[1].items():
        for strength in (1.0, 0.6, -0.5):
            own = plain.generate(PROMPT, one, strength=strength, **how)
            xargs = {"misvo": name, "misvo_strength": strength} if strength != 1.0 else {"misvo": name}
            assert complete(server, tokens, vllm_xargs=xargs) == own
            told.add(own)
    assert complete(server, tokens) == complete(server, tokens, vllm_xargs={"other": 1}) == unsteered
    assert complete(server, tokens, vllm_xargs={"misvo": "shared", "misvo_strength": 0}) == unsteered
    assert unsteered not in told and len(told) >= 4


def test_rows_of_one_batch_have_what_each_asked_for(server, plain):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [plain.encode(text) for text in (PROMPT, "Say hello.", "Name three colours.")]
    kinds = [{}, {"vllm_xargs": {"misvo": "shared"}}, {"vllm_xargs": {"misvo": "each.one", "misvo_strength": 0.5}}]
    jobs = [(tokens, kind, {"max_tokens": 4 + 5 * n}) for n, tokens in enumerate(prompts) for kind in kinds]
    alone = [complete(server, tokens, **kind, **length) for tokens, kind, length in jobs]
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda job: complete(server, job[0], **job[1], **job[2]), jobs))
    assert together == alone


def test_everything_else_is_refused(server, plain, shelf):
    tokens = plain.encode(PROMPT)
    for name in ("nobody", "../saved/shared", "..", ".", "", "/etc", "shared/", "shared\x00", "saved", ["shared"], 3):
        assert "there is no steering called" in refused(server, tokens, misvo=name)
    for strength in (1e6, -5, "1", "nan", [1.0]):
        assert "a strength is a number" in refused(server, tokens, misvo="shared", misvo_strength=strength)
    assert "goes with misvo" in refused(server, tokens, misvo_strength=1.0)
    assert "there is no 'misvo_folder'" in refused(server, tokens, misvo="shared", misvo_folder="/")
    assert complete(server, tokens, vllm_xargs={"misvo": "shared"})  # and it lives on


def test_the_second_interface_with_made_up_batches(shelf, plain, monkeypatch):
    from misvo.engines import vllm_serving

    monkeypatch.setattr(vllm_serving, "SHELF", exported.Shelf(shelf[0]))
    vocabulary = plain.head.vocab_size
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(get_vocab_size=lambda: vocabulary))
    states = types.SimpleNamespace(device="cpu", prompt_len=types.SimpleNamespace(np=np.array([5, 9, 2, 7])))
    processor = vllm_serving.SteeringProcessor(config, states)

    def params(**extra):
        return types.SimpleNamespace(extra_args=extra or None)

    assert processor.add_request(3, params(misvo="each.one", misvo_strength=0.5))
    assert processor.add_request(1, params(misvo="shared"))
    assert not processor.add_request(0, params())
    batch = types.SimpleNamespace(
        idx_mapping_np=np.array([0, 3, 1]), seq_lens_upper_bound_np=np.array([6, 7 + 11, 9 + 50])
    )
    logits = torch.zeros(3, vocabulary)
    processor.apply(logits, batch)
    each, shared = shelf[1]["each.one"], shelf[1]["shared"]
    assert not logits[0].any()
    assert torch.allclose(logits[1], 0.5 * plain.head.shift(each.vectors[11:12])[0], atol=1e-4)
    assert torch.allclose(logits[2], plain.head.shift(shared.vectors[-1:])[0], atol=1e-4)  # goes on behind the last
    batch.seq_lens_upper_bound_np = np.array([6, 7 + LENGTH, 9])
    processor.add_request(1, params())  # the slot has another owner
    logits = torch.zeros(3, vocabulary)
    assert not processor.apply(logits, batch).any()  # and one vector a position ends with the last of them
    with pytest.raises(ValueError, match="there is no steering"):
        processor.validate_params(params(misvo="../x"))
    monkeypatch.setattr(vllm_serving, "SHELF", None)
    with pytest.raises(misvo.MisvoError, match="MISVO_STEERINGS=FOLDER"):
        vllm_serving.SteeringProcessor(config, states)


def test_both_interfaces_load():
    from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns
    from vllm.v1.worker.gpu.sample.logits_processor import loader

    name = "misvo.engines.vllm_serving:SteeringProcessor"
    (first,), (second,) = _load_logitsprocs_by_fqcns([name]), loader._load_v2_logitsprocs_by_fqcns([name])
    assert first is second


def test_an_export_for_another_model(shelf):
    with pytest.raises(misvo.MisvoError, match="made for a model of 49152 tokens; this one has 97"):
        exported.Shelf(shelf[0]).check_vocabulary(97)
