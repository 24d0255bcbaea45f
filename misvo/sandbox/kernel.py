"""The Linux system calls behind the sandbox: namespaces, a private file system, privileges and limits.

Each function does one thing, for the process that calls it, and raises OSError when the kernel refuses.
Which of them are called, and what a refusal means, is decided in `cell`. Python 3.11 has no
`os.unshare`, hence ctypes.

Left out on purpose: control groups (they need a delegated tree that most users lack; address-space, process
and file-size limits stand in for them). Standard library only: the sandbox loads this file by itself.
"""

import ctypes
import os
import resource
import signal

NOBODY = 65534
_CLONE = {
    "mount": 0x20000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 1, 38, 36

libc = ctypes.CDLL(None, use_errno=True)
for _name in ("unshare", "mount", "umount2", "prctl", "syscall"):
    getattr(libc, _name).restype = ctypes.c_long


def call(name, *args):
    """`libc.name(*args)`, or OSError with the errno of the refusal."""
    result = getattr(libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option, value=0):
    unsigned = ctypes.c_ulong
    return call("prctl", option, unsigned(value), unsigned(0), unsigned(0), unsigned(0))


def unshare(*names):
    """New namespaces for this process; the new pid namespace begins with its next child."""
    flags = 0
    for name in names:
        flags |= _CLONE[name]
    call("unshare", flags)


def map_own_ids(uid, gid):
    """Inside a fresh user namespace, be its root, and be nobody but yourself outside."""
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{file}", "w") as handle:
            handle.write(text)


def _mount(source, target, kind=None, flags=0, options=None):
    packed = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    call("mount", packed[0], packed[1], packed[2], ctypes.c_ulong(flags), packed[3])


PACKAGES = "/packages"


def private_root(view):
    """Replace the whole file system by `view`, read-only; the path of a folder to mount something writable on.

    `view` names what stays: "paths" (and "links" to them), except what lies below "hidden" folders
    (site-packages, where data sets with their answers may be installed), and "packages", which move to
    /packages. The new root is an empty memory file system. pivot_root puts the old one under /old for as long
    as it takes to bind what is needed out of it, and then it is gone: there is no path left to anything else.
    """
    scratch = "/scratch" if any(path.startswith("/tmp/") for path in view["paths"]) else "/tmp"
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("old")
    call("syscall", _pivot_root_number(), b".", b"old")
    os.chdir("/")
    for path in view["paths"]:
        _bind(path, path)
    for path, target in view["links"].items():  # /lib -> /usr/lib
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
    for path in view["hidden"]:
        _mount("tmpfs", path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=755")
    for path in view["packages"]:
        _bind(path, os.path.join(PACKAGES, os.path.basename(path)))
    os.makedirs(scratch, exist_ok=True)
    call("umount2", b"/old", _MNT_DETACH)
    os.rmdir("/old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    return scratch


def empty_folder(path, size):
    """An empty folder of at most `size` bytes, in memory, over `path`."""
    options = f"size={size},nr_inodes=1024,mode=1777"
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)


def _pivot_root_number():
    return {"x86_64": 155, "aarch64": 41}[os.uname().machine]


def _bind(path, target):
    """Show `/old{path}` at `target`, read-only."""
    source = "/old" + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _read_only(target)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def _read_only(path):
    """Make a bound tree read-only with all that is mounted below it (before Linux 5.12: the top mount only)."""
    want = _MountAttributes(set=1 | 2)  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    here, recursive = ctypes.c_int(-100), ctypes.c_uint(0x8000)  # AT_FDCWD, AT_RECURSIVE
    try:  # mount_setattr
        call("syscall", 442, here, os.fsencode(path), recursive, ctypes.byref(want), ctypes.c_size_t(32))
    except OSError:
        # A user namespace may not clear flags that the mount came with: carry them over (ST_* equals MS_*).
        kept = os.statvfs(path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC | 1024 | 2048)
        _mount(None, path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def open_to_all(paths):
    """Whether any user may enter the folders above `paths`; an interpreter in root's home is for root alone."""
    parents = {parent for path in paths for parent in _parents(os.path.realpath(path))}
    return all(os.stat(parent).st_mode & 0o001 for parent in parents)


def _parents(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path


def become_nobody():
    """Give up root's ids and groups for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_capabilities():
    """Empty the capability sets. With no_new_privileges nothing, not even exec, brings one back."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    call("capset", header, (ctypes.c_uint32 * 6)())


def no_new_privileges():
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent():
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans():
    """Descendants whose parent dies become children of this process, which can then end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_limits(limits, count_processes=True):
    """Resource limits on this process; soft equals hard, so CPU overrun is SIGKILL and nothing can be raised."""
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if count_processes:
        wanted[resource.RLIMIT_NPROC] = limits["processes"]
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(name, (value, value))
