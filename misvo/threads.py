"""How the threads of a program of ours wait for each other. A library sets nothing: only programs call this.

OpenMP's threads wait hundreds of times for every token. Threads that sleep at once lose up to half of the speed of a
quiet machine to waking up; threads that spin for long were seen 25 times slower when another process wanted a core. A
bounded number of turns lies between. Machines differ (docs/speed.md): `benchmarks/threads.py` tells what suits yours,
and what is set in the environment stays.
"""

import os

SPINS = "20000"


def wait_briefly() -> None:
    """To be called before torch is imported; what the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
