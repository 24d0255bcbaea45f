"""A steering as one file of safetensors, as clients download it, and back from what a client sends.

The vectors are the tensor `vectors`; what else a steering knows is in the file's metadata: the head's fingerprint, how
vectors are tied, and, as JSON under `about`, the model's name, the prompt and the settings. Nothing of a client's file
is believed before it is looked at: shapes, types, finite numbers, settings that are settings.
"""

import json

import safetensors
import safetensors.torch
import torch

from misvo import prompts
from misvo.errors import MisvoError
from misvo.names import TIES
from misvo.server.errors import ApiError
from misvo.settings import Settings
from misvo.steering import Steering

MOST_POSITIONS = 65_536
LONGEST_NAME = 200  # characters


def encode(steering: Steering) -> bytes:
    about = {name: steering.metadata.get(name) for name in ("model", "prompt", "settings")}
    metadata = {"head": steering.head or "", "tie": steering.tie, "about": json.dumps(about)}
    return safetensors.torch.save({"vectors": steering.vectors.contiguous()}, metadata)


def decode(content: bytes) -> Steering:
    """The steering in a file of a client's; ApiError 400 where it is none."""
    try:
        tensors = safetensors.torch.load(content)
        size = int.from_bytes(content[:8], "little")  # of the header, which the line above has looked at
        metadata = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
        about = json.loads(metadata.get("about") or "{}")
        vectors = tensors["vectors"]
        head, tie = metadata.get("head") or None, metadata.get("tie", "position")
    except (safetensors.SafetensorError, ValueError, KeyError, AttributeError, RecursionError, TypeError) as error:
        raise _refused("it is no file of safetensors with a tensor by the name of vectors") from error
    if len(tensors) > 1:
        raise _refused("it holds other tensors beside the vectors")
    if vectors.dtype != torch.float32 or vectors.ndim != 2 or not 1 <= len(vectors) <= MOST_POSITIONS:
        raise _refused("the vectors are not float32 numbers of shape (positions, hidden size)")
    if not torch.isfinite(vectors).all():
        raise _refused("the vectors are not finite")
    if tie not in TIES:
        raise _refused("its tie is none")
    return Steering(vectors, head, tie, _about(about))


def _about(told) -> dict:
    """What a steering says of its origin: all of it plain, and settings that can be made."""
    try:
        model, prompt, settings = (told.get(name) for name in ("model", "prompt", "settings"))
        if prompt is not None:
            prompts.check_form(prompt)
        made_with = None if settings is None else Settings(**settings).to_dict()
    except (MisvoError, TypeError, ValueError, AttributeError) as error:
        raise _refused("what it says of its prompt and settings is wrong") from error
    if model is not None and (not isinstance(model, str) or len(model) > LONGEST_NAME):
        raise _refused("the name of its model is none")
    known = {"model": model, "prompt": prompt, "settings": made_with}
    return {name: value for name, value in known.items() if value is not None}


def _refused(why: str) -> ApiError:
    return ApiError(400, f"this is not the file of a steering: {why}.", code="no_steering")
