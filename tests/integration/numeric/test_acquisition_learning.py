"""Lookahead leaves something to learn on the family of the page, and a trained policy learns some of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.rivals.lookahead import rollout_lookahead
from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.lookahead import knowledge_gradient
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.rules import RULES
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.types.seeds import derive

FAMILY = LinearFamily(costs=(1.0, 20.0), budget=20.0)
HELD_OUT = [derive(0, "held out", index) for index in range(3000)]


def saved(better: np.ndarray, than: np.ndarray) -> tuple[float, float]:
    """Share of the mean regret that is saved, and the lower end of its paired 95 % interval."""
    interval = mean_interval((than - better).tolist())
    assert interval is not None
    return float((than - better).mean() / than.mean()), interval[0] / float(than.mean())


@pytest.mark.long
def test_lookahead_saves_a_tenth_of_the_regret_of_improvement_per_cost() -> None:
    tasks = FAMILY.draw(HELD_OUT[:500])
    base = play(RULES["EI per cost"], tasks).expected_regret
    ahead = play(rollout_lookahead(RULES["EI per cost"], samples=32), tasks).expected_regret
    gradient = play(knowledge_gradient(samples=16), tasks).expected_regret
    share, low = saved(ahead, base)
    assert share >= 0.10
    assert low > 0.05
    assert saved(gradient, base)[1] > 0.0


@pytest.mark.long
async def test_a_trained_policy_ends_with_less_regret_than_improvement_per_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = AcquisitionEnv(FAMILY, reward="expected_regret")
    config = ControlConfig(
        total_steps=100_000,
        num_groups=32,
        gamma=1.0,
        learning_rate=3e-3,
        entropy_coef=0.001,
        progress=False,
        log_episodes=False,
    )
    async with ControlTrainer(AcquisitionPolicyNetwork(), env, config) as trainer:
        await trainer.train()
        after = await trainer.evaluate(HELD_OUT)
    played = after.rollout
    regret = np.where(played.alive, played.components["regret"], 0.0).sum(axis=0)
    base = play(RULES["EI per cost"], FAMILY.draw(HELD_OUT))
    share, low = saved(regret, base.regret)
    assert share > 0.05
    assert low > 0.0
