"""Landlock: file access limited to a few folders, for machines whose kernel or container refuses namespaces.

Any process may give up rights this way (Linux 5.13 and later), so it needs no privilege. Where the program
has a private file system this adds nothing and is not used.

Left out on purpose: Landlock's own network rules; the system-call filter refuses sockets altogether.
Standard library only.
"""

import ctypes
import os

from .kernel import call

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14)  # and truncate
_READ = _READ_FILE | _READ_DIR


class _Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("files", "network", "scoped"))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version():
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return call("syscall", _CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def restrict(view, writable):
    """From now on this process reads only `view` (see `kernel.private_root`) and writes only `writable`."""
    found = version()
    rights = (1 << 13) - 1  # version 1
    rights |= (1 << 13 if found >= 2 else 0) | (1 << 14 if found >= 3 else 0) | (1 << 15 if found >= 5 else 0)
    size = 24 if found >= 6 else 8
    # Scope 3: no abstract sockets and no signals to outside.
    wanted = _Ruleset(files=rights, scoped=3 if found >= 6 else 0)
    ruleset = call("syscall", _CREATE, ctypes.byref(wanted), ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for path in view["paths"]:
            _allow_view(ruleset, path, view["hidden"])
        for path in view["packages"]:
            _allow(ruleset, os.path.dirname(path), _READ_DIR)
            _allow(ruleset, path, _READ)
        for path in writable:
            _allow(ruleset, path, rights & ~_EXECUTE)
        call("syscall", _RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow_view(ruleset, path, hidden):
    """Read all below `path` but files in `hidden` folders: rights only add up, so name the siblings instead."""
    if path in hidden:
        return
    if not any(folder.startswith(path + "/") for folder in hidden):
        _allow(ruleset, path, _READ)
        return
    _allow(ruleset, path, _READ_DIR)  # imports list folders
    for entry in os.scandir(path):
        if not entry.is_symlink():  # what it points to is in view by itself, or should not be
            _allow_view(ruleset, entry.path, hidden)


def _allow(ruleset, path, rights):
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = _Beneath(rights, handle)
        call("syscall", _ADD, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(handle)
