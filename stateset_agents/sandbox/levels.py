"""The walls that this machine has, from the strongest on, and the choice among them."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import get_args

from stateset_agents.sandbox.claims import Claims
from stateset_agents.sandbox.job import Job, Limits
from stateset_agents.sandbox.local import run_job
from stateset_agents.sandbox.syscalls import can_filter, this_architecture
from stateset_agents.sandbox.walls import Level, Walls, find_interpreter, landlock_version
from stateset_agents.types.errors import ConfigurationError, SandboxFailure

LEVELS: tuple[Level, ...] = ("landlock", "bubblewrap", "namespaces")
"""The levels in the order in which `auto` tries them."""
LEVEL_NAMES: Mapping[Level, str] = {level: level for level in LEVELS} | {"landlock": "Landlock"}
"""Names of the levels as people write them."""
CURE = (
    "use Linux 5.13 or newer with Landlock and seccomp, install bubblewrap, allow user namespaces, or name "
    'an executor: sandbox: "http://..."'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The levels of a machine; each level was tried by running a program behind it."""

    landlock: int
    """Version of its interface; 0: none."""
    lacks: Mapping[str, str]
    """Level -> why it does not work here."""

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(level for level in LEVELS if level not in self.lacks)


def what_is_there(python: str | None = None) -> Machine:
    """The levels that `auto` may take on this machine, tried now or earlier in this process."""
    tried = {level: _why_not_by_itself(level, python) for level in LEVELS}
    return Machine(
        landlock=landlock_version(),
        lacks={level: why for level, why in tried.items() if why is not None},
    )


def choose_walls(level: str, *, python: str | None = None) -> Walls:
    """The walls of a level; "auto": the first that works here.

    Raises ConfigurationError where that level does not work, or none does, with the cure.
    """
    for named in get_args(Level):
        if level == named:
            why = None if level == "unsafe" else _why_not(named, python)
            if why is not None:
                raise ConfigurationError(
                    f"the sandbox {level!r} does not work here ({why}): use sandbox: auto"
                )
            return _walls(named, python)
    if level != "auto":
        names = ", ".join(("auto", *get_args(Level)))
        raise ConfigurationError(
            f"sandbox must be one of {names}, or the address of an executor, got {level!r}"
        )
    lacks = {name: _why_not_by_itself(name, python) for name in LEVELS}
    for name, why in lacks.items():
        if why is None:
            return _walls(name, python)
    reasons = "; ".join(f"{name}: {why}" for name, why in lacks.items())
    raise ConfigurationError(f"this machine has no walls for programs ({reasons}): {CURE}")


def _why_not_by_itself(level: Level, python: str | None) -> str | None:
    """The reason why `auto` does not take this level; None where it may."""
    why = _why_not(level, python)
    if why is None and not can_filter():
        return (
            "the kernel has no seccomp filters, so a program may wait and make processes; "
            f"sandbox: {level} accepts that"
        )
    return why


def _walls(level: Level, python: str | None) -> Walls:
    return Walls(
        level=level,
        interpreter=find_interpreter(python),
        filters_calls=level != "unsafe" and can_filter(),
        bubblewrap=shutil.which("bwrap") or "bwrap",
    )


@cache
def _why_not(level: Level, python: str | None) -> str | None:
    """The part that is missing; None where a program ran behind these walls and could not reach beyond."""
    if this_architecture() is None:
        return f"the system calls of {sys.platform} on {platform.machine()} are not known here"
    if level == "landlock" and not landlock_version():
        return "the kernel has no Landlock"
    if level == "landlock" and not can_filter():
        return "the kernel has no seccomp filters"
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        claims = probe(_walls(level, python))
    except SandboxFailure as error:
        return str(error)
    if claims.agree(0, []):
        return None
    return f"a program reached {claims.claimed or claims.raised or claims.ending}"


_TRIAL = """
import os, socket
def reached(port):
    found = []
    for name in ("/etc/passwd", "/proc/1/stat"):
        try:
            found.append(os.read(os.open(name, os.O_RDONLY), 1) and name)
        except OSError:
            pass
    try:
        socket.create_connection(("127.0.0.1", port), 5)
        found.append("the network")
    except OSError:
        pass
    return found
"""


def probe(walls: Walls) -> Claims:
    """The things that a program behind these walls reaches of a file, another process and the network: a list
    of names.

    Raises SandboxFailure where the walls could not be put up.
    """
    # A namespace may have a loopback device of its own.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        trial = Job(program=_TRIAL, entry_point="reached", arguments=((port,),))
        return run_job(trial, limits=Limits(), walls=walls)
