"""Runs a program, reads its outputs, and ends it with all it started, for `external_program`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from stateset_agents.runtime.user_code import guarded

_KEPT_BYTES = 64 * 1024
"""Of each output's end."""
_TERM_SECONDS = 5.0
"""From SIGTERM, which lets a program end what it started elsewhere, to SIGKILL."""
_DRAIN_SECONDS = 1.0
"""For an output that something outside the group still holds open."""


class ProgramProcess:
    """Made by `await ProgramProcess.start(...)`; leads a process group of its own, which ends with it."""

    def __init__(self, transport: asyncio.SubprocessTransport, outputs: _OutputProtocol) -> None:
        self._transport = transport
        self._outputs = outputs
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, stdin: bytes
    ) -> ProgramProcess:
        """Run it with `env` besides this process's own variables; `stdin` is all that it can read there.

        Raises EnvironmentFailure where it cannot be run.
        """
        made = asyncio.get_running_loop().subprocess_exec(
            _OutputProtocol, *command, env={**os.environ, **env}, cwd=cwd, start_new_session=True
        )
        transport, outputs = await guarded(f"running {command[0]}", made)
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(stdin)  # in the background: a program need not read it
        pipe.close()
        return cls(transport, outputs)

    async def ended(self) -> int:
        """Wait for its end: the exit code, or minus the signal that ended it."""
        return await asyncio.shield(self._ended)

    @property
    def is_running(self) -> bool:
        return not self._ended.done()

    def printed(self, fd: int = 1) -> str:
        """The end of what it wrote to its standard output (2: error output), without white space around."""
        return self._outputs.kept[fd].decode(errors="replace").strip()

    @property
    def last_error_line(self) -> str:
        """The last line of its error output, or that there is none."""
        lines = self.printed(2).splitlines()
        return f"{lines[-1]:.400}" if lines else "it wrote nothing to stderr"

    async def stop(self) -> None:
        """End it and all that it started, gently first; does nothing where it has ended."""
        if self.is_running:
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait([self._ended], timeout=_TERM_SECONDS)
            finally:
                if self.is_running:
                    self._signal(signal.SIGKILL)
        await asyncio.shield(self._ended)

    async def _wait(self) -> int:
        """The exit code, once nothing of the group is left and its outputs are read."""
        await self._outputs.exited.wait()
        self._signal(signal.SIGKILL)  # what it left running in the background
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._outputs.closed.wait(), _DRAIN_SECONDS)
        code = self._transport.get_returncode()
        self._transport.close()
        assert code is not None
        return code

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter where all are zombies
            os.killpg(self._transport.get_pid(), number)


class _OutputProtocol(asyncio.SubprocessProtocol):
    """The ends of both outputs. `asyncio.subprocess` would take a program for running as long as anything it
    started holds one of them open."""

    def __init__(self) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.kept[fd] += data
        del self.kept[fd][:-_KEPT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
