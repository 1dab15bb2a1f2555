"""Runs one program in a process of this machine: started, watched, ended and reaped, in the caller's thread.

It consumes a job, waits for the child's claims, its end or a limit, and produces `Claims`; `Watch.end` of
another thread unblocks it. The thread stays for as long as the child lives, since the kernel ends a child
with the thread that started it.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.sandbox.child import KILLED
from stateset_agents.sandbox.claims import READY, Claims, Ending, read_claims, why_broken
from stateset_agents.sandbox.job import Job, Limits
from stateset_agents.sandbox.walls import Walls
from stateset_agents.types.errors import SandboxFailure

_CHUNK = 1 << 16


@dataclass(slots=True)
class Watch:
    """A child from its start to its reaping, for whoever no longer waits for it."""

    _pid: int = 0
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Kill the child and its group; one that has not started does not start."""
        with self._lock:
            self._is_over = True
            if self._pid:
                os.killpg(self._pid, signal.SIGKILL)

    def start(self, command: list[str], **settings: Any) -> int:
        """The child's process id. Raises SandboxFailure where nobody waits any more, or none could start."""
        with self._lock:
            if self._is_over:
                raise SandboxFailure("nobody waits for this program any more")
            try:
                process = subprocess.Popen(command, start_new_session=True, **settings)
            except OSError as error:
                raise SandboxFailure(f"no process could be started: {error}") from error
            process.returncode = 0  # we reap it ourselves, for its account
            self._pid = process.pid
            return process.pid

    def reap(self) -> tuple[int, float]:
        """Kill the process's group and wait; its exit status and processor seconds."""
        with self._lock:
            pid, self._pid = self._pid, 0
            os.killpg(pid, signal.SIGKILL)  # its name is ours until it is reaped
        try:
            _, status, usage = os.wait4(pid, 0)
        except ChildProcessError as error:
            raise SandboxFailure(
                "this program's children are reaped by others: set SIGCHLD to its default"
            ) from error
        return status, usage.ru_utime + usage.ru_stime


@dataclass(frozen=True, slots=True)
class _Run:
    """The output of a child, and its end."""

    written: bytes
    status: int
    cpu_seconds: float
    limit: Ending | None
    """The limit by which we ended it."""

    def used_up(self, limits: Limits) -> bool:
        """True if the program used its whole processor time. This is the clock of the timer that ends it,
        which goes off a little later."""
        return self.cpu_seconds >= limits.cpu_seconds


def run_job(job: Job, *, limits: Limits, walls: Walls, watch: Watch | None = None) -> Claims:
    """The program's claims. Raises SandboxFailure where the sandbox or the machine failed."""
    run = _watched(job, limits, walls, watch or Watch())
    has_begun = run.written.startswith(READY)
    if run.limit == "wall limit" and not (has_begun and (run.used_up(limits) or not walls.filters_calls)):
        raise SandboxFailure(
            f"the machine was too busy: {run.cpu_seconds:.2f} s of processor time in "
            f"{limits.wall_seconds:g} s; lower max_concurrent or raise wall_seconds"
        )
    if not has_begun:
        why = why_broken(run.written.partition(b"\n")[0]) or f"status {run.status}"
        raise SandboxFailure(f"the sandbox's walls ({walls.level}) could not be put up: {why}")
    ending = _ending(run, limits, walls)
    lines = run.written.removeprefix(READY)
    if ending != "finished":
        lines = lines[: lines.rfind(b"\n") + 1]  # it may have been cut in a line
    claims = None if ending == "output limit" else read_claims(lines, num_cases=job.num_cases)
    claimed, raised = claims or ({}, {})
    return Claims(
        claimed=claimed,
        raised=raised,
        ending="malformed" if claims is None and ending == "finished" else ending,
        level=walls.level,
        cpu_seconds=run.cpu_seconds,
    )


def _ending(run: _Run, limits: Limits, walls: Walls) -> Ending:
    if run.limit is None and run.status == 0:
        return "finished"
    if run.used_up(limits):
        return "cpu limit"
    if run.limit is not None:
        return run.limit
    code = os.waitstatus_to_exitcode(run.status)
    was_killed = code == -signal.SIGKILL or (walls.has_namespace and code == KILLED)
    if was_killed and walls.filters_calls:  # behind the filter a program cannot kill itself
        raise SandboxFailure("the program was killed from outside: is the machine out of memory?")
    return "ended early"


def _watched(job: Job, limits: Limits, walls: Walls, watch: Watch) -> _Run:
    with ExitStack() as open_files:
        # A pipe could be opened a second time by /proc/self/fd, to read from it, which waits for ever.
        reading, writing = (open_files.enter_context(end) for end in socket.socketpair())
        reading.setblocking(False)
        reading.shutdown(socket.SHUT_WR)
        with ExitStack() as of_the_child:
            of_the_child.callback(writing.close)
            request = {
                **job.request(),
                **walls.request(),
                "claims": writing.fileno(),
                "limits": limits.of_process(),
                "cpu_seconds": limits.cpu_seconds,
            }
            stdin = os.memfd_create("job")
            of_the_child.callback(os.close, stdin)
            with open(stdin, "wb", closefd=False) as file:
                file.write(walls.interpreter.child)
                marshal.dump(request, file, 4)
            os.lseek(stdin, 0, os.SEEK_SET)
            ruleset = request["ruleset"]
            pid = watch.start(
                walls.command(),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                pass_fds=[descriptor for descriptor in (writing.fileno(), ruleset) if descriptor >= 0],
            )
        output, limit = b"", None
        try:
            output, limit = _read(reading.fileno(), pid, limits)
        finally:
            status, cpu_seconds = watch.reap()
        if limit is None:
            output += _rest(reading.fileno(), limits.output_bytes - len(output))
            limit = "output limit" if len(output) > limits.output_bytes else None
        return _Run(output, status, cpu_seconds, limit)


def _read(reading: int, pid: int, limits: Limits) -> tuple[bytes, Ending | None]:
    """The child's output until it ends, and the limit that ends it, if any."""
    chunks: list[bytes] = []
    size, until = 0, time.monotonic() + limits.wall_seconds
    process = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        waiting.register(reading, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return b"".join(chunks), "wall limit"
            ready = dict(waiting.poll(left * 1000))
            if reading in ready:
                chunk = os.read(reading, _CHUNK)
                chunks.append(chunk)
                size += len(chunk)
                if size > limits.output_bytes:
                    return b"".join(chunks), "output limit"
                if not chunk:  # closed; the process may go on
                    waiting.unregister(reading)
            elif process in ready:
                return b"".join(chunks), None
    finally:
        os.close(process)


def _rest(reading: int, limit: int) -> bytes:
    """The output between the last look and the end, at least up to one byte beyond `limit`: a process that
    left the child's group may go on writing."""
    rest = b""
    with suppress(BlockingIOError):
        while len(rest) <= limit and (chunk := os.read(reading, _CHUNK)):
            rest += chunk
    return rest
