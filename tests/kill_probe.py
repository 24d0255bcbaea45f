"""Kill a sweep with SIGKILL at random moments until it has died often enough, then let it end (see test_bench_kill).

    python tests/kill_probe.py CONFIG.toml FOLDER KILLS SEED

Every try is a forked child of this process, which has the imports behind it, so that a try costs no start-up. Prints
a JSON line: how many children were killed, and how many rows each of them left.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child cannot use the threads of its parent

import torch

from misvo.bench import config as configs
from misvo.bench import sweep
from misvo.calls import steer_many  # noqa: F401  imported here, so that no child has to

torch.set_num_threads(1)


def start(config, folder) -> int:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            sweep.run(config, folder)
        except BaseException as error:
            print(f"child: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    return child


def main():
    path, folder, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    config, chance = configs.read(path), random.Random(seed)
    config.models[0].load()  # the imports that loading a model takes
    started = time.perf_counter()
    assert os.waitpid(start(config, folder), 0)[1] == 0
    whole = time.perf_counter() - started
    shutil.rmtree(folder)
    left = []
    while len(left) < kills:
        child = start(config, folder)
        time.sleep(chance.uniform(0, 0.7 * whole))
        if os.waitpid(child, os.WNOHANG)[0]:  # it ended before its time: begin again
            shutil.rmtree(folder)
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        rows = folder / "rows.jsonl"
        left.append(rows.read_bytes().count(b"\n") if rows.exists() else 0)
    code = os.waitpid(start(config, folder), 0)[1]
    print(json.dumps({"killed": len(left), "rows": left, "code": code, "seconds": whole}))


if __name__ == "__main__":
    main()
