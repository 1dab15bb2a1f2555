"""Training loops in functions: plain, from easy to hard, with a reward for what is new."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.functional.batch import (
    Apply,
    GRPOBatch,
    Params,
    applied,
    collect_grpo_batch,
    initial_params,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.reuse import (
    SampleReuseManager,
    create_sample_reuse_manager,
)
from stateset_agents.numeric.acquisition.functional.rewards import Bonus, RewardConfig
from stateset_agents.numeric.acquisition.functional.states import (
    AcquisitionState,
    create_acquisition_state,
    create_random_scm,
)
from stateset_agents.numeric.acquisition.functional.update import (
    GRPOUpdate,
    OptimizerState,
    UpdateStep,
    create_grpo_trainer,
)
from stateset_agents.numeric.policy import as_tensors, sample_actions
from stateset_agents.numeric.rollout import action_keys, uniforms
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

LOG_EVERY, REUSE_EVERY = 100, 50
"""Updates between two lines of the log, and between two counts of how often samples were used."""

Collect = Callable[[Params, int], GRPOBatch]
"""(parameters, key) -> new samples."""
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What a loop gives back."""

    params: dict[str, Tensor]
    opt_state: OptimizerState
    updates: tuple[GRPOUpdate, ...]
    num_experiments: int

    def load_into(self, policy_network: nn.Module) -> None:
        """Give the network these parameters."""
        policy_network.load_state_dict(self.params)


# ------------------------------------------------------------------------------------------ reuse


def collect_grpo_batch_with_reuse(
    collect: Collect, params: Params, manager: SampleReuseManager, *, required_size: int, key: int
) -> tuple[GRPOBatch, SampleReuseManager]:
    """The samples of this update, new ones where they are due, and the manager after this use."""
    if manager.should_collect_new_samples(required_size):
        samples = collect(params, key)
        return samples, manager.reset_with_new_samples(samples)
    assert manager.current_samples is not None
    return manager.current_samples, manager.update_for_reuse()


def training_step_with_reuse(
    update_step: UpdateStep,
    collect: Collect,
    params: Params,
    opt_state: OptimizerState,
    manager: SampleReuseManager,
    *,
    required_size: int,
    key: int,
) -> tuple[dict[str, Tensor], OptimizerState, SampleReuseManager, GRPOUpdate]:
    """One update, of new samples or of those that are held."""
    batch, manager = collect_grpo_batch_with_reuse(
        collect, params, manager, required_size=required_size, key=key
    )
    params, opt_state, seen = update_step(params, opt_state, batch)
    return params, opt_state, manager, seen


# ------------------------------------------------------------------------------------------ states


def generate_scms_for_difficulty(difficulty: Difficulty, number: int, *, key: int) -> Tasks:
    """`number` models of its family; a function of `key` alone."""
    return create_random_scm(key, difficulty.family, number=number)


def generate_initial_states(
    policy_network: nn.Module,
    params: Params,
    difficulty: Difficulty,
    number: int,
    *,
    key: int,
    apply: Apply | None = None,
) -> AcquisitionState:
    """`number` states that the policy meets: each a task of its own, which the policy has played until as
    much of the budget was spent as chance says, so that starts, middles and ends are trained. Every one can
    pay an experiment."""
    apply = apply or applied(policy_network)
    family = difficulty.family
    states = create_acquisition_state(family, generate_scms_for_difficulty(difficulty, number, key=key))
    least = 1.0 - np.random.default_rng(derive(key, "left")).random(number)  # of the budget's share
    keys = action_keys(derive(key, "walk"), 0, number, 1)
    found: list[AcquisitionState] = []
    step = 0
    while True:
        with torch.no_grad():
            logits = apply(params, as_tensors(states.observations)).numpy()
        actions, _ = sample_actions(logits, states.mask, uniforms(keys, step))
        after = states.after(actions)
        stays = (after.worth()["cost"] < least) | ~after.goes_on
        found.append(states.take(np.flatnonzero(stays)))
        goes = np.flatnonzero(~stays)
        if not len(goes):
            return found[0].joined(found[1:])
        states, least, keys, step = after.take(goes), least[goes], keys[goes], step + 1


# ------------------------------------------------------------------------------------------ loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """One stage of a curriculum."""

    family: LinearFamily
    share: float = 1.0
    """Of the experiments, relative to the other stages'."""
    entropy_scale: float = 1.0
    """Times entropy_coeff."""
    learning_rate_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("share", "entropy_scale", "learning_rate_scale"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name} of a difficulty must be above 0, got {value}")


def adjust_grpo_config_for_difficulty(config: GRPOConfig, difficulty: Difficulty) -> GRPOConfig:
    """The same settings with the stage's entropy_coeff and learning_rate."""
    return config.model_copy(
        update={
            "entropy_coef": difficulty.entropy_scale * config.entropy_coef,
            "learning_rate": difficulty.learning_rate_scale * config.learning_rate,
        }
    )


