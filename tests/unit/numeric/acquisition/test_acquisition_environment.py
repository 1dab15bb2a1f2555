"""Acquisition as a batched environment, and the network that plays it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.environment import CANDIDATE_FEATURES, AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.rules import RULES
from stateset_agents.numeric.environments.base import BatchedEnvironment, check_environment
from stateset_agents.numeric.evaluation import evaluate_rule
from stateset_agents.numeric.experiment import make_environment
from stateset_agents.numeric.policy import as_tensors
from stateset_agents.numeric.rollout import Rollout, action_keys, collect
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.types.errors import ConfigurationError

FAMILY = LinearFamily(num_variables=4, costs=(1.0, 4.0), budget=8.0)


def rolled(env: AcquisitionEnv, *, num_groups: int = 12, group_size: int = 4) -> Rollout:
    keys = action_keys(0, 0, num_groups, group_size)
    return collect(AcquisitionPolicyNetwork(), env, range(num_groups), group_size=group_size, keys=keys)


def column(name: str) -> int:
    return CANDIDATE_FEATURES.index(name)


def test_the_environment_is_one_by_the_trainer_s_check_and_can_fork() -> None:
    env = AcquisitionEnv(LinearFamily(num_variables=4, num_graphs=2, num_observations=2, set_at_once=2))
    assert isinstance(env, BatchedEnvironment)
    assert check_environment(env)


def test_a_rule_in_the_environment_is_a_campaign() -> None:
    env, rule = AcquisitionEnv(FAMILY), RULES["EI per cost"]
    env.reset(range(30))
    regret, paid, live = np.zeros(30), np.zeros(30), np.ones(30, dtype=bool)
    while live.any():
        done = env.step(env.rule_actions(rule))
        regret += np.where(live, done.components["regret"], 0.0)
        paid += np.where(live, done.components["cost"], 0.0)
        live &= ~(done.terminated | done.truncated)
    assert regret == pytest.approx(play(rule, FAMILY.draw(range(30))).regret)
    assert (paid <= FAMILY.budget + 1e-9).all()


def test_a_file_makes_it_from_numbers_and_its_rules_are_the_rules() -> None:
    env = make_environment(
        {"name": "causal_acquisition", "num_variables": 4, "costs": [1, 4], "budget": 8, "reward": "regret"}
    )
    assert isinstance(env, AcquisitionEnv)
    assert env.family == FAMILY
    found = evaluate_rule(env.rules()["sd per cost"], env, range(20))
    outcome = play(RULES["sd per cost"], FAMILY.draw(range(20)))
    assert found.components["regret"] == pytest.approx(outcome.regret.mean())
    assert list(found.lengths) == outcome.num_experiments.tolist()


def test_joined_rows_go_on_as_they_were() -> None:
    env, other = AcquisitionEnv(FAMILY), AcquisitionEnv(FAMILY)
    env.reset([1, 2])
    other.reset([3])
    other.step(other.rule_actions(RULES["EI per cost"]))
    both = env.joined([other])
    assert np.array_equal(both.observe()["candidates"][2], other.observe()["candidates"][0])
    actions = both.rule_actions(RULES["EI per cost"])
    both.step(actions)
    other.step(actions[2:])
    env.step(actions[:2])
    assert np.array_equal(both.regret, np.concatenate([env.regret, other.regret]))


def test_rewards_add_up_to_the_fall_of_regret() -> None:
    for scale in (0.5, 1e6):  # tanh of nearly nothing is the raw regret
        env = AcquisitionEnv(FAMILY, reward_scale=scale)
        played = rolled(env)
        env.reset([seed for seed in range(12) for _ in range(4)])
        start = env.regret
        end = np.where(played.alive, played.components["regret"], 0.0).sum(axis=0)
        expected = scale * (np.tanh(start / scale) - np.tanh(end / scale))
        assert played.returns == pytest.approx(expected, abs=1e-4)
    env = AcquisitionEnv(FAMILY, reward="expected_regret")
    played = rolled(env)
    env.reset([seed for seed in range(12) for _ in range(4)])
    end = np.where(played.alive, played.components["expected_regret"], 0.0).sum(axis=0)
    assert played.returns == pytest.approx(env.expected_regret - end, abs=1e-4)


def test_what_is_observed_is_what_is_known() -> None:
    env = AcquisitionEnv(FAMILY)
    seen = env.reset([3, 3, 8])["candidates"]
    mean, deviation = env.situation.belief.effect_moments()
    unit = np.sqrt((deviation**2).mean(axis=1, keepdims=True))
    assert seen[..., column("mean")] == pytest.approx(
        (mean - mean.max(axis=1, keepdims=True)) / unit, abs=1e-5
    )
    assert seen[..., column("deviation")] == pytest.approx(deviation / unit, abs=1e-5)
    assert (seen[..., column("affordable")] == env.action_mask()).all()
    assert seen[..., column("probability of being best")].sum(axis=1) == pytest.approx(1.0)
    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])
    after = env.step(np.array([1, 1, 2])).observations["candidates"]  # type: ignore[call-overload]  # by name
    assert after[:, :, column("count")].sum(axis=1) == pytest.approx(np.log(2), abs=1e-6)
    assert (after[..., column("deviation")] < seen[..., column("deviation")] + 1e-6).mean() > 0.8


def test_the_horizon_truncates() -> None:
    played = rolled(AcquisitionEnv(FAMILY, max_experiments=2))
    assert played.lengths.max() == 2
    assert played.truncated.any()


def test_what_cannot_be_is_refused() -> None:
    env = AcquisitionEnv(FAMILY)
    env.reset(range(50))
    with pytest.raises(ConfigurationError, match="reward must be regret or expected_regret, got 'money'"):
        AcquisitionEnv(FAMILY, reward="money")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="reward_scale must be above 0, got 0"):
        AcquisitionEnv(FAMILY, reward_scale=0)
    with pytest.raises(ConfigurationError, match="horizon must be at least 1, got 0"):
        AcquisitionEnv(FAMILY, max_experiments=0)
    for action in (-1, 6):
        with pytest.raises(
            ConfigurationError, match=f"row 0: experiment {action} is not in the menu, 0 to 5"
        ):
            env.step(np.full(50, action))
    for _ in range(8):
        mask = env.action_mask()
        assert mask is not None
        short = mask.any(axis=1) & ~mask.all(axis=1)
        actions = mask.argmax(axis=1)
        if short.any():
            actions[short] = (~mask[short]).argmax(axis=1)
            break
        env.step(actions)
    with pytest.raises(ConfigurationError, match=r"row \d+: experiment \d costs [\d.]+, above [\d.]+"):
        env.step(actions)


def test_permuting_the_menu_permutes_the_logits_and_any_size_is_played() -> None:
    network = AcquisitionPolicyNetwork(critic=True, seed=3)
    torch.nn.init.normal_(network.score.weight, generator=torch.Generator().manual_seed(0))
    for num_variables in (3, 6):
        seen = as_tensors(AcquisitionEnv(LinearFamily(num_variables=num_variables)).reset(range(5)))
        order = torch.randperm(2 * (num_variables - 1), generator=torch.Generator().manual_seed(1))
        logits, values = network(seen), network.values(seen)
        mixed = {**seen, "candidates": seen["candidates"][:, order]}
        assert torch.allclose(network(mixed), logits[:, order], atol=1e-6)
        assert torch.allclose(network.values(mixed), values, atol=1e-6)
        assert logits.std() > 0.01
    with pytest.raises(ConfigurationError, match="has no critic: make it with critic=True"):
        AcquisitionPolicyNetwork().values(seen)
    with pytest.raises(ConfigurationError, match="hidden must be at least 1, got 0"):
        AcquisitionPolicyNetwork(hidden=0)


async def test_the_trainer_trains_on_it() -> None:
    env = AcquisitionEnv(FAMILY, reward="expected_regret")
    config = ControlConfig(total_steps=1500, num_groups=16, gamma=1.0, progress=False, log_episodes=False)
    network = AcquisitionPolicyNetwork()
    async with ControlTrainer(network, env, config) as trainer:
        before = await trainer.evaluate(range(200), deterministic=False)
        await trainer.train()
        after = await trainer.evaluate(range(200), deterministic=False)
    assert before.mean is not None
    assert after.mean is not None
    assert after.mean > before.mean
    assert after.components["expected_regret"] < before.components["expected_regret"]
