"""One GRPO update as a function, and loops of updates: plain, from easy to hard, with bonuses for trying.

(parameters, optimiser state, batch) -> update_step -> new parameters, new state, a `GRPOUpdate`

The loss is `control.update.minibatch_loss`, the clip and AdamW are torch's, the schedule is the house's: the
object form, `ControlTrainer`, does the same with the same numbers. The group's mean is the baseline, and
there is no critic (https://arxiv.org/abs/2402.03300).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from stateset_agents.algorithms.losses import Denominators, Metrics, estimate
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.functional.batch import (
    Apply,
    GRPOBatch,
    Params,
    applied,
    collect_grpo_batch,
    compute_advantages,
    initial_params,
    sampled,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import Bonus, RewardConfig
from stateset_agents.numeric.acquisition.functional.states import (
    AcquisitionState,
    create_acquisition_state,
    create_random_scm,
)
from stateset_agents.numeric.rollout import action_keys, uniforms
from stateset_agents.numeric.update import StepBatch, action_logprobs, minibatch_loss
from stateset_agents.runs.settings import schedule
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOUpdate:
    """Measurements of one update; losses are those of the parameters before it."""

    policy_loss: float
    entropy_loss: float
    """- entropy_coeff * mean_entropy."""
    kl_penalty: float
    """kl_penalty_coeff * max(0, KL to the reference - the dead zone)."""
    total_loss: float
    """The sum of the three."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    group_baseline: float
    """Mean over the states of what their samples earned on average."""
    mean_reward: float
    reward_std: float
    """Deviation of all rewards: the size of advantages before they are scaled, where states are alike."""
    mean_advantage: float
    """0 but for rounding."""
    advantage_std: float
    """1 where scale_rewards is on and no group ties."""
    mean_entropy: float
    """Nats."""
    approx_kl: float
    """KL(old || policy), k3: 0 in the first use of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerState:
    """AdamW's."""

    means: Params
    squares: Params
    num_updates: int = 0
    """Steps that moved the parameters."""
    num_experiments: int = 0
    """Experiments of the batches so far, every use counted; the learning rate falls by this number."""


UpdateStep = Callable[
    [Params, OptimizerState, GRPOBatch], tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]
]


def create_grpo_trainer(
    policy_network: nn.Module,
    config: GRPOConfig,
    *,
    kl_dead_zone: float = 0.0,
    compile: bool = False,
    chunk_size: int | None = None,
) -> tuple[UpdateStep, Callable[[Params], OptimizerState]]:
    """(update_step, optimizer_init). Both are pure: the same values give the same results, and inputs stay as
    they are; nothing random is in them.

    `kl_dead_zone`: below so many nats of KL (k3) there is no penalty; the reference is the network as it is
    now, and kept only where kl_penalty_coeff is above 0. `compile`: the forward pass by `torch.compile`.
    `chunk_size`: samples of a piece of the gradient; any size gives the same step. An update whose loss or
    gradient is not finite changes nothing.

    >>> update_step, optimizer_init = create_grpo_trainer(network, config)
    >>> params, opt_state, seen = update_step(params, optimizer_init(params), batch)
    """
    expect_that(0 <= kl_dead_zone < math.inf, "kl_dead_zone", "be at least 0", kl_dead_zone)
    expect_that(chunk_size is None or chunk_size >= 1, "chunk_size", "be at least 1", chunk_size)
    apply = applied(policy_network, compile=compile)
    reference = initial_params(policy_network) if config.beta else None

    def update_step(
        params: Params, opt_state: OptimizerState, batch: GRPOBatch
    ) -> tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]:
        steps = _steps(batch, config)
        chosen = config
        if reference is not None:
            steps = replace(steps, ref_logprobs=_log_probs(apply, reference, steps, chunk_size))
            now = _log_probs(apply, params, steps, chunk_size)
            assert steps.ref_logprobs is not None
            if float(estimate(now, steps.ref_logprobs).mean()) <= kl_dead_zone:
                chosen = config.model_copy(update={"beta": 0.0})
        loss, metrics, gradients = _gradients(apply, params, steps, chosen, chunk_size)
        norm = float(nn.utils.get_total_norm(gradients.values()))
        measurements = _seen(batch, steps, metrics, norm, chosen, kl_dead_zone)
        shrunk = min(1.0, config.max_grad_norm / (norm + 1e-6))  # as clip_grad_norm_ has it
        clipped = {name: shrunk * part for name, part in gradients.items()}
        moved = replace(opt_state, num_experiments=opt_state.num_experiments + batch.num_experiments)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return dict(params), moved, measurements
        return (*_moved(params, clipped, moved, opt_state.num_experiments, config), measurements)

    def optimizer_init(params: Params) -> OptimizerState:
        zeros = {name: torch.zeros_like(each) for name, each in params.items()}
        return OptimizerState(means=zeros, squares=dict(zeros))

    return update_step, optimizer_init


