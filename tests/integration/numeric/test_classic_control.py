"""The classic tasks are solved from ten seeds, within the steps of docs/evidence/numeric-trainings.md."""

from __future__ import annotations

import time

import pytest

from stateset_agents.numeric.environments.classic import BatchedAcrobot, BatchedCartPole
from stateset_agents.numeric.evaluation import evaluate
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer

CART_POLE = {
    "total_steps": 110_000,
    "num_groups": 8,
    "group_size": 16,
    "steps_per_rollout": 6000,
    "lone_steps": "zero",
    "learning_rate": 5e-3,
    "entropy_coef": 0.0,
    "num_iterations": 6,
}
ACROBOT = {
    "steps_per_rollout": 8192,
    "learning_rate": 3e-3,
    "eval_steps": 60_000,
    "load_best_at_end": True,
}
BY_ESTIMATOR = {
    "step_group": {**ACROBOT, "total_steps": 600_000, "lone_steps": "zero"},
    "gae": {**ACROBOT, "total_steps": 300_000, "advantage_estimator": "gae"},
}


async def learned(environment, folder, hidden=(64, 64), **settings):
    """The greedy policy's returns from a hundred starts, the steps it took, and its CPU seconds."""
    config = ControlConfig(output_dir=str(folder), progress=False, save_steps=0, **settings)
    critic = config.advantage_estimator == "gae"
    policy = MlpPolicy(environment.spec, hidden=hidden, critic=critic, seed=config.seed)
    async with ControlTrainer(policy, environment, config) as trainer:
        started = time.process_time()
        await trainer.train()
        seconds = time.process_time() - started
        return evaluate(policy, environment, range(10**6, 10**6 + 100)), trainer.step_number, seconds


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
async def test_cart_pole_stands_for_500_steps_in_all_of_100_episodes(tmp_path, seed):
    found, steps, _ = await learned(BatchedCartPole(), tmp_path, hidden=(32, 32), seed=seed, **CART_POLE)
    assert set(found.returns) == {500.0}
    assert steps <= 120_000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", BY_ESTIMATOR)
async def test_acrobot_swings_up_in_less_than_ninety_steps(tmp_path, estimator, seed):
    found, steps, seconds = await learned(BatchedAcrobot(), tmp_path, seed=seed, **BY_ESTIMATOR[estimator])
    print(f"{estimator}: {found.mean:.1f} after {steps} steps and {seconds:.1f} CPU s")
    assert found.mean >= -90
