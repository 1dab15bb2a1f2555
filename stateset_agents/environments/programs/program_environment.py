"""A user's program as an environment: its requests are the conversation, whichever way it is run.

`external_program.py` runs it as a process of its own, `in_process_agent.py` in the trainer's event loop.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.core.environment import Conversation, Observation, OptionalMembers, ReplyLimits
from stateset_agents.core.sources.datasets import read_any_scenarios
from stateset_agents.environments.programs.rollout_endpoint import ClientTurn, RolloutServer, RolloutSession
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.trajectory import Outcome

API_KEY = "none-needed"
"""The key that clients are given: whoever knows a conversation's URL may speak in it."""
_LAST_SECONDS = 10.0
"""Seconds that a program has to end after its conversation was cut."""
_KEYS = ("reward", "success", "metadata")
"""Keys of a program's verdict."""


class RunningProgram(Protocol):
    """One run of a program."""

    @property
    def is_running(self) -> bool: ...

    async def ended(self) -> Any:
        """Wait for its end."""
        ...

    def ending(self) -> tuple[str, str]:
        """How it ended, and why, as one reads it in an error."""
        ...

    def outcome(self, *, is_cut: bool) -> Outcome:
        """Its verdict once it has ended; `is_cut`: after its conversation was cut.

        Raises EnvironmentFailure where it broke.
        """
        ...

    async def stop(self) -> None:
        """End it; does nothing where it has ended."""
        ...


class ProgramEnvironment(OptionalMembers):
    """Runs a program once for every conversation; its requests are the conversation."""

    def __init__(
        self,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
        *,
        max_turns: int,
        ignore: Sequence[str],
        untrained: Sequence[str],
        local: bool,
    ) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigurationError(f"max_turns must be a whole number from 1 on, got {max_turns!r:.60}")
        for name, value in (("ignore", ignore), ("untrained", untrained)):
            if isinstance(value, str):
                raise ConfigurationError(f"{name} must be a list of names, got {value!r}: write [{value!r}]")
        importlib.import_module("aiohttp.web")  # here, for it takes long enough to be felt in an event loop
        self._max_turns = max_turns
        self._ignore, self._untrained = tuple(ignore), tuple(untrained)
        self._scenarios = tuple(read_any_scenarios(scenarios))
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, RolloutServer] = WeakKeyDictionary()
        self.local = local

    def scenarios(self, split: str) -> list[Scenario]:
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> ProgramConversation:
        """Run the program and wait for its first request.

        Raises EnvironmentFailure where it cannot be run or ends before it asks anything.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            self._servers[loop] = RolloutServer(ignore=self._ignore, untrained=self._untrained)
        server = self._servers[loop]
        rollout = await server.open()
        program = None
        try:
            program = await self._run(scenario, seed, rollout.url)
            first_turn = await _next_or_end(rollout, program)
            if first_turn is None:
                ending, reason = program.ending()
                raise EnvironmentFailure(f"{ending} before it asked anything: {reason}")
        except BaseException:
            await _end(server, rollout, program)
            raise
        return ProgramConversation(
            opening=first_turn.conversation,
            tools=first_turn.tools,
            reply_limits=first_turn.limits,
            server=server,
            rollout=rollout,
            program=program,
            max_turns=self._max_turns,
        )

    @abstractmethod
    async def _run(self, scenario: Scenario, seed: int, url: str) -> RunningProgram:
        """Begin a run whose requests go to `url`. Raises EnvironmentFailure where it cannot be run."""


@dataclass(kw_only=True, eq=False)
class ProgramConversation:
    """One run of the program."""

    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    """Tools of the request that waits."""
    reply_limits: ReplyLimits
    """Limits of the reply to that request."""
    server: RolloutServer
    rollout: RolloutSession
    program: RunningProgram
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
        client_turn = await _next_or_end(self.rollout, self.program)
        if client_turn is None:
            return Observation(terminated=True)
        self.tools, self.reply_limits = client_turn.tools, client_turn.limits
        return Observation(
            messages=client_turn.messages,
            conversation=client_turn.conversation,
            truncated=self.turns_left == 0,
        )

    async def outcome(self) -> Outcome:
        if self.rollout.is_waiting and self.program.is_running:  # one that has ended was not cut
            self.is_cut = True
            if self.turns_left == 0:
                reason = f"the agent has had its {self.max_turns} turns: the conversation is over"
                self.rollout.end(ApiError(reason, code="max_turns"))
            else:
                reason = "the conversation has filled the model's context and is over"
                self.rollout.end(ApiError(reason, code="context_length_exceeded"))
            try:
                async with asyncio.timeout(_LAST_SECONDS):
                    await self.program.ended()
            except TimeoutError:
                await self.program.stop()
                return FAILED
        await self.program.ended()
        return self.program.outcome(is_cut=self.is_cut)

    def fork(self) -> Conversation:
        raise ConfigurationError(
            "a conversation of a program cannot be forked, for a running program cannot be copied: leave "
            "turn_retries at 0, and train with an advantage_estimator that plays no branches"
        )

    async def close(self) -> None:
        await _end(self.server, self.rollout, self.program)


async def _next_or_end(rollout: RolloutSession, program: RunningProgram) -> ClientTurn | None:
    """The program's next request; None where it ends instead."""
    request, ended = asyncio.ensure_future(rollout.next()), asyncio.ensure_future(program.ended())
    try:
        await asyncio.wait([request, ended], return_when=asyncio.FIRST_COMPLETED)
        return request.result() if request.done() and program.is_running else None
    finally:
        request.cancel()
        ended.cancel()


async def _end(server: RolloutServer, rollout: RolloutSession, program: RunningProgram | None) -> None:
    try:
        if program is not None:
            await program.stop()
    finally:
        await server.close(rollout)


FAILED = Outcome(reward=0.0, success=False)
"""The outcome of a program that was cut and gave no verdict."""


def read_verdict(data: Any) -> Outcome | None:
    """The verdict in {"reward": NUMBER, "success": true or false, "metadata": {...}}, each of which may be
    absent; None where `data` is another thing."""
    fits = isinstance(data, dict) and data.keys() <= set(_KEYS)
    reward, success, metadata = (data.get(key) for key in _KEYS) if fits else (None, "", None)
    if (
        isinstance(reward, bool)
        or not isinstance(reward, int | float | None)
        or not (reward is None or abs(reward) <= sys.float_info.max)  # NaN is not, either
        or not isinstance(success, bool | None)
        or not isinstance(metadata, dict | None)
    ):
        return None
    return Outcome(reward=reward, success=success, metadata=metadata or {})
