"""PPO by parts: one part is PPO bit for bit, tasks' scales change nothing, and what the critic remembers."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.grouping.partitioner import GROUP_STRATEGIES, Partitioner
from stateset_agents.numeric.credit import Values, credit
from stateset_agents.numeric.environments.suites import Task, TaskMix, mix
from stateset_agents.numeric.policy import MlpPolicy, ScaledCritic, ValuedPolicy
from stateset_agents.numeric.rollout import action_keys, collect
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import GRPO, TaskPolicy, policy_for
from stateset_agents.numeric.update import StepBatch, minibatch_loss, update
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError


def two_signals(scale: float = 1.0) -> TaskMix:
    """Two tasks of one kind, of which the second pays `scale` for everything."""
    return TaskMix(
        [
            Task(name="one", environment=Signals(), random=-2.0, solved=4.5),
            Task(name="two", environment=Signals(stop=4), random=-2.0, solved=4.5, scale=scale),
        ]
    )


def played(environment, *, rows=24):
    policy = MlpPolicy(environment.spec, critic=True)
    return collect(policy, environment, list(range(rows)), group_size=1, keys=action_keys(0, 0, rows, 1))


def values_of(rollout):
    draw = np.random.default_rng(0)
    return Values(draw.normal(size=rollout.rewards.shape), draw.normal(size=len(rollout.seeds)))


def learned(rollout, environment, **settings):
    policy = MlpPolicy(environment.spec, hidden=(16,), critic=True)
    chosen = {"advantage_estimator": "gae", "group_size": 1, "minibatch_size": 32, "progress": False}
    config = ControlConfig(**{**chosen, **settings})
    optimization = Optimization(policy, config, num_updates=config.total_steps)
    result = update(policy, optimization, rollout, config)
    return policy.state_dict(), result


def test_one_part_is_ppo_bit_for_bit():
    environment = Signals()
    rollout = played(environment)
    plain, _ = learned(rollout, environment)
    for strategy in ("auto", "difficulty", "online"):
        parts, result = learned(rollout, environment, group_strategy=strategy, n_groups=1)
        assert all(torch.equal(plain[name], parts[name]) for name in plain), strategy
        assert result.metrics["partition/parts"] == 1
    divided, _ = learned(rollout, environment, group_strategy="difficulty", n_groups=3)
    assert not all(torch.equal(plain[name], divided[name]) for name in plain)


@pytest.mark.parametrize("strategy", GROUP_STRATEGIES)
def test_every_strategy_learns_from_a_rollout(strategy):
    environment = two_signals()
    _, result = learned(played(environment), environment, group_strategy=strategy, n_groups=2)
    assert result.failure is None
    assert 0 <= result.metrics["partition/sign_flips"] < 0.5
    assert result.metrics["absolute_share/one"] + result.metrics["absolute_share/two"] == pytest.approx(1)


def advantages(scale, strategy):
    """Of rollouts that differ in one task's scale alone, with a critic that follows it."""
    environment = two_signals(scale)
    rollout = played(environment)
    values = values_of(rollout)
    of_task = np.where(rollout.tasks.ids == 1, scale, 1.0)
    values = dataclasses.replace(values, before=values.before * of_task, final=values.final * of_task)
    partitioner = Partitioner(strategy)
    return credit(rollout, "gae", gamma=0.99, values=values, partitioner=partitioner)


def test_by_task_a_tasks_scale_changes_no_advantage_and_without_it_drowns():
    same, scaled = advantages(1.0, "task").advantages, advantages(100.0, "task").advantages
    assert np.abs(same - scaled).max() < 1e-5
    drowned = advantages(100.0, "none").metrics
    assert drowned["absolute_share/one"] < 0.1
    assert drowned["partition/sign_flips"] > 0.05
    assert advantages(100.0, "task").metrics["partition/sign_flips"] == 0


