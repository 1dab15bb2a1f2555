"""The type of an advantage estimator, its input and output, and the arithmetic that several share.

An estimator gives every scored member one number per conversation, turn or token; update/credit.py spreads
the numbers over the agent's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from stateset_agents.algorithms.advantages import Credit, Scaling, standardized, turn_gae
from stateset_agents.grouping.advantages import normalise_by_part
from stateset_agents.grouping.partitions import key_parts
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

UNBIASED_LOSS = "dr_grpo"
"""The loss that keeps unbiased advantages so: the policy chooses how long a conversation is, and a mean over
its tokens, or over the step's, weighs its turns by that choice."""

PerMember = list[list[Sequence[float] | None]]
"""[groups][members] numbers, one per conversation, turn or agent token; None where unscored."""


class CreditSettings(Protocol):
    """The settings that estimators read; `TrainingConfig` has them, and says what each means."""

    @property
    def advantage_normalization(self) -> Scaling: ...
    @property
    def baseline_type(self) -> str: ...
    @property
    def bootstrap_truncated(self) -> bool: ...
    @property
    def gae_lambda(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    @property
    def group_strategy(self) -> str: ...
    @property
    def multi_objective_aggregation(self) -> str: ...
    @property
    def reward_clip(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """The critic's values of one trajectory."""

    values: Sequence[float]
    """Before each turn, or before each agent token."""
    final: float
    """After the last turn."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a step, and the critic's targets."""

    raw: PerMember
    """Before scaling."""
    scaled: PerMember
    returns: PerMember | None = None
    """The critic's targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """The arithmetic of an estimator, and the settings that go with it."""

    credit: Callable[[ScoredStep], Advantages]
    per: Literal["conversation", "turn", "token"]
    """What one advantage is for."""
    critic: Literal["turn", "token"] | None = None
    """Where it needs a value: before every turn, before every agent token, or nowhere."""
    baseline: bool = False
    """Does it compare whole conversations, so that `baseline_type` says with what?"""
    sees_shaping: bool = True
    """False where all that it compares starts from one state, so that potential-based shaping cancels."""
    branches: bool = False
    """Are other ways on played from its turns, `num_branches` from each?"""
    normalizations: tuple[str, ...]
    """Values of `advantage_normalization` it knows; the first is its default."""
    smallest_group: int = 1
    """Scored members below which a group teaches it nothing."""
    group_default: int = 2
    """Its default of `min_group_size`."""
    loss: str | None = None
    """Its default of `loss_type`; None leaves the field's own."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The input of an estimator."""

    groups: Mapping[int, TrajectoryGroup]
    """Those with enough scored members, by their index in the step."""
    config: CreditSettings
    values: Mapping[tuple[int, int], ValueEstimate]
    """(group, member) -> the critic's values; empty without one."""

    def clipped(self, reward: float) -> float:
        return max(-self.config.reward_clip, min(self.config.reward_clip, reward))

    def families(self) -> list[str]:
        """[groups] the family of each group's scenario."""
        return [group.trajectories[0].scenario.family for group in self.groups.values()]

    def turn_rewards(self, trajectory: Trajectory) -> list[float]:
        """[turns] of a scored trajectory, each clipped."""
        return [self.clipped(reward) for reward in trajectory.rewards_by_turn]

    def each(self, credit: Callable[[Trajectory, ValueEstimate], Credit]) -> tuple[PerMember, PerMember]:
        """Advantages and returns of every member that has a value; without agent tokens it has none."""
        advantages: PerMember = []
        returns: PerMember = []
        for index, group in self.groups.items():
            credits = [
                credit(trajectory, self.values[index, member]) if (index, member) in self.values else None
                for member, trajectory in enumerate(group.trajectories)
            ]
            advantages.append([None if credit is None else credit.advantages for credit in credits])
            returns.append([None if credit is None else credit.returns for credit in credits])
        return advantages, returns


def bootstraps(trajectory: Trajectory, *, bootstrap_truncated: bool) -> bool:
    """Does a conversation have a value after its last turn, because a limit cut it?"""
    return bootstrap_truncated and trajectory.status is Status.TRUNCATED


def gae_over_turns(
    step: ScoredStep, trajectory: Trajectory, rewards: Sequence[float], value: ValueEstimate
) -> Credit:
    """GAE over the turns of one conversation, whose `rewards` are clipped here; all [turns]."""
    clipped = [step.clipped(reward) for reward in rewards]
    return turn_gae(clipped, value.values, **gae_settings(step, trajectory, value))


def gae_settings(step: ScoredStep, trajectory: Trajectory, value: ValueEstimate) -> dict[str, Any]:
    """GAE's settings, and how the conversation ended."""
    return {
        "gamma": step.config.gamma,
        "lam": step.config.gae_lambda,
        "terminated": not bootstraps(trajectory, bootstrap_truncated=step.config.bootstrap_truncated),
        "final_value": value.final,
    }


def scaled_over_step(raw: PerMember, step: ScoredStep) -> PerMember:
    """Centred and divided by the deviation over all values of the step, or of the family's conversations, or
    as they are: [groups][members] values, of conversations, turns or tokens."""
    if step.config.advantage_normalization == "none":
        return raw
    if step.config.group_strategy == "family":
        scaled = iter(_by_family(raw, step))
    else:
        scaled = iter(standardized(flat(raw)))
    return [
        [None if numbers is None else [next(scaled) for _ in numbers] for numbers in members]
        for members in raw
    ]


def _by_family(raw: PerMember, step: ScoredStep) -> list[float]:
    """The values in the order of `flat`, each centred and scaled within its family."""
    families = [family for family, members in zip(step.families(), raw, strict=True) for _ in flat([members])]
    labels = key_parts(families, key="family").labels
    scaled: list[float] = normalise_by_part(np.array(flat(raw), dtype=np.float64), labels).tolist()
    return scaled


def flat(raw: PerMember) -> list[float]:
    """Every number of the step, in order."""
    return [number for members in raw for numbers in members if numbers is not None for number in numbers]


def tokens_per_turn(trajectory: Trajectory) -> list[int]:
    """[turns] how many tokens the agent sampled."""
    return [len(turn.completion.token_ids) for turn in trajectory.turns]
