"""Scored groups become samples: each trajectory that trains, with one advantage per agent token.

An estimator is one function here, one line in `_CREDIT`, and its needs in settings/estimators.py. It gives
every scored member one number per conversation, turn or token; the rest is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

from stateset_agents.algorithms.advantages import (
    Credit,
    broadcast_turns,
    group_advantages,
    per_turn_group_credit,
    returns_to_go,
    standardized,
    token_gae,
    turn_gae,
)
from stateset_agents.algorithms.branching import branch_credit
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

__all__ = ["Credited", "Valued", "assign_credit", "goes_on", "trainable"]


@dataclass(frozen=True, slots=True)
class Valued:
    """What the critic expected of one trajectory."""

    values: Sequence[float]
    """Before each turn, or before each agent token."""
    final: float
    """After everything that was said."""


@dataclass(frozen=True, slots=True)
class Credited:
    """What a step trains on, and what it left out."""

    samples: list[Sample]
    num_dropped_groups: int
    """Groups with fewer scored members than `min_group_size`."""

    advantages: list[list[tuple[float, ...] | None]]
    """[groups][members] advantages per agent token, None where a member does not train."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """advantage/mean and advantage/std, before they are scaled."""
    returns: list[Sequence[float]] = field(default_factory=list)
    """[samples][turns or agent tokens] what the critic learns towards; empty without one."""


_PerMember = list[list[Sequence[float] | None]]
"""[groups][members] numbers, one per conversation, turn or agent token; None where unscored."""


@dataclass(frozen=True, slots=True)
class _Estimate:
    per: Literal["conversation", "turn", "token"]
    """What one number is for."""
    raw: _PerMember
    """Before scaling."""
    scaled: _PerMember
    returns: _PerMember | None = None


def trainable(groups: Sequence[TrajectoryGroup], config: TrainingConfig) -> list[tuple[int, int]]:
    """(group, member) of the trajectories that train, in order: scored, with an agent token, in a group
    with at least `min_group_size` scored members."""
    return [
        (place, member)
        for place, group in enumerate(groups)
        if len(group.scored) >= config.min_group_size
        for member, trajectory in enumerate(group.trajectories)
        if trajectory.reward is not None and trajectory.num_agent_tokens
    ]


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    config: TrainingConfig,
    values: Mapping[tuple[int, int], Valued] | None = None,
) -> Credited:
    """`advantage_estimator`'s credit of every trajectory that trains, spread over its agent tokens.

    Unscored members train nothing and enter no baseline; a group with fewer than `min_group_size` scored
    members is left out whole. `values` has what the critic expected of each of `trainable(groups)`.
    """
    used = {place: group for place, group in enumerate(groups) if len(group.scored) >= config.min_group_size}
    estimate = _CREDIT[config.advantage_estimator](_Step(used, config, values or {}))
    rows = {place: row for row, place in enumerate(used)}
    samples: list[Sample] = []
    returns: list[Sequence[float]] = []
    credit: list[list[tuple[float, ...] | None]] = [[None] * len(group.trajectories) for group in groups]
    for place, member in trainable(groups, config):
        own = estimate.scaled[rows[place]][member]
        assert own is not None  # it is scored
        group, trajectory = groups[place], groups[place].trajectories[member]
        per_token = _spread(own, trajectory, estimate.per)
        credit[place][member] = per_token
        samples.append(Sample(trajectory=trajectory, advantages=per_token, weight=group.weight))
        if estimate.returns is not None:
            returns.append(estimate.returns[rows[place]][member] or ())
    return Credited(samples, len(groups) - len(used), credit, _moments(estimate.raw), returns)


def goes_on(trajectory: Trajectory, *, bootstrap: bool) -> bool:
    """Is a conversation still worth something after its last turn, because a limit cut it?"""
    return bootstrap and trajectory.status is Status.TRUNCATED


def _spread(credit: Sequence[float], trajectory: Trajectory, per: str) -> tuple[float, ...]:
    """A conversation's, its turns' or its tokens' credit on each agent token."""
    match per:
        case "conversation":
            return (credit[0],) * trajectory.num_agent_tokens
        case "turn":
            return tuple(broadcast_turns(credit, _tokens_per_turn(trajectory)))
        case _:
            return tuple(credit)


def _moments(raw: _PerMember) -> dict[str, float]:
    everything = _flat(raw)
    if not everything:
        return {}
    return {"advantage/mean": fmean(everything), "advantage/std": pstdev(everything)}


# ------------------------------------------------------------------------------ estimators


@dataclass(frozen=True, slots=True)
class _Step:
    """What an estimator reads."""

    groups: Mapping[int, TrajectoryGroup]
    """Those with enough scored members, by place."""
    config: TrainingConfig
    values: Mapping[tuple[int, int], Valued]

    def clipped(self, reward: float) -> float:
        return max(-self.config.reward_clip, min(self.config.reward_clip, reward))

    def turn_rewards(self, one: Trajectory) -> list[float]:
        """[turns] of a scored trajectory, each clipped."""
        return [self.clipped(reward) for reward in one.rewards_by_turn]

    def each(self, credit: Callable[[Trajectory, Valued], Credit]) -> tuple[_PerMember, _PerMember]:
        """Advantages and returns of every member that has a value; without agent tokens it has none."""
        advantages: _PerMember = []
        returns: _PerMember = []
        for place, group in self.groups.items():
            made = [
                credit(trajectory, self.values[place, member]) if (place, member) in self.values else None
                for member, trajectory in enumerate(group.trajectories)
            ]
            advantages.append([None if one is None else one.advantages for one in made])
            returns.append([None if one is None else one.returns for one in made])
        return advantages, returns


