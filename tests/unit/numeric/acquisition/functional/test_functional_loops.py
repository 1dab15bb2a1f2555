"""The functional training loops, and what is said of an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.diagnostics import debug_grpo_update
from stateset_agents.numeric.acquisition.functional.rewards import CountBonus, RewardConfig
from stateset_agents.numeric.acquisition.functional.states import AcquisitionState
from stateset_agents.numeric.acquisition.functional.update import (
    Difficulty,
    GRPOUpdate,
    TrainingLoop,
    adjust_grpo_config_for_difficulty,
    create_sample_reuse_manager,
    curriculum_enhanced_grpo,
    enhanced_grpo_training_loop,
    generate_initial_states,
    generate_scms_for_difficulty,
    training_step_with_reuse,
)
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.evaluation import evaluate
from stateset_agents.types.errors import ConfigurationError

FAMILY = LinearFamily(num_variables=3, costs=(1.0, 4.0), budget=6.0)
SMALL = GRPOConfig(total_steps=500, num_groups=4, group_size=4, num_iterations=4, learning_rate=3e-3)


def quiet(line: str) -> None:
    pass


SCMS = generate_scms_for_difficulty(Difficulty(family=FAMILY, num_scms=300))


def trained(config: GRPOConfig = SMALL, **settings: Any) -> TrainingLoop:
    settings = {"policy_network": AcquisitionPolicyNetwork(hidden=8), "log": quiet, **settings}
    return enhanced_grpo_training_loop(config, generate_initial_states(SCMS), SCMS, **settings)


def test_states_are_those_that_the_policy_meets_from_start_to_end() -> None:
    loop = TrainingLoop(config=SMALL, policy_network=AcquisitionPolicyNetwork(hidden=8))
    first = generate_initial_states(SCMS).take(np.arange(200))

    def met() -> tuple[AcquisitionState, int]:
        return loop._met(first, np.random.default_rng(3), 3)

    states, number = met()
    assert number == states.environment.situation.counts.sum()
    assert len(states) == 200
    assert states.goes_on.all()
    left = states.worth()["cost"]
    assert (left > 0.99).mean() > 0.05
    assert (left < 0.5).mean() > 0.2
    again, _ = met()
    assert np.array_equal(left, again.worth()["cost"])
    # a row goes on with its own noise, wherever it stands in the batch
    alone = states.take(np.array([7]))
    action = np.full(200, int(states.environment.situation.costs[7].argmin()))
    action = np.where(states.mask[np.arange(200), action], action, states.mask.argmax(axis=1))
    after, single = states.after(action), alone.after(action[7:8])
    assert after.environment.regret[7] == single.environment.regret[0]


@pytest.mark.long
def test_the_loop_logs_and_reuses_with_frozen_log_probs() -> None:
    lines: list[str] = []
    policy = AcquisitionPolicyNetwork(hidden=8)
    before = {name: each.clone() for name, each in policy.state_dict().items()}
    found = trained(policy_network=policy, log=lines.append)
    assert all(torch.equal(before[name], each) for name, each in policy.state_dict().items())
    assert found.num_experiments >= 500
    assert found.opt_state.num_experiments == 4 * found.num_experiments  # every use counts
    assert len(found.updates) % 4 == 0  # every batch is used four times
    assert [line.split(":")[0] for line in lines][:3] == ["update 50", "update 100", "update 100"]
    assert lines[0] == "update 50: use 2 of 4 of its samples"
    assert lines[1].startswith("update 100: reward ")
    assert lines[2] == "update 100: use 4 of 4 of its samples"
    rewards = [seen.mean_reward for seen in found.updates]
    kinds = [seen.approx_kl for seen in found.updates]
    for begin in range(0, len(rewards), 4):
        assert len(set(rewards[begin : begin + 4])) == 1
        assert kinds[begin] == pytest.approx(0.0, abs=1e-7)  # new samples are the policy's own
    assert max(kinds) > 1e-6  # later uses compare with the policy that chose, not with themselves
    again = trained(policy_network=policy)
    assert all(torch.equal(found.params[name], again.params[name]) for name in found.params)
    found.load_into(policy)
    assert all(torch.equal(found.params[name], each) for name, each in policy.state_dict().items())


def test_what_is_reused_is_the_same_object() -> None:
    calls: list[int] = []

    config = SMALL.model_copy(update={"num_iterations": 2})
    manager = create_sample_reuse_manager(config)
    seen, lines = [], []
    for key in range(5):

        def collect(key: int = key) -> list[int]:
            calls.append(key)
            return [key] * 4

        samples, manager = training_step_with_reuse(manager, config, collect, log=lines.append)
        seen.append(samples)
    assert lines[:3] == [
        "Collected fresh samples",
        "Reusing samples (iteration 2)",
        "Collected fresh samples",
    ]
    assert seen == [[0] * 4, [0] * 4, [2] * 4, [2] * 4, [4] * 4]
    assert calls == [0, 2, 4]
    assert seen[0] is seen[1] is not seen[2]


@pytest.mark.long
def test_a_curriculum_changes_models_and_settings_and_shares_the_experiments() -> None:
    widths: list[int] = []

    class Watching(AcquisitionPolicyNetwork):
        def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
            widths.append(observations["candidates"].shape[1])
            return super().forward(observations)

    larger = replace(FAMILY, num_variables=4)
    stages = [Difficulty(family=FAMILY, total_steps=125), Difficulty(family=larger, total_steps=375)]
    found = curriculum_enhanced_grpo(stages, config=SMALL, policy_network=Watching(hidden=8), log=quiet)
    assert set(widths) == {4, 6}
    assert widths == sorted(widths)
    assert 500 <= found.num_experiments < 600
    hard = Difficulty(family=FAMILY, entropy_scale=2.0, learning_rate_scale=0.5)
    adjusted = adjust_grpo_config_for_difficulty(hard, SMALL)
    assert adjusted.entropy_coef == 2 * SMALL.entropy_coef
    assert adjusted.learning_rate == 0.5 * SMALL.learning_rate
    with pytest.raises(ConfigurationError, match="curriculum_schedule must have a Difficulty, got 'none'"):
        curriculum_enhanced_grpo([])
    with pytest.raises(ConfigurationError, match="total_steps of a difficulty must be above 0, got 0"):
        Difficulty(family=FAMILY, total_steps=0)


def test_bonuses_reach_the_loop() -> None:
    asked, few = [], SMALL.model_copy(update={"total_steps": 60})

    class Counted(CountBonus):
        def compute_bonuses(self, states: AcquisitionState, actions: np.ndarray) -> np.ndarray:
            asked.append(len(states))
            return super().compute_bonuses(states, actions)

    plain, paid = trained(few), trained(few, exploration_strategy=Counted(1.0))
    assert set(asked) == {16}
    assert paid.updates[0].mean_reward > plain.updates[0].mean_reward + 0.4


@pytest.mark.long
def test_it_learns_to_save_its_budget() -> None:
    policy = AcquisitionPolicyNetwork(hidden=16)
    config = SMALL.model_copy(update={"total_steps": 1500, "num_groups": 8, "group_size": 8})
    thrift = RewardConfig(weights={"cost": 1.0})
    found = trained(config, policy_network=policy, reward_config=thrift, reward_scaling="none")
    before = evaluate(policy, AcquisitionEnv(FAMILY), range(200))
    found.load_into(policy)
    after = evaluate(policy, AcquisitionEnv(FAMILY), range(200))
    cheapest = play(lambda now: now.costs.argmin(axis=1), FAMILY.draw(range(200))).num_experiments
    assert np.mean(before.lengths) < 0.9 * cheapest.mean()
    assert np.mean(after.lengths) > 0.97 * cheapest.mean()


# ------------------------------------------------------------------------------------------ diagnostics

HEALTHY = GRPOUpdate(
    policy_loss=0.0,
    entropy_loss=-0.02,
    kl_penalty=0.0,
    total_loss=-0.02,
    grad_norm=0.5,
    group_baseline=0.1,
    mean_reward=0.1,
    reward_std=0.4,
    mean_advantage=0.0,
    advantage_std=1.0,
    mean_entropy=2.0,
    approx_kl=0.01,
    max_entropy=float(np.log(49)),
)


@pytest.mark.parametrize(
    ("changes", "check", "sign", "advice"),
    [
        ({"mean_advantage": 0.2}, "advantages_normalized", "!", "keep groups whole"),
        ({"reward_std": 3.5}, "advantages_raw", "!", "group_size up"),
        ({"mean_entropy": 0.1}, "entropy_reasonable", "✗", "lower learning_rate, raise entropy_coef or beta"),
        ({"mean_entropy": 0.09, "max_entropy": None}, "entropy_reasonable", "✗", "lower learning_rate"),
        ({"approx_kl": 0.2}, "kl_bounded", "!", "lower num_iterations or learning_rate"),
        ({"approx_kl": 0.4}, "kl_bounded", "✗", "lower num_iterations or learning_rate"),
        ({"grad_norm": 2.5}, "gradients_stable", "!", "check the scale of the rewards"),
        ({"grad_norm": 5.5}, "gradients_stable", "✗", "check the scale of the rewards"),
    ],
)
def test_each_check_can_fail_and_advises(
    changes: dict[str, float], check: str, sign: str, advice: str
) -> None:
    lines: list[str] = []
    update = replace(HEALTHY, **changes)
    assert not debug_grpo_update(update, say=lines.append)
    [bad] = [line for line in lines if not line.startswith("✓")]
    assert bad.startswith(f"{sign} {check}: ")
    assert advice in bad


def test_a_fresh_policy_over_many_actions_is_well() -> None:
    fresh = replace(HEALTHY, mean_entropy=float(np.log(49)))
    lines: list[str] = []
    assert debug_grpo_update(fresh, say=lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "✓ advantages_normalized",
        "✓ advantages_raw",
        "✓ entropy_reasonable",
        "✓ kl_bounded",
        "✓ gradients_stable",
    ]
    steep = replace(fresh, grad_norm=4.0)
    assert not debug_grpo_update(steep, say=quiet)
    assert debug_grpo_update(steep, config=GRPOConfig(max_grad_norm=10.0), say=quiet)
