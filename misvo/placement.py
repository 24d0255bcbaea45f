"""In which precision a model is loaded and on which device it stands: the words that people use, checked before any
weight is read."""

import warnings

import torch

from misvo.errors import MisvoError, first_line, short

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")  # a device_map that is no device


def parse_dtype(dtype) -> torch.dtype | str:
    """ "auto" (as the checkpoint was saved) or one of torch's: `bf16`, `half`, "torch.float16", torch.float32, …"""
    if dtype is None or dtype == "auto":
        return "auto"
    found = dtype
    if isinstance(dtype, str):
        name = dtype.lower().removeprefix("torch.")
        found = getattr(torch, SHORT_NAMES.get(name, name), None)
    if not isinstance(found, torch.dtype) or found not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise MisvoError(f"unknown dtype {str(dtype)!r}: choose one of auto, {known} (or fp32, bf16, fp16).")
    return found


def check_device(device) -> None:
    """Put a number on the device and read it again; say what there is where that cannot be done."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # an unknown word, a build without CUDA, a GPU that is not there or not free
        reason = short(first_line(error), 120).rstrip(".")
        raise MisvoError(
            f"the device {str(device)!r} cannot be used here ({reason}): choose one of {', '.join(devices())}."
        ) from error


def check_placement(device, device_map) -> None:
    """Refuse a device that is not there, by either name."""
    if device is not None and device_map is not None:
        raise MisvoError("device and device_map exclude each other: give one of them.")
    if device is not None:
        check_device(device)
    elif isinstance(device_map, str | int | torch.device) and device_map not in SPREADING:
        check_device(device_map)


def devices() -> list[str]:
    """The devices of this machine that torch can use."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return ["cpu", *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]


def warn_of_slow_products(model) -> None:
    """Say what to do where the weights of a checkpoint are in 16 bits and the CPU under it multiplies only in 32."""
    if model.device.type == "cpu" and not multiplies_in(model.dtype):
        name = str(model.dtype).removeprefix("torch.")
        size = sum(weight.numel() for weight in model.parameters()) * torch.float32.itemsize / 1e9
        warnings.warn(
            f"this checkpoint was saved in {name}, in which this CPU is slow: with dtype='float32' (--dtype float32) "
            f"many responses decode twice as fast and more, and weights take {size:.1f} GB instead of {size / 2:.1f}.",
            stacklevel=3,
        )


def multiplies_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has products of this precision; 16 bits need newer instructions than AVX2."""
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return True  # of what is not oneDNN's nothing is known
    ops = torch.ops.mkldnn
    return ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
