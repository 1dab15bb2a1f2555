"""A temperature that cools while the reward is at its target."""

from __future__ import annotations

import pytest

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.step import TemperatureScheduler, next_temperature
from stateset_agents.types.errors import ConfigurationError


def test_at_the_target_it_decays_below_it_it_warms():
    scheduler = TemperatureScheduler()
    assert scheduler.step(0.7) == pytest.approx(0.995)
    assert scheduler.step(0.9) == pytest.approx(0.995**2)
    assert scheduler.step(0.69) == pytest.approx(0.995**2 * 1.01)
    assert scheduler.step(0.5, target_reward=0.5) == pytest.approx(0.995**3 * 1.01)


def test_it_stays_between_minimum_and_initial():
    scheduler = TemperatureScheduler(0.8, min_temp=0.6, decay_rate=0.5)
    assert [scheduler.step(reward) for reward in (0.0, 1.0, 1.0)] == [0.8, 0.6, 0.6]
    for _ in range(100):
        scheduler.step(0.0)
    assert scheduler.current_temp == 0.8


def test_two_hundred_good_steps_from_1_reach_about_a_third():
    scheduler = TemperatureScheduler()
    for _ in range(200):
        scheduler.step(1.0)
    assert scheduler.current_temp == pytest.approx(0.995**200)  # .367


@pytest.mark.parametrize(
    ("initial", "options", "said"),
    [
        (0.2, {}, "at most the initial 0.2, got 0.3"),
        (1.0, {"min_temp": 0.0}, "must be above 0"),
        (1.0, {"decay_rate": 1.1}, "at most 1, got 1.1"),
        (1.0, {"decay_rate": 0.0}, "decay_rate must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(initial, options, said):
    with pytest.raises(ConfigurationError, match=said):
        TemperatureScheduler(initial, **options)


def test_without_a_schedule_or_a_reward_nothing_moves():
    assert next_temperature(TrainingConfig(), 0.9, 1.0) == 0.9
    adaptive = TrainingConfig(temperature_schedule="adaptive")
    assert next_temperature(adaptive, 0.9, None) == 0.9
    assert next_temperature(adaptive, 0.9, 1.0) == pytest.approx(0.9 * 0.995)


def test_a_minimum_above_the_temperature_is_refused():
    with pytest.raises(ConfigurationError, match=r"temperature_min 0\.3 exceeds temperature 0\.2"):
        TrainingConfig(temperature_schedule="adaptive", temperature=0.2)