def test_weights_enter_the_loss():
    environment = two_signals()
    rollout = played(environment)
    found = {}
    for method in ("balanced", "performance"):
        partitioner = Partitioner("task", weight_method=method)
        result = credit(rollout, "gae", gamma=0.99, values=values_of(rollout), partitioner=partitioner)
        found[method] = result
    assert found["balanced"].metrics["part_weight/one"] == 0.5
    weights = found["performance"].metrics
    assert weights["part_weight/one"] + weights["part_weight/two"] == pytest.approx(1)
    # the task that is further from solved counts more: each step by the ratio of the weights
    own = rollout.alive & (rollout.tasks.ids == 0)
    ratio = found["performance"].advantages[own] / found["balanced"].advantages[own]
    assert ratio == pytest.approx(np.full(own.sum(), weights["part_weight/one"] / 0.5))
    scores = rollout.tasks.scores(rollout.returns)
    lags = scores[rollout.tasks.ids == 0].mean() < scores[rollout.tasks.ids == 1].mean()
    assert (weights["part_weight/one"] > 0.5) == lags


def test_a_balanced_part_counts_the_same_whatever_its_length():
    rollout = played(two_signals())  # the second task ends after 4 of 6 steps
    assert rollout.lengths[rollout.tasks.ids == 0].mean() > rollout.lengths[rollout.tasks.ids == 1].mean()
    result = credit(
        rollout,
        "gae",
        gamma=0.99,
        values=values_of(rollout),
        partitioner=Partitioner("task"),
    )
    squares = [
        np.abs(result.advantages[:, rollout.tasks.ids == task][rollout.alive[:, rollout.tasks.ids == task]])
        for task in (0, 1)
    ]
    roots = [np.sqrt(np.mean(part**2)) * len(part) for part in squares]
    assert roots[0] == pytest.approx(roots[1], rel=1e-5)  # deviation 1, times steps, times weight by steps


