"""An agent program of your own, trained as it is: it talks to an official client, and we answer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.core.environment import Conversation, Observation, ReplyLimits
from stateset_agents.core.sources.datasets import read_any_scenarios
from stateset_agents.environments.programs.rollout_endpoint import ClientTurn, RolloutServer, RolloutSession
from stateset_agents.runtime.user_code import guarded
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario, expect_split
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


_LAST_SECONDS = 10.0
"""Seconds that a program has to end after its conversation was cut."""
_KEYS = ("reward", "success", "metadata")
"""Keys of the verdict that a program prints."""


class ExternalProgram:
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
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigurationError(f"max_turns must be a whole number from 1 on, got {max_turns!r:.60}")
        for name, value in (("ignore", ignore), ("untrained", untrained)):
            if isinstance(value, str):
                raise ConfigurationError(f"{name} must be a list of names, got {value!r}: write [{value!r}]")
        if cwd is not None and not Path(cwd).is_dir():
            raise ConfigurationError(f"cwd {str(cwd)!r} is no folder")
        _expect_program(command[0], cwd)
        importlib.import_module("aiohttp.web")  # here, for it takes long enough to be felt in an event loop
        self._command = tuple(command)
        self._verdict = _checked_verdict(verdict)
        self._max_turns = max_turns
        self._ignore, self._untrained = tuple(ignore), tuple(untrained)
        self._env = dict(env or {})
        self._cwd = None if cwd is None else Path(cwd)
        self._scenarios = tuple(read_any_scenarios(scenarios))
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, RolloutServer] = WeakKeyDictionary()
        self.local = local

    def scenarios(self, split: str) -> list[Scenario]:
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Run the program and wait for its first request.

        Raises EnvironmentFailure where it cannot be run or ends before it asks anything.
        """
        stdin = _stdin_line(scenario, seed)
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            self._servers[loop] = RolloutServer(ignore=self._ignore, untrained=self._untrained)
        server = self._servers[loop]
        rollout = await server.open()
        process = None
        try:
            process = await ProgramProcess.start(
                self._command, env=self._variables(rollout.url), cwd=self._cwd, stdin=stdin
            )
            first_turn = await _next_or_end(rollout, process)
            if first_turn is None:
                raise EnvironmentFailure(
                    f"{_ending(await process.ended())} before it asked anything: {process.last_error_line}"
                )
        except BaseException:
            await _end(server, rollout, process)
            raise
        return _ProgramConversation(
            opening=first_turn.conversation,
            tools=first_turn.tools,
            reply_limits=first_turn.limits,
            server=server,
            rollout=rollout,
            process=process,
            verdict=self._verdict,
            max_turns=self._max_turns,
        )

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
            "OPENAI_API_KEY": "none-needed",
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none-needed",
        }


@dataclass(kw_only=True, eq=False)
class _ProgramConversation:
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    """Tools of the request that waits."""
    reply_limits: ReplyLimits
    """Limits of the reply to that request."""
    server: RolloutServer
    rollout: RolloutSession
    process: ProgramProcess
    verdict: Literal["stdout"] | Mapping[int, bool] | None
    max_turns: int
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.turns_left = self.max_turns

    async def take(self, completion: Completion) -> Observation:
        """The program's answer to a reply of which its client also learns how it ended and its length."""
        return await self.step(completion.message, completion)

    async def step(self, reply: Message, completion: Completion | None = None) -> Observation:
        self.rollout.answer(reply, completion)
        self.turns_left -= 1
        client_turn = await _next_or_end(self.rollout, self.process)
        if client_turn is None:
            return Observation(terminated=True)
        self.tools, self.reply_limits = client_turn.tools, client_turn.limits
        return Observation(
            messages=client_turn.messages,
            conversation=client_turn.conversation,
            truncated=self.turns_left == 0,
        )

    async def outcome(self) -> Outcome:
        if self.rollout.is_waiting and self.process.is_running:  # one that has ended was not cut
            self.is_cut = True
            if self.turns_left == 0:
                reason = f"the agent has had its {self.max_turns} turns: the conversation is over"
                self.rollout.end(ApiError(reason, code="max_turns"))
            else:
                reason = "the conversation has filled the model's context and is over"
                self.rollout.end(ApiError(reason, code="context_length_exceeded"))
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await self.process.ended()
            except TimeoutError:
                await self.process.stop()
                return _failed()
        code = await self.process.ended()
        if code not in (self.verdict if isinstance(self.verdict, Mapping) else (0,)):
            if self.is_cut:
                return _failed()
            raise EnvironmentFailure(f"{_ending(code)}: {self.process.last_error_line}")
        if self.verdict == "stdout":
            return (
                _failed() if self.is_cut and not self.process.printed() else _printed(self.process.printed())
            )
        if self.verdict is None:
            return Outcome(reward=None, metadata={"stdout": self.process.printed()[-2000:]})
        success = self.verdict[code]
        return Outcome(reward=float(success), success=success)

    def fork(self) -> Conversation:
        raise ConfigurationError(
            "a conversation of an external program cannot be forked, for a process cannot be copied: leave "
            "turn_retries at 0, and train with an advantage_estimator that plays no branches"
        )

    async def close(self) -> None:
        await _end(self.server, self.rollout, self.process)


async def _next_or_end(rollout: RolloutSession, process: ProgramProcess) -> ClientTurn | None:
    """The program's next request; None where it ends instead."""
    request, ended = asyncio.ensure_future(rollout.next()), asyncio.ensure_future(process.ended())
    try:
        await asyncio.wait([request, ended], return_when=asyncio.FIRST_COMPLETED)
        return request.result() if request.done() and process.is_running else None
    finally:
        request.cancel()
        ended.cancel()


async def _end(server: RolloutServer, rollout: RolloutSession, process: ProgramProcess | None) -> None:
    try:
        if process is not None:
            await process.stop()
    finally:
        await server.close(rollout)


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
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    fits = isinstance(data, dict) and data.keys() <= set(_KEYS)
    reward, success, metadata = (data.get(key) for key in _KEYS) if fits else (None, "", None)
    if (
        isinstance(reward, bool)
        or not isinstance(reward, int | float | None)
        or not isinstance(success, bool | None)
        or not isinstance(metadata, dict | None)
    ):
        raise EnvironmentFailure(
            'the program must print {"reward": NUMBER, "success": true or false, "metadata": {...}}, any of '
            f"them absent, as its last line, got {line!r:.200}"
        )
    return Outcome(reward=reward, success=success, metadata=metadata or {})


def _failed() -> Outcome:
    """The outcome of a program that was cut and gave no verdict."""
    return Outcome(reward=0.0, success=False)


def _ending(code: int) -> str:
    return f"the program was ended by signal {-code}" if code < 0 else f"the program exited with code {code}"


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
