"""The walls: what the filter of system calls decides, and which level is chosen on which machine."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stateset_agents.sandbox import Job, Limits, Sandbox, SandboxFailure, levels, what_is_there
from stateset_agents.sandbox.levels import LEVELS, choose_walls
from stateset_agents.sandbox.local import run_job
from stateset_agents.sandbox.syscalls import ARCHITECTURES, Architecture, assemble
from stateset_agents.sandbox.walls import find_interpreter, landlock_version, make_ruleset
from stateset_agents.types.errors import ConfigurationError

ALLOW, EPERM, KILL = "allow", "EPERM", "kill"


def verdict(architecture: Architecture, number: int, *arguments: int, audit: int | None = None) -> str:
    """What the kernel would answer: the program is run here."""
    given = (*arguments, 0, 0, 0)[:3]
    seen = struct.pack("=IIQQQQ", number, audit or architecture.audit, 0, *given)
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
    assert verdict(architecture, futex, 7, 1) == ALLOW
    assert verdict(architecture, futex, 7, 129) == ALLOW  # FUTEX_WAKE_PRIVATE
    assert verdict(architecture, futex, 7, 0) == EPERM  # FUTEX_WAIT
    assert verdict(architecture, futex, 7, 137) == EPERM  # FUTEX_WAIT_BITSET_PRIVATE
    assert verdict(architecture, ioctl, 7, 0x5401) == ALLOW
    assert verdict(architecture, ioctl, 7, 0x5412) == EPERM  # TIOCSTI
    assert verdict(architecture, fcntl, 7, 3) == ALLOW
    assert verdict(architecture, fcntl, 7, 4, 0x4000) == EPERM  # F_SETFL: O_DIRECT after the opening
    assert verdict(architecture, fcntl, 7, 8) == EPERM  # F_SETOWN
    assert verdict(architecture, architecture.checked["madvise"], 7, 7, 4) == ALLOW  # MADV_DONTNEED
    for advice in (3, 20, 21, 25):  # MADV_WILLNEED, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE
        assert verdict(architecture, architecture.checked["madvise"], 7, 7, advice) == EPERM
    assert verdict(architecture, 0, audit=0x40000003) == KILL  # of 32 bits
    if architecture.foreign_from is not None:
        assert verdict(architecture, architecture.foreign_from) == KILL


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda found: found.name)
def test_files_are_opened_for_reading_by_way_of_the_page_cache(architecture: Architecture) -> None:
    """With the numbers of <fcntl.h> on each architecture."""
    direct, directory, no_follow, large = {
        "x86-64": (0o40000, 0o200000, 0o400000, 0o100000),
        "arm64": (0o200000, 0o40000, 0o100000, 0o400000),
    }[architecture.name]
    common = 0o400 | 0o4000 | 0o1000000 | 0o2000000 | 0o10000000  # NOCTTY NONBLOCK NOATIME CLOEXEC PATH
    places = {"open": 1, "openat": 2}
    for name in places.keys() & architecture.checked.keys():
        for flags in (0, common, common | directory | no_follow | large):
            given = (7,) * places[name] + (flags,)
            assert verdict(architecture, architecture.checked[name], *given) == ALLOW, oct(flags)
        refused = {direct, 1, 2, 0o100, 0o1000, 0o2000, 0o10000, 0o20000, 0o4010000, 0o20000000}
        for flags in refused:  # O_DIRECT, WRONLY, RDWR, CREAT, TRUNC, APPEND, DSYNC, ASYNC, SYNC, TMPFILE
            given = (7,) * places[name] + (flags | 0o2000000,)
            assert verdict(architecture, architecture.checked[name], *given) == EPERM, oct(flags)


WAITING = """
accept accept4 clock_nanosleep connect copy_file_range creat epoll_pwait epoll_pwait2 epoll_wait eventfd2
fallocate fanotify_init fdatasync flock fsync futex_wait futex_waitv inotify_init1 io_getevents
io_pgetevents io_setup io_submit io_uring_enter io_uring_setup memfd_create migrate_pages mknod mknodat
mlock mlock2 mlockall move_pages mq_open mq_timedreceive mq_timedsend msgrcv msgsnd msync nanosleep
openat2 pause pipe pipe2 poll posix_fadvise fadvise64 ppoll preadv preadv2 process_madvise pselect6
pwrite64 pwritev2 readahead readv recvfrom recvmmsg recvmsg rt_sigsuspend rt_sigtimedwait
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield select semop semtimedop
sendfile sendmsg sendto setpriority signalfd4 socketpair splice sync sync_file_range syncfs tee
timerfd_create truncate ftruncate userfaultfd vfork vmsplice wait4 waitid
"""
"""What can wait without processor time, makes something to wait on, or gives its turn to others."""


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda found: found.name)
def test_what_waits_starts_or_reaches_out_is_not_listed(architecture: Architecture) -> None:
    listed = {**architecture.allowed, **architecture.checked}.keys()
    assert (
        listed & {*WAITING.split(), "clone", "clone3", "execve", "socket", "kill", "tgkill", "ptrace"}
        == set()
    )


WAITS = {
    "reads past the page cache": """
