"""`Sandbox`: run programs that nobody has read, many at once, and hear what they claim."""

from __future__ import annotations

import asyncio
import os

from stateset_agents.runtime.tasks import in_thread
from stateset_agents.sandbox.claims import Claims
from stateset_agents.sandbox.job import Job, Limits
from stateset_agents.sandbox.levels import choose_walls
from stateset_agents.sandbox.local import Watch, run_job
from stateset_agents.sandbox.remote import run_elsewhere
from stateset_agents.types.errors import ConfigurationError


class Sandbox:
    """Walls around programs.

        sandbox = Sandbox()
        claims = await sandbox.run(Job(program=text, entry_point="add", arguments=((1, 2),)))
        claims.agree(0, 3)

    `sandbox`: "auto", the strongest level of this machine; "landlock", "bubblewrap", "namespaces"; the
    address of an executor, "http://..."; or "unsafe", which keeps to the limits and nothing else. `python`:
    the interpreter that runs programs; None: this one, without its site-packages. Raises ConfigurationError
    where the level does not work here.
    """

    def __init__(
        self,
        sandbox: str = "auto",
        *,
        limits: Limits | None = None,
        max_concurrent: int | None = None,
        python: str | None = None,
    ) -> None:
        """`max_concurrent`: programs at once; None: one for each core that this process may use."""
        if max_concurrent is not None and (
            isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1
        ):
            raise ConfigurationError(
                f"max_concurrent must be a whole number of at least 1, or None, got {max_concurrent!r}"
            )
        self.limits = limits or Limits()
        self._url = sandbox if sandbox.startswith(("http://", "https://")) else None
        self._walls = None if self._url is not None else choose_walls(sandbox, python=python)
        self._max_concurrent = max_concurrent or _cores()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @property
    def level(self) -> str:
        """Where programs run: a level's name, or the executor's address."""
        return self._url or (self._walls.level if self._walls is not None else "")

    @property
    def local(self) -> bool:
        """Do programs run on this machine?"""
        return self._url is None

    async def run(self, job: Job) -> Claims:
        """What the program claims; it waits for one of `max_concurrent` places.

        Raises SandboxFailure where the sandbox or the machine failed, and nothing is known of the program. A
        cancelled call ends the program.
        """
        async with self._slot():
            if self._walls is None:
                return await run_elsewhere(self.level, job, limits=self.limits)
            watch = Watch()
            try:
                return await in_thread(run_job, job, limits=self.limits, walls=self._walls, watch=watch)
            except asyncio.CancelledError:
                watch.end()
                raise

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()  # a semaphore per loop: a sandbox may outlive its first one
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._max_concurrent))
        return self._slots[1]


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
