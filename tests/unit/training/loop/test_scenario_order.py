"""The order of scenarios: a function of seed and place."""

from __future__ import annotations

import random

import pytest

from stateset_agents.training.loop.curriculum.orders import ScenarioOrder
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

SCENARIOS = [Scenario(id=str(number)) for number in range(7)]


def ids(scenarios):
    return [scenario.id for scenario in scenarios]


def test_every_scenario_comes_once_per_epoch():
    order = ScenarioOrder(SCENARIOS, seed=0)
    for epoch in range(3):
        assert sorted(ids(order.take(7 * epoch, 7))) == list("0123456")


def test_epochs_and_seeds_have_their_own_order():
    order = ScenarioOrder(SCENARIOS, seed=0)
    assert ids(order.take(0, 7)) != ids(order.take(7, 7))
    assert ids(order.take(0, 7)) != ids(ScenarioOrder(SCENARIOS, seed=1).take(0, 7))


def test_a_resumed_run_plays_what_is_left():
    whole = ScenarioOrder(SCENARIOS, seed=3).take(0, 20)
    resumed = ScenarioOrder(SCENARIOS, seed=3)
    assert ids(resumed.take(12, 8)) == ids(whole[12:])
    assert ids(resumed.take(2, 5)) == ids(whole[2:7])  # and back again


def test_each_epoch_is_shuffled_once_though_steps_look_back_over_its_edge(monkeypatch):
    shuffled = []

    class Counting(random.Random):
        def shuffle(self, x):
            shuffled.append(len(x))
            super().shuffle(x)

    monkeypatch.setattr(random, "Random", Counting)
    order = ScenarioOrder(SCENARIOS, seed=0)
    for place in range(28):  # four epochs
        for earlier in range(max(0, place - 5), place + 1):
            order.at(earlier)
    assert len(shuffled) == 4


def test_the_fingerprint_is_of_the_scenarios_content():
    same = ScenarioOrder([Scenario(id=str(number)) for number in range(7)], seed=9)
    other = ScenarioOrder([*SCENARIOS[:-1], Scenario(id="6", context={"order": 1})], seed=0)
    own = ScenarioOrder(SCENARIOS, seed=0).fingerprint()
    assert own == same.fingerprint() != other.fingerprint()


def test_an_environment_without_train_scenarios_is_refused():
    with pytest.raises(ConfigurationError, match="no train scenario"):
        ScenarioOrder([], seed=0)
