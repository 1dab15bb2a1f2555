"""What a rollout keeps, whose random numbers a row takes, and what becomes of rows that break."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.numeric.environments.base import Spec, check_environment
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.policy import MlpPolicy, as_tensors, logits_of, sample_actions
from stateset_agents.numeric.rollout import action_keys, collect, collect_branches, uniforms
from stateset_agents.types.errors import ConfigurationError


def play(environment, seeds=(1, 2), group_size=3, *, policy=None, keys="own", **options):
    if isinstance(keys, str):
        keys = action_keys(0, 0, len(seeds), group_size)
    policy = policy or MlpPolicy(environment.spec)
    return collect(policy, environment, list(seeds), group_size=group_size, keys=keys, **options)


def test_a_group_has_one_start_and_members_act_for_themselves():
    rollout = play(BatchedCartPole(), group_size=4)
    assert rollout.group_ids.tolist() == [0] * 4 + [1] * 4
    assert (rollout.observations[0, :4] == rollout.observations[0, 0]).all()
    assert (rollout.observations[0, 4] != rollout.observations[0, 0]).any()
    assert len(set(map(tuple, rollout.actions[:8, :4].T))) > 1
    assert rollout.returns.tolist() == rollout.lengths.tolist()
    assert rollout.num_steps == rollout.lengths.sum()


def test_a_row_is_the_same_in_any_company():
    alone = play(BatchedCartPole(), (2,), group_size=2, keys=action_keys(0, 0, 2, 2)[2:])
    together = play(BatchedCartPole(), (1, 2), group_size=2, keys=action_keys(0, 0, 2, 2))
    length = alone.lengths[0]
    assert together.lengths[2] == length
    assert np.array_equal(together.actions[:length, 2], alone.actions[:length, 0])


def test_numbers_of_a_stream_are_even_and_differ_by_seed_update_and_row():
    keys = action_keys(7, 0, 100, 10)
    drawn = np.stack([uniforms(keys, step) for step in range(100)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - 10_000).max() < 400  # four standard deviations
    assert np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1] == pytest.approx(0, abs=0.02)
    assert np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1] == pytest.approx(0, abs=0.02)
    assert not set(keys) & set(action_keys(7, 1, 100, 10)) | set(keys) & set(action_keys(8, 0, 100, 10))
    blocks = uniforms(keys, np.arange(3)[:, None])
    assert np.array_equal(blocks, drawn[:3])


def test_actions_are_drawn_as_often_as_the_softmax_says():
    drawn = (np.arange(10_000) + 0.5) / 10_000
    logits = np.tile(np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32)), (10_000, 1))
    actions, logprobs = sample_actions(logits, None, drawn)
    assert np.bincount(actions).tolist() == [1000, 6000, 3000]
    assert np.exp(logprobs[actions == 1]) == pytest.approx(0.6)
    mask = np.tile([True, False, True], (10_000, 1))
    actions, logprobs = sample_actions(logits, mask, drawn)
    assert np.bincount(actions).tolist() == [2500, 0, 7500]
    assert np.exp(logprobs[actions == 2]) == pytest.approx(0.75)
    assert set(sample_actions(logits, None, None)[0]) == {1}


def test_few_rows_act_by_numpy_with_the_weights_as_they_are_and_a_changed_forward_by_torch():
    spec = Spec(name="two", observation_shape={"b": (2, 3), "a": (4,)}, num_actions=5, horizon=1)
    generator = np.random.default_rng(0)
    seen = {
        "a": generator.normal(size=(16, 4)).astype(np.float32),
        "b": generator.normal(size=(16, 2, 3)).astype(np.float32),
    }
    policy = MlpPolicy(spec, seed=3)
    with torch.no_grad():
        policy.actor[-1].weight.mul_(100.0)
    assert policy.on_arrays() is not None
    for _ in range(2):
        with torch.no_grad():
            wanted = policy(as_tensors(seen)).numpy()
            policy.actor[0].bias.add_(0.5)
        assert not np.allclose(logits_of(policy, 16)(seen), wanted, atol=1e-3)
        with torch.no_grad():
            policy.actor[0].bias.sub_(0.5)
        assert np.allclose(logits_of(policy, 16)(seen), wanted, atol=1e-6)
        assert np.allclose(logits_of(policy, 1000)(seen), wanted, atol=1e-6)

    class Halved(MlpPolicy):
        def forward(self, observations):
            return super().forward(observations) / 2

    halved = Halved(spec, seed=3)
    halved.load_state_dict(policy.state_dict())
    assert halved.on_arrays() is None
    assert np.allclose(logits_of(halved, 16)(seen), wanted / 2, atol=1e-6)
    assert MlpPolicy(spec).to(torch.bfloat16).on_arrays() is None
    policy.register_forward_hook(lambda module, inputs, output: output + 1)
    assert np.allclose(logits_of(policy, 16)(seen), wanted + 1, atol=1e-6)


def test_ends_limits_and_last_observations():
    environment = Signals(horizon=5, stop=2)
    rollout = play(environment, (1, 2), group_size=2, max_steps=4)
    assert rollout.terminated.tolist() == [True, True, False, False]
    assert rollout.truncated.tolist() == [False, False, True, True]
    assert rollout.lengths.tolist() == [2, 2, 4, 4]
    signals = [np.random.default_rng(seed).integers(3, size=6) for seed in (1, 2)]
    assert rollout.final_observations.argmax(1).tolist() == [signals[0][2]] * 2 + [signals[1][4]] * 2
    record = rollout.episodes()[3]
    assert (record["group"], record["member"], record["seed"], record["length"]) == (1, 1, 2, 4)
    assert record["ended"] == "truncated"
    assert record["components"]["cost"] == -1.0
    assert record["return"] == pytest.approx(sum(record["components"].values()))


class Broken(Signals):
    """Rows of seed 3 break in the second step, in the part that `where` names."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def reset(self, seeds):
        self.bad = np.array(seeds) == 3
        observations = super().reset(seeds)
        if self.where == "start":
            observations[self.bad] = np.inf
        return observations

    def step(self, actions):
        transition = super().step(actions)
        if self.time == 2 and self.where == "reward":
            transition.rewards[self.bad] = np.nan
        if self.time == 2 and self.where == "observation":
            transition.observations[self.bad] = np.nan
        return transition


