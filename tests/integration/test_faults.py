"""A training whose environment, tools, reward and judge fail one call in five and hang one in twenty."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
from pathlib import Path

import pytest
from chat_server import ChatServer
from faulty_desk import Faults, Trained, evaluated, opinion, reward_of, train, true_reward

from stateset_agents.training.checkpoint import fingerprint

SHORT = {"max_steps": 2, "per_device_train_batch_size": 2, "num_generations": 4, "seed": 1}
LONG = {"max_steps": 45, "seed": 1}
"""Of the 110 steps that the model's card recommends."""


async def rewards_are_true(trained: Trained) -> int:
    """How many conversations have a reward; each is what the same words earn where nothing fails."""
    scored = [one for one in trained.rollouts if one.reward is not None]
    async with ChatServer(speak=opinion) as server:
        sound = reward_of(server.url)
        for start in range(0, len(scored), 64):
            some = scored[start : start + 64]
            true = await asyncio.gather(*(true_reward(one, sound) for one in some))
            assert [one.reward for one in some] == true
    return len(scored)


async def test_a_short_training_amid_faults_ends_bit_equal_to_one_without(tmp_path: Path) -> None:
    threads = threading.active_count()
    sound = await train(tmp_path / "sound", None, **SHORT)
    faulty = await train(tmp_path / "faulty", Faults(seed=0), **SHORT)
    assert faulty.metrics["faults/retries"] > 10
    assert faulty.metrics["faults/timeouts"] > 0
    assert faulty.trainer.summary()["deterministic"] is False
    assert sound.trainer.summary()["deterministic"] is False  # by its judge
    assert await rewards_are_true(faulty) == 16
    weights = [fingerprint(one.trainer.learner.weights()) for one in (sound, faulty)]
    assert weights[0] == weights[1]
    for one in (sound, faulty):
        await one.trainer.close()
    del sound, faulty
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threading.active_count() <= threads + 1


@pytest.mark.faults
async def test_a_training_amid_faults_learns_as_much_as_one_without(tmp_path: Path) -> None:
    runs = {}
    for name, faults in (("sound", None), ("faulty", Faults(seed=0))):
        trained = await train(tmp_path / name, faults, **LONG)
        result = await evaluated(trained.trainer.agent, tries=2)
        num_scored = await rewards_are_true(trained)
        metrics = trained.metrics
        runs[name] = {
            "success": result.success,
            "n": result.n,
            "scored": num_scored,
            "seconds": trained.trainer.progress.seconds,
            "weights": fingerprint(trained.trainer.learner.weights())[:12],
            **{
                key: metrics[key]
                for key in (
                    "rollout/conversations",
                    "rollout/failed",
                    "rollout/unscored",
                    "faults/retries",
                    "faults/timeouts",
                    "faults/outages",
                )
            },
        }
        if faults is not None:
            runs[name]["calls"] = faults.calls
            runs[name]["failing"] = faults.failed
            runs[name]["hanging"] = faults.hung
        await trained.trainer.close()
        print(name, json.dumps(runs[name]))
    one, other = runs["sound"], runs["faulty"]
    assert other["n"] >= 1000
    assert (
        other["scored"]
        == other["rollout/conversations"] - other["rollout/failed"] - other["rollout/unscored"]
    )
    difference = other["success"] - one["success"]
    half = 1.96 * math.sqrt(sum(run["success"] * (1 - run["success"]) / run["n"] for run in (one, other)))
    print(f"difference {difference:+.4f}, half-width {half:.4f}")
    assert half <= 0.04
    assert abs(difference) <= half
    for what in ("environment", "tool", "reward", "judge"):
        assert 0.17 < other["failing"][what] / other["calls"][what] < 0.23
        assert 0.03 < other["hanging"][what] / other["calls"][what] < 0.07
