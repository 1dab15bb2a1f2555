"""Cosines between the gradients of tasks: by hand, when they are recorded, and that they change nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_toys import Signals
from torch import Tensor, nn

from stateset_agents.numeric.credit import credit
from stateset_agents.numeric.environments.base import Spec, Transition
from stateset_agents.numeric.environments.suites import Task, TaskMix, make_suite
from stateset_agents.numeric.rollout import Rollout, action_keys, collect
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import GRPO
from stateset_agents.numeric.studies.runner import MetricsWatch, StudySettings, run_study
from stateset_agents.numeric.update import update
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError


class Arms:
    """A bandit: an arm is pulled once and pays what it pays."""

    def __init__(self, *pays: float) -> None:
        self.pays = np.array(pays, dtype=np.float32)
        self.spec = Spec(name="arms", observation_shape=(1,), num_actions=len(pays), horizon=1)

    def reset(self, seeds: Any) -> Any:
        return np.ones((len(seeds), 1), dtype=np.float32)

    def step(self, actions: Any) -> Transition:
        ended = np.ones(len(actions), dtype=bool)
        return Transition(
            observations=np.ones((len(actions), 1), dtype=np.float32),
            rewards=self.pays[actions],
            terminated=ended,
            truncated=~ended,
        )

    def fork(self, rows: Any) -> Any:
        raise NotImplementedError("nothing comes after the pull")

    def action_mask(self) -> None:
        return None


class Shared(nn.Module):
    """The same logits for every task: their gradients meet in the same three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, observations: Tensor) -> Tensor:
        return self.logits.expand(len(observations), 3)


def two_bandits(second: tuple[float, ...], first: tuple[float, ...] = (1.0, 0.0, 0.0)) -> TaskMix:
    pays = {"one": first, "two": second}
    return TaskMix([Task(name=n, environment=Arms(*p), random=0.0, solved=1.0) for n, p in pays.items()])


def played(environment: TaskMix, policy: nn.Module, rows: int = 64) -> Rollout:
    keys = action_keys(0, 0, rows, 8)
    return collect(policy, environment, list(range(rows)), group_size=8, keys=keys)


def learned(rollout: Rollout, policy: nn.Module, *, updates_before: int = 0, **settings: Any) -> Any:
    config = ControlConfig(**{"advantage_normalization": "none", "progress": False, **settings})
    optimization = Optimization(policy, config, num_updates=10)
    return update(policy, optimization, rollout, config, updates_before=updates_before).metrics


def by_hand(rollout: Rollout, policy: Shared) -> float:
    """Of minus the mean of A (1[a] - p), each task's over its own steps."""
    credited = credit(rollout, "step_group", gamma=0.99, scaling="none")
    assert rollout.tasks is not None
    with torch.no_grad():
        p = policy.logits.softmax(0).double().numpy()
    pulls = (np.eye(3)[rollout.actions[0]] - p) * credited.advantages[0][:, None]
    one, two = (-pulls[rollout.tasks.ids == task].mean(axis=0) for task in range(2))
    return float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))


@pytest.mark.parametrize(
    ("second", "low", "high"),
    [
        ((1.0, 0.0, 0.0), 0.99, 1.0),  # equal tasks
        ((-1.0, 0.0, 0.0), -1.0, -0.99),  # what one wants the other shuns
        ((0.0, 1.0, 0.0), -0.8, -0.2),  # another arm: the more of one, the less of the other
    ],
)
def test_the_cosine_of_two_bandits_by_hand(second: tuple[float, ...], low: float, high: float) -> None:
    policy = Shared()
    rollout = played(two_bandits(second), policy)
    wanted = by_hand(rollout, policy)
    found = learned(rollout, policy, gradient_cosines_every=10)["gradient_cosine/one+two"]
    assert found == pytest.approx(wanted, abs=1e-6)
    assert low <= found <= high + 1e-9


def test_a_task_without_a_gradient_has_no_cosine() -> None:
    policy = Shared()
    rollout = played(two_bandits((0.5, 0.5, 0.5)), policy)  # every arm pays the same
    metrics = learned(rollout, policy, gradient_cosines_every=1)
    assert not any(name.startswith("gradient_cosine/") for name in metrics)


def test_recording_changes_no_weight_and_comes_every_so_often() -> None:
    rollout = played(two_bandits((0.0, 1.0, 0.0)), Shared())
    plain, watched = Shared(), Shared()
    without = learned(rollout, plain)
    with_them = learned(rollout, watched, gradient_cosines_every=10)
    assert torch.equal(plain.logits, watched.logits)
    assert not torch.equal(plain.logits, Shared().logits)
    assert with_them.keys() - without.keys() == {"gradient_cosine/one+two"}
    seen = [
        "gradient_cosine/one+two" in learned(rollout, Shared(), updates_before=n, gradient_cosines_every=10)
        for n in (0, 1, 9, 10, 11, 20)
    ]
    assert seen == [True, False, False, True, False, True]


async def test_a_training_writes_them_to_its_metrics(tmp_path: Path) -> None:
    environment = TaskMix(
        [Task(name=name, environment=Signals(), random=-2.0, solved=4.5) for name in ("one", "two")]
    )
    settings = {"num_groups": 8, "total_steps": 4 * 48, "minibatch_size": 16, "num_iterations": 1}
    async with GRPO(
        "task",
        environment=environment,
        gradient_cosines_every=2,
        output_dir=str(tmp_path),
        progress=False,
        **settings,
    ) as grpo:
        await grpo.train()
        log = RunLog(grpo.trainer.run)
    found = [line.values.get("gradient_cosine/one+two") for line in log.metrics()]
    assert [value is not None for value in found] == [True, False, True, False]
    assert all(-1 <= value <= 1 for value in found if value is not None)


async def test_one_task_has_nobody_to_be_compared_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="10 compares tasks, and signals is one"):
        async with GRPO(environment=Signals(), gradient_cosines_every=10, output_dir=str(tmp_path)):
            pass


def test_a_study_keeps_the_mean_of_each_pair(tmp_path: Path) -> None:
    watch = MetricsWatch(make_suite("curriculum"))
    one, two, three = watch.suite.tasks
    names = [f"gradient_cosine/{a}+{b}" for a, b in ((one, two), (one, three))]
    watch.on_step_end(1, {names[0]: 0.5, names[1]: -0.25})
    watch.on_step_end(2, {})
    watch.on_step_end(3, {names[0]: 0.25})
    assert watch.gradient_cosines() == [[1.0, 0.375, -0.25], [0.375, 1.0, None], [-0.25, None, 1.0]]
    assert MetricsWatch(make_suite("cart_pole")).gradient_cosines() == []

    small = {"num_groups": 8, "steps_per_rollout": 200, "minibatch_size": 64, "num_iterations": 1}
    arms = {"PPO": {"group_strategy": "none"}}
    study = StudySettings(
        suites=("mix", "cart_pole"), arms=arms, seeds=(0,), total_steps=400, settings=small, episodes=1
    )
    folder = asyncio.run(run_study(tmp_path, study))
    mixed, alone = folder.cells()
    (_, cosine), (same, _) = mixed.gradient_cosines
    assert cosine == same
    assert cosine is not None
    assert -1 < cosine < 1
    assert alone.gradient_cosines == []
    line = json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[1])
    assert line["gradient_cosines"] == [[1.0, cosine], [cosine, 1.0]]
