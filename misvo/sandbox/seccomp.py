"""A system-call filter for model-written programs: no children, no sockets, no signals to others.

The second wall behind the namespaces, and the first one where the kernel refuses namespaces. A refused call
fails with EPERM, so a program sees an ordinary OSError. It is a list of what is refused, not of what is
allowed: the interpreter and its C library may call whatever else they need on machines we have not seen.

Left out on purpose: machines other than x86_64 and aarch64 (reported as not filtered). Standard library
only.
"""

import ctypes
import functools
import os
import struct

from .kernel import call, prctl

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_THREAD, _PR_SET_PDEATHSIG = 0x10000, 1

# name: (x86_64, aarch64); None where the machine has no such call.
_REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # The network. socketpair stays: asyncio needs one, and it leads nowhere.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    # Namespaces and mounts: walls are built before this filter, not after.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # Memory that the address-space limit does not count, and that may outlive the process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Kernel interfaces that no answer needs and that have a history.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
}
_SPECIAL = {"clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131)}
_SPECIAL |= {"prlimit64": (302, 261), "prctl": (157, 167)}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# Classic BPF over struct seccomp_data: nr at 0, arch at 4, args from 16 (low word first on these machines).
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06


def _op(code, value, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, value)


@functools.cache
def program(machine, own_pid):
    """The filter as bytes: what is refused above, and some calls by their first argument."""
    column, arch = _MACHINES[machine]
    refuse = _op(_RET, _ERRNO | _EPERM)
    allow = _op(_RET, _ALLOW)
    code = [
        *(_op(_LOAD, 4), _op(_JEQ, arch, 1, 0), refuse),  # a foreign calling convention has other numbers
        *(_op(_LOAD, 0), _op(_JGE, 0x40000000, 0, 1), refuse),  # x32
    ]
    for numbers in _REFUSED.values():
        if numbers[column] is not None:
            code += [_op(_JEQ, numbers[column], 0, 1), refuse]
    number = {name: numbers[column] for name, numbers in _SPECIAL.items()}
    # ENOSYS makes the C library fall back on clone, whose flags a filter can read.
    code += [_op(_JEQ, number["clone3"], 0, 1), _op(_RET, _ERRNO | _ENOSYS)]
    # A thread is no child.
    code += [_op(_JEQ, number["clone"], 0, 4), _op(_LOAD, 16), _op(_JSET, _CLONE_THREAD, 0, 1), allow, refuse]
    # The signal that ends the program with its attendant stays set.
    code += [_op(_JEQ, number["prctl"], 0, 4), _op(_LOAD, 16), _op(_JEQ, _PR_SET_PDEATHSIG, 1, 0), allow, refuse]
    for name in ("kill", "tgkill"):  # to oneself
        code += [_op(_JEQ, number[name], 0, 4), _op(_LOAD, 16), _op(_JEQ, own_pid, 0, 1), allow, refuse]
    code += [_op(_JEQ, number["prlimit64"], 0, 5), _op(_LOAD, 16)]
    code += [_op(_JEQ, own_pid, 1, 0), _op(_JEQ, 0, 0, 1), allow, refuse]
    return b"".join([*code, allow])


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install():
    """Filter this process, which must have set no_new_privs, from now on."""
    code = program(os.uname().machine, os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    spec = _Program(len(code) // 8, ctypes.addressof(buffer))
    call("prctl", 22, ctypes.c_ulong(2), ctypes.byref(spec), ctypes.c_ulong(0), ctypes.c_ulong(0))


def available():
    """Whether this machine and kernel know the filter (it is not installed)."""
    try:
        prctl(21)  # PR_GET_SECCOMP
    except OSError:
        return False
    return os.uname().machine in _MACHINES
