"""Programs that try to reach what lies outside: files, network, processes, the kernel. Each attacks one wall.

Each returns what it got hold of, and raises when it got nothing. Words between @ signs are filled in by the test:
@CANARY@ a file with a secret, @HOME@ the user's home folder, @PORT@ a listening TCP port on loopback, @SOCKET@ an
abstract Unix socket, @VICTIM@ another process of the same user, @TARGET@ a path outside that must not come to be.
"""

PROGRAMS = {
    "read a file of the user": "def solve(n): return open('@CANARY@').read()",
    "read it through a symbolic link": """
import os
def solve(n):
    os.symlink("@CANARY@", "link")
    return open("link").read()
""",
    "read it through a hard link": """
import os
def solve(n):
    os.link("@CANARY@", "link")
    return open("link").read()
""",
    "read it up the tree": "def solve(n): return open('../' * 30 + '@CANARY@'[1:]).read()",
    "read it through another process's root": "def solve(n): return open('/proc/1/root@CANARY@').read()",
    "read it through an inherited handle": """
import os
def solve(n):
    for handle in range(3, 256):
        try: return os.read(os.open("@CANARY@", os.O_RDONLY, dir_fd=handle), 100).decode()
        except OSError: pass
    raise OSError
""",
    "find it by walking": """
import os
def solve(n):
    for folder, _, files in os.walk("/"):
        if os.path.basename("@CANARY@") in files:
            return open(os.path.join(folder, os.path.basename("@CANARY@"))).read()
    raise OSError
""",
    "list the home folder": "import os\ndef solve(n): return os.listdir('@HOME@/..') and open('@CANARY@').read()",
    "read the verifier's environment": """
import os
def solve(n):
    found = dict(os.environ)
    for pid in (os.getppid(), 1):
        try: found[pid] = open(f"/proc/{pid}/environ").read()
        except OSError: pass
    return found["MISVO_TEST_SECRET"]
""",
    "connect to loopback": """
import socket
def solve(n): return str(socket.create_connection(("127.0.0.1", @PORT@), timeout=2))
""",
    "connect to loopback by IPv6": """
import socket
def solve(n): return str(socket.create_connection(("::ffff:127.0.0.1", @PORT@), timeout=2))
""",
    "connect without the socket module": """
import ctypes
def solve(n):
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.socket(2, 1, 0)
    address = (2).to_bytes(2, "little") + (@PORT@).to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    if handle < 0 or libc.connect(handle, address, 16) < 0: raise OSError
    return "connected"
""",
    "connect to an abstract socket": """
import socket
def solve(n):
    client = socket.socket(socket.AF_UNIX)
    client.connect("\\0@SOCKET@")
    return "connected"
""",
    "send a datagram": """
import socket
def solve(n):
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @PORT@))
""",
    "listen": """
import socket
def solve(n):
    server = socket.create_server(("127.0.0.1", 0))
    return server.getsockname()[1]
""",
    "fetch by URL": """
import urllib.request
def solve(n): return urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=2).read()
""",
    "write a file outside": "def solve(n): return open('@TARGET@', 'w').write('x')",
    "change the standard library": """
import os
def solve(n):
    with open(os.path.join(os.path.dirname(os.__file__), "misvo_was_here.py"), "w") as file:
        return file.write("x")
""",
    "change an open module": """
import os
def solve(n):
    os.chmod(os.__file__, 0o777)
    with open(os.__file__, "a") as file:
        return file.write("# misvo was here")
""",
    "make a device": """
import os, stat
def solve(n):
    os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
    return "made"
""",
    "run a shell": """
import os
def solve(n):
    if os.system("true") != 0: raise OSError
    return "ran"
""",
    "run a program": """
import subprocess, sys
def solve(n): return subprocess.run([sys.executable, "-c", "pass"], check=True).returncode
""",
    "become another program": "import os\ndef solve(n): os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "leave a daemon behind": """
import os, time
def solve(n):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return "left"
""",
    "leave a child behind by a raw system call": """
import ctypes, time
def solve(n):
    pid = ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)
    if pid == 0: time.sleep(600)
    if pid < 0: raise OSError
    return "left"
""",
    "kill everyone": "import os\ndef solve(n): os.kill(-1, 9); return 'killed'",
    "kill the attendant": "import os\ndef solve(n): os.kill(os.getppid() or @VICTIM@, 9); return 'killed'",
    "kill another process": "import os\ndef solve(n): os.kill(@VICTIM@, 9); return 'killed'",
    "kill by handle": """
import os, signal
def solve(n):
    signal.pidfd_send_signal(os.pidfd_open(@VICTIM@), 9)
    return "killed"
""",
    "trace another process": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).ptrace(16, @VICTIM@, 0, 0) < 0: raise OSError
    return "traced"
""",
    "survive the attendant": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) != 0: raise OSError
    return "survived"
""",
    "renice another process": "import os\ndef solve(n): os.setpriority(os.PRIO_PROCESS, @VICTIM@, 19); return 'niced'",
    "become root": "import os\ndef solve(n): os.setresuid(0, 0, 0); return open('@CANARY@').read()",
    "a new user namespace": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).unshare(0x10000000) != 0: raise OSError
    return "root"
""",
    "a mount": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).mount(b"proc", b".", b"proc", 0, None) != 0: raise OSError
    return "mounted"
""",
    "a change of root": "import os\ndef solve(n): os.chroot('.'); return 'moved'",
    "raised limits": """
import resource
def solve(n):
    resource.setrlimit(resource.RLIMIT_CPU, (10 ** 6, 10 ** 6))
    return "raised"
""",
    "shared memory that stays": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).shmget(0x6D697376, 4096, 0o1666) < 0: raise OSError
    return "shared"
""",
    "the kernel's key ring": """
import ctypes
def solve(n):
    if ctypes.CDLL(None).syscall(250, 0, -3, 0) < 0: raise OSError
    return "keys"
""",
    "a terminal's input": """
import fcntl, os
def solve(n):
    fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x5412, b"x")
    return "typed"
""",
}