def test_failed_rows_move_no_boundary():
    rollout = played(Signals())
    failed = np.zeros(24, dtype=bool)
    failed[:3] = True
    rewards = rollout.rewards.copy()
    rewards[:, :3] = 1e9
    broken = dataclasses.replace(
        rollout, failed=failed, alive=rollout.alive & ~failed, terminated=~failed, rewards=rewards
    )
    partitioner = Partitioner("difficulty")
    result = credit(broken, "gae", gamma=0.99, values=values_of(rollout), partitioner=partitioner)
    assert not result.advantages[:, :3].any()
    assert sum(result.metrics[f"part_size/{part}"] for part in range(4)) == 21


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_strategy": "task", "advantage_estimator": "group"}, "other than group"),
        (
            {"group_strategy": "task", "advantage_normalization": "none"},
            "needs advantage_normalization batch",
        ),
        ({"group_weight_method": "adaptive"}, "set group_strategy"),
        ({"group_strategy": "auto", "group_weight_method": "adaptive"}, "take group_strategy online"),
        ({"group_strategy": "tasks"}, "did you mean 'task'"),
        ({"group_strategy": "auto", "n_groups": 9}, "less than or equal to 8"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ControlConfig(**settings)


# ------------------------------------------------------------------------------------------ critic


def test_statistics_move_and_values_stay():
    environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    policy = policy_for(environment)
    assert isinstance(policy, ValuedPolicy)
    assert isinstance(policy, ScaledCritic)
    observations = torch.from_numpy(environment.reset(list(range(40))))
    for _ in range(3):
        before = policy.values(observations)
        returns = torch.where(observations[:, -2] == 1, 100.0, -3.0) + torch.arange(40.0)
        policy.follow_returns(observations, returns)
        assert (policy.values(observations) - before).abs().max() < 1e-3
    scales = policy.value_scales(observations)
    own = returns[observations[:, -2] == 1]
    assert scales[0].item() == pytest.approx(own.std(unbiased=False).item(), rel=1e-4)
    assert policy.return_mean.tolist() == pytest.approx([119.0, 17.0])


@pytest.mark.parametrize(("value_clip", "error"), [(0.05, 1.0 + 1.047 - 0.05), (5.0, 1.0), (None, 1.0)])
def test_a_value_clip_is_in_deviations_of_the_task_s_returns(value_clip, error):
    """Returns of deviation 100, and values that moved by 104.7, by 1.047 of them; 100 are left to go."""
    environment = two_signals()
    policy = policy_for(environment)
    observations = torch.from_numpy(environment.reset([0, 2]))  # both of the first task
    policy.follow_returns(observations, torch.tensor([-100.0, 100.0]))
    values = policy.values(observations).detach()
    batch = StepBatch(
        observations=observations,
        masks=None,
        actions=torch.tensor([0, 1]),
        old_logprobs=torch.log_softmax(policy(observations), dim=-1)[:, 0].detach(),
        advantages=torch.zeros(2),
        trajectory_ids=torch.arange(2),
        lengths=torch.ones(2, dtype=torch.int64),
        old_values=values - 104.7,
        returns=values + 100.0,
        max_length=1,
    )
    _, metrics = minibatch_loss(policy, batch, ControlConfig(value_clip=value_clip))
    assert metrics.to_dict()["loss/value"] == pytest.approx(error**2 / 2, rel=1e-4)


def test_a_task_that_was_not_met_keeps_its_statistics():
    environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    policy = policy_for(environment)
    observations = torch.from_numpy(environment.reset([0, 2]))
    policy.follow_returns(observations, torch.tensor([3.0, 5.0]))
    assert policy.return_mean.tolist() == [4.0, 0.0]
    assert policy.updates.tolist() == [1, 0]


def test_the_actor_of_both_policies_is_the_same():
    environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    observations = torch.from_numpy(environment.reset([0, 1]))
    plain, scaled = policy_for(environment, value_normalization="none"), policy_for(environment)
    assert torch.equal(plain(observations), scaled(observations))


def test_a_critic_by_task_needs_tasks():
    with pytest.raises(ConfigurationError, match="make a TaskMix"):
        policy_for(Signals(), value_normalization="task")
    assert isinstance(policy_for(Signals()), MlpPolicy)
    with pytest.raises(ConfigurationError, match="indicator of 3 tasks"):
        TaskPolicy(Signals().spec, 3)


# ------------------------------------------------------------------------------------------ training


@pytest.mark.long
def test_a_training_by_parts_learns_both_tasks_and_resumes_with_the_same_bits(tmp_path):
    settings = {
        "total_steps": 2400,
        "num_groups": 64,
        "steps_per_rollout": 400,
        "minibatch_size": 200,
        "learning_rate": 1e-2,
        "progress": False,
    }

    async def train(folder, **others):
        environment = two_signals(0.01)
        grpo = GRPO(
            "online",
            2,
            "adaptive",
            environment=environment,
            output_dir=str(folder),
            **{**settings, "lr_scheduler_type": "constant", **others},
        )
        async with grpo:
            before = await grpo.evaluate(range(60))
            await grpo.train()
            after = await grpo.evaluate(range(60))
        return grpo, before, after

    async def both():
        whole, before, after = await train(tmp_path / "whole")
        half, _, _ = await train(tmp_path / "half", total_steps=1200)
        rest = GRPO(
            "online",
            2,
            "adaptive",
            environment=two_signals(0.01),
            output_dir=str(tmp_path),
            run=half.trainer.run,
            **{**settings, "lr_scheduler_type": "constant"},
        )
        async with rest:
            await rest.trainer.load_checkpoint()
            await rest.train()
        return whole, rest, before, after

    whole, rest, before, after = asyncio.run(both())
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, rest.policy.state_dict()[name]), name
    scores = after.rollout.tasks.scores(after.rollout.returns)
    for task in (0, 1):  # the second one's rewards are a hundredth, and it ends after 4 steps at odd seeds
        own = after.rollout.tasks.ids == task
        old = before.rollout.tasks.scores(before.rollout.returns)[own].mean()
        assert scores[own].mean() > old + 0.1
    metrics = list(RunLog(whole.trainer.run).metrics())
    assert {"score/one", "part_weight/0"} <= metrics[-1].values.keys()


def test_a_loop_of_ones_own_updates_by_parts():
    environment = two_signals(0.01)
    grpo = GRPO("task", environment=environment, total_steps=2000, minibatch_size=64, progress=False)
    before = {name: value.clone() for name, value in grpo.policy.state_dict().items()}
    result = grpo.update(played(environment))
    assert result.metrics["part_weight/one"] == 0.5
    assert any(not torch.equal(value, before[name]) for name, value in grpo.policy.state_dict().items())


@pytest.mark.long
def test_cart_pole_reaches_195_by_parts(tmp_path):
    from stateset_agents.numeric.environments.classic import BatchedCartPole

    async def train():
        async with GRPO(
            environment=BatchedCartPole(), total_steps=60_000, progress=False, output_dir=str(tmp_path)
        ) as grpo:
            await grpo.train()
            return await grpo.evaluate(range(50))

    assert asyncio.run(train()).mean >= 195