@pytest.mark.parametrize("where", ["start", "reward", "observation"])
def test_a_row_that_gives_no_finite_number_fails_alone(where):
    rollout = play(Broken(where), (3, 4), group_size=2)
    assert rollout.failed.tolist() == [True, True, False, False]
    assert rollout.lengths.tolist() == [0, 0, 6, 6]
    assert not (rollout.terminated | rollout.truncated)[:2].any()
    record = rollout.episodes()[0]
    assert (record["return"], record["ended"]) == (None, "failed")
    assert np.isfinite(rollout.returns).all()


def test_branches_are_other_ways_on_from_a_state():
    environment = Signals(horizon=6)
    policy = MlpPolicy(environment.spec)
    keys = action_keys(0, 0, 2, 2)
    plain = play(environment, (1, 2), 2, policy=policy, keys=keys)
    rollout = collect_branches(
        policy, environment, [1, 2], group_size=2, keys=keys, gamma=1.0, num_branches=64, every=3
    )
    assert np.array_equal(rollout.actions, plain.actions)  # branches disturb nothing
    assert rollout.branches.counts[:, 0].tolist() == [0, 0, 0, 64, 0, 0]
    assert rollout.branches.num_steps == 4 * 64 * 3
    assert rollout.num_steps == 4 * 6 + 4 * 64 * 3
    # of three steps of chance, each worth 1/3 - 1/4
    assert rollout.branches.means[3] == pytest.approx(3 * (1 / 3 - 1 / 4), abs=0.4)
    assert len(set(rollout.branches.means[3])) > 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_actions": 1}, "num_actions must be at least 2, got 1"),
        ({"horizon": 0}, "horizon must be at least 1"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        Spec(**{"name": "x", "observation_shape": (1,), "num_actions": 2, "horizon": 5, **spec})


class Changed(Signals):
    """Signals with one thing changed."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.resets = 0

    def reset(self, seeds):
        observations = super().reset(seeds)
        self.resets += 1
        match self.change:
            case "unequal starts":
                observations[1] += 1
            case "memory":
                observations += self.resets
            case "shape":
                return observations[:, :2]
            case "dtype":
                return observations.astype(int)
            case "wide":
                return observations.astype(float)
            case "names":
                return {"a": observations}
        return observations

    def step(self, actions):
        transition = super().step(actions)
        match self.change:
            case "unequal noise":
                transition.rewards[1] += 0.5
            case "reward shape":
                return dataclasses.replace(transition, rewards=transition.rewards[:, None])
            case "reward dtype":
                return dataclasses.replace(transition, rewards=(transition.rewards > 0).astype(int))
            case "terminated dtype":
                return dataclasses.replace(transition, terminated=transition.terminated * 1.0)
            case "components":
                return dataclasses.replace(transition, components={"named": transition.rewards})
        return transition

    def fork(self, rows):
        fork = super().fork(rows)
        if self.change == "fork":
            fork.signals = (fork.signals + 1) % 3
        return fork


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("unequal starts", "two rows with one seed and the same actions differ at the start"),
        ("unequal noise", "two rows with one seed and the same actions differ at the step 1"),
        ("memory", "two resets with the same seeds differ at the start"),
        ("fork", "a fork differs from its original at step 2"),
        ("shape", r"observations must have shape \(4, 3\), got \(4, 2\)"),
        ("dtype", "observations must be float32, got int64"),
        ("names", "both must be one array, or both several by name"),
        ("reward shape", r"rewards must have shape \(4,\), got \(4, 1\)"),
        ("wide", r"observations must be float32, got float64: give observations\.astype\(np\.float32\)"),
        ("reward dtype", "rewards must be a float, got int64"),
        ("terminated dtype", "terminated must be bool, got float64"),
        ("components", r"a step's components are \['named'\] and spec.components \['cost', 'named'\]"),
    ],
)
def test_an_environment_that_breaks_its_word_is_told_what(change, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        check_environment(Changed(change))
    assert "\n" not in str(error.value)
    assert check_environment(Signals()) is True
    assert check_environment(Signals(forks=False)) is False


def test_a_missing_part_of_an_observation_is_named():
    environment = Signals()
    environment.spec = dataclasses.replace(environment.spec, observation_shape={"a": (3,), "b": (2,)})
    environment._observations = lambda: {"a": np.zeros((4, 3), dtype=np.float32)}
    with pytest.raises(ConfigurationError, match="observations lack 'b'"):
        check_environment(environment)


def test_a_row_without_an_allowed_action_and_a_mask_of_another_shape_are_told():
    environment = Signals(masked=True)
    rollout = play(environment)
    assert rollout.masks.shape == (6, 6, 4)
    assert rollout.actions.max() == 2
    environment.action_mask = lambda: np.zeros((6, 4), dtype=bool)
    with pytest.raises(ConfigurationError, match=r"action_mask\(\) allows row 0 no action at step 1"):
        play(environment)
    environment.action_mask = lambda: np.ones((6, 2), dtype=bool)
    with pytest.raises(ConfigurationError, match=r"action_mask\(\) must be bool of shape \(6, 4\)"):
        play(environment)
