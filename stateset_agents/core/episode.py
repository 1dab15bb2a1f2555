"""One agent, one scenario, one trajectory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from stateset_agents.backends.base import Session
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Conversation, Environment
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Status, Trajectory, Turn
from stateset_agents.errors import PROGRAMMING_ERRORS, ConfigurationError, EnvironmentFailure
from stateset_agents.messages import Completion, Message
from stateset_agents.streams import derive

__all__ = ["EpisodeSeeds", "run_episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSeeds:
    """Where an episode's random choices come from."""

    user: int
    """Shared by the members of a group: every member meets the same user."""
    agent: int
    """This member's own; turn t samples from `derive(agent, t)`."""


async def run_episode(
    agent: MultiTurnAgent,
    environment: Environment,
    scenario: Scenario,
    *,
    seeds: EpisodeSeeds,
    session: Session,
    temperature: float | None = None,
) -> Trajectory:
    """Let agent and environment talk until one of them ends it; the backend forgets the session after.

    What breaks outside the agent (environment, tool, backend) gives a trajectory with `Status.FAILED`,
    its error, and the turns that went well; programming and configuration errors travel.
    """
    turns: list[Turn] = []
    trajectory = Trajectory(scenario=scenario, member=session.member, seed=seeds.user)

    async def speak(ids: Sequence[int], room: int) -> Completion:
        params = agent.sampling(stream=derive(seeds.agent, len(turns)), temperature=temperature)
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        return await agent.reply(ids, params, session=session, turn=len(turns))

    try:
        conversation = await environment.start(scenario, seeds.user)
        try:
            trajectory = replace(trajectory, opening=agent.with_system_prompt(conversation.opening))
            status, metadata = await _converse(agent, conversation, trajectory.opening, speak, turns)
            outcome = await conversation.outcome()
        finally:
            await conversation.close()
        return replace(trajectory, turns=tuple(turns), status=status, outcome=outcome, metadata=metadata)
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        reason = f"{type(error).__name__}: {error}"
        return replace(trajectory, turns=tuple(turns), status=Status.FAILED, error=reason)
    finally:
        await agent.backend.release(session)


async def _converse(
    agent: MultiTurnAgent,
    conversation: Conversation,
    opening: Sequence[Message],
    speak: Callable[[Sequence[int], int], Awaitable[Completion]],
    turns: list[Turn],
) -> tuple[Status, dict[str, bool]]:
    """Fill `turns` until the conversation ends; how it ended, and what the trajectory should remember."""
    delta = agent.template.prompt(opening, conversation.tools)
    if len(delta) >= agent.context_length:
        raise EnvironmentFailure(
            f"the opening has {len(delta)} tokens and the context {agent.context_length}: shorten the "
            "scenario, the system prompt or the tools, or raise max_context_tokens"
        )
    row: list[int] = []
    while True:
        room = agent.context_length - len(row) - len(delta)
        if room < 1:
            return Status.TRUNCATED, {"context_overflow": True}
        row.extend(delta)
        completion = await speak(row, room)
        row.extend(completion.token_ids)
        turns.append(Turn(prompt_ids=tuple(delta), completion=completion))
        observation = await conversation.step(completion.message)
        turns[-1] = replace(turns[-1], feedback=observation.messages, reward=observation.reward)
        if observation.terminated:
            return Status.TERMINATED, {}
        if observation.truncated:
            return Status.TRUNCATED, {}
        if not observation.messages:
            raise EnvironmentFailure(
                "the environment answered a reply with no message and did not end the conversation"
            )
        delta = _next_delta(agent, observation.messages, completion.token_ids)


def _next_delta(agent: MultiTurnAgent, feedback: Sequence[Message], said: Sequence[int]) -> list[int]:
    """The template's delta; a turn that was cut by length first gets its end token, untrained."""
    delta = agent.template.delta(feedback)
    if said and said[-1] in agent.template.stop_ids:
        return delta
    return [agent.template.end_id, *delta]
