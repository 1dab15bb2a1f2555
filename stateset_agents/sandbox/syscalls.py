"""System calls that a program needs to compute, by number and architecture; everything else is refused.

Read, write and close what is open; open files for reading, and which Landlock or namespaces decide on;
memory; handlers of its own signals; clocks and random numbers; its own end. Nothing that starts, signals or
looks at a process, nothing that makes a socket, a pipe or a file, and nothing that waits, for time, for
another process or for a disk that the page cache would spare (O_DIRECT, pages thrown out of it), so that a
program that takes long uses processor time. `sched_yield` waits, too: beside busy neighbours a loop of it
has a thousandth of a core.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace


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
        """For each call of `checked`."""
        flags = Check(argument=2, mask=0xFFFFFFFF & ~(_OPEN_FLAGS | self.open_flags), values=(0,))
        return {**_CHECKS, "open": replace(flags, argument=1), "openat": flags}


_X86_64 = Architecture(
    name="x86-64",
    audit=0xC000003E,
    foreign_from=0x40000000,  # x32
    allowed={
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8,
        "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15,
        "pread64": 17, "writev": 20, "mremap": 25, "dup": 32,
        "dup2": 33, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "gettimeofday": 96,
        "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
        "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201,
        "sched_getaffinity": 204,
        "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "exit_group": 231,
        "newfstatat": 262, "dup3": 292, "getrandom": 318, "statx": 332,
    },
    checked={"open": 2, "ioctl": 16, "madvise": 28, "fcntl": 72, "futex": 202, "openat": 257},
    open_flags=0x10000 | 0x20000 | 0x8000,
    capset=126,
    pivot_root=155,
    seccomp=317,
)  # fmt: skip
_ARM64 = Architecture(
    name="arm64",
    audit=0xC00000B7,
    foreign_from=None,
    allowed={
        "getcwd": 17, "dup": 23, "dup3": 24, "close": 57, "getdents64": 61,
        "lseek": 62, "read": 63, "write": 64, "writev": 66, "pread64": 67, "newfstatat": 79,
        "fstat": 80, "exit": 93, "exit_group": 94, "clock_gettime": 113, "clock_getres": 114,
        "sched_getaffinity": 123, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160, "getrlimit": 163,
        "getrusage": 165, "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175,
        "getgid": 176, "getegid": 177, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222,
        "mprotect": 226, "getrandom": 278, "statx": 291,
    },
    checked={"fcntl": 25, "ioctl": 29, "openat": 56, "futex": 98, "madvise": 233},
    open_flags=0x4000 | 0x8000 | 0x20000,
    capset=91,
    pivot_root=41,
    seccomp=277,
)  # fmt: skip
ARCHITECTURES: Mapping[str, Architecture] = {"x86_64": _X86_64, "aarch64": _ARM64}
"""By the name that `platform.machine()` gives them."""


def this_architecture() -> Architecture | None:
    """This machine's; None where its numbers are not known, or another kernel than Linux has its own."""
    return ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
