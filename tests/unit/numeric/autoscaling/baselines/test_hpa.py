"""Kubernetes' autoscaler: the documentation's example, what is idle, what is remembered, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stateset_agents.numeric.autoscaling.baselines import (
    Hpa,
    HpaEpisode,
    InReplicas,
    exactly,
    in_actions,
    wished_replicas,
)
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.evaluation import evaluate_rule
from stateset_agents.types.errors import ConfigurationError


def wish(replicas, metric, target, starting=0):
    return int(wished_replicas(np.array([replicas]), np.array([starting]), np.array([metric]), target)[0])


def test_the_documentation_s_example():
    assert wish(50, 90, 75) == 60


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ((10, 0.77, 0.7), 10),  # 10 % off is tolerated
        ((10, 0.78, 0.7), 12),
        ((10, 0.63, 0.7), 10),
        ((10, 0.62, 0.7), 9),
        ((10, 0.0, 0.7), 0),  # limits come later
        ((10, 0.9, 0.6, 2), 12),  # 8 busy ones are 12 % too few once 2 idle ones are counted, not 15
        ((10, 0.9, 0.6, 3), 10),  # within the tolerance with the idle ones
        ((10, 0.9, 0.6, 5), 10),  # idle ones would make it go down: stays
        ((10, 0.3, 0.6, 4), 3),  # down: the ready ones alone are counted
    ],
)
def test_a_wish_counts_starting_replicas_as_idle_on_the_way_up(case, expected):
    assert wish(*case) == expected


def run(hpa, metrics, replicas, limits=(1, 100)):
    episode, found = HpaEpisode(hpa), []
    have = np.array([replicas])
    for number, metric in enumerate(metrics):
        have = episode.replicas(15.0 * number, have, np.array([0]), np.array([metric]), limits)
        found.append(int(have[0]))
    return found


def test_up_goes_at_once_to_double_or_four_more():
    assert run(Hpa(target=0.1), [1.0, 1.0, 1.0], 2) == [6, 12, 24]
    assert run(Hpa(target=0.1), [1.0, 1.0], 2, limits=(1, 8)) == [6, 8]


def test_down_goes_to_the_highest_wish_of_the_window_and_at_once_without_one():
    low = [0.35] * 25
    patient = run(Hpa(target=0.7), low, 10)
    assert patient == [10] * 20 + [5] * 5  # what was there counts as the first wish
    assert run(Hpa(target=0.7, window_seconds=60), low, 10)[:5] == [10, 10, 10, 10, 5]
    assert run(Hpa(target=0.7, window_seconds=0), low, 10)[0] == 5


def test_wishes_are_remembered_as_they_were_not_what_was_made_of_them():
    # 20 are wished for and 12 allowed; later 5 are, and the held 12 do not become a wish themselves
    found = run(Hpa(target=0.5, window_seconds=60), [1.0, 0.45, 0.2, 0.2, 0.2, 0.2], 10, limits=(1, 12))
    assert found == [12, 12, 12, 12, 12, 5]


def test_it_looks_every_fifteen_seconds_however_long_a_step_is():
    episode = HpaEpisode(Hpa(target=0.5, window_seconds=0))
    have, looked = np.array([8]), []
    for seconds in range(0, 40, 5):
        found = episode.replicas(float(seconds), have, np.array([0]), np.array([1.0]), (1, 100))
        looked.append(bool(found[0] != 8))
    assert looked == [True, False, False, True, False, False, True, False]


def test_an_autoscaler_is_named_by_its_settings():
    assert Hpa().name == "HPA 70 %, 300 s"


def test_the_target_is_held_in_the_simulator_by_exact_numbers_and_by_actions():
    environment, hpa = InfrastructureEnv(horizon=60), Hpa(target=0.6, window_seconds=60.0)
    exact = evaluate_rule(exactly(hpa), InReplicas(environment), range(6))
    used = environment.observed().utilization.mean()
    assert used == pytest.approx(0.6, abs=0.08)
    near = evaluate_rule(in_actions(hpa), environment, range(6))
    assert near.rollout.actions.max() < environment.spec.num_actions
    assert exact.rollout.actions.max() >= environment.spec.num_actions or exact.mean != near.mean
    assert near.mean == pytest.approx(exact.mean, rel=0.1)
    fork = InReplicas(environment)
    fork.reset([1, 2])
    assert fork.fork(np.array([1])).step(np.array([7])).rewards.shape == (1,)
    assert fork.action_mask() is None


def test_at_a_bound_the_nearest_action_is_to_stay():
    environment = InfrastructureEnv(horizon=4)
    environment.reset([0, 1])
    most, least = environment.cluster.max_replicas, environment.cluster.min_replicas
    for bound, wished in ((most, 2 * most), (least, 0)):
        environment.step_to(np.full(2, bound))
        actions = environment.actions_for(np.full(2, wished))
        assert environment.action_mask()[[0, 1], actions].all()
        assert environment.step(actions).rewards.shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0}, "target must lie above 0 and at most at 1, got 0"),
        ({"window_seconds": -1}, "window_seconds must not be negative, got -1"),
        ({"sync_seconds": 0}, "sync_seconds must be positive, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        Hpa(**change)


def test_without_a_metric_the_replicas_stay_as_kubernetes_leaves_them() -> None:
    episode = HpaEpisode(Hpa(target=0.5, window_seconds=60))
    replicas, none = np.array([10, 10, 4]), np.zeros(3, dtype=np.int64)

    def after(seconds: float, *metric: float) -> list[int]:
        return episode.replicas(seconds, replicas, none, np.array(metric), (1, 60)).tolist()

    assert after(0, 0.5, 0.5, 0.5) == [10, 10, 4]
    for seconds in (15, 30, 45):
        assert after(seconds, math.nan, 0.05, math.inf) == [10, 10, 4]
    assert after(75, 0.05, math.nan, math.nan) == [1, 10, 4]  # what was not known is no wish to stay
