"""Several tasks as one environment: rows as in their own task, scales, masks, forks, and what scores mean."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from control_toys import Signals

from stateset_agents.numeric.environments.base import check_environment
from stateset_agents.numeric.environments.classic import BatchedAcrobot, BatchedCartPole
from stateset_agents.numeric.environments.suites import SUITES, Task, TaskMix, make_suite, mix
from stateset_agents.numeric.experiment import ControlFile, make_environment
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.rollout import action_keys, collect
from stateset_agents.numeric.studies.partitioned import TaskPolicy
from stateset_agents.types.errors import ConfigurationError


def test_a_row_plays_its_own_task_with_its_own_seed():
    environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    seeds = [4, 7, 6, 9]  # even ones balance a pole
    start = environment.reset(seeds)
    assert start.shape == (4, 4 + 6 + 2)
    assert start[:, 10:].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]]
    pole, acrobot = BatchedCartPole(), BatchedAcrobot()
    assert np.array_equal(start[[0, 2], :4], pole.reset([4, 6]))
    assert np.array_equal(start[[1, 3], 4:10], acrobot.reset([7, 9]))
    assert not start[[1, 3], :4].any()
    ours = environment.step(np.array([1, 2, 0, 0]))
    theirs = acrobot.step(np.array([2, 0]))
    assert np.array_equal(ours.observations[[1, 3], 4:10], theirs.observations)
    assert ours.rewards.tolist() == pytest.approx([1, -0.01, 1, -0.01])


def test_a_pole_has_two_of_three_actions():
    environment = mix({"cart_pole": 1.0, "acrobot": 1.0})
    environment.reset([0, 1])
    assert environment.action_mask().tolist() == [[True, True, False], [True, True, True]]
    rollout = collect(
        MlpPolicy(environment.spec), environment, [0, 1, 2], group_size=4, keys=action_keys(0, 0, 3, 4)
    )
    assert rollout.actions[:, rollout.tasks.ids == 0][rollout.alive[:, rollout.tasks.ids == 0]].max() == 1
    assert rollout.tasks.ids.tolist() == [0] * 4 + [1] * 4 + [0] * 4


def test_a_mix_passes_the_checks_of_every_environment_and_forks():
    assert check_environment(mix({"cart_pole": 0.01, "acrobot": 1.0}))
    environment = TaskMix(
        [
            Task(name="own", environment=Signals(masked=True), random=0.0, solved=4.5),
            Task(name="pole", environment=BatchedCartPole(), random=22.0, solved=500.0),
        ]
    )
    assert check_environment(environment)
    environment.reset([0, 1, 2])
    assert environment.action_mask()[0].tolist() == [True, True, True, False]  # the task's own mask
    copy = environment.fork(np.array([2, 1, 1]))
    assert copy.task_rows().ids.tolist() == [0, 1, 1]


def test_scores_take_the_scale_out_again():
    environment = mix({"cart_pole": 0.01, "acrobot": 1.0})
    environment.reset([0, 1, 2])
    scores = environment.task_rows().scores(np.array([5.0, -80.0, 0.22]))
    assert scores.tolist() == pytest.approx([1, 1, 0])


def test_starts_of_one_task():
    environment = mix({"cart_pole": 1.0, "acrobot": 1.0})
    seeds = environment.seeds_of(1, [10, 11, 12])
    assert seeds == [11, 11, 13]
    environment.reset(seeds)
    assert environment.task_rows().ids.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", [name for name in SUITES if name != "lunar_lander"])
def test_every_suite_is_an_environment_with_references(name):
    suite = make_suite(name)
    check_environment(suite.environment)
    assert all(suite.references[task][1] > suite.references[task][0] for task in suite.tasks)


def test_what_cannot_be_mixed_is_said():
    pole = Task(name="pole", environment=BatchedCartPole(), random=22.0, solved=500.0)
    with pytest.raises(ConfigurationError, match="at least two tasks, got 1"):
        TaskMix([pole])
    with pytest.raises(ConfigurationError, match="scale must be positive, got 0"):
        mix({"cart_pole": 0.0, "acrobot": 1.0})
    with pytest.raises(ConfigurationError, match="solved must be above random"):
        TaskMix([pole, Task(name="worse", environment=BatchedCartPole(), random=5.0, solved=5.0)])
    with pytest.raises(ConfigurationError, match="did you mean 'cart_pole'"):
        mix({"cartpole": 1.0, "acrobot": 1.0})
    with pytest.raises(ConfigurationError, match="did you mean 'curriculum'"):
        make_suite("curiculum")


def test_lunar_lander_is_a_suite_and_without_box2d_the_error_says_what_to_install():
    if find_spec("Box2D") is None:
        with pytest.raises(ConfigurationError, match="Box2D is not installed"):
            make_suite("lunar_lander")
    else:
        assert make_suite("lunar_lander").environment.spec.name == "LunarLander-v3"


def test_a_file_mixes_tasks_and_chooses_the_critic():
    spec = {"name": "mix", "scales": {"cart_pole": 1.0, "acrobot": 0.01}}
    environment = make_environment(spec)
    by_critic = {"advantage_estimator": "gae", "group_size": 1}
    file = ControlFile(environment=spec, training=by_critic)
    assert isinstance(file.new_policy(environment), TaskPolicy)
    plain = ControlFile(environment=spec, training=by_critic, policy={"value_normalization": "none"})
    assert isinstance(plain.new_policy(environment), MlpPolicy)
    without = ControlFile(environment=spec, policy={"value_normalization": "task"})
    with pytest.raises(ConfigurationError, match="advantage_estimator to gae"):
        without.new_policy(environment)
    with pytest.raises(ConfigurationError, match="did you mean 'cart_pole'"):
        make_environment({"name": "mix", "scales": {"cartpole": 1.0, "acrobot": 1.0}})
