"""The batched CartPole and Acrobot are Gymnasium's, and Gymnasium's own can be rows of a batch."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils import EzPickle

from stateset_agents.numeric.environments.base import check_environment
from stateset_agents.numeric.environments.classic import BatchedAcrobot, BatchedCartPole
from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch
from stateset_agents.types.errors import ConfigurationError

STEPS = 1_200


@pytest.mark.parametrize(
    ("make", "name", "tolerance"),
    [(BatchedCartPole, "CartPole-v1", 1e-6), (BatchedAcrobot, "Acrobot-v1", 1e-4)],
)
def test_every_random_step_is_gymnasium_s(make, name, tolerance):
    batched, single = make(), gymnasium.make(name)
    dice = np.random.default_rng(5)
    steps = seed = 0
    ends = set()
    while steps < STEPS:
        seed += 1
        observations = batched.reset([seed, seed])
        expected, _ = single.reset(seed=seed)
        assert np.array_equal(observations[0], expected)
        over = False
        while not over:
            action = dice.integers(batched.spec.num_actions)
            ours = batched.step(np.array([action, action]))
            expected, reward, terminated, truncated, _ = single.step(int(action))
            assert ours.observations[0] == pytest.approx(expected, abs=tolerance)
            assert ours.rewards.tolist() == [reward] * 2
            assert ours.terminated.tolist() == [terminated] * 2
            over = terminated or truncated
            assert bool(ours.terminated[0] | ours.truncated[0]) is over
            steps += 1
        ends.add("terminated" if terminated else "truncated")
    assert ends >= ({"terminated"} if name == "CartPole-v1" else {"truncated"})


def test_the_horizon_truncates():
    environment = BatchedCartPole(horizon=3)
    environment.reset([1, 2])
    cuts = [environment.step(np.array([0, 1])).truncated.tolist() for _ in range(3)]
    assert cuts == [[False, False], [False, False], [True, True]]


@pytest.mark.parametrize("make", [BatchedCartPole, BatchedAcrobot, lambda: GymnasiumBatch("CartPole-v1")])
def test_equal_seeds_are_equal_episodes_and_forks_follow(make):
    assert check_environment(make()) is True


def test_rows_of_gymnasium_are_the_batched_environment():
    ours, theirs = BatchedCartPole(), GymnasiumBatch("CartPole-v1")
    assert replace(ours.spec, action_names=()) == theirs.spec  # Gymnasium has no names for them
    seeds = [3, 3, 4]
    assert np.array_equal(ours.reset(seeds), theirs.reset(seeds))
    dice = np.random.default_rng(0)
    over = np.zeros(3, dtype=bool)
    for _ in range(60):
        actions = dice.integers(2, size=3)
        one, other = ours.step(actions), theirs.step(actions)
        assert one.observations[~over] == pytest.approx(other.observations[~over], abs=1e-6)
        assert np.array_equal(one.terminated[~over], other.terminated[~over])
        over |= one.terminated
    assert over.all()


class Odd(gymnasium.Env):
    """Three actions from 5 on, observations by name."""

    action_space = spaces.Discrete(3, start=5)
    observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (1, 3))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": np.zeros(2), "b": np.zeros((1, 3))}, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return {"a": np.full(2, action), "b": np.zeros((1, 3))}, 1.0, False, False, {}


def test_named_observations_and_actions_that_start_elsewhere():
    environment = GymnasiumBatch(Odd, horizon=2)
    assert environment.spec.observation_shape == {"a": (2,), "b": (1, 3)}
    environment.reset([0, 1])
    found = environment.step(np.array([0, 2]))
    assert found.observations["a"].tolist() == [[5, 5], [7, 7]]
    assert environment.step(np.array([0, 2])).truncated.all()


class Unfit(Odd):
    def __init__(self, **changes):
        vars(self).update(changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GymnasiumBatch("Pendulum-v1"),
            r"actions must be Discrete, got Box.*give GymnasiumBatch levels=3",
        ),
        (lambda: GymnasiumBatch("NoSuch-v1"), "gymnasium cannot make NoSuch-v1"),
        (lambda: GymnasiumBatch(Odd), "Odd has no limit of steps: give GymnasiumBatch a horizon"),
        (lambda: GymnasiumBatch(Odd, horizon=2, size=3), "size: options are for an id"),
        (
            lambda: GymnasiumBatch(lambda: Unfit(observation_space=spaces.Discrete(3)), horizon=2),
            "observations must be a Box or a Dict of Boxes",
        ),
    ],
)
def test_what_cannot_be_rows_is_refused_in_one_line(make, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


class Old(Odd):
    """Whose `step` and `reset` give what a test says."""

    begun, stepped = Odd().reset(), Odd().step(5)

    def reset(self, *, seed=None, options=None):
        return type(self).begun

    def step(self, action):
        return type(self).stepped


def test_a_reward_may_be_an_array_of_one_number(monkeypatch):
    monkeypatch.setattr(Old, "stepped", (Old.begun[0], np.array([0.5]), False, False, {}))
    environment = GymnasiumBatch(Old, horizon=2)
    environment.reset([0])
    assert environment.step(np.array([0])).rewards.tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("begun", Old.begun[0], r"Old: reset must return \(observation, info\) .*, got dict: wrap"),
        ("begun", (Old.begun[0], 1), r"Old: reset must return \(observation, info\) .*, got 2 values"),
        ("stepped", (Old.begun[0], 1.0, False, {}), "Old: step must return .*, got 4 values: .*shimmy"),
        ("stepped", (Old.begun[0], None, False, False, {}), "must give one number as its reward, got None"),
        (
            "stepped",
            (Old.begun[0], [1, 2], False, False, {}),
            "one number as its reward, got .1, 2.",
        ),
    ],
)
def test_what_is_not_gymnasium_s_way_is_said_in_one_line(monkeypatch, name, given, message):
    monkeypatch.setattr(Old, name, given)
    environment = GymnasiumBatch(Old, horizon=2)

    def play():
        environment.reset([0])
        environment.step(np.array([0]))

    with pytest.raises(ConfigurationError, match=message):
        play()


def test_an_environment_that_is_made_anew_by_a_copy_cannot_fork():
    class Pickled(Odd, EzPickle):  # as LunarLander and Atari are
        def __init__(self):
            EzPickle.__init__(self)

    environment = GymnasiumBatch(Pickled, horizon=2)
    environment.reset([0, 1])
    with pytest.raises(NotImplementedError):
        environment.fork(np.array([0]))