def _group(step: _Step) -> _Estimate:
    """Each conversation's reward against its group's, the same on all its tokens."""
    rewards = [
        [None if reward is None else step.clipped(reward) for reward in group.rewards]
        for group in step.groups.values()
    ]
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    raw = _ones(group_advantages(rewards, baseline=kind, scaling="none"))
    return _Estimate("conversation", raw, _ones(group_advantages(rewards, baseline=kind, scaling=scaling)))


def _turn_group(step: _Step) -> _Estimate:
    """Each turn's return-to-go against that of the siblings still talking at that turn; never scaled."""
    raw: _PerMember = []
    for group in step.groups.values():
        rewards = [None if one.reward is None else step.turn_rewards(one) for one in group.trajectories]
        raw.append(list(per_turn_group_credit(rewards, gamma=step.config.gamma)))
    return _Estimate("turn", raw, raw)


def _branch(step: _Step) -> _Estimate:
    """Each turn against other ways on from where it stood; never scaled."""
    raw: _PerMember = []
    gamma = step.config.gamma
    for group in step.groups.values():
        rewards = [None if one.reward is None else step.turn_rewards(one) for one in group.trajectories]
        ways_on: list[list[list[float]]] = [[[] for _ in one.turns] for one in group.trajectories]
        places = {one.member: place for place, one in enumerate(group.trajectories)}
        for branch in group.branches:
            if branch.trajectory.reward is not None:
                to_go = returns_to_go(step.turn_rewards(branch.trajectory)[branch.turn :], gamma=gamma)
                ways_on[places[branch.trajectory.member]][branch.turn].append(to_go[0])
        raw.append(list(branch_credit(rewards, ways_on, gamma=gamma)))
    return _Estimate("turn", raw, raw)


def _turn_gae(step: _Step) -> _Estimate:
    """GAE over the turns of each conversation by itself."""
    advantages, returns = step.each(lambda one, valued: _over_turns(step, one, one.rewards_by_turn, valued))
    return _Estimate("turn", advantages, _over_batch(advantages, step.config), returns)


def _token_gae(step: _Step) -> _Estimate:
    """GAE over the agent's tokens; a turn's reward is earned by its last one."""

    def over_tokens(one: Trajectory, valued: Valued) -> Credit:
        mask, rewards, values = [], [], []
        known = iter(valued.values)
        for reward, count in zip(one.rewards_by_turn, _tokens_per_turn(one), strict=True):
            mask += [1] * count + [0]  # one observation stands for what was said in between
            rewards += [0.0] * count + [step.clipped(reward)]
            values += [next(known) for _ in range(count)] + [0.0]
        credit = token_gae(rewards, values, mask, **_gae(step, one, valued))
        acted = [place for place, bit in enumerate(mask) if bit]
        return Credit([credit.advantages[t] for t in acted], [credit.returns[t] for t in acted])

    advantages, returns = step.each(over_tokens)
    return _Estimate("token", advantages, _over_batch(advantages, step.config), returns)


def _hybrid(step: _Step) -> _Estimate:
    """What the conversation earned as a whole, against its group, plus GAE over what its turns earned.

    Both are in units of reward, so they are added first and scaled together.
    """

    def own_turns(one: Trajectory, valued: Valued) -> Credit:
        return _over_turns(step, one, one.turn_rewards or (0.0,) * len(one.turns), valued)

    outcomes = group_advantages(
        [
            [None if one.reward is None else step.clipped(one.outcome_reward) for one in group.trajectories]
            for group in step.groups.values()
        ],
        baseline=step.config.baseline_type,
        scaling="none",
    )
    advantages, returns = step.each(own_turns)
    raw: _PerMember = [
        [
            None if outcome is None or own is None else [outcome + value for value in own]
            for outcome, own in zip(group, turns, strict=True)
        ]
        for group, turns in zip(outcomes, advantages, strict=True)
    ]
    return _Estimate("turn", raw, _over_batch(raw, step.config), returns)


_CREDIT: Mapping[str, Callable[[_Step], _Estimate]] = {
    "group": _group,
    "turn_group": _turn_group,
    "branch": _branch,
    "turn_gae": _turn_gae,
    "token_gae": _token_gae,
    "hybrid": _hybrid,
}


# ------------------------------------------------------------------------------ their parts


def _over_turns(step: _Step, one: Trajectory, rewards: Sequence[float], valued: Valued) -> Credit:
    clipped = [step.clipped(reward) for reward in rewards]
    return turn_gae(clipped, valued.values, **_gae(step, one, valued))


def _gae(step: _Step, one: Trajectory, valued: Valued) -> dict[str, Any]:
    """GAE's settings, and how the conversation ended."""
    return {
        "gamma": step.config.gamma,
        "lam": step.config.gae_lambda,
        "terminated": not goes_on(one, bootstrap=step.config.bootstrap_truncated),
        "final_value": valued.final,
    }


def _over_batch(raw: _PerMember, config: TrainingConfig) -> _PerMember:
    """Centred and divided by the deviation over all turns or tokens of the step, or as they are."""
    if config.advantage_normalization == "none":
        return raw
    everything = iter(standardized(_flat(raw)))
    return [[None if own is None else [next(everything) for _ in own] for own in members] for members in raw]


def _flat(numbers: _PerMember) -> list[float]:
    return [value for members in numbers for own in members if own is not None for value in own]


def _ones(numbers: Sequence[Sequence[float | None]]) -> _PerMember:
    return [[None if number is None else (number,) for number in members] for members in numbers]


def _tokens_per_turn(trajectory: Trajectory) -> list[int]:
    return [len(turn.completion.token_ids) for turn in trajectory.turns]
