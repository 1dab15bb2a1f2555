"""`token_gae`: an agent token against a critic (GAE, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from stateset_agents.algorithms.advantages import Credit, token_gae
from stateset_agents.training.estimators.base import (
    Advantages,
    Estimator,
    ScoredStep,
    ValueEstimate,
    gae_settings,
    scaled_over_step,
    tokens_per_turn,
)
from stateset_agents.types.trajectory import Trajectory


def _credit(step: ScoredStep) -> Advantages:
    """GAE over the agent's tokens; a turn's reward is earned by its last one."""

    def over_tokens(trajectory: Trajectory, value: ValueEstimate) -> Credit:
        mask, rewards, values = [], [], []
        remaining = iter(value.values)
        for reward, count in zip(trajectory.rewards_by_turn, tokens_per_turn(trajectory), strict=True):
            mask += [1] * count + [0]  # one position for the observation after the turn
            rewards += [0.0] * count + [step.clipped(reward)]
            values += [next(remaining) for _ in range(count)] + [0.0]
        credit = token_gae(rewards, values, mask, **gae_settings(step, trajectory, value))
        acted = [index for index, bit in enumerate(mask) if bit]
        return Credit([credit.advantages[t] for t in acted], [credit.returns[t] for t in acted])

    advantages, returns = step.each(over_tokens)
    return Advantages(advantages, scaled_over_step(advantages, step), returns)


ESTIMATOR = Estimator(
    credit=_credit, per="token", critic="token", normalizations=("batch", "none"), group_default=1
)
