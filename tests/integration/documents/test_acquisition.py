"""The document on causal acquisition: every call as it is printed there, on small models.

`rows_s2.yaml` says which test shows which row, docs/documents.md what each name is called here.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from repository_paths import ROOT
from torch import Tensor

from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.functional.batch import (
    GRPOBatch,
    applied,
    collect_grpo_batch,
    compiled_batch_collection,
    compute_advantages,
    grpo_with_exploration,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.diagnostics import debug_grpo_update
from stateset_agents.numeric.acquisition.functional.rewards import (
    RewardConfig,
    apply_reward_scaling,
    dual_reward,
)
from stateset_agents.numeric.acquisition.functional.states import (
    AcquisitionState,
    create_acquisition_state,
    create_random_scm,
)
from stateset_agents.numeric.acquisition.functional.update import (
    Difficulty,
    GRPOUpdate,
    SampleReuseManager,
    adjust_grpo_config_for_difficulty,
    collect_grpo_batch_with_reuse,
    compiled_grpo_update,
    create_grpo_trainer,
    create_sample_reuse_manager,
    curriculum_enhanced_grpo,
    enhanced_grpo_training_loop,
    generate_initial_states,
    generate_scms_for_difficulty,
    memory_efficient_grpo_update,
    training_step_with_reuse,
)
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.surrogates import Posterior
from stateset_agents.types.errors import ConfigurationError

HERE = ROOT / "tests" / "integration" / "documents"
FAMILY = LinearFamily(num_variables=3, costs=(1.0, 4.0), budget=6.0)


class Ridge(torch.nn.Module):
    """A surrogate of one's own: the target is linear in what is set, with a Gaussian prior of the weights."""

    num_outputs = 1

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale, dtype=torch.float64), requires_grad=False)
        self.mean: Tensor | None = None
        self.covariance: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def condition_on_observations(self, X: Tensor, Y: Tensor) -> Ridge:
        self.seen.append((X, Y))
        other = Ridge(float(self.scale))
        precision = X.mT @ X + torch.eye(X.shape[2], dtype=X.dtype) / self.scale**2
        other.covariance = torch.linalg.inv(precision)
        other.mean = other.covariance @ X.mT @ Y
        return other

    def posterior(self, X: Tensor) -> Posterior:
        if self.mean is None or self.covariance is None:
            mean, covariance = torch.zeros(X.shape[:2], dtype=X.dtype), self.scale**2 * X @ X.mT
        else:
            mean, covariance = (X @ self.mean)[..., 0], X @ self.covariance @ X.mT
        noise = 1e-9 * torch.eye(X.shape[1], dtype=X.dtype)
        return Posterior(torch.distributions.MultivariateNormal(mean, covariance + noise))


policy_network = AcquisitionPolicyNetwork(hidden=8)
config = GRPOConfig(group_size=8, num_groups=4, num_iterations=2, learning_rate=3e-3, total_steps=60)
reward_config = RewardConfig()
surrogate_model, surrogate_params = Ridge(), {"scale": torch.tensor(1.5, dtype=torch.float64)}
scms = [create_random_scm(key, FAMILY) for key in range(10)]
states = [create_acquisition_state(scm) for scm in scms]
key, keys = torch.Generator().manual_seed(0), range(100)


def batch_of(**changes: Any) -> GRPOBatch:
    """The document's call, by its keywords."""
    printed = {
        "policy_network": policy_network,
        "params": policy_network.init(1, states[0]),
        "states": states,
        "scms": scms,
        "surrogate_model": surrogate_model,
        "surrogate_params": surrogate_params,
        "config": config,
        "reward_config": reward_config,
        "key": 7,
        "reward_scaling": "tanh",
        "reward_clip_value": 10.0,
    }
    return collect_grpo_batch(**{**printed, **changes})


def updated() -> tuple[Any, Any, GRPOBatch, GRPOUpdate]:
    update_step, optimizer_init = create_grpo_trainer(policy_network, config)
    params, batch = policy_network.init(1, states[0]), batch_of()
    params, opt_state, update_info = update_step(params, optimizer_init(params), batch)
    return params, opt_state, batch, update_info


# ------------------------------------------------------------------------------ core types


