"""Plans against every plan there is, against changed ones in the simulator, and what they may know."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scripts.rivals.autoscaling_planning import (
    Forecast,
    Mpc,
    clairvoyant,
    first_wish,
    static_replicas,
    whole_plan,
    worth,
)
from stateset_agents.numeric.autoscaling.baselines import Hpa, InReplicas, exactly
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.rewards import MoneyReward
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad
from stateset_agents.numeric.evaluation import evaluate_rule
from stateset_agents.types.errors import ConfigurationError


def earned(gains, wishes, price, startup, ready):
    """Of one replica: `wishes` says in which steps it is wanted."""
    total, left = 0.0, 0 if ready else None
    for gain, wanted in zip(gains, wishes, strict=True):
        if not wanted:
            left = None
            continue
        left = startup if left is None else left
        total += (gain if left == 0 else 0.0) - price
        left = max(left - 1, 0)
    return total


@pytest.mark.parametrize("startup", [0, 2, 3])
def test_a_plan_is_the_best_of_all_plans(startup):
    generator = np.random.default_rng(startup)
    for ready in (0, 1):
        gains = generator.uniform(0, 3, size=(9, 40, 1))
        plans = whole_plan(gains, np.ones(40), startup, np.full(40, ready))
        for row in range(40):
            found = earned(gains[:, row, 0], plans[:, row], 1.0, startup, ready)
            best = max(
                earned(gains[:, row, 0], wishes, 1.0, startup, ready)
                for wishes in itertools.product((0, 1), repeat=9)
            )
            assert found == pytest.approx(best)


def test_the_first_wish_keeps_what_starts_and_waits_with_what_is_not_needed_yet():
    price, startup = np.ones(1), 3
    gains = np.zeros((12, 1, 3))
    gains[:, :, 0] = 5.0  # the first is needed always, the second from step 5 on, the third never
    gains[5:, :, 1] = 5.0

    def first(gains, ready, starting=(0, 0)):
        return int(first_wish(gains, price, startup, np.array([ready]), np.array(starting)[:, None])[0])

    assert first(gains, 1) == 1
    assert first(gains[1:], 1) == 1  # on time is in three steps
    assert first(gains[2:], 1) == 2
    assert first(gains[2:], 3) == 2  # a second one that is there is kept: a new one would cost as much
    assert first(gains[3:], 1, (1, 0)) == 2  # it starts already
    assert first(gains[2:], 2, (0, 1)) == 2  # what starts for nothing is stopped


def test_a_replica_is_worth_the_lateness_it_takes_away():
    cluster, money = Cluster(max_replicas=12), MoneyReward()
    found = worth(cluster, money)
    load = 5 * cluster.replica_capacity
    gains = found(np.array([load]))[0]
    assert gains.shape == (12,)
    assert (np.diff(gains) <= 1e-9).all()
    assert gains[:5].min() > 1
    assert gains[-1] < 0.01
    assert gains.sum() == pytest.approx(20 * 0.99, rel=0.01)  # from all late to none
    blurred = worth(cluster, money, (-0.4, 0.0, 0.4))(np.array([load]))[0]
    assert blurred[6] > gains[6] + 0.5  # it may be needed
    assert blurred[3] < gains[3]


class Scripted:
    """The same load for every seed until a step, then the seed's own."""

    mean_rate = 2000.0

    def draw(self, seed, num_steps, step_seconds):
        rates = 2000 + 200 * np.sin(np.arange(num_steps) / 5)
        rates[40:] *= 1 + seed
        return rates


def test_all_but_the_clairvoyant_know_the_past_alone():
    environment = InfrastructureEnv(Scripted(), Cluster(max_replicas=24), horizon=60)
    mpc = Mpc.fit(InfrastructureEnv(horizon=60), range(20), start_ups=3)
    for rule, is_blind in ((mpc, True), (Hpa(), True), (static_replicas(9), True), (clairvoyant, False)):
        wishes = evaluate_rule(exactly(rule), InReplicas(environment), [0, 1]).rollout.actions
        assert np.array_equal(wishes[:39, 0], wishes[:39, 1]) is is_blind
        assert rule is not mpc or not np.array_equal(wishes[:, 0], wishes[:, 1])
    assert wishes[36, 1] > 1.6 * wishes[36, 0]  # the clairvoyant starts replicas in time


def test_no_rule_is_better_than_the_clairvoyant_and_a_plan_beats_autoscalers():
    small = InfrastructureEnv(GeneratedLoad(rates=(500, 1500)), Cluster(max_replicas=24), horizon=120)
    environment = InReplicas(small)
    seeds = range(10**6, 10**6 + 24)
    forecast = Mpc.fit(small, range(60)).forecast

    def played(rule):
        return evaluate_rule(exactly(rule), environment, seeds)

    hpa = Hpa(target=0.6, window_seconds=0.0)
    plans = [played(Mpc(forecast=forecast, caution=caution)) for caution in (0.0, 1.0, 2.0)]
    best, planned, scaled, constant = (
        found.mean / 120 for found in (played(clairvoyant), plans[1], played(hpa), played(static_replicas(8)))
    )
    assert best > -1
    assert best > planned + 0.2
    assert planned > scaled
    assert scaled > constant + 0.5
    late = [plan.components["money_late"] for plan in plans]
    assert late == sorted(late)  # the more cautious, the less is late


def test_a_forecast_learns_growth_and_does_not_depend_on_the_level():
    class Growing:
        mean_rate = 1.0

        def draw(self, seed, num_steps, step_seconds):
            return 100 * np.exp(0.01 * (1 + seed % 5) * np.arange(num_steps))

    forecast = Forecast.fit(Growing(), range(10), num_steps=30, step_seconds=15.0, ahead=4, lags=5)
    assert forecast.lags == 5
    assert forecast.errors.shape[0] == 4
    assert np.abs(forecast.errors).max() < 1e-6
    past = np.exp(0.02 * np.arange(9))[:, None] * [7.0, 7000.0]
    expected = past[-1] * np.exp(0.02 * np.arange(1, 5))[:, None]
    assert forecast(past) == pytest.approx(expected, rel=1e-6)
    assert forecast(past[:1]).shape == (4, 2)
    with pytest.raises(ConfigurationError, match=r"num_steps must be at least lags \+ ahead \(9\), got 8"):
        Forecast.fit(Growing(), [1], num_steps=8, step_seconds=15.0, ahead=4, lags=5)
    drawn = Forecast.fit(GeneratedLoad(), range(30), num_steps=200, step_seconds=15.0, ahead=8)
    assert (np.diff(drawn.errors[:, -1]) > 0).all()  # further ahead is less certain


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="number must be at least 1, got 0"):
        static_replicas(0)
    with pytest.raises(ConfigurationError, match="start_ups must be at least 2, got 1"):
        Mpc.fit(InfrastructureEnv(), range(2), start_ups=1)
    forecast = Forecast.fit(GeneratedLoad(), range(2), num_steps=60, step_seconds=15.0, ahead=4)
    with pytest.raises(ConfigurationError, match="caution must not be negative, got -1"):
        Mpc(forecast=forecast, caution=-1)
