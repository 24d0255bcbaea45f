"""Vectors exported for a server: Wu of every position, by names that cannot be paths, at strengths that are bounded."""

import json

import pytest
import torch
from conftest import make_policy

from misvo import cli_saved, exported
from misvo.errors import MisvoError
from misvo.steering import Steering


@pytest.fixture(scope="module")
def policy():
    return make_policy("granite")  # whose logits are scaled


def vectors(policy, tie, length=6):
    u = torch.randn(length, policy.head.hidden_size, generator=torch.Generator().manual_seed(1))
    return u[:1].expand(length, -1).contiguous() if tie == "shared" else u


@pytest.mark.parametrize("tie", ["shared", "position"])
def test_rows_are_the_shift_of_the_logits(policy, tie, tmp_path):
    u = vectors(policy, tie)
    exported.export(policy.head, u, tie == "shared", tmp_path / "calm", {"model": "tiny"})
    shift = exported.Shelf(tmp_path).load("calm")
    whole = policy.head.weight.double() * policy.head.scale
    for position in range(6):
        assert torch.allclose(shift.at(position).double(), whole @ u[position].double(), atol=1e-4)
    assert len(shift.rows) == (1 if tie == "shared" else 6)
    beyond = shift.at(100)
    assert beyond is None if tie == "position" else torch.equal(beyond, shift.at(5))


def test_names_are_no_paths(policy, tmp_path):
    exported.export(policy.head, vectors(policy, "shared"), True, tmp_path / "shelf" / "calm")
    exported.export(policy.head, vectors(policy, "shared"), True, tmp_path / "outside")
    (tmp_path / "shelf" / "half").mkdir()
    shelf = exported.Shelf(tmp_path / "shelf")
    assert list(shelf.about) == ["calm"]
    for name in ("../outside", "outside", "half", "calm/", "./calm", "", ".", "..", "calm\x00", None, 3, ["calm"]):
        with pytest.raises(MisvoError, match=r"there is no steering called .*this server has: calm"):
            shelf.load(name)
    exported.export(policy.head, vectors(policy, "shared"), True, tmp_path / "shelf" / "later")
    with pytest.raises(MisvoError, match="there is no steering"):  # as it was when it was made
        shelf.check("later")
    with pytest.raises(MisvoError, match="cannot be a name"):
        exported.export(policy.head, vectors(policy, "shared"), True, tmp_path / "a b")


@pytest.mark.parametrize("strength", [4.1, -1e9, float("nan"), float("inf"), "1", True, None, [1]])
def test_strengths_that_are_refused(strength):
    with pytest.raises(MisvoError, match="a strength is a number from −4 to 4"):
        exported.check_strength(strength)


def test_strengths():
    assert [exported.check_strength(one) for one in (0, -4, 0.8)] == [0.0, -4.0, 0.8]


def test_what_cannot_be_read(policy, tmp_path):
    exported.export(policy.head, vectors(policy, "shared"), True, tmp_path / "calm")
    with pytest.raises(MisvoError, match="calm was made for a model of 61 tokens; this one has 62"):
        exported.Shelf(tmp_path).check_vocabulary(62)
    (tmp_path / "calm" / exported.ROWS).write_bytes(b"none")
    with pytest.raises(MisvoError, match="cannot be read"):
        exported.Shelf(tmp_path).load("calm")
    for text in ("[]", "{", json.dumps({"format": "other", "vocabulary": 61, "goes_on": True})):
        (tmp_path / "calm" / exported.ABOUT).write_text(text)
        with pytest.raises(MisvoError, match="not the description"):
            exported.Shelf(tmp_path)
    with pytest.raises(MisvoError, match="there is no folder"):
        exported.Shelf(tmp_path / "nowhere")


def test_the_command(policy, tmp_path, capsys):
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    made = Steering(vectors(policy, "shared"), policy.head.fingerprint, "shared", {"model": str(tmp_path / "model")})
    made.save_pretrained(tmp_path / "run")
    load = {"dtype": "auto", "device": None, "device_map": None, "revision": None, "trust_remote_code": False}
    load |= {"quantize": None, "compile": False, "engine": "torch", "engine_option": []}
    cli_saved.export(tmp_path / "run", tmp_path / "named" / "calm", **load)
    assert '"misvo": "calm"' in capsys.readouterr().out
    shift = exported.Shelf(tmp_path / "named").load("calm")
    assert torch.allclose(shift.at(0), policy.head.shift(made.vectors[:1])[0], atol=1e-5) and shift.goes_on
    with pytest.raises(MisvoError, match="is there already"):
        cli_saved.export(tmp_path / "run", tmp_path / "named" / "calm", **load)
    other = Steering(made.vectors, "another", "shared", made.metadata)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(MisvoError, match="whose LM head is not the one"):
        cli_saved.export(tmp_path / "other", tmp_path / "named" / "other", **load)
