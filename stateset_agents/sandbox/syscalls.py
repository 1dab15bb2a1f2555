"""System calls that a program needs to compute; everything else is refused. syscalls.json has their numbers.

Read, write and close what is open; open files for reading, and which Landlock or namespaces decide on;
memory; handlers of its own signals; clocks and random numbers; its own end. Nothing that starts, signals or
looks at a process, nothing that makes a socket, a pipe or a file, and nothing that waits, for time, for
another process or for a disk that the page cache would spare (O_DIRECT, pages thrown out of it), so that a
program that takes long uses processor time. `sched_yield` waits, too: beside busy neighbours a loop of it
has a thousandth of a core.
"""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A call is allowed where an argument's low half, masked, is one of these values."""

    argument: int
    """0 is the first."""
    mask: int
    values: tuple[int, ...]


_OPEN_FLAGS = 0x100 | 0x800 | 0x40000 | 0x80000 | 0x200000
"""O_NOCTTY, O_NONBLOCK, O_NOATIME, O_CLOEXEC and O_PATH; reading is no flag."""
_CHECKS: Mapping[str, Check] = {
    "ioctl": Check(argument=1, mask=0xFFFFFFFF, values=(0x5401, 0x5450, 0x5451)),  # what open() asks
    "fcntl": Check(argument=1, mask=0xFFFFFFFF, values=(1, 2, 3)),  # F_GETFD, F_SETFD, F_GETFL
    "futex": Check(argument=1, mask=0x7F, values=(1,)),  # FUTEX_WAKE: there is no thread to wait for
    "madvise": Check(argument=2, mask=0xFFFFFFFF, values=(0, 1, 2, 4, 8, 14, 15)),  # what allocators say
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A processor's numbers, as the kernel's headers have them (asm/unistd.h, linux/audit.h)."""

    name: str
    audit: int
    """AUDIT_ARCH_*: what a filter sees, so that no call comes in by another numbering."""
    foreign_from: int | None
    """The first number of a second numbering of the same architecture."""
    allowed: Mapping[str, int]
    checked: Mapping[str, int]
    """Allowed with some values of an argument alone."""
    open_flags: int
    """O_DIRECTORY, O_NOFOLLOW and O_LARGEFILE, whose numbers differ."""
    capset: int
    pivot_root: int
    seccomp: int

    @property
    def checks(self) -> Mapping[str, Check]:
        """The check of each call of `checked`."""
        flags = Check(argument=2, mask=0xFFFFFFFF & ~(_OPEN_FLAGS | self.open_flags), values=(0,))
        return {**_CHECKS, "open": replace(flags, argument=1), "openat": flags}


_NUMBERS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(
        name="x86-64",
        audit=0xC000003E,
        foreign_from=0x40000000,  # x32
        open_flags=0x10000 | 0x20000 | 0x8000,
        **_NUMBERS["x86_64"],
    ),
    "aarch64": Architecture(
        name="arm64",
        audit=0xC00000B7,
        foreign_from=None,
        open_flags=0x4000 | 0x8000 | 0x20000,
        **_NUMBERS["aarch64"],
    ),
}
"""Architectures by the name that `platform.machine()` gives them."""


def this_architecture() -> Architecture | None:
    """The architecture of this machine; None where its numbers are not known, or the kernel is not Linux."""
    return ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None


# --- the filter, in classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html)
#
# The grader assembles it; the child installs the bytes. What is not on the list fails with EPERM, so that
# honest code sees an ordinary PermissionError. A call by another numbering (32-bit, x32) ends the process.

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_ALU|AND|K, BPF_RET|K."""
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM = 1
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`; of an argument's 8 bytes the first 4, on little-endian machines."""


def assemble(architecture: Architecture) -> bytes:
    """[num_instructions * 8 bytes] of `struct sock_filter`: code, jump if true, jump if false, k."""
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture.audit, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
    ]
    if architecture.foreign_from is not None:
        program += [_step(_AT_LEAST, architecture.foreign_from, 0, 1), _step(_RETURN, _KILL_PROCESS)]
    for number in architecture.allowed.values():
        program += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    for name, number in architecture.checked.items():
        check = architecture.checks[name]
        inside = [_step(_LOAD, _ARGUMENTS + 8 * check.argument), _step(_AND, check.mask)]
        for value in check.values:
            inside += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
        inside.append(_step(_RETURN, _ERRNO | _EPERM))
        program += [_step(_EQUAL, number, 0, len(inside)), *inside]
    program.append(_step(_RETURN, _ERRNO | _EPERM))
    return b"".join(program)


def _step(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def can_filter() -> bool:
    """True if this kernel has filters that end a process, and its numbers are known."""
    architecture = this_architecture()
    if architecture is None:
        return False
    action = ctypes.c_uint32(_KILL_PROCESS)
    get_action_avail = 2
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(architecture.seccomp, get_action_avail, 0, ctypes.byref(action)) == 0)