def enhanced_grpo_training_loop(
    policy_network: nn.Module,
    family: LinearFamily,
    config: GRPOConfig,
    *,
    reward_config: RewardConfig | None = None,
    compute_bonuses: Bonus | None = None,
    compile: bool = False,
    log: Log = print,
) -> Trained:
    """Updates until `total_steps` experiments have been made; everything follows from `config.seed`.

    The network gives its first parameters and stays as it is: `Trained.load_into` changes it. `log` gets a
    line every 100 updates, and every 50 one that says how often samples were used.
    """
    return curriculum_enhanced_grpo(
        policy_network,
        [Difficulty(family=family)],
        config,
        reward_config=reward_config,
        compute_bonuses=compute_bonuses,
        compile=compile,
        log=log,
    )


def grpo_with_exploration(
    policy_network: nn.Module,
    family: LinearFamily,
    config: GRPOConfig,
    compute_bonuses: Bonus,
    *,
    reward_config: RewardConfig | None = None,
    log: Log = print,
) -> Trained:
    """The loop with bonuses in the rewards, such as `count_bonus(0.1)`."""
    return enhanced_grpo_training_loop(
        policy_network,
        family,
        config,
        reward_config=reward_config,
        compute_bonuses=compute_bonuses,
        log=log,
    )


def curriculum_enhanced_grpo(
    policy_network: nn.Module,
    stages: Sequence[Difficulty],
    config: GRPOConfig,
    *,
    reward_config: RewardConfig | None = None,
    compute_bonuses: Bonus | None = None,
    compile: bool = False,
    log: Log = print,
) -> Trained:
    """The loop over families of rising difficulty, `total_steps` experiments in all stages together.

    The policy takes any number of variables, so that stages may differ in size; AdamW's state goes on from
    one to the next.
    """
    if not stages:
        raise ConfigurationError("stages must have at least one Difficulty, got none")
    apply = applied(policy_network, compile=compile)
    run = _Run(policy_network, config, reward_config, compute_bonuses, apply, log)
    total = sum(stage.share for stage in stages)
    until = 0.0
    for index, stage in enumerate(stages):
        until += stage.share
        last = index == len(stages) - 1
        run.stage(stage, config.total_steps if last else round(config.total_steps * until / total), compile)
    return Trained(
        params=run.params,
        opt_state=run.opt_state,
        updates=tuple(run.updates),
        num_experiments=run.num_experiments,
    )


class _Run:
    """A loop under way: the one owner of its parameters, samples and counts."""

    def __init__(
        self,
        network: nn.Module,
        config: GRPOConfig,
        reward_config: RewardConfig | None,
        bonus: Bonus | None,
        apply: Apply,
        log: Log,
    ) -> None:
        self._network, self._config, self._log = network, config, log
        self._rewards, self._bonus, self._apply = reward_config, bonus, apply
        self.params = initial_params(network)
        self.opt_state = create_grpo_trainer(network, config)[1](self.params)
        self.updates: list[GRPOUpdate] = []
        self.num_experiments = 0

    def stage(self, difficulty: Difficulty, until: int, compile: bool) -> None:
        """Updates until so many experiments have been made in all."""
        config = adjust_grpo_config_for_difficulty(self._config, difficulty)
        update_step, _ = create_grpo_trainer(self._network, config, compile=compile)
        manager = create_sample_reuse_manager(config)
        required = config.num_groups * config.group_size

        def collect(params: Params, key: int) -> GRPOBatch:
            states = generate_initial_states(
                self._network,
                params,
                difficulty,
                config.num_groups,
                key=derive(key, "states"),
                apply=self._apply,
            )
            batch = collect_grpo_batch(
                self._network,
                params,
                states,
                config,
                self._rewards,
                key=derive(key, "actions"),
                compute_bonuses=self._bonus,
                apply=self._apply,
            )
            walked = int(states.environment.situation.counts.sum())
            batch = replace(batch, num_experiments=batch.num_experiments + walked)
            self.num_experiments += batch.num_experiments
            return batch

        while self.num_experiments < until or not manager.should_collect_new_samples(required):
            self.params, self.opt_state, manager, seen = training_step_with_reuse(
                update_step,
                collect,
                self.params,
                self.opt_state,
                manager,
                required_size=required,
                key=derive(config.seed, "functional", len(self.updates)),
            )
            self.updates.append(seen)
            self._say(manager)

    def _say(self, manager: SampleReuseManager) -> None:
        number, seen = len(self.updates), self.updates[-1]
        if number % LOG_EVERY == 0:
            self._log(
                f"update {number}: reward {seen.mean_reward:.4f}, loss {seen.total_loss:.4f}, entropy "
                f"{seen.mean_entropy:.3f}, KL {seen.approx_kl:.4f}, {self.num_experiments:,} experiments"
            )
        if number % REUSE_EVERY == 0:
            self._log(
                f"update {number}: use {manager.reuse_iteration} of {manager.max_iterations} of its samples"
            )
