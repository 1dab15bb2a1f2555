"""`hybrid`: the outcome against the group, plus the turns' rewards against a critic."""

from __future__ import annotations

from stateset_agents.algorithms.advantages import Credit, group_advantages
from stateset_agents.training.estimators.base import (
    Advantages,
    Estimator,
    PerMember,
    ScoredStep,
    ValueEstimate,
    gae_over_turns,
    scaled_over_step,
)
from stateset_agents.types.trajectory import Trajectory


def _credit(step: ScoredStep) -> Advantages:
    """What the conversation earned as a whole, against its group, plus GAE over what its turns earned.

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


ESTIMATOR = Estimator(
    credit=_credit,
    per="turn",
    critic="turn",
    baseline=True,
    normalizations=("batch", "none"),
    smallest_group=2,
)
