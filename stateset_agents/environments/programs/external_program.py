"""An agent program of your own, trained as it is: it talks to an official client, and we answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stateset_agents.environments.programs.program_environment import (
    API_KEY,
    FAILED,
    ProgramEnvironment,
    read_verdict,
)
from stateset_agents.runtime.user_code import guarded
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

# The program's process

_KEPT_BYTES = 64 * 1024
"""Bytes kept of each output's end."""
_TERM_SECONDS = 5.0
"""Seconds from SIGTERM, which lets a program end what it started elsewhere, to SIGKILL."""
_DRAIN_SECONDS = 1.0
"""Seconds to wait for an output that something outside the group still holds open."""


class ProgramProcess:
    """Made by `await ProgramProcess.start(...)`; leads a process group of its own, which ends with it."""

    def __init__(self, transport: asyncio.SubprocessTransport, outputs: _OutputProtocol) -> None:
        self._transport = transport
        self._outputs = outputs
        self._ended = asyncio.create_task(self._wait())
        self.verdict: Literal["stdout"] | Mapping[int, bool] | None = None
        """Where its verdict is; see `ExternalProgram`."""

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, stdin: bytes
    ) -> ProgramProcess:
        """Run it with `env` besides this process's own variables; `stdin` is all that it can read there.

        Raises EnvironmentFailure where it cannot be run.
        """
        starting = asyncio.get_running_loop().subprocess_exec(
            _OutputProtocol, *command, env={**os.environ, **env}, cwd=cwd, start_new_session=True
        )
        transport, outputs = await guarded(f"running {command[0]}", starting)
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

    def ending(self) -> tuple[str, str]:
        code = self._ended.result()
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        lines = self.printed(2).splitlines()
        return f"the program {how}", f"{lines[-1]:.400}" if lines else "it wrote nothing to stderr"

    def outcome(self, *, is_cut: bool) -> Outcome:
        code, verdict, printed = self._ended.result(), self.verdict, self.printed()
        if code not in (verdict if isinstance(verdict, Mapping) else (0,)):
            if is_cut:
                return FAILED
            raise EnvironmentFailure(": ".join(self.ending()))
        if verdict == "stdout":
            return FAILED if is_cut and not printed else _printed(printed)
        if verdict is None:
            return Outcome(reward=None, metadata={"stdout": printed[-2000:]})
        return Outcome(reward=float(verdict[code]), success=verdict[code])

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


