"""`group`: a whole conversation against its group (GRPO, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.algorithms.decoupled import decoupled_advantages, summed_advantages
from stateset_agents.training.estimators.base import Advantages, Estimator, PerMember, ScoredStep
from stateset_agents.types.errors import ConfigurationError


def _credit(step: ScoredStep) -> Advantages:
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
        return Advantages(_tuples(raw), _tuples(_by_family(step, rewards)))
    return Advantages(_tuples(raw), _tuples(group_advantages(rewards, baseline=kind, scaling=scaling)))


def _by_family(step: ScoredStep, rewards: Sequence[Sequence[float | None]]) -> list[Sequence[float | None]]:
    """As if each family's groups were the whole step."""
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    families = step.families()
    found: dict[int, Sequence[float | None]] = {}
    for family in dict.fromkeys(families):
        places = [place for place, other in enumerate(families) if other == family]
        own = group_advantages([rewards[place] for place in places], baseline=kind, scaling=scaling)
        found |= dict(zip(places, own, strict=True))
    return [found[place] for place in range(len(rewards))]


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


ESTIMATOR = Estimator(
    credit=_credit,
    per="conversation",
    sees_shaping=False,
    baseline=True,
    normalizations=("population", "sample", "batch", "none"),
    smallest_group=2,
)
