"""The half of the sandbox that runs beside the program: it shuts the door, runs the program, writes claims.

It stands alone: an interpreter started as `python -I -S` gets it compiled by stdin, with a job behind it, and
can import nothing of this package. `shut_the_door` is ours. From the first line of the program on, everything
in this process is the program's, and what it writes are claims.

A line is JSON: `"ready"` when the door is shut, or `["broken", why]`; then `[case, "value", claim]` or
`[case, "raised", text]`. `json` is not imported, which would take as long as all the rest.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import time
from _json import encode_basestring_ascii as _quoted
from typing import Any

Job = dict[str, Any]

KILLED = 137
"""Exit code of the process that waits for the program's, where SIGKILL killed the program."""

_MOST_DEPTH = 60
"""Most levels of lists in lists; claims.py reads no deeper either."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_LANDLOCK_RESTRICT_SELF = 446  # on every architecture
_SIGKILL = 9
_CLOCK_PROCESS_CPUTIME_ID, _TIMER_ABSTIME, _SIGEV_SIGNAL = 2, 1, 0
_ROUNDED = 0.001
"""Seconds beyond the limit, so that an account, cut to whole microseconds, does not lie below it."""
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""mount, cgroup, uts, ipc, user, pid and net."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2


def shut_the_door(job: Job) -> list[int]:
    """Take from this process what the program is not to have; file descriptors of the texts for its stdin.

    Raises OSError where the kernel refuses a step.
    """
    inputs = [_memory_file(text) for text in job["stdin"]]
    os.dup2(2, 0)  # the null device
    call = _caller()
    if job["parent"] is not None:
        call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != job["parent"]:  # it ended before that
            os._exit(1)
    cost = 0.0
    if job["mounts"] is not None:
        _leave_the_machine(call, job["mounts"], job["pivot_root"])
        cost += _go_on_in_a_child(call, is_program=False)  # the first of the new process namespace
    if job["is_first"]:
        cost += _go_on_in_a_child(call, is_program=True)  # the first gets no signal that it sends itself
    if job["capset"]:
        _drop_capabilities(call, job["capset"])
        call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["ruleset"] >= 0:
        call("syscall", _LANDLOCK_RESTRICT_SELF, job["ruleset"], 0)
        os.close(job["ruleset"])
    _limit(job["limits"], len(inputs))
    _end_after(call, job["cpu_seconds"] + _ROUNDED - cost)
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    if job["filter"]:
        _filter_system_calls(call, job["filter"])
    return inputs


def _memory_file(text: bytes) -> int:
    descriptor = os.memfd_create("stdin")
    while text:
        text = text[os.write(descriptor, text) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _caller() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: int | bytes | None) -> int:
        words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in arguments]
        function = getattr(libc, name, None)
        if function is None:  # timers, before glibc 2.34
            function = getattr(ctypes.CDLL("librt.so.1", use_errno=True), name)
        result: int = function(*words)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}{arguments[:1]}: {os.strerror(number)}")
        return result

    return call


def _drop_capabilities(call: Any, capset: int) -> None:
    """Give up all capabilities, so that root is only a name."""
    import ctypes

    for capability in range(64):
        try:
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:  # it has no right to, or there are no more
            break
    header, none = ctypes.create_string_buffer(8), ctypes.create_string_buffer(24)
    # _LINUX_CAPABILITY_VERSION_3, this process
    header.raw = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)
    call("syscall", capset, ctypes.addressof(header), ctypes.addressof(none))


def _limit(limits: dict[str, int], more_files: int) -> None:
    import resource

    for name, most in limits.items():
        most += more_files if name == "NOFILE" else 0
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _end_after(call: Any, seconds: float) -> None:
    """SIGKILL for this process when it has used so many seconds of processor time in all.

    That clock is exact, where RLIMIT_CPU counts ticks (timer_create(2)).
    """
    import ctypes

    event = bytes(8) + b"".join(number.to_bytes(4, sys.byteorder) for number in (_SIGKILL, _SIGEV_SIGNAL))
    timer = ctypes.c_void_p()
    call("timer_create", _CLOCK_PROCESS_CPUTIME_ID, event + bytes(48), ctypes.addressof(timer))
    nanoseconds = max(1, int(seconds * 1e9))
    once = (ctypes.c_long * 4)(0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    call("timer_settime", timer.value or 0, _TIMER_ABSTIME, ctypes.addressof(once), None)


def _filter_system_calls(call: Any, program: bytes) -> None:
    """`program`: instructions of 8 bytes, as syscalls.py assembles them."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    described = Program(len(program) // 8, program)
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.addressof(described), 0, 0)


