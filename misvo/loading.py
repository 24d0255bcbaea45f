"""A causal LM and its tokenizer by name: what `Policy.from_pretrained` asks of transformers, and its errors in a
sentence each."""

import difflib
import re
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from misvo import embedded, hub, placement
from misvo.errors import MisvoError

# What decides where files come from goes to the tokenizer too.
OF_BOTH = (
    "cache_dir",
    "code_revision",
    "force_download",
    "gguf_file",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
# What else people give: for a hint, where a name is close to one of these.
OF_THE_MODEL = (
    "attn_implementation",
    "config",
    "generation_config",
    "key_mapping",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "quantization_config",
    "use_safetensors",
    "variant",
)


def load(name, *, dtype="auto", device=None, device_map=None, torch_dtype=None, **options):
    """(model, tokenizer) of an embedded model, a Hugging Face id or a folder. `options` are those of transformers."""
    if not isinstance(name, str | PathLike):
        raise MisvoError(
            f"from_pretrained takes a name or a folder, not {type(name).__name__}: a model that you have loaded "
            "becomes a policy by misvo.Policy(model, tokenizer)."
        )
    if torch_dtype is not None:
        if dtype not in (None, "auto", torch_dtype):
            raise MisvoError("torch_dtype is an older name of dtype: give one of them.")
        dtype = torch_dtype
    dtype = placement.parse_dtype(dtype)
    placement.check_placement(device, device_map)
    if "output_loading_info" in options:
        raise _unknown("output_loading_info")
    known = str(name) in embedded.MODELS
    folder = embedded.model_folder(str(name)) if known else name
    source = hub.find(folder, options.get("local_files_only", False))
    if source.local_files_only:
        options["local_files_only"] = True
    shared = {option: value for option, value in options.items() if option in OF_BOTH}
    try:
        with source.reading(), embedded.quiet() if known else _bars_as_wished():
            tokenizer = AutoTokenizer.from_pretrained(folder, **shared)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device_map, **options)
            model = model if device is None else model.to(device)
    except Exception as error:  # a hub, a disk, a format, a package that is missing: each has errors of its own
        strange = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(error, TypeError) and strange and strange[1] in options:
            raise _unknown(strange[1]) from error
        raise MisvoError(_failure(name, source.explain(error), isinstance(error, OSError))) from error
    if dtype == "auto":  # nobody chose it
        placement.warn_of_slow_products(model)
    return model.eval(), tokenizer


@contextmanager
def _bars_as_wished():
    """No bar while weights load where transformers is to speak of errors alone, as under the command line; downloads,
    which may take an hour, keep theirs."""
    weights, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if not weights or logging.get_verbosity() < logging.ERROR:
        yield
        return
    logging.disable_progress_bar()  # those of downloads with it
    try:
        if downloads:
            enable_progress_bars()
        yield
    finally:
        logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()


def _failure(name, reason, not_found):
    kind = "folder" if Path(name).is_dir() else "name"
    wish = ""
    if not_found:
        close = difflib.get_close_matches(str(name).lower(), embedded.MODELS, n=1)
        own = f"did you mean {close[0]!r}?" if close else f"embedded models are {', '.join(embedded.MODELS)}."
        wish = f"; give a Hugging Face id or a folder; {own}"
    return f"no model could be loaded from the {kind} {str(name)!r}: {reason}{wish or '.'}"


def _unknown(option):
    close = difflib.get_close_matches(option, [*OF_BOTH, *OF_THE_MODEL, "dtype", "device", "device_map"], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "it takes those of transformers' own from_pretrained."
    return MisvoError(f"from_pretrained has no option {option!r} for this model: {hint}")