class ExternalProgram(ProgramEnvironment):
    """Runs your program once for every conversation; its requests are the conversation.

        ExternalProgram(["python", "agent.py"], "tasks.jsonl", verdict="stdout")

    The program is a process of its own. It finds the endpoint in `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`,
    where `openai.OpenAI()` and `anthropic.Anthropic()` look for it, and on its standard input one line of
    JSON: `id`, `family`, `opening` and `context` of the scenario, and `seed`, which all conversations of a
    group share. Its requests, and the replies to them, are the conversation (see `rollout_endpoint.py`), and
    its end is the conversation's.

    A program that exits with another code than expected has broken: its conversation fails, and is neither
    scored nor trained on. One whose conversation is cut, by `max_turns` or because the context is full, is
    told so by an error of status 400 (`code` "max_turns" or "context_length_exceeded") and may still give its
    verdict; one that does not has failed its task, for what the agent causes is scored.
    """

    def __init__(
        self,
        command: Sequence[str],
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
        *,
        verdict: Literal["stdout"] | Mapping[int, bool] | None = None,
        max_turns: int = 20,
        ignore: Sequence[str] = (),
        untrained: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        local: bool = False,
    ) -> None:
        """
        Args:
            command: The program and its arguments.
            scenarios: Scenarios as `ConversationEnvironment` takes them.
            verdict: Source of the verdict. "stdout": the program's last line, a JSON object with `reward`
                (a number), `success` (true or false) and `metadata`, each of which may be absent. Exit codes
                with their success, such as {0: True, 3: False}: a success earns 1, a failure 0. Absent, the
                reward function has to know by itself; what the program printed stands in
                `trajectory.metadata["stdout"]` (its last 2000 characters).
            max_turns: Maximum replies of the agent.
            ignore: Fields of requests that count as absent, such as "max_tokens", which would bound the
                reply, or "logit_bias", which would be refused.
            untrained: Sub-agents that are answered and not trained, by the `model` that their requests name.
            env: Variables of the program besides this process's own.
            cwd: The folder it runs in.
            local: Say True where its words depend on the scenario, the seed and the replies alone, so that a
                run is repeatable.
        """
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ConfigurationError(
                f'command must be a list of texts, got {command!r:.80}: write ["python", "agent.py"]'
            )
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigurationError(f"cwd {str(cwd)!r} is no folder")
        _expect_program(command[0], cwd)
        super().__init__(scenarios, max_turns=max_turns, ignore=ignore, untrained=untrained, local=local)
        self._command = tuple(command)
        self._verdict = _checked_verdict(verdict)
        self._env = dict(env or {})
        self._cwd = None if cwd is None else Path(cwd)

    async def _run(self, scenario: Scenario, seed: int, url: str) -> ProgramProcess:
        stdin, variables = _stdin_line(scenario, seed), self._variables(url)
        process = await ProgramProcess.start(self._command, env=variables, cwd=self._cwd, stdin=stdin)
        process.verdict = self._verdict
        return process

    def _variables(self, url: str) -> dict[str, str]:
        """The endpoint's, and no proxy on the way to it."""
        direct = ",".join(
            filter(None, ["127.0.0.1", os.environ.get("NO_PROXY") or os.environ.get("no_proxy")])
        )
        return {
            "NO_PROXY": direct,
            "no_proxy": direct,
            **self._env,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": API_KEY,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": API_KEY,
        }


def _stdin_line(scenario: Scenario, seed: int) -> bytes:
    """The line that a program reads."""
    data = {
        "id": scenario.id,
        "family": scenario.family,
        "opening": scenario.opening,
        "context": dict(scenario.context),
        "seed": seed,
    }
    if scenario.prompt:  # a system message, earlier turns
        data["messages"] = [message.to_openai() for message in scenario.prompt]
    if scenario.tools is not None:
        data["tools"] = [dict(schema) for schema in scenario.tools]
    try:
        return json.dumps(data).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"scenario {scenario.id}: its context must be plain JSON for a program to read it ({error})"
        ) from error


def _printed(text: str) -> Outcome:
    """The verdict in the last line; raises EnvironmentFailure where it is none."""
    line = text.splitlines()[-1] if text else ""
    try:
        outcome = read_verdict(json.loads(line))
    except (ValueError, RecursionError):
        outcome = None
    if outcome is None:
        raise EnvironmentFailure(
            'the program must print {"reward": NUMBER, "success": true or false, "metadata": {...}}, any of '
            f"them absent, as its last line, got {line!r:.200}"
        )
    return outcome


def _checked_verdict(verdict: Any) -> Literal["stdout"] | Mapping[int, bool] | None:
    if verdict is None or verdict == "stdout":
        return verdict  # type: ignore[no-any-return]  # it is one of the two
    if isinstance(verdict, Mapping) and verdict:
        codes = dict(verdict)
        if all(type(code) is int and type(success) is bool for code, success in codes.items()):
            return codes
    raise ConfigurationError(
        f'verdict must be "stdout", exit codes such as {{0: True, 3: False}}, or absent, got {verdict!r:.60}'
    )


def _expect_program(name: str, cwd: str | Path | None) -> None:
    """Raises ConfigurationError where there is no such program."""
    beside = Path(cwd or ".", name)
    if shutil.which(name) is None and not (os.sep in name and os.access(beside, os.X_OK)):
        raise ConfigurationError(f"command {name!r} is no program that can be run: give its path")
