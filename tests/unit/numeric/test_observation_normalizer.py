"""Observations that are far from 1: normalised by what was seen, saved with the weights, and warned of."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.numeric.environments.suites import mix
from stateset_agents.numeric.experiment import ControlExperiment, load_control, load_policy
from stateset_agents.numeric.policy import MlpPolicy, ObservationNormalizer, logits_of
from stateset_agents.numeric.rollout import largest_rms
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import policy_for
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.tracking.diagnostics import diagnose
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError


class SmallSignals(Signals):
    """Signals of a thousandth."""

    def _observations(self):
        return super()._observations() * np.float32(1e-3)


def test_statistics_are_those_of_all_that_was_seen_in_whatever_parts():
    values = (
        np.random.default_rng(0).normal([1e-3, 500.0, 7.0], [1e-4, 30.0, 0.0], (100, 3)).astype(np.float32)
    )
    normalizer = ObservationNormalizer(3)
    flat = torch.from_numpy(values)
    assert normalizer(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 1.0]]  # nothing was seen yet
    for part in (flat[:1], flat[1:40], flat[40:]):
        normalizer.follow(part)
    mean, deviation = normalizer.statistics()
    assert mean.numpy() == pytest.approx(values.mean(axis=0), rel=1e-5)
    assert deviation[:2].numpy() == pytest.approx(values.std(axis=0)[:2], rel=1e-4)
    normalized = normalizer(flat)
    assert normalized[:, :2].std(dim=0, correction=0).tolist() == pytest.approx([1.0, 1.0], rel=1e-3)
    assert normalized[:, 2].tolist() == [0.0] * 100  # it never changed
    assert normalizer(torch.tensor([[1.0, 0.0, 7.0]])).tolist() == [[10.0, -10.0, 0.0]]
    assert normalizer.on_array(values) == pytest.approx(normalized.numpy(), abs=1e-6)


def trained(folder, *, normalizes, environment=None):
    environment = environment or SmallSignals()
    policy = MlpPolicy(environment.spec, hidden=(16,), normalize_observations=normalizes)
    config = ControlConfig(
        total_steps=3072,
        num_groups=8,
        group_size=8,
        minibatch_size=128,
        learning_rate=1e-2,
        output_dir=str(folder),
        progress=False,
    )
    return ControlTrainer(policy, environment, config)


def test_statistics_are_saved_with_the_weights_and_used_by_numpy_too():
    observed = SmallSignals().reset(list(range(5)))
    policy, copied = (
        MlpPolicy(SmallSignals().spec, hidden=(16,), normalize_observations=True, seed=seed)
        for seed in (1, 7)
    )
    policy.follow_observations(observed)
    copied.load_state_dict(policy.state_dict())
    expected = policy(torch.from_numpy(observed)).detach().numpy()
    assert logits_of(copied, 5)(observed) == pytest.approx(expected, abs=1e-5)
    assert copied.normalizer.count == 5


async def test_a_file_asks_for_it_and_a_checkpoint_keeps_it(tmp_path):
    data = {
        "kind": "control",
        "environment": {"name": f"{__name__}:SmallSignals"},
        "policy": {"hidden": [8], "normalize_observations": True},
        "training": {"total_steps": 60, "num_groups": 2, "group_size": 4, "output_dir": str(tmp_path)},
    }
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(data))
    async with ControlExperiment(load_control(file)) as experiment:
        await experiment.initialize()
        await experiment.train()
    policy = load_policy(experiment.run.path, SmallSignals())
    assert policy.normalizer.count >= 60
    *_, last = RunLog(experiment.run).metrics()
    assert "observation/rms" not in last.values
    with pytest.raises(ConfigurationError, match="normalize_observations goes with value_normalization none"):
        policy_for(mix({"cart_pole": 1.0, "acrobot": 0.01}), normalize_observations=True)


async def test_a_policy_that_normalises_learns_from_small_numbers_and_another_is_told_to(tmp_path):
    means = {}
    for normalizes in (False, True):
        trainer = trained(tmp_path, normalizes=normalizes)
        async with trainer:
            await trainer.train()
            means[normalizes] = (await trainer.evaluate()).mean
        told = {finding.check: finding for finding in diagnose(RunLog(trainer.run))}
        assert ("observations" in told) is not normalizes
        if not normalizes:
            assert told["observations"].verdict == "warn"
            assert "set policy.normalize_observations to true" in told["observations"].cure
    assert means[False] < 1.5 < 4.0 < means[True]  # guessing earns 0.5, naming all 4.5


def test_the_largest_number_decides_on_the_scale():
    assert largest_rms(np.array([[3e-3, 0.0], [4e-3, 1e-5]])) == pytest.approx(np.sqrt(12.5e-6))
    assert largest_rms({"a": np.ones((2, 1)), "b": np.full((2, 2), 30.0)}) == 30.0
    assert largest_rms(np.zeros((0, 3))) == 0.0


def test_a_rollout_that_failed_as_a_whole_leaves_the_statistics_as_they_are() -> None:
    normalizer = ObservationNormalizer(2)
    normalizer.follow(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    normalizer.follow(torch.zeros(0, 2))
    assert normalizer.mean.tolist() == [2.0, 2.0]
    assert int(normalizer.count) == 2
