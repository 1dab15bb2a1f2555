"""Credit by estimator, whole groups in minibatches, and each setting's part in an update."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.algorithms.group_arrays import returns_to_go_array
from stateset_agents.numeric.credit import Values, credit
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.rollout import action_keys, collect, collect_branches
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.update import minibatches, step_minibatches, update
from stateset_agents.runs.optimizer import Optimization


def played(environment=None, *, groups=4, size=3, policy=None):
    environment = environment or Signals(stop=2)
    policy = policy or MlpPolicy(environment.spec, hidden=(8,), critic=True)
    keys = action_keys(0, 0, groups, size)
    return collect(policy, environment, list(range(groups)), group_size=size, keys=keys)


def with_numbers(rewards, alive, **changes):
    """A rollout of one group with these rewards [T, G]."""
    rollout = played(groups=1, size=len(rewards[0]))
    alive = np.array(alive, dtype=bool)
    return dataclasses.replace(
        rollout,
        rewards=np.array(rewards, dtype=float),
        alive=alive,
        failed=~alive.any(axis=0),
        terminated=alive.any(axis=0),
        truncated=np.zeros(alive.shape[1], dtype=bool),
        **changes,
    )


def test_credit_by_hand():
    rollout = with_numbers([[1, 0, 5], [2, 9, 5]], [[1, 1, 0], [1, 0, 0]])  # the third member failed
    found = credit(rollout, "step_group", gamma=0.5, scaling="none")
    assert found.advantages.tolist() == [[2, -2, 0], [2, 0, 0]]
    assert found.trained.tolist() == [[True, True, False], [True, False, False]]
    assert found.metrics["credit/std"] == pytest.approx(np.std([2, -2, 2]))
    calm = credit(rollout, "step_group", gamma=0.5, scaling="none", lone_steps="zero")
    assert calm.advantages.tolist() == [[2, -2, 0], [0, 0, 0]]
    scaled = credit(rollout, "step_group", gamma=0.5, scaling="batch")
    assert scaled.advantages == pytest.approx(found.advantages / np.std([2, -2, 2]))
    whole = credit(rollout, "group", gamma=0.5, scaling="population")
    assert whole.advantages == pytest.approx(np.array([[1, -1, 0], [1, 0, 0]]))
    values = Values(np.array([[1.0, 0, 0], [1.0, 0, 0]]), np.zeros(3))
    single = credit(rollout, "gae", gamma=1.0, gae_lambda=0.0, scaling="none", values=values)
    assert single.advantages.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert single.returns.tolist() == [[2, 0, 0], [2, 0, 0]]
    centred = credit(rollout, "gae", gamma=1.0, gae_lambda=0.0, scaling="batch", values=values)
    assert centred.advantages[found.trained].mean() == pytest.approx(0)


def test_a_group_with_one_member_takes_no_part_unless_a_critic_judges():
    rollout = with_numbers([[1, 5], [2, 5]], [[1, 0], [1, 0]])
    assert not credit(rollout, "step_group", gamma=1.0).trained.any()
    values = Values(np.zeros((2, 2)), np.zeros(2))
    assert credit(rollout, "gae", gamma=1.0, values=values).trained.sum() == 2


def test_branches_judge_an_action_by_other_ways_on():
    environment = Signals(horizon=4)
    policy = MlpPolicy(environment.spec)
    rollout = collect_branches(
        policy,
        environment,
        [1],
        group_size=2,
        keys=action_keys(0, 0, 1, 2),
        gamma=1.0,
        num_branches=500,
        every=1,
    )
    found = credit(rollout, "branch", gamma=1.0, scaling="none").advantages
    named = rollout.components["named"]
    assert found[1:] == pytest.approx(named[1:] - 1 / 3, abs=0.12)  # better or worse than chance, and no more


def test_minibatches_are_of_whole_groups_and_hold_every_step_once():
    groups = [slice(0, 5), slice(5, 12), slice(12, 13), slice(13, 20)]
    parts = list(minibatches(groups, 8, np.random.default_rng(0)))
    assert sorted(torch.cat(parts).tolist()) == list(range(20))
    assert all(len(part) >= 8 for part in parts)
    for part in parts:
        for group in groups:
            assert len(set(part.tolist()) & set(range(group.start, group.stop))) in (
                0,
                group.stop - group.start,
            )
    assert [len(part) for part in minibatches(groups, 100, np.random.default_rng(0))] == [20]
    orders = {
        tuple(torch.cat(list(minibatches(groups, 1, np.random.default_rng(i)))).tolist()) for i in range(9)
    }
    assert len(orders) > 3


def test_where_nobody_is_compared_minibatches_are_of_single_steps():
    parts = list(step_minibatches(20, 6, np.random.default_rng(0)))
    assert [len(part) for part in parts] == [7, 7, 6]
    assert sorted(torch.cat(parts).tolist()) == list(range(20))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)  # each episode's steps in a row
    assert [len(part) for part in step_minibatches(5, 6, np.random.default_rng(0))] == [5]
    assert (
        len(
            {
                tuple(torch.cat(list(step_minibatches(20, 6, np.random.default_rng(i)))).tolist())
                for i in range(9)
            }
        )
        == 9
    )


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 4),
        ({"loss_type": "grpo"}, 2),  # its loss is a mean over episodes, which stay whole
        ({"group_size": 2}, 4),
        ({"group_size": 2, "advantage_estimator": "step_group"}, 1),
    ],
)
def test_an_episode_is_not_a_minibatch_by_itself(changes, number):
    """Two episodes of six steps, in minibatches of three."""
    config = ControlConfig(
        **{"advantage_estimator": "gae", "group_size": 1, "minibatch_size": 3, "num_iterations": 1, **changes}
    )
    policy = MlpPolicy(Signals().spec, hidden=(8,), critic=True)
    size = config.group_size
    rollout = played(Signals(), groups=2 // size, size=size, policy=policy)
    assert rollout.lengths.tolist() == [6, 6]
    result = update(policy, Optimization(policy, config, num_updates=9), rollout, config)
    assert result.metrics["optimizer/steps"] == number


def learned(rollout=None, *, reference=None, **settings):
    """The weights after an update from one rollout."""
    policy = MlpPolicy(Signals().spec, hidden=(8,), critic=True)
    config = ControlConfig(**{"minibatch_size": 8, "total_steps": 1000, "learning_rate": 0.01, **settings})
    optimization = Optimization(policy, config, num_updates=config.total_steps)
    rollout = rollout or played()
    result = update(policy, optimization, rollout, config, reference=reference, position=0)
    assert result.failure is None
    return torch.cat([value.detach().flatten() for value in policy.parameters()]), result.metrics


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.5},
        {"advantage_normalization": "none"},
        {"advantage_estimator": "group"},
        {"advantage_estimator": "gae"},
        {"num_iterations": 2},
        {"minibatch_size": 30},
        {"loss_type": "grpo"},
        {"clip_ratio": 0.01},
        {"clip_ratio_high": 0.01},
        {"entropy_coef": 0.5},
        {"learning_rate": 0.02},
        {"lr_scheduler_type": "constant", "warmup_ratio": 0.5},
        {"max_grad_norm": 1e-3},
        {"weight_decay": 0.9},
        {"seed": 1},
    ],
)
def test_each_setting_changes_an_update(change):
    assert not torch.equal(learned(**change)[0], learned()[0])
    assert torch.equal(learned()[0], learned()[0])


@pytest.mark.parametrize("change", [{"gae_lambda": 0.1}, {"value_coef": 0.0}, {"value_clip": 1e-3}])
def test_each_setting_of_a_critic_changes_an_update(change):
    gae = {"advantage_estimator": "gae"}
    assert not torch.equal(learned(**gae, **change)[0], learned(**gae)[0])


def test_settings_that_act_on_large_ratios_and_on_the_reference():
    rollout = played()
    far = dataclasses.replace(rollout, logprobs=rollout.logprobs - 3)  # the policy has moved by e^3
    assert not torch.equal(learned(far, dual_clip=2.0)[0], learned(far)[0])
    reference = MlpPolicy(Signals().spec, hidden=(8,), seed=5)
    for change in ({}, {"kl_estimator": "k1"}):
        weights, metrics = learned(rollout, reference=reference, beta=1.0, **change)
        assert metrics["kl/reference"] > 0
        assert not torch.equal(weights, learned(rollout)[0])
    first, _ = learned(rollout, reference=reference, beta=1.0)
    second, _ = learned(rollout, reference=reference, beta=1.0, kl_estimator="k1")
    assert not torch.equal(first, second)


def test_the_learning_rate_falls_with_the_steps():
    policy = MlpPolicy(Signals().spec)
    config = ControlConfig(total_steps=1000, learning_rate=0.01)
    optimization = Optimization(policy, config, num_updates=1000)
    rates = [
        update(policy, optimization, played(), config, position=position).metrics["optimizer/learning_rate"]
        for position in (0, 250, 900)
    ]
    assert rates == pytest.approx([0.01, 0.0075, 0.001])


def test_metrics_are_of_the_last_pass_and_the_ratio_begins_at_one():
    _, metrics = learned()
    assert metrics["policy/first_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert 4 <= metrics["optimizer/steps"] <= 4 * 4  # passes times groups
    assert 0 < metrics["policy/entropy"] < np.log(3)
    assert {"loss/policy", "kl/old", "policy/clip_fraction_high", "optimizer/grad_norm"} <= metrics.keys()


@pytest.mark.long
def test_the_critic_learns_what_a_state_is_worth():
    environment = BatchedCartPole()
    policy = MlpPolicy(environment.spec, critic=True)
    rollout = played(environment, groups=16, size=4, policy=policy)
    config = ControlConfig(
        advantage_estimator="gae", gae_lambda=1.0, total_steps=10**6, num_iterations=20, minibatch_size=256
    )
    optimization = Optimization(policy, config, num_updates=config.total_steps)
    losses = [
        update(policy, optimization, rollout, config, position=0).metrics["loss/value"] for _ in range(6)
    ]
    returns = returns_to_go_array(rollout.rewards, rollout.alive, gamma=config.gamma)[rollout.alive]
    assert losses[-1] < losses[0]
    of_one_value = returns.var() / 2  # for all states
    assert losses[-1] < 0.6 * of_one_value  # the rest is the actions' chance
