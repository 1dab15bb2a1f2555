"""Advantage estimators: their type, their input and output, each by name, and what several share.

An estimator gives every scored member one number per conversation, turn or token; update/batch.py spreads
the numbers over the agent's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from stateset_agents.algorithms.advantages import (
    Credit,
    Scaling,
    branch_credit,
    decoupled_advantages,
    group_advantages,
    per_turn_group_credit,
    returns_to_go,
    standardized,
    summed_advantages,
    token_gae,
    turn_gae,
)
from stateset_agents.grouping.advantages import normalise_by_part
from stateset_agents.grouping.partitions import key_parts
from stateset_agents.types.errors import ConfigurationError
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
    """Values before each turn, or before each agent token."""
    final: float
    """Value after the last turn."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a step, and the critic's targets."""

    raw: PerMember
    """Advantages before scaling."""
    scaled: PerMember
    returns: PerMember | None = None
    """The critic's targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """The arithmetic of an estimator, and the settings that go with it."""

    credit: Callable[[ScoredStep], Advantages]
    per: Literal["conversation", "turn", "token"]
    """The unit that one advantage is for."""
    critic: Literal["turn", "token"] | None = None
    """The places at which it needs a value: before every turn, before every agent token, or nowhere."""
    baseline: bool = False
    """True where it compares whole conversations, so that `baseline_type` says with what."""
    sees_shaping: bool = True
    """False where all that it compares starts from one state, so that potential-based shaping cancels."""
    branches: bool = False
    """True where other ways on are played from its turns, `num_branches` from each."""
    normalizations: tuple[str, ...]
    """Values of `advantage_normalization` it knows; the first is its default."""
    smallest_group: int = 1
    """Scored members below which a group teaches it nothing."""
    group_default: int = 2
    """The estimator's default of `min_group_size`."""
    loss: str | None = None
    """The estimator's default of `loss_type`; None leaves the field's own."""


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The input of an estimator."""

    groups: Mapping[int, TrajectoryGroup]
    """Groups with enough scored members, by their index in the step."""
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
    """True where a conversation has a value after its last turn, because a limit cut it."""
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


# `group`: a whole conversation against its group (GRPO, https://arxiv.org/abs/2402.03300).


def _group_credit(step: ScoredStep) -> Advantages:
    """Each conversation's reward against its group's, the same on all its tokens."""
    if step.config.multi_objective_aggregation == "normalize_then_sum":
        return _by_parts(step)
    rewards = [
        [None if reward is None else step.clipped(reward) for reward in group.rewards]
        for group in step.groups.values()
    ]
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    raw = group_advantages(rewards, baseline=kind, scaling="none")
    if step.config.group_strategy == "family":
        return Advantages(_tuples(raw), _tuples(_families_apart(step, rewards)))
    return Advantages(_tuples(raw), _tuples(group_advantages(rewards, baseline=kind, scaling=scaling)))


def _families_apart(
    step: ScoredStep, rewards: Sequence[Sequence[float | None]]
) -> list[Sequence[float | None]]:
    """Advantages as if each family's groups were the whole step."""
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    families = step.families()
    advantages: list[Sequence[float | None]] = list(rewards)
    for family in dict.fromkeys(families):
        places = [place for place, other in enumerate(families) if other == family]
        of_family = group_advantages([rewards[place] for place in places], baseline=kind, scaling=scaling)
        for place, numbers in zip(places, of_family, strict=True):
            advantages[place] = numbers
    return advantages


def _by_parts(step: ScoredStep) -> Advantages:
    """Each part of the rewards against its group's, then summed and scaled over the step."""
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    weights = [dict(group.reward_weights) for group in step.groups.values()]
    if not weights:
        return Advantages([], [])
    if not weights[0] or any(other != weights[0] for other in weights):
        raise ConfigurationError(
            "multi_objective_aggregation normalize_then_sum compares part by part, and these groups have no "
            "reward_weights in common: play them by generate_trajectories, or set the field of each"
        )
    parts = {
        name: [
            [
                step.clipped(member.breakdown[name])
                if member.reward is not None and name in member.breakdown
                else None
                for member in group.trajectories
            ]
            for group in step.groups.values()
        ]
        for name in weights[0]
    }
    raw = summed_advantages(parts, weights[0], baseline=kind, scaling="none")
    scaled = decoupled_advantages(parts, weights[0], baseline=kind, scaling=scaling)
    return Advantages(_tuples(raw), _tuples(scaled))


def _tuples(numbers: Sequence[Sequence[float | None]]) -> PerMember:
    """[groups][members] numbers, each as the one number of its conversation."""
    return [[None if number is None else (number,) for number in members] for members in numbers]


# `turn_group`: a turn against its siblings' turns (RLOO, https://arxiv.org/abs/2402.14740, per turn).


def _turn_group_credit(step: ScoredStep) -> Advantages:
    """Each turn's return-to-go against that of the siblings still talking at that turn; never scaled."""
    raw: PerMember = []
    for group in step.groups.values():
        rewards = [
            None if trajectory.reward is None else step.turn_rewards(trajectory)
            for trajectory in group.trajectories
        ]
        raw.append(list(per_turn_group_credit(rewards, gamma=step.config.gamma)))
    return Advantages(raw, raw)


# `branch`: a turn against other ways on that are played (after VinePPO, https://arxiv.org/abs/2410.01679).


