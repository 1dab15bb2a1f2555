"""GRPO over experiments in functions: samples, updates, reuse, loops, diagnostics."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.functional.batch import (
    GRPOBatch,
    applied,
    collect_grpo_batch,
    compiled_batch_collection,
    compute_advantages,
    grpo_with_exploration,
    initial_params,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import (
    CountBonus,
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
    GRPOUpdate,
    compiled_grpo_update,
    create_grpo_trainer,
    create_sample_reuse_manager,
    memory_efficient_grpo_update,
)
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.policy import as_tensors
from stateset_agents.numeric.rollout import action_keys, collect
from stateset_agents.numeric.update import update
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.types.errors import ConfigurationError

FAMILY = LinearFamily(num_variables=4, costs=(1.0, 4.0), budget=8.0)
CONFIG = GRPOConfig(group_size=8, num_groups=6, num_iterations=1, learning_rate=3e-3)
PLAIN = RewardConfig(weights={"regret": 1.0})


def begun(number: int = 6, family: LinearFamily = FAMILY) -> AcquisitionState:
    return create_acquisition_state(create_random_scm(0, family, number=number))


def network(seed: int = 0) -> AcquisitionPolicyNetwork:
    """One whose choices are far from uniform."""
    made = AcquisitionPolicyNetwork(hidden=16, seed=seed)
    with torch.no_grad():
        made.score.weight.mul_(100)
    return made


def sampled(config: GRPOConfig = CONFIG, rewards: RewardConfig = PLAIN, *, key: int = 1) -> GRPOBatch:
    return collected(network(), begun(), rewards, key=key, config=config)


def collected(
    policy: AcquisitionPolicyNetwork,
    states: AcquisitionState,
    rewards: RewardConfig = PLAIN,
    *,
    key: int = 1,
    config: GRPOConfig = CONFIG,
    params: dict[str, torch.Tensor] | None = None,
) -> GRPOBatch:
    scms = states.environment.tasks
    params = params or initial_params(policy)
    return collect_grpo_batch(policy, params, states, scms, None, None, config, rewards, key, "none")


def as_double(batch: GRPOBatch) -> GRPOBatch:
    seen = {name: part.astype(np.float64) for name, part in batch["states"].observations.items()}
    states = replace(batch["states"], observations=seen)
    return {**batch, "states": states, "old_log_probs": batch["old_log_probs"].double()}


# ------------------------------------------------------------------------------------------ config


def test_the_document_s_defaults_and_names() -> None:
    config = GRPOConfig()
    assert (config.group_size, config.clip_ratio, config.entropy_coeff) == (64, 0.2, 0.01)
    assert (config.kl_penalty_coeff, config.max_grad_norm, config.learning_rate) == (0.0, 1.0, 3e-4)
    assert (config.num_iterations, config.scale_rewards, config.weight_decay) == (4, True, 0.0)
    named = GRPOConfig(entropy_coeff=0.5, kl_penalty_coeff=0.25, scale_rewards=False, total_steps=7)
    assert (named.entropy_coef, named.beta, named.advantage_normalization) == (0.5, 0.25, "none")
    assert GRPOConfig(scale_rewards=True).advantage_normalization == "population"
    with pytest.raises(ValueError, match="group_size"):
        GRPOConfig(group_size=1)


# ------------------------------------------------------------------------------------------ samples


def test_every_state_has_its_group_against_one_model_and_one_noise() -> None:
    batch = sampled()
    assert len(batch["states"]) == len(batch["actions"]) == 48
    assert batch["group_ids"].tolist() == np.repeat(np.arange(6), 8).tolist()
    for group in range(6):
        rows = batch["group_ids"] == group
        for action in batch["actions"][rows].unique():
            same = batch["rewards"][rows & (batch["actions"] == action)]
            assert (same == same[0]).all()  # equal actions earn the same
    assert len(set(batch["actions"].tolist())) > 2
    assert batch["states"].mask[np.arange(48), batch["actions"]].all()


def test_old_log_probs_are_those_of_the_policy_and_a_key_gives_the_samples() -> None:
    policy, batch = network(), sampled()
    states = batch["states"]
    logits = policy(as_tensors(states.observations)).masked_fill(~torch.from_numpy(states.mask), -torch.inf)
    again = torch.log_softmax(logits, dim=-1).gather(1, batch["actions"][:, None])[:, 0]
    assert again.tolist() == pytest.approx(batch["old_log_probs"].tolist(), abs=1e-6)
    same, other = sampled(), sampled(key=2)
    assert torch.equal(same["actions"], batch["actions"])
    assert torch.equal(same["rewards"], batch["rewards"])
    assert not torch.equal(other["actions"], batch["actions"])


def test_rewards_are_the_rise_of_the_objectives_by_hand() -> None:
    states = begun()
    actions = np.array([0, 1, 2, 3, 4, 5])
    before, after = states.worth(), states.after(actions).worth()
    assert before["cost"].tolist() == [1.0] * 6
    prices = states.environment.situation.costs[np.arange(6), actions]
    assert before["cost"] - after["cost"] == pytest.approx(prices / FAMILY.budget)
    assert (after["precision"] >= before["precision"] - 1e-9).all()  # what is measured is known better
    both = RewardConfig(weights={"regret": 2.0, "cost": 0.5})
    rises = {name: after[name] - before[name] for name in before}
    assert both.total(rises) == pytest.approx(2 * rises["regret"] + 0.5 * rises["cost"])
    bent = apply_reward_scaling(both.total(rises), "tanh", 0.1)
    assert bent.numpy() == pytest.approx(0.1 * np.tanh(both.total(rises) / 0.1))
    assert states.worth()["cost"].tolist() == [1.0] * 6  # the states stay as they are


def test_a_dual_reward_pays_for_the_graph_too() -> None:
    family = replace(FAMILY, num_graphs=3)
    states = begun(40, family)
    after = states.after(np.zeros(40, dtype=np.int64)).worth()
    found = after["structure"] - states.worth()["structure"]
    assert states.worth()["structure"] == pytest.approx(-np.log(3))
    assert found.mean() > 0.05  # nats of the graph's entropy
    rises = {name: after[name] - value for name, value in states.worth().items()}
    dual = dual_reward(optimisation=0.0, discovery=1.0)
    assert dual.total(rises) == pytest.approx(found)


def test_a_campaign_s_reward_is_all_that_follows() -> None:
    rewards = replace(PLAIN, horizon="campaign")
    policy, states = network(), begun()
    batch = collected(policy, states, rewards)
    assert torch.equal(batch["actions"], sampled()["actions"])
    keys = action_keys(1, 0, 6, 8)
    environment = AcquisitionEnv(FAMILY)
    environment.begin(states.environment.tasks.take(np.repeat(np.arange(6), 8)))
    start = environment.regret
    whole = collect(policy, _Begun(environment), list(range(6)), group_size=8, keys=keys)
    ends = np.where(whole.alive, whole.components["regret"], 0.0).sum(axis=0)
    assert batch["rewards"].tolist() == pytest.approx((start - ends).tolist(), abs=1e-9)
    assert batch["num_experiments"] == whole.num_steps


class _Begun:
    """An environment whose reset goes on where it is."""

    def __init__(self, environment: AcquisitionEnv) -> None:
        self.environment, self.spec = environment, environment.spec
        self.step, self.action_mask = environment.step, environment.action_mask

    def reset(self, seeds: list[int]) -> dict[str, np.ndarray]:
        return self.environment.observe()


def test_bonuses_enter_the_reward_before_members_are_compared() -> None:
    policy, states = network(), begun()
    plain = collected(policy, states)
    tried = states.after(np.zeros(6, dtype=np.int64))
    bonus = CountBonus(0.5)
    params, scms = initial_params(policy), states.environment.tasks
    collect = grpo_with_exploration(bonus, policy, params, reward_scaling="none")
    paid = collect(states, scms, None, None, CONFIG, PLAIN, 1)
    assert (paid["rewards"] - plain["rewards"]).tolist() == pytest.approx([0.5] * 48)
    found = bonus.compute_bonuses(tried, np.array([0, 0, 0, 1, 1, 1]))
    assert found == pytest.approx([0.5 / np.sqrt(2)] * 3 + [0.5] * 3)


# ------------------------------------------------------------------------------------------ updates


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    scaled = compute_advantages(rewards, GRPOConfig())
    assert scaled.flatten().tolist() == pytest.approx([-1, 1, 0, 0])
    assert compute_advantages(rewards, GRPOConfig(scale_rewards=False)).tolist() == [[-1, 1], [0, 0]]
    wide = 10 * rewards
    assert compute_advantages(wide, GRPOConfig(scale_rewards=False)).tolist() == [[-10, 10], [0, 0]]


def test_an_update_has_the_twelve_fields_and_they_add_up() -> None:
    batch, policy = sampled(), network()
    update_step, optimizer_init = create_grpo_trainer(policy, CONFIG)
    params = initial_params(policy)
    _, _, seen = update_step(params, optimizer_init(params), batch)
    assert [field.name for field in fields(GRPOUpdate)] == [
        "policy_loss",
        "entropy_loss",
        "kl_penalty",
        "total_loss",
        "grad_norm",
        "group_baseline",
        "mean_reward",
        "reward_std",
        "mean_advantage",
        "advantage_std",
        "mean_entropy",
        "approx_kl",
        "max_entropy",
    ]
    assert seen.max_entropy == pytest.approx(np.log(batch["states"].mask.sum(axis=1)).mean())
    assert seen.total_loss == pytest.approx(seen.policy_loss + seen.entropy_loss + seen.kl_penalty)
    assert seen.entropy_loss == pytest.approx(-CONFIG.entropy_coeff * seen.mean_entropy)
    assert seen.mean_reward == pytest.approx(float(batch["rewards"].mean()))
    assert seen.group_baseline == pytest.approx(seen.mean_reward)
    assert seen.mean_advantage == pytest.approx(0.0, abs=1e-6)
    tied = torch.tensor([float(group.std(correction=0)) == 0 for group in batch["rewards"].reshape(6, 8)])
    assert seen.advantage_std == pytest.approx(float((~tied).double().mean() ** 0.5), abs=1e-4)
    assert seen.approx_kl == pytest.approx(0.0, abs=1e-9)


def test_the_functional_form_is_the_object_form_over_fifty_steps() -> None:
    changes = {"lr_scheduler_type": "linear", "total_steps": 50 * 48, "weight_decay": 0.01, "beta": 0.05}
    config = CONFIG.model_copy(update=changes)
    policy, reference = network(), network()
    optimization = Optimization(policy, config, num_updates=config.total_steps)
    update_step, optimizer_init = create_grpo_trainer(network(), config)
    params = initial_params(policy)
    opt_state = optimizer_init(params)
    states = begun()
    for number in range(50):
        environment = _Begun(AcquisitionEnv(FAMILY))
        environment.environment.begin(states.environment.tasks.take(np.repeat(np.arange(6), 8)))
        keys = action_keys(number, 0, 6, 8)
        rollout = collect(policy, environment, list(range(6)), group_size=8, keys=keys, max_steps=1)
        update(policy, optimization, rollout, config, reference=reference, position=48 * number)
        batch = collected(network(), states, key=number, config=config, params=params)
        assert np.array_equal(batch["actions"].numpy(), rollout.actions[0])
        batch["rewards"] = torch.from_numpy(rollout.rewards[0])  # the environment's tanh
        held = {name: each.clone() for name, each in params.items()}
        moments = {name: each.clone() for name, each in opt_state.means.items()}
        before, state_before = params, opt_state
        params, opt_state, _ = update_step(params, opt_state, batch)
        assert all(torch.equal(before[name], held[name]) for name in held)
        assert all(torch.equal(state_before.means[name], moments[name]) for name in moments)
    assert state_before.num_updates == 49
    for name, each in policy.named_parameters():
        assert torch.allclose(params[name], each.detach(), rtol=0, atol=1e-6), name
    moved = max(float((params[name] - each).abs().max()) for name, each in initial_params(network()).items())
    assert moved > 0.01


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 48, 1000])
def test_any_chunk_size_is_one_step(chunk_size: int) -> None:
    config = CONFIG.model_copy(update={"beta": 0.1})
    policy, batch = network().double(), as_double(sampled())
    params = {name: each + 0.01 for name, each in initial_params(policy).items()}
    update_step, optimizer_init = create_grpo_trainer(policy, config)
    state = optimizer_init(params)
    whole, _, seen = update_step(params, state, batch)
    cut, _, also = memory_efficient_grpo_update(params, state, batch, chunk_size=chunk_size)
    assert all(torch.allclose(whole[name], cut[name], rtol=0, atol=1e-6) for name in whole)
    for field in fields(GRPOUpdate):
        assert getattr(seen, field.name) == pytest.approx(getattr(also, field.name), abs=1e-9), field.name
    with pytest.raises(ConfigurationError, match="chunk_size must be at least 1, got 0"):
        update_step(params, state, batch, chunk_size=0)


def test_a_piece_s_samples_are_all_that_is_in_memory() -> None:
    sizes: list[int] = []

    class Counting(AcquisitionPolicyNetwork):
        def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
            sizes.append(len(observations["context"]))
            return super().forward(observations)

    policy, batch = Counting(), sampled()
    params = initial_params(policy)
    state = create_grpo_trainer(policy, CONFIG)[1](params)
    memory_efficient_grpo_update(params, state, batch)
    assert sizes == [16, 16, 16]


def test_kl_is_to_the_first_policy_with_a_dead_zone_and_absent_without_beta() -> None:
    config = CONFIG.model_copy(update={"beta": 1.0, "entropy_coef": 0.0})
    policy, batch = network(), sampled()
    elsewhere = {name: each + 0.05 for name, each in initial_params(policy).items()}

    def updated(**options: float) -> tuple[dict[str, torch.Tensor], GRPOUpdate]:
        update_step, optimizer_init = create_grpo_trainer(policy, config, **options)
        params, _, seen = update_step(elsewhere, optimizer_init(elsewhere), batch)
        return params, seen

    always, seen = updated()
    kl = seen.kl_penalty
    assert kl > 0.001
    above, part = updated(kl_dead_zone=0.5 * kl)
    assert part.kl_penalty == pytest.approx(0.5 * kl)
    assert all(torch.equal(always[name], above[name]) for name in always)  # the slope is the same
    below, none = updated(kl_dead_zone=1.01 * kl)
    assert none.kl_penalty == 0.0
    without, _, free = create_grpo_trainer(policy, config.model_copy(update={"beta": 0.0}))[0](
        elsewhere, create_grpo_trainer(policy, config)[1](elsewhere), batch
    )
    assert free.kl_penalty == 0.0
    assert all(torch.equal(below[name], without[name]) for name in below)
    assert not all(torch.equal(always[name], without[name]) for name in always)


def test_what_is_not_finite_changes_nothing() -> None:
    batch, policy = sampled(), network()
    batch["rewards"] = torch.where(torch.arange(48) == 3, torch.nan, batch["rewards"])
    update_step, optimizer_init = create_grpo_trainer(policy, CONFIG)
    params = initial_params(policy)
    after, state, seen = update_step(params, optimizer_init(params), batch)
    assert all(torch.equal(after[name], params[name]) for name in params)
    assert state.num_updates == 0
    assert np.isnan(seen.grad_norm)


def test_a_biased_arm_is_learned_and_the_step_is_clipped() -> None:
    policy, config = network(), CONFIG.model_copy(update={"max_grad_norm": 1e-9, "entropy_coef": 0.0})
    batch = sampled()
    update_step, optimizer_init = create_grpo_trainer(policy, config)
    params = initial_params(policy)
    after, _, seen = update_step(params, optimizer_init(params), batch)
    assert seen.grad_norm > 1e-3  # before clipping
    largest = max(float((after[name] - params[name]).abs().max()) for name in params)
    assert largest < 0.5 * config.learning_rate  # clipped to 1e-9, below AdamW's eps of 1e-8


@pytest.mark.long
def test_the_compiled_form_is_the_plain_form() -> None:
    policy, batch = network(), sampled()
    params = initial_params(policy)
    update_step, optimizer_init = create_grpo_trainer(policy, CONFIG)
    state = optimizer_init(params)
    plain, _, seen = update_step(params, state, batch)
    compiled, _, also = compiled_grpo_update(params, state, batch)
    log_probs = [
        torch.log_softmax(applied(policy)(each, as_tensors(batch["states"].observations)), -1)
        for each in (plain, compiled)
    ]
    assert torch.allclose(*log_probs, rtol=0, atol=1e-5)
    assert also.total_loss == pytest.approx(seen.total_loss, abs=1e-6)
    keys = [3, 4, 5, 6, 7, 8]
    states, settings = begun(), {"config": CONFIG, "reward_config": PLAIN, "reward_scaling": "none"}
    compiled_batch = compiled_batch_collection(params, states, keys, **settings)
    for place, key in enumerate(keys):  # each state's group is by its own key
        alone = collected(policy, states[place], key=key)
        rows = compiled_batch["group_ids"] == place
        assert torch.equal(compiled_batch["actions"][rows], alone["actions"])
        assert torch.allclose(compiled_batch["old_log_probs"][rows], alone["old_log_probs"], atol=1e-5)
    with pytest.raises(ConfigurationError, match="the number of keys must be that of the states, got 1"):
        compiled_batch_collection(params, states, [0])


def test_what_cannot_be_compiled_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object) -> object:
        def call(*_: object) -> None:
            raise RuntimeError("no C++ compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(ConfigurationError) as refused:
        applied(nn.Linear(1, 1), compile=True)({}, None)
    assert str(refused.value) == (
        "torch.compile failed with no C++ compiler; install a C++ compiler (g++), or leave compile out"
    )


# ------------------------------------------------------------------------------------------ reuse


def test_a_manager_gives_new_ones_and_counts_every_use() -> None:
    empty = create_sample_reuse_manager(CONFIG.model_copy(update={"num_iterations": 3}))
    batch = sampled()
    assert empty.should_collect_new_samples(48)
    first = empty.reset_with_new_samples(batch)
    assert (first.reuse_iteration, empty.current_samples) == (1, ())
    assert not first.should_collect_new_samples(48)
    assert first.should_collect_new_samples(49)  # too few
    third = first.update_for_reuse().update_for_reuse()
    assert (third.reuse_iteration, first.reuse_iteration) == (3, 1)
    assert third.should_collect_new_samples(48)
    with pytest.raises(AttributeError):
        first.reuse_iteration = 2  # type: ignore[misc]  # it is frozen


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RewardConfig(weights={"regrets": 1.0}), "weights must be of regret, expected_"),
        (lambda: RewardConfig(weights={"regret": -1.0}), "weights: regret must be at least 0, got -1.0"),
        (
            lambda: RewardConfig(weights={}),
            "weights must name at least one objective with a weight, got none",
        ),
        (lambda: RewardConfig(horizon="year"), "horizon must be step or campaign, got 'year'"),
        (lambda: apply_reward_scaling([], "log"), "reward_scaling must be one of tanh, clip, none, got"),
        (lambda: CountBonus(-1.0), "the weight of a bonus must be at least 0, got -1.0"),
        (lambda: create_grpo_trainer(network(), CONFIG, kl_dead_zone=-1), "kl_dead_zone must be at least 0"),
        (lambda: create_acquisition_state([]), "scms must be at least one, got 0"),
        (
            lambda: create_acquisition_state([create_random_scm(0, FAMILY), create_random_scm(0)]),
            "scms[1] must be of the family and surrogate of scms[0], got 'another': train",
        ),
        (
            lambda: collect_grpo_batch(
                network(), {}, begun(2), create_random_scm(1, FAMILY), None, None, CONFIG, PLAIN, 0
            ),
            "scms must be the models that the states were made of, got 'others, or",
        ),
        (
            lambda: create_random_scm(np.zeros(2, dtype=np.uint32)),  # type: ignore[arg-type]  # JAX's
            "key must be an int or a torch.Generator, got ndarray: for jax.random.key(0) write key=0",
        ),
        (
            lambda: create_grpo_trainer(network(), CONFIG)[0](
                {},
                None,
                {**sampled(), "rewards": torch.zeros(3)},  # type: ignore[arg-type]  # not reached
            ),
            'the number of batch["rewards"] must be 48, one for each sample, got (3,)',
        ),
    ],
)
def test_bad_input_is_one_line(call, message) -> None:  # type: ignore[no-untyped-def]  # any refusal
    with pytest.raises(ConfigurationError) as refused:
        call()
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_spent_state_is_refused() -> None:
    states = begun(1)
    while states.goes_on.all():
        cheap = states.environment.situation.costs.argmin(axis=1)
        states = states.after(cheap)
    policy = network()
    with pytest.raises(ConfigurationError, match="state 0 cannot pay an experiment: leave it out"):
        collected(policy, states)
