"""A conversion that takes half a second, for test_policy.py's processes, which need not import torch for it."""

import os
import time

from misvo import embedded


def fake_conversion(source, folder, starts_with_bos):
    with open(folder.parent / "conversions", "a") as log:
        log.write(f"{os.getpid()}\n")
    (folder / "first").write_text("half")
    time.sleep(0.5)
    (folder / "second").write_text("whole")


def convert(folder):
    embedded.wheel_paths = lambda entry: [entry.file]
    embedded.convert = fake_conversion
    os.environ["MISVO_CACHE"] = str(folder)
    path = embedded.model_folder("smollm2-135m")
    return {p.name: p.read_text() for p in path.iterdir()}
