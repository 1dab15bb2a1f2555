"""Training in environments of other ecosystems: two steps each, with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_training import make_trainer, snapshot

from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.gymnasium_text import GymnasiumText
from stateset_agents.tracking.run_log import RunLog


async def trained(folder: Path, environment: Environment, **settings: Any) -> RunLog:
    """Two steps of one group of three, which have moved the weights."""
    given = {"gradient_accumulation_steps": 1, "num_generations": 3, "max_steps": 2, **settings}
    trainer = make_trainer(folder, environment=environment, reward=EnvironmentReward(), **given)
    await trainer.initialize()
    before = snapshot(trainer)
    await trainer.train()
    after = snapshot(trainer)
    assert any((after[name] != before[name]).any() for name in before)
    await trainer.close()
    log = RunLog(trainer.run)
    assert [line.step for line in log.metrics()] == [1, 2]
    return log


async def test_gymnasium_trains_with_the_turns_own_rewards_and_forks(tmp_path: Path) -> None:
    cliff = GymnasiumText(
        "CliffWalking-v1",
        render=lambda observation: f"on {observation}",
        parse=lambda reply: len(reply) % 4,  # anything is a move: a random model says no words
        num_train=4,
        max_turns=3,
    )
    log = await trained(tmp_path, cliff, advantage_estimator="branch", advantage_normalization=False)
    rollouts = list(log.rollouts("train", branches=True))
    assert len(rollouts) > 6  # and the branches
    for rollout in rollouts:
        rewards = [turn.reward for turn in rollout.turns]
        assert set(rewards) <= {-1.0, -100.0}
        assert rollout.reward == sum(rewards)