import os
try:
    file = os.open(os.__file__, os.O_RDONLY | os.O_DIRECT)
    while True: os.pread(file, 4096, 0)
except PermissionError: pass
""",
    "pages thrown out of the cache": """
import ctypes, os
libc, size = ctypes.CDLL(None), 1 << 14
libc.mmap.restype = ctypes.c_void_p
pages = libc.mmap(None, ctypes.c_size_t(size), 1, 2, os.open(os.__file__, os.O_RDONLY), ctypes.c_long(0))
while libc.madvise(ctypes.c_void_p(pages), ctypes.c_size_t(size), 21) == 0:  # MADV_PAGEOUT
    ctypes.string_at(pages, size)
""",
    "its own claims, read": """
import os
for number in range(3, 64):
    try: os.read(number, 1)
    except OSError: pass
    try: os.read(os.open(f"/proc/self/fd/{number}", os.O_RDONLY), 1)
    except OSError: pass
""",
    "its turn given away": """
import os
try:
    while True: os.sched_yield()
except PermissionError: pass
""",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_program_that_wants_to_wait_does_not(name: str) -> None:
    """In a second, where each of these could last the hour."""
    for level in what_is_there().levels:
        job = Job(program=WAITS[name] + "def f(): return 1", entry_point="f", arguments=((),))
        claims = run_job(job, limits=Limits(wall_seconds=3600), walls=choose_walls(level))
        assert (claims.ending, claims.agree(0, 1)) == ("finished", True), (level, claims)


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
    if landlock_version():
        os.close(make_ruleset(readable, version=landlock_version()))


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


def test_without_seccomp_auto_takes_nothing_and_a_name_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may take filters away."""
    monkeypatch.setattr(levels, "can_filter", lambda: False)
    levels._why_not.cache_clear()
    try:
        assert what_is_there().levels == ()
        with pytest.raises(
            ConfigurationError, match="may wait and make processes; sandbox: namespaces accepts that"
        ):
            Sandbox()
        for level in ("bubblewrap", "namespaces"):
            if levels._why_not(level, None) is None:
                walls = choose_walls(level)
                fork = "import os\ndef f(): return os.fork() > 0 or os._exit(0)"
                job = Job(program=fork, entry_point="f", arguments=((),))
                assert run_job(job, limits=Limits(), walls=walls).agree(0, True)
    finally:
        levels._why_not.cache_clear()


def test_this_machine_has_walls() -> None:
    machine = what_is_there()
    assert Sandbox().level == machine.levels[0]
    assert set(machine.levels) | set(machine.lacks) == set(LEVELS)


@pytest.mark.parametrize("filters_calls", [True, False], ids=["with seccomp", "without"])
def test_walls_that_reach_nothing_stand_at_every_level_of_this_machine(filters_calls: bool) -> None:
    for level in what_is_there().levels:
        if level == "landlock" and not filters_calls:  # Landlock alone knows no signals and no datagrams
            continue
        claims = levels.probe(replace(choose_walls(level), filters_calls=filters_calls))
        assert claims.agree(0, []), (level, claims)
    unsafe = levels.probe(choose_walls("unsafe"))  # so the trial can tell
    assert unsafe.agree(0, ["/etc/passwd", "/proc/1/stat", "the network"]) or os.geteuid()


def test_what_is_mounted_for_a_program_takes_no_file_and_no_folder() -> None:
    """It would be memory that no limit of the process bounds."""
    program = """
import os, sys
def linked(path): os.symlink("x" * 4000, path)
def written(path): open(path, "w")
def made(folders):
    found = []
    for folder in [*folders, *sys.path]:
        for make in (os.mkdir, os.mkfifo, linked, written):
            try:
                make(folder + "/made")
                found.append(folder)
            except OSError: pass
    return found
"""
    folders = ["", "/tmp", "/usr", "/lib", "/proc", "/dev/shm", *map(str, find_interpreter().hidden())]
    job = Job(program=program, entry_point="made", arguments=((folders,),))
    for level in what_is_there().levels:
        if level != "landlock":  # which mounts nothing
            walls = replace(choose_walls(level), filters_calls=False)
            claims = run_job(job, limits=Limits(), walls=walls)
            assert claims.agree(0, []), (level, claims)


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
    walls = replace(choose_walls("auto"), level="bubblewrap", bubblewrap="/bin/false")
    with pytest.raises(SandboxFailure, match=r"walls \(bubblewrap\) could not be put up"):
        run_job(Job(program="", stdin=("",)), limits=Limits(), walls=walls)
