"""One agent, one scenario, one trajectory; or another way on from the middle of one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stateset_agents.backends.base import Session
from stateset_agents.core.chat.history import Prompt
from stateset_agents.core.environment import (
    Conversation,
    Environment,
    ReplyLimits,
    start_conversation,
    step_conversation,
)
from stateset_agents.core.rollout.player import Player, Speaker
from stateset_agents.runtime.circuit_breakers import wait_listener
from stateset_agents.runtime.tasks import Deadline
from stateset_agents.runtime.user_code import call_checked, format_error
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    ContextLengthExceeded,
    ConversationRefused,
    EnvironmentFailure,
    EnvironmentTimeout,
)
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.timeline import Stopwatch
from stateset_agents.types.trajectory import Outcome, Status, Trajectory, Turn

T = TypeVar("T")
BetweenTurns = Callable[[Trajectory, Conversation], Awaitable[None]]
"""Awaited before each turn of the agent but the first, with what has happened so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSeeds:
    """Where an episode's random choices come from."""

    user: int
    """Shared by the members of a group: every member meets the same user."""
    agent: int
    """This member's own; turn t samples from `derive(agent, t)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fork:
    """A conversation as it stood before one of the agent's turns; its owner plays it on or closes it."""

    trajectory: Trajectory
    """What had happened."""
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

    def begin() -> Awaitable[Conversation]:
        return start_conversation(environment, scenario, seeds.user)

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
        kept = {**outcome.metadata, **metadata, **speaker.metadata}
        return replace(
            trajectory,
            turns=tuple(turns),
            status=status,
            outcome=outcome,
            metadata=kept,
            spans=watch.spans,
        )
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        late = {"timed_out": True} if isinstance(error, _OutOfTime) else {}
        return replace(
            trajectory,
            turns=tuple(turns),
            status=Status.FAILED,
            error=format_error(error),
            metadata={**late, **speaker.metadata},
            spans=watch.spans,
        )
    finally:
        if between_turns is None:
            await agent.release(session)


class _OutOfTime(EnvironmentTimeout):
    """The conversation's own time is up."""

    def __init__(self) -> None:
        super().__init__("the conversation's time was up before its first reply was: raise episode_timeout")


class _TimeLeft:
    """Of one conversation; it stands still while the conversation waits for an outage to pass."""

    def __init__(self, seconds: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._deadline = Deadline(seconds)
        self._stands_until = -math.inf

    async def bounds(self, work: Awaitable[T]) -> T:
        """What `work` returns; when the time is up it is cancelled with _OutOfTime."""
        is_over = False

        def stand_still(seconds: float) -> None:
            now = self._clock()
            begin, end = max(now, self._stands_until), now + seconds  # calls at once may wait together
            if end > begin and not is_over:  # a task that the work left behind waits on
                self._deadline.extend(end - begin)
                self._stands_until = end

        token = wait_listener.set(stand_still)
        try:
            async with self._deadline.bound(_OutOfTime()):
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
            completion = await _reply(speaker, prompt, conversation, len(turns))
        except ContextLengthExceeded as error:
            if not turns:
                raise EnvironmentFailure(
                    "the opening leaves no room for a reply: shorten the scenario, the system prompt or the "
                    f"tools ({error})"
                ) from error
            return Status.TRUNCATED, {"context_overflow": True}
        except ConversationRefused as error:  # for what this environment said: others may go on
            raise EnvironmentFailure(str(error)) from error
        watch.turn(completion.begun)
        speaker.add(prompt, completion)
        turns.append(_turn(prompt, completion, len(turns)))
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


async def _reply(speaker: Speaker, prompt: Prompt, conversation: Conversation, turn: int) -> Completion:
    limits = None if prompt.asks_summary else getattr(conversation, "reply_limits", None)
    limits = limits or ReplyLimits()
    return await speaker.reply(prompt, turn=turn, max_new_tokens=limits.max_new_tokens, stop=limits.stop)


def _turn(prompt: Prompt, completion: Completion, index: int) -> Turn:
    follows = -1 if prompt.follows == index - 1 or index == 0 else prompt.follows
    return Turn(
        prompt_ids=prompt.added, completion=completion, follows=follows, is_summary=prompt.asks_summary
    )


def _heard(turn: Turn) -> Sequence[Message]:
    """What a turn adds to the conversation: nothing where it is a summary for the agent itself."""
    return () if turn.is_summary else (turn.completion.message, *turn.feedback)