def memory_efficient_grpo_update(
    policy_network: nn.Module,
    params: Params,
    opt_state: OptimizerState,
    batch: GRPOBatch,
    config: GRPOConfig,
    *,
    chunk_size: int = 16,
) -> tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]:
    """One update, with the activations of `chunk_size` samples in memory at a time. Advantages are of whole
    groups, and the pieces' gradients make one step."""
    update_step, _ = create_grpo_trainer(policy_network, config, chunk_size=chunk_size)
    return update_step(params, opt_state, batch)


def compiled_grpo_update(policy_network: nn.Module, config: GRPOConfig) -> UpdateStep:
    """`create_grpo_trainer`'s update_step, whose forward and backward pass is compiled at the first call."""
    return create_grpo_trainer(policy_network, config, compile=True)[0]


# ------------------------------------------------------------------------------------------ inside


def _steps(batch: GRPOBatch, config: GRPOConfig) -> StepBatch:
    """The batch as `minibatch_loss` wants it: each sample is an episode of one step."""
    size = batch.group_size
    advantages = compute_advantages(batch.rewards.reshape(-1, size), config).reshape(-1)
    return StepBatch(
        observations=batch.states,
        masks=batch.masks,
        actions=batch.actions,
        old_logprobs=batch.old_log_probs,
        advantages=advantages.to(batch.old_log_probs.dtype),
        trajectory_ids=torch.arange(len(batch)),
        lengths=torch.ones(len(batch), dtype=torch.int64),
        max_length=1,
    )


def _pieces(batch: StepBatch, size: int | None) -> Iterator[StepBatch]:
    """The batch in pieces of `size` samples, whose trajectories keep their numbers."""
    if size is None or size >= len(batch):
        yield batch
        return
    for begin in range(0, len(batch), size):
        yield batch.at(slice(begin, begin + size))


def _log_probs(apply: Apply, params: Params, batch: StepBatch, size: int | None) -> Tensor:
    """[N] log-probs of the actions, piece by piece."""
    return torch.cat([action_logprobs(partial(apply, params), piece) for piece in _pieces(batch, size)])


def _gradients(
    apply: Apply, params: Params, batch: StepBatch, config: GRPOConfig, size: int | None
) -> tuple[float, Metrics, dict[str, Tensor]]:
    """The loss, its metrics, and the gradient, summed over the pieces."""
    live = {name: each.detach().requires_grad_() for name, each in params.items()}
    whole: Denominators = batch.denominators()
    total, metrics, sums = 0.0, Metrics(), None
    for piece in _pieces(batch, size):
        loss, part_metrics = minibatch_loss(partial(apply, live), piece, config, denominators=whole)
        parts = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        filled = [
            torch.zeros_like(each) if part is None else part
            for part, each in zip(parts, live.values(), strict=True)
        ]
        sums = filled if sums is None else [a + b for a, b in zip(sums, filled, strict=True)]
        total, metrics = total + float(loss.detach()), metrics + part_metrics
    assert sums is not None
    return total, metrics, dict(zip(live, sums, strict=True))