def test_the_configuration_has_the_printed_defaults_and_names() -> None:
    made = GRPOConfig(group_size=64, num_iterations=4, scale_rewards=True, kl_penalty_coeff=0.0)
    for settings in (made, GRPOConfig()):
        assert (settings.group_size, settings.clip_ratio, settings.entropy_coeff) == (64, 0.2, 0.01)
        assert (settings.kl_penalty_coeff, settings.max_grad_norm, settings.learning_rate) == (0.0, 1.0, 3e-4)
        assert (settings.num_iterations, settings.scale_rewards) == (4, True)
    assert GRPOConfig(kl_penalty_coeff=0.1).kl_penalty_coeff == 0.1
    with pytest.raises(ValueError, match="group_size"):
        GRPOConfig(group_size=1)


def test_an_update_has_the_printed_fields_in_their_order() -> None:
    names = [field.name for field in fields(GRPOUpdate)]
    assert names[:5] == ["policy_loss", "entropy_loss", "kl_penalty", "total_loss", "grad_norm"]
    assert names[5:10] == ["group_baseline", "mean_reward", "reward_std", "mean_advantage", "advantage_std"]
    assert names[10:12] == ["mean_entropy", "approx_kl"]
    update_info = GRPOUpdate(0.1, -0.02, 0.0, 0.08, 0.5, 0.2, 0.2, 0.4, 0.0, 1.0, 2.0, 0.01)
    assert (update_info.policy_loss, update_info.approx_kl) == (0.1, 0.01)


def test_a_manager_is_frozen_and_made_positionally() -> None:
    samples = [(None, 0, 1.0, -0.5)] * 8
    manager = SampleReuseManager(samples, 0, 4)
    assert (manager.current_samples, manager.reuse_iteration, manager.max_iterations) == (samples, 0, 4)
    assert not manager.should_collect_new_samples(8)
    assert manager.should_collect_new_samples(9)
    with pytest.raises(FrozenInstanceError):
        manager.reuse_iteration = 1  # type: ignore[misc]  # it is frozen
    later = manager.update_for_reuse()
    assert (later.reuse_iteration, manager.reuse_iteration) == (1, 0)
    fresh = replace(later, reuse_iteration=4).reset_with_new_samples(samples)
    assert not fresh.should_collect_new_samples(8)
    uses = fresh
    for _ in range(3):
        uses = uses.update_for_reuse()
    assert uses.should_collect_new_samples(8)  # four uses in all, the first included


# ------------------------------------------------------------------------------ core functions


def test_the_trainer_is_made_and_steps_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    update_step, optimizer_init = create_grpo_trainer(policy_network, config)
    params = policy_network.init(key, states[0])
    opt_state = optimizer_init(params)
    before = {name: each.clone() for name, each in params.items()}
    new_params, new_opt_state, update_info = update_step(params, opt_state, batch_of())
    print(f"Policy loss: {update_info.policy_loss:.3f}")
    print(f"Group baseline: {update_info.group_baseline:.3f}")
    print(f"KL divergence: {update_info.approx_kl:.6f}")
    assert "Policy loss: " in capsys.readouterr().out
    assert all(torch.equal(before[name], each) for name, each in params.items())  # a pure function
    assert any(not torch.equal(before[name], each) for name, each in new_params.items())
    assert (opt_state.num_updates, new_opt_state.num_updates) == (0, 1)


def test_parameters_come_of_a_key_and_a_state() -> None:
    params, same, other = (policy_network.init(seed, states[0]) for seed in (1, 1, 2))
    assert all(torch.equal(params[name], same[name]) for name in params)
    assert not torch.equal(params["mix.weight"], other["mix.weight"])
    own = dict(policy_network.named_parameters())
    assert params.keys() == own.keys()
    assert not torch.equal(params["mix.weight"], own["mix.weight"])  # the network keeps its own
    assert applied(policy_network)(params, batch_tensors(states[0])).shape == (1, FAMILY.num_actions)
    drawn = [policy_network.init(torch.Generator().manual_seed(5), states[0]) for _ in range(2)]
    assert torch.equal(drawn[0]["mix.weight"], drawn[1]["mix.weight"])


def batch_tensors(state: AcquisitionState) -> dict[str, Tensor]:
    return {name: torch.from_numpy(part) for name, part in state.observations.items()}


def test_a_batch_is_collected_and_indexed_as_printed() -> None:
    batch = batch_of()
    assert len(batch["states"]) == 10 * config.group_size
    assert batch["rewards"].shape == batch["old_log_probs"].shape == (80,)
    assert f"Mean reward: {torch.mean(batch['rewards']):.3f}".startswith("Mean reward: ")
    assert isinstance(batch["states"][0], AcquisitionState)
    assert len(list(batch["states"][:3])) == 3
    interventions = batch["states"].interventions(batch["actions"].numpy())
    assert all(len(each) == 1 and set(each) <= {0, 1} for each in interventions)  # the target is variable 2
    by_position = collect_grpo_batch(
        policy_network,
        policy_network.init(1, states[0]),
        states,
        scms,
        surrogate_model,
        surrogate_params,
        config,
        reward_config,
        7,
    )
    assert torch.equal(by_position["rewards"], batch["rewards"])
    plain = batch_of(reward_scaling="none")
    assert batch_of(reward_clip_value=0.01)["rewards"].abs().max() <= 0.01
    assert batch["rewards"].tolist() == pytest.approx((10 * torch.tanh(plain["rewards"] / 10)).tolist())


