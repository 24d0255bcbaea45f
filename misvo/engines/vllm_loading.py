"""Starting vLLM: the versions that are known, the options that cannot be had, the environment that it needs."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from misvo.errors import MisvoError, first_line, short

# From the first on, below the second: what `vllm_runners.py` reads of vLLM's model runners is theirs to change.
VERSIONS = ((0, 32), (0, 33))
# Options that would make tokens wrong, and why.
REFUSED = {
    "speculative_config": "speculative decoding guesses several tokens at once, and misvo draws each of them in turn",
    "enable_lora": "adapters change the model under the steering",
    "logits_processors": "they would change tokens that are drawn already",
    "worker_extension_cls": "misvo has one of its own",
    "worker_cls": "misvo needs vLLM's own",
}
ONE = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "nnodes")
EXECUTORS = ("uni", "mp")  # in one process, or one for each rank, on this machine
# Set where the user's environment says nothing.
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner is written and has not run on a GPU yet
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OWN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # vLLM's own switch, where `own_process` is not given
CPU_CACHE = 2**30  # bytes of keys and values
ON_A_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # threads stay as the process has them
UNGUARDED = (
    "vLLM runs in another process, which begins by reading the script that started it: put what the script does under "
    '`if __name__ == "__main__":`, or load the model with own_process=False.'
)


def check(options: dict) -> None:
    """Refuse in a sentence what would be wrong, before anything is loaded."""
    for name, why in REFUSED.items():
        if options.get(name):
            raise MisvoError(f"{name} cannot be had with steering: {why}. Leave it out.")
    for name in ONE:
        if options.get(name, 1) != 1:
            raise MisvoError(f"{name}={options[name]} is not supported: take 1, and more workers by --ray.")
    executor = options.get("distributed_executor_backend", "mp")
    if executor not in EXECUTORS:
        raise MisvoError(f"distributed_executor_backend={executor!r} is not supported: leave it out.")


def check_version() -> None:
    try:
        import vllm
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == "vllm" else f" ({first_line(error)})"
        raise MisvoError(
            f"engine='vllm' needs the package vllm{reason}: pip install 'vllm>=0.32,<0.33', or `make vllm` on a CPU."
        ) from error
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    least, below = VERSIONS
    if not least <= version < below:
        shown = ">={}.{},<{}.{}".format(*least, *below)
        raise MisvoError(f"vLLM {vllm.__version__} is not one that misvo knows: pip install 'vllm{shown}'.")


def start(options: dict) -> Any:
    """vLLM's LLMEngine, with misvo's worker extension, in a process of its own unless `own_process` is False."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a process that vLLM starts runs the script
        raise MisvoError(UNGUARDED)
    options = dict(options)
    own_process = options.pop("own_process", os.environ.get(OWN_PROCESS, "1") != "0")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    executor = "uni" if options.get("tensor_parallel_size", 1) == 1 else "mp"
    usual: dict[str, Any] = {"disable_log_stats": True, "distributed_executor_backend": executor}
    if current_platform.is_cpu():
        for name, value in ON_A_CPU.items():
            os.environ.setdefault(name, value)
        # The usual block of 128 tokens would share no prompt that is shorter; the usual cache is most of the memory.
        usual |= {"enforce_eager": True, "block_size": 32}
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            usual["kv_cache_memory_bytes"] = CPU_CACHE
    own = {"worker_extension_cls": "misvo.engines.vllm_worker.LawWorker"}
    try:
        arguments = EngineArgs(**{**usual, **options, **own})
    except TypeError as error:
        raise MisvoError(f"vLLM has no such option: {first_line(error)}.") from error
    try:
        with _environment(OWN_PROCESS, str(int(own_process))), _heard_ctrl_c():
            return LLMEngine.from_engine_args(arguments, enable_multiprocessing=own_process)
    except Exception as error:  # a format, a device, memory: each has errors of its own
        raise MisvoError(f"vLLM could not load {options['model']!r}: {short(first_line(error), 300)}") from error


class _CtrlC(BaseException):
    pass


@contextmanager
def _heard_ctrl_c() -> Iterator[None]:
    """vLLM swallows a KeyboardInterrupt while it starts, and then waits for processes that heard the same Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):  # or it is ignored
        yield
        return

    def stop(*_):
        raise _CtrlC

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    except _CtrlC:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