def _leave_the_machine(call: Any, mounts: dict[str, list[str]], pivot_root: int) -> None:
    """Into namespaces of its own: no network, no processes, no files but `show` without `hide`."""
    user, group = os.getuid(), os.getgid()
    call("unshare", _NEW_NAMESPACES)
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    descriptors = {path: os.open(path, os.O_PATH) for path in mounts["show"]}
    root = "/tmp" if os.path.isdir("/tmp") else "/var"
    read_only = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    call("mount", b"tmpfs", root.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"size=1m,mode=755")
    for path, descriptor in descriptors.items():
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        call("mount", f"/proc/self/fd/{descriptor}".encode(), target.encode(), None, _MS_BIND, None)
        flags = os.statvfs(target).f_flag & 0b1111
        call("mount", None, target.encode(), None, flags | read_only, None)
        os.close(descriptor)
    for path in mounts["hide"]:
        call("mount", b"tmpfs", (root + path).encode(), b"tmpfs", _MS_RDONLY, b"size=4k,mode=000")
    os.chdir(root)
    call("syscall", pivot_root, b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    call("mount", None, b"/", None, read_only, None)


def _go_on_in_a_child(call: Any, *, is_program: bool) -> float:
    """Leave this process to wait for its child, in which the caller goes on, and to end as it does.

    Gives the processor time used until then, which the child's clock does not have. A program's own codes
    become 0 or 1, so that none can say that it was killed.
    """
    cost = time.process_time()
    inside = os.fork()
    if inside:
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        was_killed = code == -_SIGKILL or (code == KILLED and not is_program)
        os._exit(KILLED if was_killed else int(code != 0))
    call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    return cost


def encoded(value: Any, depth: int = 0) -> str:
    """JSON of a value of exact built-in types: a subclass may say of itself what it likes.

    >>> encoded((True, 1, 0.5))
    '["tuple",[true,1,["float","0x1.0000000000000p-1"]]]'

    Raises TypeError for any other type, ValueError for a value in which others are nested too deeply.
    """
    kind = type(value)
    if depth > _MOST_DEPTH:
        raise ValueError(f"nested more than {_MOST_DEPTH} deep")
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value) if -(2**63) <= value < 2**63 else f'["int","{value:x}"]'
    if kind is str:
        return _quoted(value)
    if kind is float:
        return f'["float","{value.hex()}"]'
    if kind is complex:
        return f'["complex","{value.real.hex()}","{value.imag.hex()}"]'
    if kind is bytes:
        return f'["bytes","{value.hex()}"]'
    if kind is dict:
        pairs = [f"[{encoded(key, depth + 1)},{encoded(item, depth + 1)}]" for key, item in value.items()]
        return f'["dict",[{",".join(pairs)}]]'
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        items = [encoded(item, depth + 1) for item in value]
        return f'["{kind.__name__}",[{",".join(items)}]]'
    raise TypeError(f"{kind.__name__} is no built-in value")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def serve(job: Job) -> None:
    """Run the job, write what it reports for the parent, and end this process."""
    claims = job["claims"]
    if claims == 1:  # an executor elsewhere hands on stdout alone
        claims, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)

    def write(line: str) -> None:
        rest = f"{line}\n".encode("ascii")
        while rest:
            rest = rest[os.write(claims, rest) :]

    try:
        inputs = shut_the_door(job)
    except Exception as error:  # whatever it is, the program has not run
        write(f'["broken",{_quoted(_described(error))}]')
        os._exit(1)
    write('"ready"')
    try:
        vars(builtins).update(exit=sys.exit, quit=sys.exit)  # -S leaves them out
        if job["entry_point"] is None:
            _run_program(job["program"], inputs, write)
        else:
            _call_function(job["program"], job["entry_point"], job["arguments"], write)
    except BaseException as error:
        write(f'[-1,"raised",{_quoted(_described(error))}]')
    finally:
        os._exit(0)  # no atexit, no threads to wait for


def _new_module(name: str) -> dict[str, Any]:
    """The names of a new module; classes look their module up by its name."""
    module = type(sys)(name)
    sys.modules[name] = module
    return vars(module)


def _call_function(program: str, entry_point: str, arguments: list[tuple[object, ...]], write: Any) -> None:
    names = _new_module("submission")
    exec(compile(program, "<submission>", "exec"), names)
    function = names[entry_point]
    for case, case_arguments in enumerate(arguments):
        try:
            line = f'[{case},"value",{encoded(function(*case_arguments))}]'
        except BaseException as error:
            line = f'[{case},"raised",{_quoted(_described(error))}]'
        write(line)


def _run_program(program: str, inputs: list[int], write: Any) -> None:
    code = compile(program, "<submission>", "exec")
    for case, descriptor in enumerate(inputs):
        os.dup2(descriptor, 0)  # open(0) reads it, too
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # the program's
        printed = io.BytesIO()
        stdout = io.TextIOWrapper(printed, encoding="utf-8", errors="surrogatepass", write_through=True)
        sys.stdout = stdout
        try:
            exec(code, _new_module("__main__"))
        except SystemExit:
            pass
        except BaseException as error:
            write(f'[{case},"raised",{_quoted(_described(error))}]')
            continue
        stdout.flush()
        text = printed.getvalue().decode("utf-8", errors="surrogatepass")
        write(f'[{case},"value",{_quoted(text)}]')
