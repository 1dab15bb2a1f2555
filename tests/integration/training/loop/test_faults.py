"""A training whose environment, tools, reward and judge fail one call in five and hang one in twenty."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path

import pytest
from chat_server import ChatServer
from faulty_desk import Faults, Trained, evaluated, opinion, reward_of, train, true_reward

from stateset_agents.evaluation.comparison import compare
from stateset_agents.runs.checkpoint_files import fingerprint

SHORT = {"max_steps": 2, "per_device_train_batch_size": 2, "num_generations": 4, "seed": 1}
LONG = {"max_steps": 20, "seed": 1}
WATCHED = ("rollout/conversations", "rollout/failed", "rollout/unscored", "faults/")


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


@pytest.mark.long
async def test_a_short_training_amid_faults_ends_bit_equal_to_one_without(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
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
    left = {thread.name for thread in set(threading.enumerate()) - threads}
    assert all(name.startswith(("user-code", "asyncio_", "model-load")) for name in left), (
        left
    )  # idle ones end by themselves


@pytest.mark.faults
async def test_a_training_amid_faults_learns_as_much_as_one_without(tmp_path: Path) -> None:
    faults = Faults(seed=0)
    sound = await train(tmp_path / "sound", None, **LONG)
    faulty = await train(tmp_path / "faulty", faults, **LONG)
    for name, trained in (("without", sound), ("amid faults", faulty)):
        told = {key: value for key, value in trained.metrics.items() if key.startswith(WATCHED)}
        weights = fingerprint(trained.trainer.learner.weights())[:16]
        print(f"\n{name}: {trained.trainer.progress.seconds:.0f} s, weights {weights}", json.dumps(told))
    for what, calls in faults.calls.items():
        failed, hung = faults.failed[what] / calls, faults.hung[what] / calls
        print(f"{what}: {calls} calls, {failed:.1%} failed, {hung:.1%} hung")
        assert 0.15 < failed < 0.25
        assert 0.02 < hung < 0.08
    assert faults.calls.keys() == {"environment", "tool", "reward", "judge"}
    num_scored = await rewards_are_true(faulty)
    unscored = faulty.metrics["rollout/failed"] + faulty.metrics["rollout/unscored"]
    assert num_scored == faulty.metrics["rollout/conversations"] - unscored
    print(f"{num_scored} rewards are those of a sound desk and judge, {unscored:.0f} conversations have none")
    measured = [await evaluated(one.trainer.agent, tries=2) for one in (sound, faulty)]
    for one in (sound, faulty):
        await one.trainer.close()
    found = compare(*measured).success
    assert found is not None
    low, high = found.interval
    print(f"success {found.a:.1%} without, {found.b:.1%} amid faults, n {measured[1].n}, ", end="")
    print(f"difference {found.difference:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}")
    assert measured[1].n >= 1000
    assert low <= 0 <= high
    assert (high - low) / 2 <= 0.04
