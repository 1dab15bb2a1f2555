"""One agent, one scenario, one trajectory; or another way on from the middle of one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from stateset_agents.backends.base import Session
from stateset_agents.core.chat.history import Prompt
from stateset_agents.core.environment import (
    Conversation,
    Environment,
    ReplyLimits,
    start_conversation,
    step_conversation,
)
from stateset_agents.runtime.circuit_breakers import wait_listener
from stateset_agents.runtime.tasks import Deadline, in_thread
from stateset_agents.runtime.user_code import call_checked, format_error
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    ContextLengthExceeded,
    ConversationRefused,
    EnvironmentFailure,
    EnvironmentTimeout,
)
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Stopwatch, Trajectory, Turn


class Speaker(Protocol):
    """An agent in one conversation."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata for the conversation's trajectory, beside the environment's."""
        ...

    async def next_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """The prompt before the agent's next turn.

        Raises ContextLengthExceeded where that leaves no room to answer, ConversationRefused where it cannot
        be shown.
        """
        ...

    async def reply(self, prompt: Prompt, *, turn: int, limits: ReplyLimits) -> Completion:
        """Turn number `turn`, from 0 on, within what the conversation asks of it.

        Raises BackendError, and ContextLengthExceeded where only the model can tell.
        """
        ...

    def add(self, prompt: Prompt, completion: Completion) -> None:
        """Go on from this turn."""
        ...


@runtime_checkable
class Player(Protocol):
    """An agent that plays conversations."""

    def new_episodes(self, number: int) -> range:
        """Numbers for so many episodes, never given out before."""
        ...

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The opening with the agent's own persona and system prompt in front."""
        ...

    def speaker(self, session: Session, *, stream: int, temperature: float | None) -> Speaker:
        """The agent's side of a new conversation; turn t samples from `derive(stream, t)`."""
        ...

    def participate(self) -> AbstractContextManager[None]:
        """Takes part in the backend's batches while open; see `Backend.participate`."""
        ...

    async def release(self, session: Session) -> None:
        """Forget a conversation; unknown sessions are ignored."""
        ...


T = TypeVar("T")
BetweenTurns = Callable[[Trajectory, Conversation], Awaitable[None]]
"""Awaited before each turn of the agent but the first, with what has happened so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSeeds:
    """The random streams of an episode."""

    user: int
    """Shared by the members of a group: every member meets the same user."""
    agent: int
    """This member's own; turn t samples from `derive(agent, t)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fork:
    """A conversation as it stood before one of the agent's turns; its owner plays it on or closes it."""

    trajectory: Trajectory
    """The conversation up to the fork."""
    conversation: Conversation
    """An independent copy of the environment's side."""


async def run_episode(
    agent: Player,
    environment: Environment,
    scenario: Scenario,
    *,
    seeds: EpisodeSeeds,
    session: Session,
    temperature: float | None = None,
    between_turns: BetweenTurns | None = None,
    seconds: float | None = None,
) -> Trajectory:
    """Let agent and environment talk until one of them ends it; the backend forgets the session after.

    After `seconds` it is cut: what was said until then is TRUNCATED and judged, a turn under way is dropped;
    where nothing was said yet it is FAILED. `metadata["timed_out"]` tells either. Time in which it waits for
    a breaker does not count.
    With `between_turns` the backend goes on remembering it, so that forks can start from what it has cached;
    who takes them releases the session.
    What breaks outside the agent (environment, tool, backend) gives a trajectory with `Status.FAILED`,
    its error, and the turns that went well; programming and configuration errors travel.
    """
    start = Trajectory(scenario=scenario, member=session.member, seed=seeds.user)
    begin = partial(start_conversation, environment, scenario, seeds.user)
    return await _play(agent, start, begin, seeds.agent, session, temperature, between_turns, seconds)


async def run_branch(
    agent: Player,
    fork: Fork,
    *,
    stream: int,
    session: Session,
    temperature: float | None = None,
    seconds: float | None = None,
) -> Trajectory:
    """Play a fork to its end and close it: the trajectory has the turns before the fork, then its own.

    `stream` is the agent's own; otherwise as `run_episode`, failures and `seconds` included.
    """

    async def begin() -> Conversation:
        return fork.conversation

    return await _play(agent, fork.trajectory, begin, stream, session, temperature, None, seconds)


