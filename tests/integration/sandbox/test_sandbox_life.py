"""Programs begin, are bounded, end and are reaped: many at once, cancelled ones, and a thousand in a row."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from attack_run import children

from stateset_agents.runtime.tasks import in_thread
from stateset_agents.sandbox import Job, Limits, Sandbox, SandboxFailure, what_is_there
from stateset_agents.sandbox.levels import choose_walls
from stateset_agents.sandbox.local import Watch, run_job
from stateset_agents.sandbox.walls import Level
from stateset_agents.types.errors import ConfigurationError

ADD = Job(program="def add(a, b): return a + b", entry_point="add", arguments=((1, 2),))
LOOP = Job(program="while True: pass", stdin=("",))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


async def test_many_at_once_and_nothing_is_left() -> None:
    sandbox = Sandbox(max_concurrent=8)
    await sandbox.run(ADD)
    before = open_files(), set(children())
    every = await asyncio.gather(*(sandbox.run(ADD) for _ in range(40)))
    assert all(claims.agree(0, 3) for claims in every)
    assert (open_files(), set(children())) == before


@pytest.mark.parametrize("most", [1, 3])
async def test_at_most_so_many_run_at_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    running, seen, lock = set[int](), list[int](), threading.Lock()
    start, reap = Watch.start, Watch.reap

    def counted_start(watch: Watch, *arguments: object, **settings: object) -> int:
        with lock:
            running.add(id(watch))
            seen.append(len(running))
        return start(watch, *arguments, **settings)  # type: ignore[arg-type]  # as it was called

    def counted_reap(watch: Watch) -> tuple[int, float]:
        found = reap(watch)
        with lock:
            running.discard(id(watch))
        return found

    monkeypatch.setattr(Watch, "start", counted_start)
    monkeypatch.setattr(Watch, "reap", counted_reap)
    sandbox = Sandbox(max_concurrent=most)
    await asyncio.gather(*(sandbox.run(ADD) for _ in range(12)))
    assert max(seen) == most


async def test_a_cancelled_call_ends_its_program() -> None:
    sandbox = Sandbox(limits=Limits(cpu_seconds=600, wall_seconds=600), max_concurrent=4)
    before = set(children())
    calls = [asyncio.create_task(sandbox.run(LOOP)) for _ in range(6)]  # two of them wait for a place
    await in_thread(wait_until, lambda: len(set(children()) - before) >= 4)
    for call in calls:
        call.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError)
        for end in await asyncio.gather(*calls, return_exceptions=True)
    )
    await in_thread(wait_until, lambda: set(children()) <= before)
    assert (await sandbox.run(ADD)).agree(0, 3)


@pytest.mark.parametrize("level", what_is_there().levels)
def test_a_program_that_something_else_kills_is_unscored(level: Level) -> None:
    watch, failures = Watch(), list[Exception]()

    def run() -> None:
        try:
            run_job(LOOP, limits=Limits(cpu_seconds=600), walls=choose_walls(level), watch=watch)
        except SandboxFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    program: list[int] = []
    wait_until(lambda: bool(watch._pid))  # 0 before it is started: the ancestor of all processes
    wait_until(lambda: bool(program.extend(looping(watch._pid)) or program))
    os.kill(program[0], signal.SIGKILL)
    thread.join()
    assert "killed from outside" in str(failures[0])


def looping(process: int) -> list[int]:
    """The youngest descendant, where it has used a second, as no start does: the program, which loops."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int((entry / "stat").read_text().rpartition(")")[2].split()[1])] = int(entry.name)
    while process in parents:
        process = parents[process]
    try:
        used = time.clock_gettime(~process << 3 | 2) if process else 0.0  # CPUCLOCK_SCHED of it
    except OSError:
        return []
    return [process] if used > 1 else []


@pytest.mark.parametrize("level", what_is_there().levels)
@pytest.mark.parametrize("code", [1, 137])
def test_a_program_that_says_it_was_killed_has_ended_early(level: Level, code: int) -> None:
    """137 is how a shell tells SIGKILL."""
    job = Job(program=f"import os\ndef f(): os._exit({code})", entry_point="f", arguments=((),))
    claims = run_job(job, limits=Limits(), walls=choose_walls(level))
    assert (claims.ending, claims.claimed) == ("ended early", {})


@pytest.mark.parametrize("level", what_is_there().levels)
def test_every_level_tells_the_processor_time_of_the_program(level: Level) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    claims = run_job(Job(program=spin, stdin=("",)), limits=Limits(), walls=choose_walls(level))
    assert 0.3 <= claims.cpu_seconds < 0.5


def test_claims_before_the_limit_count() -> None:
    job = Job(
        program="def f(n):\n    while n > 1: pass\n    return n",
        entry_point="f",
        arguments=((0,), (1,), (2,), (0,)),
    )
    claims = run_job(job, limits=Limits(cpu_seconds=1, wall_seconds=300), walls=choose_walls("auto"))
    assert (claims.ending, sorted(claims.claimed)) == ("cpu limit", [0, 1])
    assert 1 <= claims.cpu_seconds < 1.2


def test_a_sandbox_serves_one_loop_after_another() -> None:
    sandbox = Sandbox(max_concurrent=1)
    for _ in range(2):
        assert asyncio.run(sandbox.run(ADD)).agree(0, 3)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"program": ""}, "give stdin"),
        ({"program": "", "entry_point": "f"}, "give arguments"),
        ({"program": "", "entry_point": "f", "stdin": ("",), "arguments": ((),)}, "give arguments"),
        ({"program": "", "entry_point": "f", "arguments": ((object(),),)}, "got object"),
        ({"program": "", "entry_point": "f", "arguments": ((threading,),)}, "got module"),
    ],
)
def test_a_job_that_is_none_is_refused(job: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Job(**job)  # type: ignore[arg-type]  # that is the point


@pytest.mark.long
async def test_a_thousand_submissions_leave_no_zombie_and_no_open_file() -> None:
    sandbox = Sandbox()
    await sandbox.run(ADD)
    before = open_files(), set(children())
    for _ in range(50):
        every = await asyncio.gather(*(sandbox.run(ADD) for _ in range(20)))
        assert all(claims.agree(0, 3) for claims in every)
        assert (open_files(), set(children())) == before
