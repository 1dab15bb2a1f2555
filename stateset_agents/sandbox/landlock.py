"""Landlock: what a process may do with files (https://docs.kernel.org/userspace-api/landlock.html).

The grader makes one ruleset for all programs, and each child puts itself under it. Neither needs a right to.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from stateset_agents.types.errors import SandboxFailure

_CREATE_RULESET, _ADD_RULE = 444, 445  # on every architecture
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""From this version on, so many rights of files are known."""
_NETWORK_FROM, _NETWORK = 4, 0b11  # to bind and to connect TCP
_SCOPES_FROM, _SCOPES = 6, 0b11  # abstract unix sockets, signals


def abi() -> int:
    """The version of Landlock in this kernel; 0 where there is none, or it is switched off."""
    if sys.platform != "linux":  # where the number is another call's
        return 0
    version_asked = 1
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, 0, version_asked)))


def make_ruleset(readable: Iterable[Path], *, version: int) -> int:
    """A file descriptor of rules that allow to read these files and folders, and nothing else of what
    Landlock knows in this version.

    Raises SandboxFailure where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    files = (1 << max(count for since, count in _FILE_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack(
        "=QQQ",
        files,
        _NETWORK if version >= _NETWORK_FROM else 0,
        _SCOPES if version >= _SCOPES_FROM else 0,
    )
    known = 24 if version >= _SCOPES_FROM else 16 if version >= _NETWORK_FROM else 8
    ruleset = int(libc.syscall(_CREATE_RULESET, attributes, known, 0))
    if ruleset < 0:
        raise SandboxFailure(f"Landlock made no ruleset: {os.strerror(ctypes.get_errno())}")
    path_beneath = 1
    for path in readable:
        allowed = _READ_FILE | _READ_DIRECTORY if path.is_dir() else _READ_FILE
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            rule = struct.pack("=Qi", allowed, beneath)
            if libc.syscall(_ADD_RULE, ruleset, path_beneath, rule, 0) < 0:
                why = os.strerror(ctypes.get_errno())
                os.close(ruleset)
                raise SandboxFailure(f"Landlock took no rule for {path}: {why}")
        finally:
            os.close(beneath)
    return ruleset