def _branch_credit(step: ScoredStep) -> Advantages:
    """Each turn against other ways on from where it stood; never scaled."""
    raw: PerMember = []
    gamma = step.config.gamma
    for group in step.groups.values():
        members = group.trajectories
        rewards = [None if member.reward is None else step.turn_rewards(member) for member in members]
        ways_on: list[list[list[float]]] = [[[] for _ in member.turns] for member in members]
        indices = {member.member: index for index, member in enumerate(members)}
        for branch in group.branches:
            if branch.trajectory.reward is not None:
                to_go = returns_to_go(step.turn_rewards(branch.trajectory)[branch.turn :], gamma=gamma)
                ways_on[indices[branch.trajectory.member]][branch.turn].append(to_go[0])
        raw.append(list(branch_credit(rewards, ways_on, gamma=gamma)))
    return Advantages(raw, raw)


# `turn_gae`: a turn against a critic (GAE, https://arxiv.org/abs/1506.02438).


def _turn_gae_credit(step: ScoredStep) -> Advantages:
    """GAE over the turns of each conversation by itself."""
    advantages, returns = step.each(
        lambda trajectory, value: gae_over_turns(step, trajectory, trajectory.rewards_by_turn, value)
    )
    return Advantages(advantages, scaled_over_step(advantages, step), returns)


# `token_gae`: an agent token against a critic (GAE, https://arxiv.org/abs/1506.02438).


def _token_gae_credit(step: ScoredStep) -> Advantages:
    """GAE over the agent's tokens; a turn's reward is earned by its last one."""

    def over_tokens(trajectory: Trajectory, value: ValueEstimate) -> Credit:
        mask, rewards, values, forced = [], [], [], []
        remaining = iter(value.values)
        for turn, reward in zip(trajectory.turns, trajectory.rewards_by_turn, strict=True):
            count = len(turn.completion.token_ids)
            forced += [*(turn.completion.forced or [False] * count), False]
            mask += [1] * count + [0]  # one position for the observation after the turn
            rewards += [0.0] * count + [step.clipped(reward)]
            values += [next(remaining) for _ in range(count)] + [0.0]
        credit = token_gae(rewards, values, mask, forced=forced, **gae_settings(step, trajectory, value))
        acted = [index for index, bit in enumerate(mask) if bit]
        return Credit([credit.advantages[t] for t in acted], [credit.returns[t] for t in acted])

    advantages, returns = step.each(over_tokens)
    choices = [
        [
            numbers
            and [number for number, forced in zip(numbers, _forced(member), strict=True) if not forced]
            for numbers, member in zip(members, group.trajectories, strict=True)
        ]
        for members, group in zip(advantages, step.groups.values(), strict=True)
    ]
    scaled = iter(flat(scaled_over_step(choices, step)))
    every = [
        [
            numbers and [0.0 if forced else next(scaled) for forced in _forced(member)]
            for numbers, member in zip(members, group.trajectories, strict=True)
        ]
        for members, group in zip(advantages, step.groups.values(), strict=True)
    ]
    return Advantages(choices, every, returns)


def _forced(trajectory: Trajectory) -> list[bool]:
    """[agent tokens] True beside which no other was allowed."""
    completions = [turn.completion for turn in trajectory.turns]
    return [
        forced
        for completion in completions
        for forced in completion.forced or (False,) * len(completion.token_ids)
    ]


# `hybrid`: the outcome against the group, plus the turns' rewards against a critic.


def _hybrid_credit(step: ScoredStep) -> Advantages:
    """Credit for what the conversation earned as a whole, against its group, plus GAE over what its turns
    earned.

    Both are in units of reward, so they are added first and scaled together.
    """

    def over_turns(trajectory: Trajectory, value: ValueEstimate) -> Credit:
        rewards = trajectory.turn_rewards or (0.0,) * len(trajectory.turns)
        return gae_over_turns(step, trajectory, rewards, value)

    outcomes = group_advantages(
        [
            [
                None if trajectory.reward is None else step.clipped(trajectory.outcome_reward)
                for trajectory in group.trajectories
            ]
            for group in step.groups.values()
        ],
        baseline=step.config.baseline_type,
        scaling="none",
    )
    advantages, returns = step.each(over_turns)
    raw: PerMember = [
        [
            None if outcome is None or turns is None else [outcome + advantage for advantage in turns]
            for outcome, turns in zip(group, members, strict=True)
        ]
        for group, members in zip(outcomes, advantages, strict=True)
    ]
    return Advantages(raw, scaled_over_step(raw, step), returns)


# Every `advantage_estimator` by name, read by settings, credit and critic; a new one is a line here.

ESTIMATORS: Mapping[str, Estimator] = {
    "group": Estimator(
        credit=_group_credit,
        per="conversation",
        sees_shaping=False,
        baseline=True,
        normalizations=("population", "sample", "batch", "none"),
        smallest_group=2,
    ),
    "turn_group": Estimator(
        credit=_turn_group_credit, per="turn", normalizations=("none",), loss=UNBIASED_LOSS
    ),
    "branch": Estimator(
        credit=_branch_credit,
        per="turn",
        sees_shaping=False,
        branches=True,
        normalizations=("none",),
        loss=UNBIASED_LOSS,
    ),
    "turn_gae": Estimator(
        credit=_turn_gae_credit, per="turn", critic="turn", normalizations=("batch", "none"), group_default=1
    ),
    "token_gae": Estimator(
        credit=_token_gae_credit,
        per="token",
        critic="token",
        normalizations=("batch", "none"),
        group_default=1,
    ),
    "hybrid": Estimator(
        credit=_hybrid_credit,
        per="turn",
        critic="turn",
        baseline=True,
        normalizations=("batch", "none"),
        smallest_group=2,
    ),
}

DEFAULT_ESTIMATOR = "group"


def estimators_with(has: Callable[[Estimator], object]) -> list[str]:
    """Names of the estimators for which `has` is true, in the registry's order."""
    return [name for name, estimator in ESTIMATORS.items() if has(estimator)]
