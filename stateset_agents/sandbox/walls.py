"""The walls around a program at each level: how its process is started and what its child closes."""

from __future__ import annotations

import ctypes
import marshal
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from stateset_agents.sandbox.syscalls import assemble, this_architecture
from stateset_agents.types.errors import ConfigurationError, SandboxFailure

# --- Landlock: what a process may do with files (https://docs.kernel.org/userspace-api/landlock.html)
#
# The grader makes one ruleset for all programs, and each child puts itself under it. Neither needs a right
# to.

_CREATE_RULESET, _ADD_RULE = 444, 445  # on every architecture
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Version of Landlock -> the number of rights of files that are known from it on."""
_NETWORK_FROM, _NETWORK = 4, 0b11  # to bind and to connect TCP
_SCOPES_FROM, _SCOPES = 6, 0b11  # abstract unix sockets, signals


def landlock_version() -> int:
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
    size = 24 if version >= _SCOPES_FROM else 16 if version >= _NETWORK_FROM else 8
    ruleset = int(libc.syscall(_CREATE_RULESET, attributes, size, 0))
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


# --- the Python that runs programs, its standard library, and our child, compiled by it

CHILD = Path(__file__).with_name("child.py")
"""The source of what runs beside a program."""
_LOOK = """
import ctypes, marshal, resource, sys
code = marshal.dumps(compile(sys.stdin.buffer.read(), "child.py", "exec"), 4)
with open("/proc/self/maps") as file:
    mapped = sorted({line.split(None, 5)[5].strip() for line in file if ".so" in line})
sys.stdout.buffer.write(marshal.dumps((sys.path, mapped, code), 4))
"""
_NOT_LIBRARY = {
    *("site-packages", "dist-packages", "ensurepip", "idlelib"),
    *("lib2to3", "pydoc_data", "test", "turtledemo"),
}
"""Entries of the standard library's folder that are packages of others, or of no use to a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python without site-packages, as the child is started."""

    path: str
    library: tuple[Path, ...]
    """sys.path of `python -I -S`, as far as it exists."""
    mapped: tuple[str, ...]
    """Shared objects that it has loaded when the door is shut."""
    child: bytes
    """child.py, compiled by it, for marshal."""

    def readable(self) -> Iterator[Path]:
        """Files and folders of the standard library, without what others have installed in it.

        Links are left out: what they lead to may lie anywhere.
        """
        for folder in self.library:
            if not folder.is_dir():
                yield folder
                continue
            for entry in sorted(folder.iterdir()):
                if not entry.is_symlink() and entry.name not in _NOT_LIBRARY and _may_read(entry):
                    yield entry

    def hidden(self) -> Iterator[Path]:
        """Folders that lie in the library and are not of it."""
        for folder in self.library:
            yield from (folder / name for name in sorted(_NOT_LIBRARY) if (folder / name).is_dir())


def _may_read(path: Path) -> bool:
    return (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)


@cache
def find_interpreter(python: str | None = None) -> Interpreter:
    """The facts that this Python says of itself; None: the one that runs us, outside of its virtual
    environment.

    Raises ConfigurationError where it cannot be started.
    """
    path = os.path.realpath(python or getattr(sys, "_base_executable", None) or sys.executable)
    try:
        run = subprocess.run(
            [path, "-I", "-S", "-c", _LOOK],
            input=CHILD.read_bytes(),
            capture_output=True,
            env={},
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the sandbox cannot start {path}: {error}; give another python") from error
    if run.returncode:
        why = run.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {run.returncode}"]
        raise ConfigurationError(f"the sandbox cannot use {path}: {why[0]}; give a Python from 3.9 on")
    paths, mapped, child = marshal.loads(run.stdout)
    return Interpreter(
        path=path,
        library=tuple(Path(entry) for entry in paths if os.path.exists(entry)),
        mapped=tuple(mapped),
        child=child,
    )


Level = Literal["landlock", "bubblewrap", "namespaces", "unsafe"]
_START = (
    "import marshal,sys;f=sys.stdin.buffer;n={'__name__':'child'};exec(marshal.load(f),n);"
    "n['serve'](marshal.load(f))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """A level, as it is put up for each program; resource limits stand at every level."""

    level: Level
    interpreter: Interpreter
    filters_calls: bool = True
    """True if seccomp filters system calls; else a program may sleep, make processes and send signals to
    itself."""
    bubblewrap: str = "bwrap"

    @property
    def has_namespace(self) -> bool:
        """True if the program is in a process namespace, where a process of ours waits for it."""
        return self.level in ("bubblewrap", "namespaces")

    def command(self) -> list[str]:
        """The command that starts the child, which then reads its code and its job from stdin."""
        start = [self.interpreter.path, "-I", "-S", "-c", _START]
        return (
            [*_bubblewrap(self.bubblewrap, self.interpreter), *start] if self.level == "bubblewrap" else start
        )

    def request(self) -> dict[str, Any]:
        """The child's part of the walls; `ruleset` is a file descriptor of ours that it must inherit, or
        -1."""
        architecture = this_architecture()
        is_closed = self.level != "unsafe" and architecture is not None
        mounts = {
            "show": [str(folder) for folder in self.interpreter.library],
            "hide": [str(folder) for folder in self.interpreter.hidden()],
        }
        return {
            "parent": None if self.level == "bubblewrap" else os.getpid(),
            "is_first": self.has_namespace,
            "mounts": mounts if self.level == "namespaces" else None,
            "pivot_root": 0 if architecture is None else architecture.pivot_root,
            "capset": architecture.capset if architecture is not None and is_closed else 0,
            "ruleset": _ruleset(self.interpreter) if self.level == "landlock" else -1,
            "filter": _filter() if is_closed and self.filters_calls else b"",
        }


@cache
def _ruleset(interpreter: Interpreter) -> int:
    """Open for as long as this process lives: one for all its programs."""
    return make_ruleset(interpreter.readable(), version=landlock_version())


@cache
def _filter() -> bytes:
    architecture = this_architecture()
    return b"" if architecture is None else assemble(architecture)


def _bubblewrap(program: str, interpreter: Interpreter) -> Iterator[str]:
    """bubblewrap's command line: nothing but the interpreter, what it loads and its library, all to read
    only."""
    yield program
    # --as-pid-1, since bubblewrap's own first process would not tell the program's account
    yield from ("--unshare-all", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL")
    yield from ("--clearenv", "--chdir", "/")
    folders = {os.path.dirname(path) for path in interpreter.mapped}
    for top in ("/lib", "/lib64"):
        if os.path.islink(top):
            yield from ("--symlink", os.readlink(top), top)
            folders.add(os.path.realpath(top)) if top == "/lib64" else None
    for path in sorted({*folders, *map(str, interpreter.library), interpreter.path}):
        yield from ("--ro-bind", path, path)
    for folder in map(str, interpreter.hidden()):
        yield from ("--tmpfs", folder, "--remount-ro", folder)
    yield from ("--remount-ro", "/")  # it is in memory, too, and no limit of a process bounds it
