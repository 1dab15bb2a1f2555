"""The record of what happened: turns make a trajectory, trajectories of one scenario make a group. All
frozen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario

Doing = Literal["environment", "waiting", "model", "reward"]
"""environment: its user, tools or outcome. waiting: a requested turn that has not begun, because the model
serves others or, with deterministic scheduling, waits for them. model: a turn is sampled. reward: scoring,
which waits for the whole group."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a conversation's time."""

    doing: Doing
    begin: float
    """Seconds of `time.monotonic()`."""
    end: float


class Stopwatch:
    """Divides the time of one conversation into spans without gaps."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """The spans so far, in order."""
        self._since = time.monotonic()

    def lap(self, doing: Doing, until: float | None = None) -> None:
        """Assign the time since the last lap, up to now or `until`."""
        end = max(self._since, time.monotonic() if until is None else until)
        if self.spans and self.spans[-1].doing == doing:
            self.spans[-1] = Span(doing, self.spans[-1].begin, end)
        elif end > self._since:
            self.spans.append(Span(doing, self._since, end))
        self._since = end


UNANSWERED = "unanswered"
"""Key in the metadata of a FAILED conversation: the endpoint of its agent gave no answer."""


class Status(StrEnum):
    """Says how a conversation ended."""

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
    """True if the task was done; None where the environment cannot tell."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[Mapping[str, Any], ...] = ()
    """Changes that the conversation made in the world (database rows, say)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON that is copied into the trajectory's metadata. Evaluations count two keys: `violations`, how
    often the agent broke each rule ({"no consent": 1}; rules that it kept may have 0), and `user_miss`, how
    often the user did not understand a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One agent completion and the messages that answered it."""

    prompt_ids: tuple[int, ...]
    """Tokens appended before the completion: a whole prompt where the turn opens a row, else the template's
    delta."""
    completion: Completion
    follows: int | None = -1
    """The turn whose tokens stand before `prompt_ids`: its index, -1 for the turn before this one, or None
    where nothing does and this turn opens a row."""
    is_summary: bool = False
    """True if the agent wrote it for itself, to go on from in a new row. Nobody else hears it."""
    feedback: tuple[Message, ...] = ()
    """Tool results or user messages that answered it."""
    reward: float | None = None
    """The environment's reward for this turn; None where it gives none."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """The terms that sum to this reward; empty if the environment does not give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Turns that the model saw behind one another: one sequence for a forward. All columns are [T]."""

    turns: tuple[Turn, ...]
    indices: tuple[int, ...]
    """Index of each of `turns` in its conversation."""
    trains_from: int = 0
    """The first of `turns` that trains in this row: those before it train in an earlier one, which they
    share."""

    token_ids: list[int]
    """The tokens that the model saw and sampled: prompt, completion, delta, completion, ..."""
    action_mask: list[int]
    """1 on tokens that the agent sampled and that train in this row, its end-of-turn tokens included."""
    logprobs: list[float]
    """Behaviour log-probs where `action_mask` is 1, 0.0 elsewhere."""
    versions: list[int]
    """Policy version behind each token where `action_mask` is 1, -1 elsewhere."""

    pixels: tuple[PixelValues, ...]
    """The pictures that the model saw, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One conversation; its rows of tokens, masks and log-probs are computed from its turns."""

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
    """The reward function's score, whose parts a curriculum may weigh anew; None while unscored."""
    turn_rewards: tuple[float, ...] = ()
    """[num_turns] what single turns earned of `reward`; empty while unscored."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    """The spans of its time, in order, up to its last complete turn; a branch has those of its own turns."""

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            if turn.follows is not None and not -1 <= turn.follows < index:
                raise ValueError(f"turn {index} follows turn {turn.follows}, which is none before it")
        for index, turn in enumerate(self.turns):
            prompt, before = turn.completion.prompt_ids, self.follows(index)
            prefix: tuple[int, ...] = ()
            added = turn.prompt_ids
            if before is not None:  # its own prompt has been checked
                earlier = self.turns[before].completion
                prefix, added = earlier.prompt_ids, earlier.token_ids + added
            if prompt[: len(prefix)] != prefix or prompt[len(prefix) :] != added:
                raise ValueError("a turn's prompt is not what stood in the conversation before it")

    def follows(self, index: int) -> int | None:
        """The turn whose tokens stand before turn `index`; None where that opens a row."""
        follows = self.turns[index].follows
        return follows if follows != -1 else (index - 1 if index else None)

    @property
    def rows(self) -> list[Row]:
        """The turns as the model saw them: one row, unless a turn saw something else than all before it.

        A row ends at each turn that none follows; in the order of their ends. What two rows share trains in
        the first.
        """
        followed = {self.follows(index) for index in range(len(self.turns))}
        rows: list[Row] = []
        trained: set[int] = set()
        for end in (index for index in range(len(self.turns)) if index not in followed):
            chain = [end]
            while (before := self.follows(chain[-1])) is not None:
                chain.append(before)
            indices = tuple(reversed(chain))
            shared = sum(index in trained for index in indices)
            rows.append(self._row(indices, trains_from=shared))
            trained.update(indices)
        return rows

    def _row(self, indices: Sequence[int], *, trains_from: int = 0) -> Row:
        """The turns of these indices behind one another."""
        turns = tuple(self.turns[index] for index in indices)
        token_ids: list[int] = []
        action_mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for place, turn in enumerate(turns):
            completion, trains = turn.completion, place >= trains_from
            token_ids += (*turn.prompt_ids, *completion.token_ids)
            num_untrained = len(turn.prompt_ids) + (0 if trains else len(completion.token_ids))
            action_mask += [0] * num_untrained
            logprobs += [0.0] * num_untrained
            versions += [-1] * num_untrained
            if trains:
                action_mask += [1] * len(completion.token_ids)
                logprobs += completion.logprobs
                versions += completion.versions
        return Row(
            turns=turns,
            indices=tuple(indices),
            trains_from=trains_from,
            token_ids=token_ids,
            action_mask=action_mask,
            logprobs=logprobs,
            versions=versions,
            pixels=turns[-1].completion.pixels if turns else (),  # the last prompt goes on from the others
        )

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
        """The conversation as chat messages, without the agent's summaries for itself."""
        messages = list(self.opening)
        for turn in self.turns:
            if not turn.is_summary:
                messages += (turn.completion.message, *turn.feedback)
        return tuple(messages)

    @property
    def replies(self) -> tuple[Message, ...]:
        """The agent's own messages, without its summaries for itself."""
        return tuple(turn.completion.message for turn in self.turns if not turn.is_summary)

    @property
    def end_to_end(self) -> Row:
        """Every turn's columns behind one another, as the log keeps them: one sequence that a model saw only
        where the conversation has one row."""
        return self._row(range(len(self.turns)))

    @property
    def token_ids(self) -> list[int]:
        """[T] what was prompted and sampled, `end_to_end`."""
        return self.end_to_end.token_ids

    @property
    def action_mask(self) -> list[int]:
        """[T] 1 on tokens that the agent sampled, `end_to_end`."""
        return self.end_to_end.action_mask

    @property
    def logprobs(self) -> list[float]:
        """[T] behaviour log-probs on sampled tokens, `end_to_end`."""
        return self.end_to_end.logprobs

    @property
    def versions(self) -> list[int]:
        """[T] the policy version behind each sampled token, `end_to_end`."""
        return self.end_to_end.versions

    @property
    def num_agent_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_trained(self) -> int:
        """Agent tokens that were the policy's choice; a grammar forced the others."""
        return sum(turn.completion.num_trained for turn in self.turns)

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
    """The conversation from the opening on; `trajectory.member` is the member that it branches from."""

    @property
    def num_agent_tokens(self) -> int:
        """Tokens that were sampled for it."""
        return sum(len(turn.completion.token_ids) for turn in self.trajectory.turns[self.turn :])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Between which two policies the last pass over a conversation took its ratios; in order of turns."""

    old: tuple[float, ...]
    """[N_i] under pi_old, which the ratio is to."""
    learner: tuple[float, ...]
    """[N_i] under the learner, before the optimiser step of the last pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The conversations that are compared with one another: G rollouts of one scenario by one policy."""

    key: str
    trajectories: tuple[Trajectory, ...]
    weight: float = 1.0
    """Multiplies its advantages; the trainer leaves it at 1, groups made by hand may not."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part of a member's breakdown in its reward; empty where the score is the reward
    function's own."""
    branches: tuple[Branch, ...] = ()
    """Branches from the members' turns, by member and turn; they count in no reward or success rate."""

    @property
    def rewards(self) -> list[float | None]:
        """[G] raw rewards, None where unscored."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def scored(self) -> Sequence[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.reward is not None]


Groups = Sequence[TrajectoryGroup] | Sequence[Trajectory]
"""Groups, or trajectories of which those of one scenario are a group."""


def as_groups(played: Groups) -> list[TrajectoryGroup]:
    """Groups as they are; of trajectories one group per scenario, groups and members in their order."""
    groups = [item for item in played if isinstance(item, TrajectoryGroup)]
    members: dict[str, list[Trajectory]] = {}
    for item in played:
        if isinstance(item, Trajectory):
            members.setdefault(item.scenario.id, []).append(item)
    return groups + [TrajectoryGroup(key=key, trajectories=tuple(of)) for key, of in members.items()]