async def _play(
    agent: Player,
    trajectory: Trajectory,
    begin: Callable[[], Awaitable[Conversation]],
    stream: int,
    session: Session,
    temperature: float | None,
    between_turns: BetweenTurns | None,
    seconds: float | None,
) -> Trajectory:
    """Go on from what has happened so far, in a conversation that is closed after."""
    turns = list(trajectory.turns)
    time_left, watch = _TimeLeft(seconds), Stopwatch()
    speaker = agent.speaker(session, stream=stream, temperature=temperature)
    metadata: dict[str, Any]

    try:
        conversation = await time_left.bounds(begin())
        try:
            watch.lap("environment")
            trajectory = replace(trajectory, opening=agent.with_system_prompt(conversation.opening))
            talk = _converse(agent, speaker, conversation, trajectory, turns, between_turns, watch)
            try:
                status, metadata = await time_left.bounds(talk)
            except _OutOfTime:
                if len(turns) == len(trajectory.turns):  # none of its own
                    raise
                status, metadata = Status.TRUNCATED, {"timed_out": True}
            outcome = await call_checked(conversation.outcome, kind=Outcome)
        finally:
            await conversation.close()
        watch.lap("environment")
        metadata = {**outcome.metadata, **metadata, **speaker.metadata}
        trajectory = replace(trajectory, status=status, outcome=outcome, metadata=metadata)
        return replace(trajectory, turns=tuple(turns), spans=tuple(watch.spans))
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        late = {"timed_out": True} if isinstance(error, _OutOfTime) else {}
        metadata = {**late, **speaker.metadata}
        trajectory = replace(trajectory, status=Status.FAILED, error=format_error(error), metadata=metadata)
        return replace(trajectory, turns=tuple(turns), spans=tuple(watch.spans))
    finally:
        if between_turns is None:
            await agent.release(session)


class _OutOfTime(EnvironmentTimeout):
    """The conversation's own time is up."""


_LATE = "the conversation's time was up before its first reply was: raise episode_timeout"


