"""System calls that a program needs to compute, by number and architecture; everything else is refused.

Read, write and close what is open; open files, which Landlock or namespaces decide on; memory; handlers of
its own signals; clocks and random numbers; its own end. Nothing that starts, signals or looks at a process,
nothing that makes a socket, a pipe or a file in memory, and nothing that waits, so that a program that takes
long uses processor time.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ARCHITECTURES", "Architecture", "this_architecture"]


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
    """Allowed with some arguments alone: see seccomp.py."""
    capset: int
    pivot_root: int
    seccomp: int


_X86_64 = Architecture(
    name="x86-64",
    audit=0xC000003E,
    foreign_from=0x40000000,  # x32
    allowed={
        "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8,
        "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15,
        "pread64": 17, "writev": 20, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32,
        "dup2": 33, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "gettimeofday": 96,
        "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
        "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201,
        "sched_getaffinity": 204,
        "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "exit_group": 231, "openat": 257,
        "newfstatat": 262, "dup3": 292, "getrandom": 318, "statx": 332,
    },
    checked={"ioctl": 16, "fcntl": 72, "futex": 202},
    capset=126,
    pivot_root=155,
    seccomp=317,
)  # fmt: skip
_ARM64 = Architecture(
    name="arm64",
    audit=0xC00000B7,
    foreign_from=None,
    allowed={
        "getcwd": 17, "dup": 23, "dup3": 24, "openat": 56, "close": 57, "getdents64": 61,
        "lseek": 62, "read": 63, "write": 64, "writev": 66, "pread64": 67, "newfstatat": 79,
        "fstat": 80, "exit": 93, "exit_group": 94, "clock_gettime": 113, "clock_getres": 114,
        "sched_getaffinity": 123, "sched_yield": 124, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160, "getrlimit": 163,
        "getrusage": 165, "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175,
        "getgid": 176, "getegid": 177, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222,
        "mprotect": 226, "madvise": 233, "getrandom": 278, "statx": 291,
    },
    checked={"fcntl": 25, "ioctl": 29, "futex": 98},
    capset=91,
    pivot_root=41,
    seccomp=277,
)  # fmt: skip
ARCHITECTURES: Mapping[str, Architecture] = {"x86_64": _X86_64, "aarch64": _ARM64}
"""By the name that `platform.machine()` gives them."""


def this_architecture() -> Architecture | None:
    """This machine's; None where its numbers are not known, or another kernel than Linux has its own."""
    return ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
