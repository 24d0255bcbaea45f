"""Without vLLM installed, the engine says in a sentence what to type. What runs in its worker is tested with it, by
`make test-vllm`; what needs no vLLM of it is tested here."""

import importlib.util

import pytest
from conftest import make_policy

import misvo
from misvo.errors import MisvoError

absent = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")


@absent
def test_a_missing_package():
    with pytest.raises(MisvoError, match=r"needs the package vllm: pip install 'vllm>=0.32,<0.33', or `make vllm`"):
        misvo.Policy.from_pretrained("smollm2-135m", engine="vllm")


def test_engines_by_name(tmp_path):
    policy = make_policy()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MisvoError, match="unknown engine 'vllmm': choose one of torch, vllm"):
        misvo.Policy.from_pretrained(tmp_path, engine="vllmm")
    assert misvo.Policy.from_pretrained(tmp_path, engine="torch").head.fingerprint == policy.head.fingerprint
