"""What happened: turns make a trajectory, trajectories of one scenario make a group. All frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.timeline import Span

__all__ = ["Branch", "Outcome", "Status", "Trajectory", "TrajectoryGroup", "Turn", "by_scenario"]


class Status(StrEnum):
    """How a conversation ended."""

    TERMINATED = "terminated"
    """The conversation came to its own end."""
    TRUNCATED = "truncated"
    """A limit (turns, context, time) cut it; it is scored nevertheless."""
    FAILED = "failed"
    """An environment or backend error; it is never scored and never trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The environment's result at the end of a conversation, however it ended."""

    reward: float | None = 0.0
    """Terminal reward, on top of the turn rewards; None where the environment gives none."""
    success: bool | None = None
    """Was the task done? None where the environment cannot tell."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[Mapping[str, Any], ...] = ()
    """What the conversation changed in the world (database rows, say)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON that is copied into the trajectory's metadata. Evaluations count two keys: `violations`, how
    often the agent broke each rule ({"no consent": 1}; rules that it kept may have 0), and `user_miss`, how
    often the user did not understand a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One agent completion and the messages that answered it."""

    prompt_ids: tuple[int, ...]
    """Tokens appended before the completion: the first prompt, later the template's delta."""
    completion: Completion
    feedback: tuple[Message, ...] = ()
    """Tool results or user messages that answered it."""
    reward: float | None = None
    """The environment's reward for this turn; None where it gives none."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """The terms that sum to this reward; empty if the environment does not give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One conversation; its token row, mask and log-probs are computed from its turns."""

    scenario: Scenario
    member: int = 0
    """Index in its group."""
    seed: int = 0
    opening: tuple[Message, ...] = ()
    """System message and the user's first words."""
    turns: tuple[Turn, ...] = ()
    status: Status = Status.TERMINATED
    outcome: Outcome | None = None
    reward: float | None = None
    """Set by the reward function alone; None while unscored."""
    turn_rewards: tuple[float, ...] = ()
    """[num_turns] what single turns earned of `reward`; empty while unscored."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """What it did when, in order, up to its last complete turn; a branch has those of its own turns."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.action_mask) == len(self.logprobs):
            raise ValueError("token ids, action mask and log-probs of a trajectory differ in length")
        seen: list[int] = []
        for turn in self.turns:
            seen.extend(turn.prompt_ids)
            if tuple(seen) != turn.completion.prompt_ids:
                raise ValueError("a turn's prompt is not what stood in the conversation before it")
            seen.extend(turn.completion.token_ids)

    @property
    def outcome_reward(self) -> float:
        """`reward` without the rewards of single turns; 0 while unscored."""
        return (self.reward or 0.0) - math.fsum(self.turn_rewards)

    @property
    def rewards_by_turn(self) -> list[float]:
        """[num_turns] of a scored conversation, summing to `reward`: the last turn gets `outcome_reward`."""
        rewards = list(self.turn_rewards) or [0.0] * len(self.turns)
        if rewards:
            rewards[-1] += self.outcome_reward
        return rewards

    @property
    def success(self) -> bool | None:
        return None if self.outcome is None else self.outcome.success

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as chat messages."""
        messages = list(self.opening)
        for turn in self.turns:
            messages.append(turn.completion.message)
            messages.extend(turn.feedback)
        return tuple(messages)

    @property
    def replies(self) -> tuple[Message, ...]:
        """The agent's own messages."""
        return tuple(turn.completion.message for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        """[T] the row the model saw: prompt, completion, delta, completion, ..."""
        return [token for turn in self.turns for token in (*turn.prompt_ids, *turn.completion.token_ids)]

    @property
    def action_mask(self) -> list[int]:
        """[T] 1 on tokens the agent sampled, its end-of-turn token included; 0 elsewhere."""
        return [
            bit
            for turn in self.turns
            for bit in [0] * len(turn.prompt_ids) + [1] * len(turn.completion.token_ids)
        ]

    @property
    def logprobs(self) -> list[float]:
        """[T] behaviour log-probs on sampled tokens, 0.0 elsewhere."""
        return [
            value
            for turn in self.turns
            for value in (*[0.0] * len(turn.prompt_ids), *turn.completion.logprobs)
        ]

    @property
    def versions(self) -> list[int]:
        """[T] policy version behind each sampled token, -1 elsewhere."""
        return [
            version
            for turn in self.turns
            for version in (*[-1] * len(turn.prompt_ids), *turn.completion.versions)
        ]

    @property
    def num_agent_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def environment_reward(self) -> float | None:
        """Turn rewards plus the outcome's; None if the environment gave neither."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if self.outcome is not None and self.outcome.reward is not None:
            rewards.append(self.outcome.reward)
        return sum(rewards) if rewards else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A continuation of a group's member from the state before one of its turns, played to its end.

    It is not trained on; its return estimates the value of that state.
    """

    turn: int
    """Index of its first own turn; the turns before are the member's, token for token."""
    trajectory: Trajectory
    """From the opening on; `trajectory.member` is the member that it branches from."""

    @property
    def num_agent_tokens(self) -> int:
        """Tokens that were sampled for it."""
        return sum(len(turn.completion.token_ids) for turn in self.trajectory.turns[self.turn :])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The conversations that are compared with one another: G rollouts of one scenario by one policy."""

    key: str
    trajectories: tuple[Trajectory, ...]
    weight: float = 1.0
    """Multiplies its advantages; the trainer leaves it at 1, groups made by hand may not."""
    branches: tuple[Branch, ...] = ()
    """Branches from the members' turns, by member and turn; they count in no reward or success rate."""

    @property
    def rewards(self) -> list[float | None]:
        """[G] raw rewards, None where unscored."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def scored(self) -> Sequence[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.reward is not None]


def by_scenario(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """One group per scenario, groups and members in the order of the trajectories."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.scenario.id, []).append(trajectory)
    return [TrajectoryGroup(key=key, trajectories=tuple(members)) for key, members in groups.items()]