def test_a_key_is_an_int_or_a_generator_and_says_what_to_write_for_another() -> None:
    by_generator = [batch_of(key=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(by_generator[0]["actions"], by_generator[1]["actions"])
    assert torch.equal(batch_of(key=torch.arange(9)[7])["actions"], batch_of(key=7)["actions"])
    with pytest.raises(ConfigurationError) as refused:
        batch_of(key=np.zeros(2, dtype=np.uint32))  # what jax.random.PRNGKey(0) is
    assert str(refused.value) == (
        "key must be an int or a torch.Generator, got ndarray: for jax.random.key(0) write key=0, and for "
        "keys that were split key=0, 1, 2, ..."
    )


def test_the_surrogate_believes_in_place_of_the_exact_posterior() -> None:
    watched = Ridge()
    paid = RewardConfig(weights={"expected_regret": 1.0}, horizon="campaign")
    own = batch_of(surrogate_model=watched, surrogate_params=None, reward_config=paid)
    exact = batch_of(surrogate_model=None, surrogate_params=None, reward_config=paid)
    assert not torch.allclose(own["rewards"], exact["rewards"])
    X, Y = watched.seen[0]
    first = next(iter(own["states"].interventions(own["actions"].numpy())))
    [(variable, value)] = first.items()
    assert X.shape[1:] == (1, 2 * FAMILY.num_variables)
    assert Y.shape == (len(X), 1, 1)
    assert X[0, 0].nonzero().flatten().tolist() == [variable, FAMILY.num_variables + variable]
    assert float(X[0, 0, FAMILY.num_variables + variable]) == value
    assert max(X.shape[1] for X, _ in watched.seen) > 2  # later experiments see the earlier ones
    wide = batch_of(surrogate_model=Ridge(1.0), surrogate_params={"scale": torch.tensor(5.0)})
    same = batch_of(surrogate_model=Ridge(5.0), surrogate_params=None)
    assert torch.allclose(wide["rewards"], same["rewards"])  # surrogate_params are the model's state_dict


def test_reused_batches_are_collected_positionally_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    manager = create_sample_reuse_manager(config)
    params = policy_network.init(1, states[0])
    update_step, optimizer_init = create_grpo_trainer(policy_network, config)
    opt_state = optimizer_init(params)
    seen = []
    for step in range(4):
        batch, manager = collect_grpo_batch_with_reuse(
            policy_network,
            params,
            states,
            scms,
            surrogate_model,
            surrogate_params,
            config,
            reward_config,
            manager,
            keys[step],
        )
        params, opt_state, _ = update_step(params, opt_state, batch)
        if step % 50 == 0:
            print(f"Step {step}: Reuse iteration {manager.reuse_iteration}")
        seen.append(batch)
    assert capsys.readouterr().out == "Step 0: Reuse iteration 1\n"
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[0] is not seen[2]
    with pytest.raises(
        ConfigurationError,
        match="current_samples must be a batch of collect_grpo_batch, which knows groups, got 'list'",
    ):
        collect_grpo_batch_with_reuse(
            policy_network,
            params,
            states,
            scms,
            None,
            None,
            config,
            None,
            SampleReuseManager([()] * 9, 0, 4),
            0,
        )


# ------------------------------------------------------------------------------ enhanced features


def test_a_step_with_reuse_says_which_samples_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    manager = create_sample_reuse_manager(config)
    with pytest.raises(ConfigurationError) as refused:
        training_step_with_reuse(manager, config)
    assert str(refused.value) == (
        "new samples are due: write training_step_with_reuse(manager, config, collect), collect() being what "
        "makes them"
    )
    samples, manager = training_step_with_reuse(manager, config, batch_of)
    again, manager = training_step_with_reuse(manager, config)
    assert again is samples
    assert capsys.readouterr().out == "Collected fresh samples\nReusing samples (iteration 2)\n"
    if manager.should_collect_new_samples(config.group_size):
        manager = manager.reset_with_new_samples(batch_of())
    assert manager.reuse_iteration == 1


def test_rewards_are_scaled_as_printed() -> None:
    rewards = torch.tensor([-30.0, 2.0])
    assert apply_reward_scaling(rewards, method="clip", clip_value=10.0).tolist() == [-10.0, 2.0]
    assert apply_reward_scaling(rewards, "none") is not rewards
    assert apply_reward_scaling(rewards, "none").tolist() == [-30.0, 2.0]
    assert torch.allclose(apply_reward_scaling(rewards), 10 * torch.tanh(rewards / 10))
    with pytest.raises(ValueError, match="'log'"):
        apply_reward_scaling(rewards, method="log")  # type: ignore[arg-type]  # wrong on purpose


def test_advantages_of_a_flat_group_as_printed() -> None:
    rewards = torch.tensor([1.0, 3.0])
    assert compute_advantages(rewards, GRPOConfig()).tolist() == pytest.approx([-1.0, 1.0])
    assert compute_advantages(rewards, GRPOConfig(scale_rewards=False)).tolist() == [-1.0, 1.0]
    assert compute_advantages(10 * rewards, GRPOConfig(scale_rewards=False)).tolist() == [-10.0, 10.0]


def test_the_loss_is_clipped_policy_minus_entropy_plus_kl_beyond_the_dead_zone() -> None:
    settings = config.model_copy(update={"beta": 0.5})
    update_step, optimizer_init = create_grpo_trainer(policy_network, settings, kl_dead_zone=0.01)
    params, batch = policy_network.init(1, states[0]), batch_of()
    far = {**params, "score.weight": 2000 * params["score.weight"]}
    _, _, seen = update_step(far, optimizer_init(far), batch)
    assert seen.kl_penalty > 0
    assert seen.total_loss == pytest.approx(seen.policy_loss + seen.entropy_loss + seen.kl_penalty)
    assert seen.entropy_loss == pytest.approx(-0.01 * seen.mean_entropy)


# ------------------------------------------------------------------------------ parts of the domain


def test_states_models_interventions_and_two_objectives() -> None:
    scm = create_random_scm(key=3, family=replace(FAMILY, num_graphs=3))
    state = create_acquisition_state(scm)
    assert isinstance(scm, Tasks)
    assert (len(scm), len(state)) == (1, 1)
    after = state.after(np.array([0]))
    assert after.worth()["cost"][0] < state.worth()["cost"][0] == 1.0
    batch = batch_of(
        states=[state], scms=[scm], surrogate_model=None, surrogate_params=None, reward_config=dual_reward()
    )
    assert batch["rewards"].std() > 0
    with pytest.raises(ConfigurationError, match="weights must be without structure"):
        batch_of(reward_config=dual_reward())


# ------------------------------------------------------------------------------ integration patterns


def test_the_loop_and_the_curriculum_train_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    trained = enhanced_grpo_training_loop(config, states, scms)
    assert trained.num_experiments >= 60
    assert len(trained.updates) % 2 == 0
    curriculum_schedule = [
        Difficulty(family=FAMILY, total_steps=30, num_scms=8, learning_rate_scale=0.5),
        Difficulty(family=replace(FAMILY, num_variables=4), total_steps=30, num_scms=8),
    ]
    for difficulty in curriculum_schedule:
        stage = adjust_grpo_config_for_difficulty(difficulty)
        models = generate_scms_for_difficulty(difficulty)
        first = generate_initial_states(models)
        assert stage.learning_rate == pytest.approx(3e-4 * difficulty.learning_rate_scale)
        assert (stage.total_steps, len(models), len(first)) == (30, 8, 8)
    whole = curriculum_enhanced_grpo(curriculum_schedule)
    assert whole.num_experiments >= 60
    assert capsys.readouterr().out == ""  # fewer than 50 updates
    believed = enhanced_grpo_training_loop(config, states, scms, surrogate_model=surrogate_model)
    assert not torch.equal(believed.params["mix.weight"], trained.params["mix.weight"])


def test_the_log_has_a_line_every_hundred_updates_and_reuse_every_fifty() -> None:
    lines: list[str] = []
    small = config.model_copy(
        update={"num_groups": 1, "group_size": 2, "total_steps": 1, "num_iterations": 100}
    )
    enhanced_grpo_training_loop(small, states, scms, policy_network=policy_network, log=lines.append)
    assert [line.split(":")[0] for line in lines] == ["update 50", "update 100", "update 100"]
    assert lines[0] == "update 50: use 50 of 100 of its samples"


def test_bonuses_enter_the_rewards_as_printed() -> None:
    class Novelty:
        def compute_bonuses(self, states: AcquisitionState) -> Tensor:
            return torch.full((len(states),), 0.25)

    class ByAction:
        def compute_bonuses(self, states: AcquisitionState, actions: np.ndarray) -> np.ndarray:
            return actions.astype(np.float64)

    arguments = (policy_network, policy_network.init(1, states[0]), states, scms)
    arguments += (surrogate_model, surrogate_params, config, reward_config, 7)
    plain = batch_of()
    enhanced_batch_collection = grpo_with_exploration(Novelty(), *arguments)
    assert torch.allclose(enhanced_batch_collection()["rewards"], plain["rewards"] + 0.25)
    batch = grpo_with_exploration(ByAction())(*arguments)
    assert torch.allclose(batch["rewards"], plain["rewards"] + plain["actions"])
    by_hand = {**plain, "rewards": plain["rewards"] + plain["actions"]}
    update_step, optimizer_init = create_grpo_trainer(policy_network, config)
    params = arguments[1]
    one, other = (update_step(params, optimizer_init(params), each)[0] for each in (batch, by_hand))
    assert all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------ performance


def test_chunks_of_a_large_batch_are_one_step_as_printed() -> None:
    params, opt_state, large_batch, _ = updated()
    _, _, seen = opt_state.update_step(params, opt_state, large_batch)
    for chunks in ({}, {"chunk_size": 7}):
        _, after, also = memory_efficient_grpo_update(params, opt_state, large_batch, **chunks)
        assert after.num_updates == opt_state.num_updates + 1
        for field in fields(GRPOUpdate):
            assert getattr(also, field.name) == pytest.approx(getattr(seen, field.name), abs=1e-5), field.name


def test_the_compiled_forms_take_the_printed_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    params, opt_state, batch_data, _ = updated()
    plain, _, _ = opt_state.update_step(params, opt_state, batch_data)
    new, _, _ = compiled_grpo_update(params, opt_state, batch_data)
    assert all(torch.equal(plain[name], new[name]) for name in plain)
    collected = compiled_batch_collection(params, states, keys[:10])
    assert len(collected["states"]) == 10 * 64
    assert len(compiled) == 2


# ------------------------------------------------------------------------------ troubleshooting


def test_the_printed_advice_reads_an_update(capsys: pytest.CaptureFixture[str]) -> None:
    *_, update_info = updated()
    if update_info.advantage_std > 3.0:
        print("High advantage variance detected")
    if update_info.mean_entropy < 0.1:
        print("Policy collapse detected")
    if update_info.grad_norm > 5.0:
        print("High gradient norm detected")
    assert debug_grpo_update(update_info) is True
    lines = capsys.readouterr().out.splitlines()
    names = (
        "advantages_normalized",
        "advantages_raw",
        "entropy_reasonable",
        "kl_bounded",
        "gradients_stable",
    )
    assert [line.split(":")[0] for line in lines] == [f"✓ {name}" for name in names]
    for changes, check in (
        ({"mean_advantage": 0.2}, "! advantages_normalized"),
        ({"reward_std": 3.5}, "! advantages_raw"),
        ({"mean_entropy": 0.01}, "✗ entropy_reasonable"),
        ({"approx_kl": 0.2}, "! kl_bounded"),
        ({"grad_norm": 5.5}, "✗ gradients_stable"),
    ):
        assert debug_grpo_update(replace(update_info, **changes)) is False
        assert check in capsys.readouterr().out


# ------------------------------------------------------------------------------ the tables beside it


def test_every_name_stands_on_a_page() -> None:
    page = (ROOT / "docs" / "causal-acquisition.md").read_text(encoding="utf-8")
    table = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}" in table, name
        assert name in page, name


NAMES = (
    *("GRPOConfig", "GRPOUpdate", "SampleReuseManager", "AcquisitionPolicyNetwork", "AcquisitionState"),
    *("create_grpo_trainer", "collect_grpo_batch", "collect_grpo_batch_with_reuse"),
    *("create_sample_reuse_manager", "training_step_with_reuse", "apply_reward_scaling"),
    *("compute_advantages", "create_acquisition_state", "create_random_scm", "enhanced_grpo_training_loop"),
    *("curriculum_enhanced_grpo", "adjust_grpo_config_for_difficulty", "generate_scms_for_difficulty"),
    *("generate_initial_states", "grpo_with_exploration", "compute_bonuses", "compiled_grpo_update"),
    *("compiled_batch_collection", "memory_efficient_grpo_update", "debug_grpo_update"),
)