def _moved(
    params: Params, gradients: Params, state: OptimizerState, position: int, config: GRPOConfig
) -> tuple[dict[str, Tensor], OptimizerState]:
    """AdamW on copies; `position`: experiments before this update, uses counted."""
    factor = schedule(
        position // config.num_iterations,
        config.total_steps,
        kind=config.lr_scheduler_type,
        warmup_ratio=config.warmup_ratio,
        min_ratio=config.lr_min_ratio,
    )
    new, means, squares = (
        {name: each.detach().clone() for name, each in values.items()}
        for values in (params, state.means, state.squares)
    )
    for is_matrix in (True, False):  # norms and biases have no weight decay, as in `Optimization`
        names = [name for name, each in new.items() if (each.ndim >= 2) == is_matrix]
        if names:
            adamw(
                [new[name] for name in names],
                [gradients[name] for name in names],
                [means[name] for name in names],
                [squares[name] for name in names],
                [],
                [torch.tensor(float(state.num_updates)) for _ in names],
                fused=True,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=config.learning_rate * factor,
                weight_decay=config.weight_decay if is_matrix else 0.0,
                eps=1e-8,
                maximize=False,
            )
    return new, replace(state, means=means, squares=squares, num_updates=state.num_updates + 1)


def _seen(
    batch: GRPOBatch, steps: StepBatch, metrics: Metrics, norm: float, config: GRPOConfig, dead_zone: float
) -> GRPOUpdate:
    measured, rewards = metrics.to_dict(), batch.rewards
    entropy = measured["policy/entropy"]
    entropy_loss = -config.entropy_coef * entropy
    penalty = config.beta * max(0.0, measured.get("kl/reference", 0.0) - dead_zone)
    return GRPOUpdate(
        policy_loss=measured["loss/policy"],
        entropy_loss=entropy_loss,
        kl_penalty=penalty,
        total_loss=measured["loss/policy"] + entropy_loss + penalty,
        grad_norm=norm,
        group_baseline=float(rewards.reshape(-1, batch.group_size).mean(dim=1).mean()),
        mean_reward=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        mean_advantage=float(steps.advantages.mean()),
        advantage_std=float(steps.advantages.std(correction=0)),
        mean_entropy=entropy,
        approx_kl=measured["kl/old"],
    )


# ------------------------------------------------------------------------------------------ reuse
#
# Samples train several times; a manager says when new ones are due, and never changes itself. The log-probs
# of a batch are of the policy that chose its actions and stay so however often it is used; the ratio to
# them is what the clip bounds. `num_iterations` counts all uses, the first included.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleReuseManager:
    """Samples to train on, and how often they have been used."""

    current_samples: GRPOBatch | None = None
    reuse_iteration: int = 0
    """Uses of it so far."""
    max_iterations: int

    def should_collect_new_samples(self, required_size: int) -> bool:
        """True if there are no samples, too few, or if they have been used `max_iterations` times."""
        held = self.current_samples
        return held is None or len(held) < required_size or self.reuse_iteration >= self.max_iterations

    def update_for_reuse(self) -> SampleReuseManager:
        """The manager after one more use of its samples."""
        return replace(self, reuse_iteration=self.reuse_iteration + 1)

    def reset_with_new_samples(self, samples: GRPOBatch) -> SampleReuseManager:
        """The manager with new samples; their first use is counted already."""
        return replace(self, current_samples=samples, reuse_iteration=1)


def create_sample_reuse_manager(config: GRPOConfig) -> SampleReuseManager:
    """Empty, for `num_iterations` uses of each batch."""
    return SampleReuseManager(max_iterations=config.num_iterations)


LOG_EVERY, REUSE_EVERY = 100, 50
"""Updates between two lines of the log, and between two counts of how often samples were used."""

Collect = Callable[[Params, int], GRPOBatch]
"""(parameters, key) -> new samples."""
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """Result of a training loop."""

    params: dict[str, Tensor]
    opt_state: OptimizerState
    updates: tuple[GRPOUpdate, ...]
    num_experiments: int

    def load_into(self, policy_network: nn.Module) -> None:
        """Give the network these parameters."""
        policy_network.load_state_dict(self.params)


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
    params, opt_state, update = update_step(params, opt_state, batch)
    return params, opt_state, manager, update


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
    parts: list[AcquisitionState] = []
    step = 0
    while True:
        actions, _ = sampled(apply, params, states, uniforms(keys, step))
        after = states.after(actions)
        stays = (after.worth()["cost"] < least) | ~after.goes_on
        parts.append(states.take(np.flatnonzero(stays)))
        goes = np.flatnonzero(~stays)
        if not len(goes):
            return parts[0].joined(parts[1:])
        states, least, keys, step = after.take(goes), least[goes], keys[goes], step + 1


