"""The filter of system calls, in classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html).

The grader assembles it; the child installs the bytes. What is not on the list fails with EPERM, so that
honest code sees an ordinary PermissionError. A call by another numbering (32-bit, x32) ends the process.
"""

from __future__ import annotations

import ctypes
import struct

from stateset_agents.sandbox.syscalls import Architecture, this_architecture

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
    """Has this kernel filters that end a process, and do we know its numbers?"""
    architecture = this_architecture()
    if architecture is None:
        return False
    action = ctypes.c_uint32(_KILL_PROCESS)
    get_action_avail = 2
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(architecture.seccomp, get_action_avail, 0, ctypes.byref(action)) == 0)
