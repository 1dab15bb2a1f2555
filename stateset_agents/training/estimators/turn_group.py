"""`turn_group`: a turn against its siblings' turns (RLOO, https://arxiv.org/abs/2402.14740, per turn)."""

from __future__ import annotations

from stateset_agents.algorithms.advantages import per_turn_group_credit
from stateset_agents.training.estimators.base import (
    UNBIASED_LOSS,
    Advantages,
    Estimator,
    PerMember,
    ScoredStep,
)


def _credit(step: ScoredStep) -> Advantages:
    """Each turn's return-to-go against that of the siblings still talking at that turn; never scaled."""
    raw: PerMember = []
    for group in step.groups.values():
        rewards = [
            None if trajectory.reward is None else step.turn_rewards(trajectory)
            for trajectory in group.trajectories
        ]
        raw.append(list(per_turn_group_credit(rewards, gamma=step.config.gamma)))
    return Advantages(raw, raw)


ESTIMATOR = Estimator(credit=_credit, per="turn", normalizations=("none",), loss=UNBIASED_LOSS)