class _TimeLeft:
    """The time limit of one conversation, which stands still while that waits for an outage to pass."""

    def __init__(self, seconds: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._deadline = Deadline(seconds)
        self._stands_until = -math.inf

    async def bounds(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled with _OutOfTime when the time is up."""
        is_over = False

        def stand_still(seconds: float) -> None:
            now = self._clock()
            begin, end = max(now, self._stands_until), now + seconds  # calls at once may wait together
            if end > begin and not is_over:  # a task that the work left behind waits on
                self._deadline.extend(end - begin)
                self._stands_until = end

        token = wait_listener.set(stand_still)
        try:
            async with self._deadline.bound(_OutOfTime(_LATE)):
                return await work
        finally:
            is_over = True
            wait_listener.reset(token)


async def _converse(
    agent: Player,
    speaker: Speaker,
    conversation: Conversation,
    start: Trajectory,
    turns: list[Turn],
    between_turns: BetweenTurns | None,
    watch: Stopwatch,
) -> tuple[Status, dict[str, bool]]:
    """Fill `turns` until the conversation ends; how it ended, and what the trajectory should remember."""
    messages = list(start.opening)
    for turn in turns:  # of a fork
        prompt = await speaker.next_prompt(messages, conversation.tools)
        if prompt.ids != turn.completion.prompt_ids:
            raise ConfigurationError(
                f"a {type(conversation).__name__} that changes what has been said, or its tools, cannot be "
                "forked: train with an advantage_estimator that plays no branches"
            )
        speaker.add(prompt, turn.completion)
        messages += _heard(turn)
    while True:
        try:
            prompt = await speaker.next_prompt(messages, conversation.tools)
            if turns and between_turns is not None:
                await between_turns(replace(start, turns=tuple(turns)), conversation)
                watch.lap("environment")
            limits = None if prompt.asks_summary else getattr(conversation, "reply_limits", None)
            limits = limits or ReplyLimits()
            completion = await speaker.reply(prompt, turn=len(turns), limits=limits)
            if not limits.trains:
                completion = replace(completion, forced=(True,) * len(completion.token_ids))
        except ContextLengthExceeded as error:
            if not turns:
                raise EnvironmentFailure(
                    "the opening leaves no room for a reply: shorten the scenario, the system prompt or the "
                    f"tools ({error})"
                ) from error
            return Status.TRUNCATED, {"context_overflow": True}
        except ConversationRefused as error:  # for what this environment said: others may go on
            raise EnvironmentFailure(str(error)) from error
        if completion.begun is not None:  # until then the model served others
            watch.lap("waiting", completion.begun)
        watch.lap("model")
        speaker.add(prompt, completion)
        follows = -1 if not turns or prompt.follows == len(turns) - 1 else prompt.follows
        turns.append(
            Turn(
                prompt_ids=prompt.added,
                completion=completion,
                follows=follows,
                is_summary=prompt.asks_summary,
            )
        )
        if prompt.asks_summary:
            continue
        observation = await step_conversation(completion, conversation)
        watch.lap("environment")
        turns[-1] = replace(
            turns[-1],
            feedback=observation.messages,
            reward=observation.reward,
            breakdown=observation.breakdown,
        )
        if observation.terminated:
            return Status.TERMINATED, {}
        if observation.truncated:
            return Status.TRUNCATED, {}
        if not observation.messages:
            raise EnvironmentFailure(
                "the environment answered a reply with no message and did not end the conversation"
            )
        messages += _heard(turns[-1])
        if observation.conversation is not None:
            messages = list(agent.with_system_prompt(observation.conversation))


def _heard(turn: Turn) -> Sequence[Message]:
    """The messages that a turn adds to the conversation: none where it is a summary for the agent itself."""
    return () if turn.is_summary else (turn.completion.message, *turn.feedback)


# --- forks of live conversations ---

_log = get_logger(__name__)
_GRACE_SECONDS = 1.0
"""Seconds to wait for a fork that is no longer wanted, so that nothing is closed while it is copied."""


class Forks:
    """Takes `each` forks between any two turns of a conversation; on leaving, closes those nobody took.

    async with Forks(2, of="RetailDesk", bounded=in_time.bounded) as forks:
        await run_episode(..., between_turns=forks.taken(session))
        for fork in forks.held(session): ...
    """

    def __init__(
        self,
        each: int,
        *,
        of: str,
        bounded: Callable[[str, Callable[[], Awaitable[Conversation]]], Awaitable[Conversation]],
    ) -> None:
        """`of`: the environment's name, for what goes wrong; `bounded` limits how long one fork may take."""
        self._each = each
        self._of = of
        self._bounded = bounded
        self._held: dict[Session, list[Fork]] = {}
        self._too_late: set[asyncio.Task[None]] = set()

    def taken(self, session: Session) -> BetweenTurns:
        """The function to call between the turns of this session's conversation."""

        async def between_turns(trajectory: Trajectory, conversation: Conversation) -> None:
            forks = self._held.setdefault(session, [])
            for _ in range(self._each):  # one after another: they copy the same conversation
                twin = await self._fork(conversation)
                forks.append(Fork(trajectory=trajectory, conversation=twin))

        return between_turns

    def held(self, session: Session) -> Sequence[Fork]:
        """The session's forks that nobody has taken, in the order of their turns."""
        return tuple(self._held.get(session, ()))

    def take(self, session: Session, fork: Fork) -> None:
        """Hand a fork over: who takes it closes it."""
        self._held[session].remove(fork)

    async def discard(self, session: Session) -> None:
        """Close what the session still holds; a fork that cannot be closed is only worth a warning."""
        closing = [_close(fork.conversation) for fork in self._held.pop(session, ())]
        await asyncio.gather(*closing)

    async def _fork(self, conversation: Conversation) -> Conversation:
        """A copy, made in a thread; one that comes when nobody waits for it any more is closed."""
        making = asyncio.ensure_future(in_thread(conversation.fork))
        try:
            return await self._bounded("forking a conversation", lambda: asyncio.shield(making))
        except NotImplementedError as error:
            raise ConfigurationError(
                f"a conversation of {self._of} cannot be forked, and branches need it: write its fork(), or "
                "train with another advantage_estimator"
            ) from error
        except (asyncio.CancelledError, EnvironmentTimeout):
            closing = asyncio.create_task(_close_when_made(making))
            self._too_late.add(closing)
            closing.add_done_callback(self._too_late.discard)
            await _done_at_last(closing)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*map(self.discard, tuple(self._held)))
        hanging = tuple(self._too_late)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def _done_at_last(task: asyncio.Task[None]) -> None:
    """Wait for it, `_GRACE_SECONDS` at most; a cancellation meanwhile waits with it, then goes on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GRACE_SECONDS
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _close(conversation: Conversation) -> None:
    try:
        await conversation.close()
    except Exception as error:  # nobody needs it any more
        _log.warning("a fork could not be closed", error=f"{type(error).__name__}: {error}")


async def _close_when_made(making: asyncio.Future[Conversation]) -> None:
    try:
        twin = await making
    except Exception:  # there is nothing to close, and why nobody waited has been told
        return
    await _close(twin)
