"""Clusters as an environment: equal seeds, forks, actions, what rules read, rewards, ten times the load."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.environment import REPLICA_FACTORS, InfrastructureEnv
from stateset_agents.numeric.autoscaling.rewards import MoneyReward
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.autoscaling.trace import TraceLoad
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad
from stateset_agents.numeric.environments.base import BatchedEnvironment, check_environment
from stateset_agents.types.errors import ConfigurationError

SPACE = InfrastructureActionSpace()
IDLE = REPLICA_FACTORS.index(1.0)


def idle(environment: InfrastructureEnv) -> np.ndarray:
    return environment.actions_for(environment.fleet.replicas)


@pytest.mark.parametrize("space", [None, InfrastructureActionSpace(enable_traffic_actions=False), SPACE])
def test_equal_seeds_are_equal_episodes_and_forks_follow(space: InfrastructureActionSpace | None) -> None:
    environment = InfrastructureEnv(actions=space)
    assert isinstance(environment, BatchedEnvironment)
    assert environment.spec.num_actions == (10 if space is None else space.total_actions)
    assert check_environment(environment) is True


def test_a_row_is_its_seed_s_whatever_the_others_are_and_a_fork_shares_the_load() -> None:
    environment, alone = InfrastructureEnv(actions=SPACE), InfrastructureEnv(actions=SPACE)
    first, single = environment.reset([5, 6, 5, 7]), alone.reset([7])
    assert np.array_equal(first[3], single[0])
    fork = environment.fork(np.array([3, 3, 0]))
    assert fork._traces is environment._traces
    dice = np.random.default_rng(1)
    for _ in range(12):
        action = dice.integers(539)
        actions = np.where(environment.action_mask()[:, action], action, idle(environment))
        ours, theirs = environment.step(actions), alone.step(actions[3:])
        forked = fork.step(actions[[3, 3, 0]])
        for name in ours.components:
            assert np.array_equal(ours.components[name][[3, 3, 0]], forked.components[name])
        assert np.array_equal(ours.observations[[3, 3, 0]], forked.observations)
        assert np.array_equal(ours.observations[3:], theirs.observations)
    fork.step_to(np.full(3, 40))
    assert (fork.fleet.replicas == 40).all()
    assert (environment.fleet.replicas != 40).all()


def test_every_action_of_the_space_does_what_it_says() -> None:
    cluster = Cluster(timeout=1.0)
    environment = InfrastructureEnv(cluster=cluster, actions=SPACE)
    environment.reset([3] * SPACE.total_actions)
    before = environment.fleet
    environment.step(np.arange(SPACE.total_actions))
    after = environment.fleet
    moves = {
        ConfigAction.DECREASE_BATCH_SIZE: ("batch", -1),
        ConfigAction.INCREASE_BATCH_SIZE: ("batch", 1),
        ConfigAction.DECREASE_TIMEOUT: ("timeout", -1),
        ConfigAction.INCREASE_TIMEOUT: ("timeout", 1),
        ConfigAction.DECREASE_CONCURRENCY: ("concurrency", -1),
        ConfigAction.INCREASE_CONCURRENCY: ("concurrency", 1),
        ConfigAction.NO_CHANGE: ("", 0),
    }
    least = 2  # one of each pool
    for index in range(SPACE.total_actions):
        action = SPACE.decode_action(index)
        wished = before.replicas[index] + int(action["scaling"])
        assert after.replicas[index] == np.clip(wished, least, cluster.max_replicas)
        assert after.weight[index] == pytest.approx(action["traffic_weight"] / 100)
        moved, by = moves[action["config"]]
        for name in ("batch", "timeout", "concurrency"):
            change = getattr(after, name)[index] - getattr(before, name)[index]
            assert change == (by if name == moved else 0)


def test_the_mask_forbids_what_would_pass_a_bound_and_never_to_do_nothing() -> None:
    environment = InfrastructureEnv(cluster=Cluster(max_replicas=6), actions=SPACE)
    environment.reset([0, 1])
    environment.step_to(np.array([2, 6]))
    mask = environment.action_mask()
    decoded = [SPACE.decode_action(index) for index in range(SPACE.total_actions)]
    scaling = np.array([int(action["scaling"]) for action in decoded])
    assert not mask[0, scaling < 0].any()
    assert not mask[1, scaling > 0].any()
    still = (scaling == 0) & np.array([action["config"] == ConfigAction.NO_CHANGE for action in decoded])
    assert mask[:, still].all()
    smaller = SPACE.encode_action(ScalingAction.MAINTAIN, ConfigAction.DECREASE_BATCH_SIZE, 20)
    assert environment.action_mask()[0, smaller]
    environment.step(np.array([smaller, smaller]))
    assert not environment.action_mask()[0, smaller]  # 1 is the smallest batch
    small = InfrastructureEnv(cluster=Cluster(max_replicas=6))
    small.reset([0, 1])
    small.step_to(np.array([1, 6]))
    assert small.action_mask().tolist() == [
        [factor >= 1 for factor in REPLICA_FACTORS],
        [factor <= 1 for factor in REPLICA_FACTORS],
    ]


def test_rules_speak_in_replicas_and_read_what_happened() -> None:
    environment = InfrastructureEnv(horizon=30)
    environment.reset([1, 2])
    to_come = environment.rates_to_come(100)
    assert to_come.shape == (30, 2)
    start = environment.observed(history=9)
    assert start.arrival_rates.shape == (1, 2)
    environment.step_to(start.ready + 7)
    for _ in range(4):
        view = environment.observed(history=3)
        assert (view.ready == start.ready).all() or view.step == 4
        assert (view.replicas == start.ready + 7).all()
        environment.step_to(view.replicas)
    view = environment.observed(history=3)
    assert np.array_equal(view.arrival_rates, to_come[2:5])
    assert (view.ready == start.ready + 7).all()
    assert view.utilization == pytest.approx(
        to_come[4] / ((start.ready + 7) * view.replica_capacity), rel=1e-6
    )
    assert view.replica_capacity == pytest.approx(environment.cluster.replica_capacity)
    assert view.cost_per_hour == pytest.approx(0.1 * view.replicas)
    for wished in (1, 9, 60, 1000):
        actions = environment.actions_for(np.full(2, wished))
        before = environment.fleet.replicas
        reached = environment.fork(np.arange(2))
        reached.step(actions)
        others = np.rint(np.array(REPLICA_FACTORS)[:, None] * before).clip(1, 60)
        off = np.abs(reached.fleet.replicas - wished)
        assert (off <= np.abs(others - wished).min(axis=0)).all()


def test_both_rewards_are_in_every_step_and_one_is_paid() -> None:
    seeds = list(range(16))
    money, document = InfrastructureEnv(), InfrastructureEnv(reward="document")
    money.reset(seeds)
    document.reset(seeds)
    for _ in range(10):
        ours, theirs = money.step(np.full(16, IDLE)), document.step(np.full(16, IDLE))
        assert np.array_equal(ours.rewards, ours.components["money"])
        assert np.array_equal(theirs.rewards, theirs.components["document"])
        assert set(ours.components) == set(money.spec.components)
        for name, part in ours.components.items():
            assert np.array_equal(part, theirs.components[name])
        outcome = money.outcome
        ideal = (
            0.1 * money._traces.mean(axis=0)[money._rows] / (0.7 * money.cluster.replica_capacity)
        )  # $/h of the episode's mean load at 70 %
        expected = -(outcome.cost_per_hour / ideal + 20 * np.maximum(outcome.late_share - 0.01, 0))
        assert ours.rewards == pytest.approx(expected)
    weights = {"cost": 0.3, "performance": 0.3, "reliability": 0.25, "efficiency": 0.15}
    total = sum(weight * ours.components[f"document_{name}"] for name, weight in weights.items())
    assert ours.components["document"] == pytest.approx(total)
    free = InfrastructureEnv(money=MoneyReward(late_weight=0.0))
    free.reset(seeds)
    assert (free.step(np.zeros(16, dtype=np.int64)).components["money_late"] == 0).all()


def test_ten_times_the_load_is_the_same_picture() -> None:
    """One feature, the logarithm of the replicas, is another; queues of more servers wait a little less."""
    small = InfrastructureEnv(GeneratedLoad(rates=(2000.0, 2000.0)), Cluster(max_replicas=100))
    large = InfrastructureEnv(GeneratedLoad(rates=(20000.0, 20000.0)), Cluster(max_replicas=1000))
    small.reset(range(20))
    large.reset(range(20))
    for _ in range(40):
        wished = np.ceil(small.observed().arrival_rates[-1] / 200).astype(np.int64)
        ours, theirs = small.step_to(wished).observations, large.step_to(10 * wished).observations
    size = 11  # its place
    assert np.median(theirs[:, size] - ours[:, size]) == pytest.approx(np.log(10) / 4, abs=1e-6)
    rest = np.delete(np.arange(ours.shape[1]), size)
    assert np.median(np.abs(ours - theirs)[:, rest], axis=0) == pytest.approx(0, abs=0.05)


def test_a_horizon_truncates_and_ends() -> None:
    environment = InfrastructureEnv(horizon=2)
    environment.reset([1])
    steps = [environment.step(np.array([IDLE])) for _ in range(2)]
    assert [step.truncated.item() for step in steps] == [False, True]
    assert not any(step.terminated.any() for step in steps)
    with pytest.raises(ConfigurationError, match="the episode is over after 2 steps: call reset"):
        environment.step(np.array([IDLE]))


def test_a_user_s_trace_drives_it_and_wrong_units_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "load.csv"
    lines = [f"{60 * minute},{1_000_000 + minute}" for minute in range(30)]
    file.write_text("\n".join(["seconds,requests_per_second", *lines]))
    environment = InfrastructureEnv(TraceLoad.from_csv(file), horizon=20)
    with caplog.at_level(logging.WARNING):
        environment.reset([0])
        environment.reset([1])
    warnings = [record.getMessage() for record in caplog.records]
    assert len([line for line in warnings if "are the rates in requests per second?" in line]) == 1
    assert environment.step(np.array([IDLE])).components["money_late"][0] < -15  # it is as bad as it looks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InfrastructureEnv(reward="cost"), "reward must be money or document, got 'cost'"),
        (
            lambda: InfrastructureEnv(actions=InfrastructureActionSpace([ScalingAction.SCALE_UP_SMALL])),
            "the action space must offer MAINTAIN and NO_CHANGE",
        ),
        (lambda: InfrastructureEnv(horizon=0), "horizon must be at least 1, got 0"),
        (lambda: MoneyReward(late_weight=-1), "late_weight must not be negative, got -1"),
        (lambda: MoneyReward(ideal_utilization=0), "ideal_utilization must be above 0, got 0"),
        (lambda: MoneyReward(allowed_late=1.5), "allowed_late must lie between 0 and 1, got 1.5"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_an_action_outside_the_space_is_refused() -> None:
    environment = InfrastructureEnv()
    environment.reset([0, 1])
    with pytest.raises(ConfigurationError, match="an action must be 0 to 9, got 10"):
        environment.step(np.array([3, 10]))
