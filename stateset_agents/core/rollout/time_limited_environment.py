"""An environment whose every answer has a time limit, and is asked for again where it fails.

The engine plays its episodes in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from stateset_agents.core.environment import (
    Conversation,
    Environment,
    Observation,
    ReplyLimits,
    start_conversation,
    step_conversation,
)
from stateset_agents.runtime.circuit_breakers import FaultTolerance
from stateset_agents.runtime.tasks import in_thread, with_timeout
from stateset_agents.runtime.user_code import call_checked
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, EnvironmentTimeout
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Outcome

T = TypeVar("T")
_log = get_logger(__name__)


class TimeLimitedEnvironment:
    """The same environment; a start, step, outcome or close that takes longer raises EnvironmentTimeout.

    A user or tool that hangs is no doing of the agent's: its conversation fails, and is neither scored nor
    trained on. With `turn_retries` an answer that failed or came too late is asked for again first: a step
    on a copy of the conversation that was taken before it (its `fork()`), start and outcome as they are.
    What fails very often in a row is waited for, all conversations together (`runtime.circuit_breakers`).
    """

    service: ClassVar[str] = "environment"
    """The name of its circuit breaker."""

    def __init__(
        self, environment: Environment, seconds: float | None, fault_tolerance: FaultTolerance | None = None
    ) -> None:
        """`seconds`: for each answer; None waits for ever. `fault_tolerance`: the engine's."""
        self._environment = environment
        self._seconds = seconds
        self._fault_tolerance = fault_tolerance or FaultTolerance()
        self.name = type(environment).__name__
        self.local = environment.local
        self.retries = self._fault_tolerance.policy.turn_retries

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self._environment.scenarios(split)

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        stream = derive(seed, "environment", scenario.id)

        async def begin(_: int) -> Conversation:
            opening: asyncio.Future[Conversation] | None = None

            def start() -> asyncio.Future[Conversation]:
                nonlocal opening
                opening = asyncio.ensure_future(start_conversation(self._environment, scenario, seed))
                return opening

            try:
                return await self.answer("opening a conversation", start)
            except (asyncio.CancelledError, EnvironmentTimeout):  # it may have been there already
                if opening is not None:
                    await self._put_away(opening)
                raise

        return _Conversation(self, await self.again(begin, stream), stream)

    async def _put_away(self, opening: asyncio.Future[Conversation]) -> None:
        """Close what nobody waits for any more, now or when it comes."""
        if not opening.done():
            opening.add_done_callback(_close_unwanted)
        elif not opening.cancelled() and opening.exception() is None:
            await self.discard(opening.result())

    async def discard(self, conversation: Conversation) -> None:
        """Close a conversation that nobody needs; one that cannot be closed is only worth a warning."""
        try:
            await self.bounded("closing a conversation", conversation.close)
        except Exception as error:
            _log.warning("a conversation could not be closed", error=f"{type(error).__name__}: {error}")

    async def answer(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        """One try, in time and behind the breaker; `doing` says what failed or took too long."""
        return await self._fault_tolerance.ask(
            self.service, lambda: self.bounded(doing, call), down=EnvironmentFailure
        )

    async def again(self, call: Callable[[int], Awaitable[T]], stream: int) -> T:
        """`call(attempt)` until it works, `turn_retries` times again at most; what the last one raised."""
        retry = self._fault_tolerance.retry
        return await retry(call, name="turn", times=self.retries, stream=stream, service=self.service)

    async def bounded(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        """One call in time, but not behind the breaker: some must be tried even when all else waits."""
        late = EnvironmentTimeout(
            f"{doing} took the environment longer than {self._seconds} s: mend the user or tool that "
            "hangs, or raise turn_timeout"
        )
        try:
            return await with_timeout(self._seconds, call(), late)
        except EnvironmentTimeout:  # a single tool's too
            self._fault_tolerance.num_timeouts += 1
            raise


class _Conversation:
    def __init__(self, environment: TimeLimitedEnvironment, inner: Conversation, stream: int) -> None:
        self.opening = inner.opening
        self._environment = environment
        self._inner = inner
        self._stream = stream
        """Random stream of the waits between tries."""
        self._num_turns = 0

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._inner.tools

    @property
    def reply_limits(self) -> ReplyLimits | None:
        return getattr(self._inner, "reply_limits", None)

    async def step(self, reply: Message) -> Observation:
        return await self._answer(lambda inner: call_checked(inner.step, reply, kind=Observation))

    async def take(self, completion: Completion) -> Observation:
        return await self._answer(lambda inner: step_conversation(completion, inner))

    async def _answer(self, ask: Callable[[Conversation], Awaitable[Observation]]) -> Observation:
        self._num_turns += 1
        spare: Conversation | None = None

        async def take(attempt: int) -> Observation:
            nonlocal spare
            if attempt and spare is not None:
                broken, self._inner, spare = self._inner, spare, None
                await self._environment.discard(broken)
            if attempt < self._environment.retries:
                spare = await self._copy()
            return await self._environment.answer("answering a reply", lambda: ask(self._inner))

        try:
            return await self._environment.again(take, derive(self._stream, self._num_turns))
        finally:
            if spare is not None:
                await self._environment.discard(spare)

    async def outcome(self) -> Outcome:
        judge = partial(call_checked, self._inner.outcome, kind=Outcome)
        return await self._environment.again(
            lambda _: self._environment.answer("judging a conversation", judge),
            derive(self._stream, "outcome"),
        )

    def fork(self) -> Conversation:
        twin = self._inner.fork()
        if twin is self._inner:
            raise ConfigurationError(
                f"{type(twin).__name__}.fork() gave the conversation itself: give an independent copy"
            )
        return _Conversation(self._environment, twin, self._stream)

    async def close(self) -> None:
        await self._environment.bounded("closing a conversation", self._inner.close)

    async def _copy(self) -> Conversation:
        making = asyncio.ensure_future(in_thread(self._inner.fork))
        try:
            return await self._environment.bounded("copying a conversation", lambda: asyncio.shield(making))
        except (asyncio.CancelledError, EnvironmentTimeout):
            making.add_done_callback(_close_unwanted)
            raise
        except NotImplementedError as error:
            raise ConfigurationError(
                f"a conversation of {self._environment.name} cannot be forked, and turn_retries needs it: "
                "write its fork(), or leave turn_retries at 0 and set episode_retries"
            ) from error


_closing: set[asyncio.Future[None]] = set()
"""Conversations and copies that came when nobody waited for them any more."""


def _close_unwanted(making: asyncio.Future[Conversation]) -> None:
    if making.cancelled() or making.exception() is not None:
        return
    closing = asyncio.ensure_future(making.result().close())
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
