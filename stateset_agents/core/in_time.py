"""An environment whose every answer has a time limit. The engine plays its episodes in one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stateset_agents.core.environment import Conversation, Environment, Observation
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Outcome
from stateset_agents.core.user_code import time_limit
from stateset_agents.errors import ConfigurationError, EnvironmentTimeout
from stateset_agents.messages import Message

__all__ = ["InTime"]


class InTime:
    """The same environment; a start, step, outcome or close that takes longer raises EnvironmentTimeout.

    A user or tool that hangs is no doing of the agent's: its conversation fails, and is neither scored nor
    trained on.
    """

    def __init__(self, environment: Environment, seconds: float | None) -> None:
        """`seconds`: for each answer; None waits for ever."""
        if seconds is not None and not seconds > 0:
            raise ConfigurationError(f"turn_timeout must be seconds above 0 or None, got {seconds!r}")
        self._environment = environment
        self._seconds = seconds
        self.local = environment.local
        self.num_timeouts = 0
        """Time limits that were exceeded, those of single tools too."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self._environment.scenarios(split)

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        async with self.limit("opening a conversation"):
            return _Conversation(self, await self._environment.start(scenario, seed))

    @asynccontextmanager
    async def limit(self, doing: str) -> AsyncIterator[None]:
        """Bounds and counts; `doing` says what took too long."""
        late = EnvironmentTimeout(
            f"{doing} took the environment longer than {self._seconds} s: mend the user or tool that "
            "hangs, or raise turn_timeout"
        )
        try:
            async with time_limit(self._seconds, late):
                yield
        except EnvironmentTimeout:
            self.num_timeouts += 1
            raise


class _Conversation:
    def __init__(self, environment: InTime, inner: Conversation) -> None:
        self.opening = inner.opening
        self.tools = inner.tools
        self._environment = environment
        self._inner = inner

    async def step(self, reply: Message) -> Observation:
        async with self._environment.limit("answering a reply"):
            return await self._inner.step(reply)

    async def outcome(self) -> Outcome:
        async with self._environment.limit("judging a conversation"):
            return await self._inner.outcome()

    def fork(self) -> Conversation:
        twin = self._inner.fork()
        if twin is self._inner:
            raise ConfigurationError(
                f"{type(twin).__name__}.fork() gave the conversation itself, and two would go on with it: "
                "give an independent copy"
            )
        return _Conversation(self._environment, twin)

    async def close(self) -> None:
        async with self._environment.limit("closing a conversation"):
            await self._inner.close()
