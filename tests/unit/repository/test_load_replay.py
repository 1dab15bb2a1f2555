"""A policy and a rule on the same recorded load, and one cluster whose actions are changes of replicas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.deploy_autoscaler import (
    RecordedLoad,
    ReplicaChanges,
    ScalingPolicy,
    replayed,
    scaling_state,
)
from scripts.rivals.autoscaling_planning import static_replicas
from stateset_agents.numeric.autoscaling.actions import ConfigAction
from stateset_agents.numeric.autoscaling.baselines import Hpa
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.types.errors import ConfigurationError

RATES = 1000.0 + 500.0 * np.sin(np.arange(61) / 7)


def test_windows_are_played_as_they_were_measured() -> None:
    load = RecordedLoad(RATES)
    assert (load.num_windows(20), load.num_windows(61)) == (3, 0)
    environment = InfrastructureEnv(load, horizon=20)
    environment.reset([0, 2])
    for _ in range(20):
        environment.step_to(np.array([9, 9]))
    seen = environment.observed(history=21).arrival_rates
    assert seen.T.tolist() == [RATES[:21].tolist(), RATES[40:].tolist()]
    with pytest.raises(ConfigurationError, match="no window 3 of 20: record more"):
        load.draw(3, 21, 15.0)
    with pytest.raises(ConfigurationError, match="no window -1"):
        load.draw(-1, 21, 15.0)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([1.0, np.nan, 2.0], "got nan in step 1"),
        ([1.0, 2.0, -50.0], "got -50.0 in step 2"),
        ([0.0, 0.0], "got 0 in all"),
        ([[1.0]], r"must be \[steps\], got the shape \(1, 1\)"),
    ],
)
def test_a_record_that_is_no_load_is_refused(rates: list[float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RecordedLoad(np.array(rates))


def test_a_replay_has_a_pair_of_mean_rewards_for_each_window() -> None:
    load = RecordedLoad(RATES)
    policy = MlpPolicy(InfrastructureEnv().spec)
    pairs = replayed(policy, static_replicas(9), load, horizon=20)
    assert len(pairs) == 3
    environment = InfrastructureEnv(load, horizon=20)
    environment.reset([1])
    rewards = [float(environment.step_to(np.array([9])).rewards[0]) for _ in range(20)]
    assert pairs[1].baseline == pytest.approx(np.mean(rewards))
    assert pairs[1].candidate < pairs[1].baseline  # weights that were never trained
    assert replayed(policy, Hpa(), load, horizon=20)[1].candidate == pairs[1].candidate
    with pytest.raises(ConfigurationError, match="the record has 61 steps, and a window 61"):
        replayed(policy, Hpa(), load, horizon=61)


def test_actions_of_a_cluster_are_changes_of_replicas() -> None:
    space = ReplicaChanges(3)
    assert [space.encode_action(**space.decode_action(index)) for index in range(7)] == list(range(7))
    names = [choice.name for choice in space.scaling_actions]
    assert names[2:5] == ["SCALE_DOWN_SMALL", "MAINTAIN", "SCALE_UP_SMALL"]
    assert names[-1] == "SCALE_BY_3"
    for wrong in (space.action(4), {**space.action(1), "config": ConfigAction.INCREASE_TIMEOUT}):
        with pytest.raises(ConfigurationError, match="must change 3 replicas at most, nothing else"):
            space.encode_action(**wrong)
    with pytest.raises(ConfigurationError, match="0 to 6, got 7"):
        space.decode_action(7)


def test_a_policy_s_change_of_replicas_is_what_its_action_does() -> None:
    environment = InfrastructureEnv(horizon=40)
    observations = environment.reset([3])
    policy = MlpPolicy(environment.spec, seed=4)
    changes = ScalingPolicy(policy, environment)
    for _ in range(40):
        state = scaling_state(environment, observations)
        wished = state["replicas"] + changes(state)["scaling"]
        twin = environment.fork(np.array([0]))
        likeliest = int(policy_choice(policy, environment, observations))
        twin.step(np.array([likeliest]))
        observations = environment.step_to(np.array([wished])).observations
        assert twin.observed().replicas.tolist() == environment.observed().replicas.tolist() == [wished]


def policy_choice(policy: MlpPolicy, environment: InfrastructureEnv, observations: np.ndarray) -> int:
    logits = policy(torch.from_numpy(observations)).detach().numpy()[0]
    return int(np.where(environment.action_mask()[0], logits, -np.inf).argmax())
