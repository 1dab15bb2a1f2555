"""One agent, one scenario, one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stateset_agents.backends.base import Session
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Conversation, Environment
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Status, Trajectory, Turn
from stateset_agents.errors import PROGRAMMING_ERRORS, ConfigurationError, EnvironmentFailure
from stateset_agents.messages import Message
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
    """Let agent and environment talk until one of them ends it.

    What breaks outside the agent (environment, tool, backend) gives a trajectory with
    `Status.FAILED` and its error; programming and configuration errors travel.
    """
    trajectory = Trajectory(scenario=scenario, member=session.member, seed=seeds.user)
    try:
        conversation = await environment.start(scenario, seeds.user)
        try:
            trajectory = await _converse(agent, conversation, trajectory, seeds, session, temperature)
            outcome = await conversation.outcome()
        finally:
            await conversation.close()
        return replace(trajectory, outcome=outcome)
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        return replace(trajectory, status=Status.FAILED, error=f"{type(error).__name__}: {error}")
    finally:
        await agent.backend.release(session)


async def _converse(
    agent: MultiTurnAgent,
    conversation: Conversation,
    trajectory: Trajectory,
    seeds: EpisodeSeeds,
    session: Session,
    temperature: float | None,
) -> Trajectory:
    opening = agent.with_system_prompt(conversation.opening)
    delta = agent.template.prompt(opening, conversation.tools)
    row: list[int] = []
    turns: list[Turn] = []

    def so_far(status: Status, **metadata: bool) -> Trajectory:
        return replace(trajectory, opening=opening, turns=tuple(turns), status=status, metadata=metadata)

    while True:
        room = agent.context_length - len(row) - len(delta)
        if room < 1:
            return so_far(Status.TRUNCATED, context_overflow=True)
        row.extend(delta)
        params = agent.sampling(stream=derive(seeds.agent, len(turns)), temperature=temperature)
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        completion = await agent.reply(row, params, session=session, turn=len(turns))
        row.extend(completion.token_ids)
        observation = await conversation.step(completion.message)
        turns.append(
            Turn(
                prompt_ids=tuple(delta),
                completion=completion,
                feedback=observation.messages,
                reward=observation.reward,
            )
        )
        if observation.terminated or observation.truncated:
            return so_far(Status.TERMINATED if observation.terminated else Status.TRUNCATED)
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
