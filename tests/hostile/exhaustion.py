"""Programs that try to use up time, memory, processes, files or patience. Each attacks one limit.

None of them answers right, so each scores 0; the verifier, and the programs beside them, carry on.
"""

PROGRAMS = {
    "a loop without end": "def solve(n):\n    while True: pass",
    "a loop without end while loading": "while True: pass\ndef solve(n): return 0",
    "a loop that swallows its alarm": """
def solve(n):
    while True:
        try:
            while True: pass
        except BaseException:
            pass
""",
    "a loop without its alarm": """
import signal
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
def solve(n):
    while True: pass
""",
    "a computation that no signal interrupts": "def solve(n): return 7 ** (10 ** 9 + n)",
    "a regular expression that never ends": """
import re
def solve(n): return re.match(r"(a+)+$", "a" * 60 + "b")
""",
    "eight spinning threads": """
import threading
def spin():
    while True: pass
def solve(n):
    for _ in range(8):
        threading.Thread(target=spin, daemon=True).start()
    spin()
""",
    "sleep": "import time\ndef solve(n): time.sleep(1000)",
    "naps": """
import time
def solve(n):
    while True: time.sleep(0.1)  # shorter naps cost enough CPU time on a slow machine to pass for work
""",
    "a deadlock": """
import threading
def solve(n):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
""",
    "waiting for input": "def solve(n): return input()",
    "waiting on an empty pipe": "import os\ndef solve(n): return os.read(os.pipe()[0], 1)",
    "stopping itself": "import os, signal\ndef solve(n): os.kill(os.getpid(), signal.SIGSTOP); raise OSError",
    "a list without end": """
def solve(n):
    everything = []
    while True: everything.append(bytearray(1 << 20))
""",
    "one huge allocation": "def solve(n): return len(bytearray(1 << 36))",
    "memory outside the heap": """
import mmap
def solve(n):
    maps = []
    while True:
        maps.append(mmap.mmap(-1, 1 << 26))
        maps[-1].write(b"x" * (1 << 26))
""",
    "memory in an anonymous file": """
import os
def solve(n):
    handle = os.memfd_create("m")
    while True: os.write(handle, b"x" * (1 << 20))
""",
    "a huge string": "def solve(n): return 'x' * (1 << 34)",
    "a huge answer": "def solve(n): return 'x' * (1 << 26)",
    "a huge number": "def solve(n): return 1 << (1 << 27)",
    "recursion without end": "def solve(n): return solve(n)",
    "recursion without end or limit": """
import sys
sys.setrecursionlimit(1 << 30)
def solve(n): return solve(n) + 1
""",
    "an answer nested without end": """
def solve(n):
    deep = []
    for _ in range(100000): deep = [deep]
    return deep
""",
    "a program nested without end": "def solve(n): return " + "(" * 5000 + ")" * 5000,
    "a fork bomb": """
import os
def solve(n):
    while True: os.fork()
""",
    "a fork bomb by subprocess": """
import subprocess, sys
def solve(n):
    while True: subprocess.Popen([sys.executable, "-c", "while True: pass"])
""",
    "a thread bomb": """
import threading, time
def solve(n):
    while True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
""",
    "output without end": """
import sys
def solve(n):
    while True: sys.stdout.write("x" * 65536)
""",
    "answers without end": """
import os
def solve(n):
    while True:
        for handle in range(3, 8):
            try: os.write(handle, b'[0,"error","x",0]\\n' * 1000)
            except OSError: pass
""",
    "a full disk": """
def solve(n):
    with open("big", "wb") as file:
        while True: file.write(b"x" * (1 << 20))
""",
    "files without end": """
def solve(n):
    for index in range(1 << 20): open(f"file{index}", "w").write("x")
""",
    "handles without end": """
import os
def solve(n):
    while True: os.open("/dev/null", os.O_RDONLY)
""",
    "a segmentation fault": "import ctypes\ndef solve(n): ctypes.string_at(1)",
    "an abort": "import os\ndef solve(n): os.abort()",
}
