"""What stands around a program at each level: how its process is started and what its child closes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from stateset_agents.sandbox import landlock
from stateset_agents.sandbox.interpreter import Interpreter
from stateset_agents.sandbox.seccomp import assemble
from stateset_agents.sandbox.syscalls import this_architecture

Level = Literal["landlock", "bubblewrap", "namespaces", "unsafe"]
_START = (
    "import marshal,sys;f=sys.stdin.buffer;n={'__name__':'child'};exec(marshal.load(f),n);"
    "n['serve'](marshal.load(f))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """One level, as it is put up for each program; resource limits stand at every level."""

    level: Level
    interpreter: Interpreter
    filters_calls: bool = True
    """By seccomp; where not, a program may wait and make processes."""
    bubblewrap: str = "bwrap"

    @property
    def has_namespace(self) -> bool:
        """Is the program in a process namespace, where a process of ours waits for it?"""
        return self.level in ("bubblewrap", "namespaces")

    @property
    def may_wait(self) -> bool:
        """Can a program sleep, and send signals to itself?"""
        return not self.filters_calls

    def command(self) -> list[str]:
        """What starts the child, which then reads its code and its job from stdin."""
        start = [self.interpreter.path, "-I", "-S", "-c", _START]
        return (
            [*_bubblewrap(self.bubblewrap, self.interpreter), *start] if self.level == "bubblewrap" else start
        )

    def request(self) -> dict[str, Any]:
        """What the child is to close; `ruleset` is a file descriptor of ours that it must inherit, or -1."""
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
    return landlock.make_ruleset(interpreter.readable(), version=landlock.abi())


@cache
def _filter() -> bytes:
    architecture = this_architecture()
    return b"" if architecture is None else assemble(architecture)


def _bubblewrap(program: str, interpreter: Interpreter) -> Iterator[str]:
    """Its arguments: nothing but the interpreter, what it loads and its library, all to read only."""
    yield from (
        program,
        "--unshare-all",
        "--as-pid-1",  # its own first process would not tell the program's account
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--clearenv",
        "--chdir",
        "/",
    )
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
