"""Gymnasium environments that need a package more: LunarLander, MuJoCo and Atari, each trained shortly."""

from __future__ import annotations

import time

import numpy as np
import pytest

from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch
from stateset_agents.numeric.environments.suites import make_suite
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.analyzer import GRPOvsPPOAnalyzer
from stateset_agents.numeric.studies.runner import ARMS
from stateset_agents.numeric.trainer import ControlTrainer

SHORT = {
    "total_steps": 400,
    "num_groups": 4,
    "steps_per_rollout": 200,
    "minibatch_size": 64,
    "num_iterations": 1,
    "max_episode_steps": 50,
    "episodes": 1,
}
pytestmark = [pytest.mark.gymnasium, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def inverted_pendulum():
    """Five forces of the continuous -3 to 3."""
    import gymnasium

    forces = np.array([[-3.0], [-1.0], [0.0], [1.0], [3.0]], dtype=np.float32)
    return gymnasium.wrappers.TransformAction(
        gymnasium.make("InvertedPendulum-v5"), forces.__getitem__, gymnasium.spaces.Discrete(len(forces))
    )


def boxing():
    """The console's 128 bytes, as shares of 255."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    return gymnasium.wrappers.TransformObservation(
        gymnasium.make("ALE/Boxing-v5", obs_type="ram"),
        lambda ram: ram.astype(np.float32) / 255,
        gymnasium.spaces.Box(0, 1, (128,), np.float32),
    )


async def trained(environment, folder, **settings):
    """Mean returns of twenty starts before and after; prints a row of docs/evidence/numeric-trainings.md."""
    config = ControlConfig(output_dir=str(folder), progress=False, save_steps=0, **settings)
    async with ControlTrainer(MlpPolicy(environment.spec), environment, config) as trainer:
        before = await trainer.evaluate(range(20))
        started = time.process_time()
        await trainer.train()
        seconds = time.process_time() - started
        after = await trainer.evaluate(range(20))
        print(
            f"\n| {environment.spec.name} | {trainer.step_number:,} | {before.mean:.1f} | {after.mean:.1f} "
            f"| {seconds:.0f} |"
        )
    assert list(folder.rglob("report.html"))
    return before, after


async def test_mujocos_inverted_pendulum_stands(tmp_path):
    environment = GymnasiumBatch(inverted_pendulum, horizon=1000)
    _, after = await trained(
        environment,
        tmp_path,
        total_steps=200_000,
        steps_per_rollout=8192,
        learning_rate=5e-3,
        gamma=0.98,
        lone_steps="zero",
        entropy_coef=0.0,
        num_iterations=6,
    )
    assert after.mean > 900


async def test_atari_boxing_by_its_memory_goes_through(tmp_path):
    environment = GymnasiumBatch(boxing, horizon=200)
    before, after = await trained(
        environment, tmp_path, total_steps=25_600, num_groups=4, group_size=16, learning_rate=2e-3
    )
    assert np.isfinite([before.mean, after.mean]).all()


async def test_lunar_lander_by_ppo_and_by_parts(tmp_path):
    analyzer = GRPOvsPPOAnalyzer(tmp_path / "lander")
    found = await analyzer.compare(["lunar_lander"], n_seeds=1, arms=ARMS, total_steps=40_000)
    print(analyzer.generate_report())
    assert list(found["arms"]) == ["PPO", "auto", "difficulty", "random"]


@pytest.mark.parametrize(
    "suite", ["LunarLander-v3", "InvertedPendulum-v5", "Hopper-v5", "Ant-v5", "ALE/Pong-v5"]
)
async def test_an_id_enters_a_study(tmp_path, suite):
    """Forces at three levels each, of Ant's eight one at a time; Atari by its 128 bytes."""
    analyzer = GRPOvsPPOAnalyzer(tmp_path / "study")
    found = await analyzer.compare([suite], n_seeds=1, **SHORT)
    assert list(found["suites"][suite]) == ["PPO", "auto"]
    assert all(np.isfinite(arm["iqm"]) for arm in found["arms"].values())
    low, high = make_suite(suite).references[suite]
    assert low < high
