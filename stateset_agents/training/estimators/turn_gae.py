"""`turn_gae`: a turn against a critic (GAE, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from stateset_agents.training.estimators.base import (
    Advantages,
    Estimator,
    ScoredStep,
    gae_over_turns,
    scaled_over_step,
)


def _credit(step: ScoredStep) -> Advantages:
    """GAE over the turns of each conversation by itself."""
    advantages, returns = step.each(
        lambda trajectory, value: gae_over_turns(step, trajectory, trajectory.rewards_by_turn, value)
    )
    return Advantages(advantages, scaled_over_step(advantages, step), returns)


ESTIMATOR = Estimator(
    credit=_credit, per="turn", critic="turn", normalizations=("batch", "none"), group_default=1
)