# ------------------------------------------------------------------------------------------ loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """One stage of a curriculum."""

    family: LinearFamily
    share: float = 1.0
    """Share of the experiments, relative to the other stages' shares."""
    entropy_scale: float = 1.0
    """Times entropy_coeff."""
    learning_rate_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("share", "entropy_scale", "learning_rate_scale"):
            value = getattr(self, name)
            expect_that(0 < value < math.inf, f"{name} of a difficulty", "be above 0", value)


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
    **settings: Any,
) -> Trained:
    """Updates until `total_steps` experiments have been made; everything follows from `config.seed`.

    The network gives its first parameters and stays as it is: `Trained.load_into` changes it. `settings` are
    those of `curriculum_enhanced_grpo`.
    """
    return curriculum_enhanced_grpo(policy_network, [Difficulty(family=family)], config, **settings)


def grpo_with_exploration(
    policy_network: nn.Module,
    family: LinearFamily,
    config: GRPOConfig,
    compute_bonuses: Bonus,
    **settings: Any,
) -> Trained:
    """The loop with bonuses in the rewards, such as `count_bonus(0.1)`; `settings` are the loop's."""
    return enhanced_grpo_training_loop(
        policy_network, family, config, compute_bonuses=compute_bonuses, **settings
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
    one to the next. `log` gets a line every 100 updates, and every 50 one that says how often samples were
    used.
    """
    if not stages:
        raise ConfigurationError("stages must have at least one Difficulty, got none")
    apply = applied(policy_network, compile=compile)
    run = _Loop(policy_network, config, reward_config, compute_bonuses, apply, log)
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


@dataclass(slots=True)
class _Loop:
    """A loop under way: the one owner of its parameters, samples and counts."""

    network: nn.Module
    config: GRPOConfig
    reward_config: RewardConfig | None
    bonus: Bonus | None
    apply: Apply
    log: Log
    params: dict[str, Tensor] = field(init=False)
    opt_state: OptimizerState = field(init=False)
    updates: list[GRPOUpdate] = field(default_factory=list)
    num_experiments: int = 0

    def __post_init__(self) -> None:
        self.params = initial_params(self.network)
        self.opt_state = create_grpo_trainer(self.network, self.config)[1](self.params)

    def stage(self, difficulty: Difficulty, until: int, compile: bool) -> None:
        """Updates until so many experiments have been made in all."""
        config = adjust_grpo_config_for_difficulty(self.config, difficulty)
        update_step, _ = create_grpo_trainer(self.network, config, compile=compile)
        manager = create_sample_reuse_manager(config)
        required = config.num_groups * config.group_size

        def collect(params: Params, key: int) -> GRPOBatch:
            states = generate_initial_states(
                self.network,
                params,
                difficulty,
                config.num_groups,
                key=derive(key, "states"),
                apply=self.apply,
            )
            batch = collect_grpo_batch(
                self.network,
                params,
                states,
                config,
                self.reward_config,
                key=derive(key, "actions"),
                compute_bonuses=self.bonus,
                apply=self.apply,
            )
            walked = int(states.environment.situation.counts.sum())
            batch = replace(batch, num_experiments=batch.num_experiments + walked)
            self.num_experiments += batch.num_experiments
            return batch

        while self.num_experiments < until or not manager.should_collect_new_samples(required):
            self.params, self.opt_state, manager, update = training_step_with_reuse(
                update_step,
                collect,
                self.params,
                self.opt_state,
                manager,
                required_size=required,
                key=derive(config.seed, "functional", len(self.updates)),
            )
            self.updates.append(update)
            self._say(manager)

    def _say(self, manager: SampleReuseManager) -> None:
        number, update = len(self.updates), self.updates[-1]
        if number % LOG_EVERY == 0:
            self.log(
                f"update {number}: reward {update.mean_reward:.4f}, loss {update.total_loss:.4f}, entropy "
                f"{update.mean_entropy:.3f}, KL {update.approx_kl:.4f}, {self.num_experiments:,} experiments"
            )
        if number % REUSE_EVERY == 0:
            self.log(
                f"update {number}: use {manager.reuse_iteration} of {manager.max_iterations} of its samples"
            )
