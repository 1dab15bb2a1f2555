"""The walls: what the filter of system calls decides, and which level is chosen on which machine."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateset_agents.sandbox import Job, Limits, Sandbox, SandboxFailure, landlock, levels, what_is_there
from stateset_agents.sandbox.interpreter import find_interpreter
from stateset_agents.sandbox.levels import LEVELS, choose_walls
from stateset_agents.sandbox.local import run_job
from stateset_agents.sandbox.seccomp import assemble
from stateset_agents.sandbox.syscalls import ARCHITECTURES, Architecture
from stateset_agents.types.errors import ConfigurationError

ALLOW, EPERM, KILL = "allow", "EPERM", "kill"


def verdict(architecture: Architecture, number: int, argument: int = 0, *, audit: int | None = None) -> str:
    """What the kernel would answer: the program is run here."""
    seen = struct.pack("=IIQQQ", number, audit or architecture.audit, 0, 0, argument)
    steps = list(struct.iter_unpack("=HBBI", assemble(architecture)))
    value, place = 0, 0
    while True:
        code, if_true, if_false, k = steps[place]
        place += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", seen, k)
        elif code == 0x54:
            value &= k
        elif code in (0x15, 0x35):
            place += if_true if (value == k if code == 0x15 else value >= k) else if_false
        else:
            return {0x7FFF0000: ALLOW, 0x00050001: EPERM, 0x80000000: KILL}[k]


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda found: found.name)
def test_the_filter_allows_what_is_listed_and_nothing_else(architecture: Architecture) -> None:
    listed = set(architecture.allowed.values())
    checked = set(architecture.checked.values())
    for number in range(600):
        if number not in checked:
            assert verdict(architecture, number) == (ALLOW if number in listed else EPERM), number


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda found: found.name)
def test_the_filter_looks_at_arguments_and_at_the_numbering(architecture: Architecture) -> None:
    futex, ioctl, fcntl = (architecture.checked[name] for name in ("futex", "ioctl", "fcntl"))
    assert verdict(architecture, futex, 1) == ALLOW
    assert verdict(architecture, futex, 129) == ALLOW  # FUTEX_WAKE_PRIVATE
    assert verdict(architecture, futex, 0) == EPERM  # FUTEX_WAIT
    assert verdict(architecture, futex, 137) == EPERM  # FUTEX_WAIT_BITSET_PRIVATE
    assert verdict(architecture, ioctl, 0x5401) == ALLOW
    assert verdict(architecture, ioctl, 0x5412) == EPERM  # TIOCSTI
    assert verdict(architecture, fcntl, 3) == ALLOW
    assert verdict(architecture, fcntl, 8) == EPERM  # F_SETOWN
    assert verdict(architecture, 0, audit=0x40000003) == KILL  # of 32 bits
    if architecture.foreign_from is not None:
        assert verdict(architecture, architecture.foreign_from) == KILL


@pytest.mark.parametrize(
    "name", ["clock_nanosleep", "nanosleep", "clone", "execve", "socket", "kill", "ptrace"]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda found: found.name)
def test_what_waits_starts_or_reaches_out_is_not_listed(architecture: Architecture, name: str) -> None:
    assert name not in {**architecture.allowed, **architecture.checked}


def _numbers_by_the_headers() -> Iterator[tuple[str, dict[str, int]]]:
    """Of the kernel's headers that this machine has."""
    for machine, header in (
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
        ("x86_64", "asm/unistd_64.h"),
        ("aarch64", "asm-generic/unistd.h"),
    ):
        path = Path("/usr/include") / header
        if path.exists():
            found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
            numbers = {name: int(number) for name, number in found}
            numbers.setdefault("newfstatat", numbers.get("fstatat", -1))
            yield machine, numbers


def test_the_numbers_are_those_of_the_kernel_s_headers() -> None:
    """Two of each, which everybody knows, where a machine has no headers."""
    assert ARCHITECTURES["x86_64"].allowed["exit_group"] == 231
    assert ARCHITECTURES["aarch64"].allowed["exit_group"] == 94
    for machine, numbers in _numbers_by_the_headers():
        ours = ARCHITECTURES[machine]
        own = {"capset": ours.capset, "pivot_root": ours.pivot_root, "seccomp": ours.seccomp}
        for name, number in {**ours.allowed, **ours.checked, **own}.items():
            assert numbers[name] == number, (machine, name)


def test_the_ruleset_names_the_standard_library_alone() -> None:
    interpreter = find_interpreter()
    readable = set(interpreter.readable())
    library = next(path for path in interpreter.library if path.is_dir())
    assert library / "collections" in readable
    assert library / "heapq.py" in readable
    for name in ("site-packages", "dist-packages", "test"):
        assert library / name not in readable
    assert not any(path.is_symlink() for path in readable)
    if landlock.abi():
        os.close(landlock.make_ruleset(readable, version=landlock.abi()))


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        (("landlock",), ("bubblewrap", "namespaces")),
        (("landlock", "bubblewrap"), ("namespaces",)),
    ],
)
def test_auto_takes_the_next_level(
    missing: tuple[str, ...], left: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_why_not", lambda level, python: "gone" if level in missing else None)
    assert choose_walls("auto").level == left[0]
    assert what_is_there().levels == left


def test_a_machine_without_walls_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_why_not", lambda level, python: "gone")
    with pytest.raises(ConfigurationError, match=r"landlock: gone; .*install bubblewrap.*http://"):
        Sandbox()
    with pytest.raises(ConfigurationError, match=r"'namespaces' does not work here \(gone\)"):
        Sandbox("namespaces")
    assert Sandbox("unsafe").level == "unsafe"


def test_this_machine_has_walls() -> None:
    machine = what_is_there()
    assert Sandbox().level == machine.levels[0]
    assert set(machine.levels) | set(machine.lacks) == set(LEVELS)


@pytest.mark.parametrize("filters_calls", [True, False], ids=["with seccomp", "without"])
def test_walls_that_reach_nothing_stand_at_every_level_of_this_machine(filters_calls: bool) -> None:
    from dataclasses import replace

    trial = levels.TRIAL
    for level in what_is_there().levels:
        if level == "landlock" and not filters_calls:  # Landlock alone knows no signals and no datagrams
            continue
        walls = replace(choose_walls(level), filters_calls=filters_calls)
        claims = run_job(trial, limits=Limits(), walls=walls)
        assert claims.agree(0, []), (level, claims)
    unsafe = run_job(trial, limits=Limits(), walls=choose_walls("unsafe"))
    assert "/etc/passwd" in str(unsafe.claimed)  # so the trial can tell


def test_without_a_filter_a_program_that_sleeps_has_failed_and_behind_one_it_cannot() -> None:
    job = Job(program="import time\ndef f(): time.sleep(60)", entry_point="f", arguments=((),))
    limits = Limits(cpu_seconds=5, wall_seconds=1)
    assert run_job(job, limits=limits, walls=choose_walls("unsafe")).ending == "wall limit"
    assert "PermissionError" in run_job(job, limits=Limits(), walls=choose_walls("auto")).raised[0]


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot start /nowhere/python"):
        Sandbox(python="/nowhere/python")
    with pytest.raises(ConfigurationError, match="cannot use"):
        Sandbox(python="/bin/false")


def test_walls_that_cannot_be_put_up_leave_a_program_unscored() -> None:
    from dataclasses import replace

    walls = replace(choose_walls("auto"), level="bubblewrap", bubblewrap="/bin/false")
    with pytest.raises(SandboxFailure, match=r"walls \(bubblewrap\) could not be put up"):
        run_job(Job(program="", stdin=("",)), limits=Limits(), walls=walls)
