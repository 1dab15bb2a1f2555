"""`branch`: a turn against other ways on that are played (after VinePPO, https://arxiv.org/abs/2410.01679)."""

from __future__ import annotations

from stateset_agents.algorithms.advantages import returns_to_go
from stateset_agents.algorithms.branching import branch_credit
from stateset_agents.training.estimators.base import (
    UNBIASED_LOSS,
    Advantages,
    Estimator,
    PerMember,
    ScoredStep,
)


def _credit(step: ScoredStep) -> Advantages:
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


ESTIMATOR = Estimator(
    credit=_credit,
    per="turn",
    sees_shaping=False,
    branches=True,
    normalizations=("none",),
    loss=UNBIASED_LOSS,
)
