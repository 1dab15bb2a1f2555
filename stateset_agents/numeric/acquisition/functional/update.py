"""One GRPO update as a function, and loops of updates: plain, from easy to hard, with bonuses for trying.

(parameters, optimiser state, batch) -> update_step -> new parameters, new state, a `GRPOUpdate`

The loss is `numeric.update.minibatch_loss`, the clip and AdamW are torch's, the schedule is the house's: the
object form, `ControlTrainer`, does the same with the same numbers. The group's mean is the baseline, and
there is no critic (https://arxiv.org/abs/2402.03300).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    SCMs,
    States,
    applied,
    collect_grpo_batch,
    compute_advantages,
    grpo_with_exploration,
    initial_params,
    sampled,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import ExplorationStrategy, RewardConfig
from stateset_agents.numeric.acquisition.functional.states import (
    AcquisitionState,
    check_scms,
    create_acquisition_state,
    create_random_scm,
    joined_states,
)
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.surrogates import Surrogate
from stateset_agents.numeric.policy import as_tensors
from stateset_agents.numeric.rollout import action_keys, uniforms
from stateset_agents.numeric.update import StepBatch, action_logprobs, minibatch_loss
from stateset_agents.rewards.composites import RewardScaling
from stateset_agents.runs.settings import schedule
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True)
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
    max_entropy: float | None = None
    """Nats of a policy that takes all payable actions alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerState:
    """AdamW's."""

    means: Params
    squares: Params
    update_step: UpdateStep
    """What it is for."""
    num_updates: int = 0
    """Steps that moved the parameters."""
    num_experiments: int = 0
    """Experiments of the batches so far, every use counted; the learning rate falls by this number."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateStep:
    """One update as a pure function: the same values give the same results, inputs stay as they are, and
    nothing random is in it. Made by `create_grpo_trainer`."""

    policy_network: nn.Module
    config: GRPOConfig
    reference: Params | None
    """What the KL is to; None without one."""
    kl_dead_zone: float
    compile: bool

    def __call__(
        self, params: Params, opt_state: OptimizerState, batch: GRPOBatch, *, chunk_size: int | None = None
    ) -> tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]:
        """New parameters, a new state, and measurements. An update whose loss or gradient is not finite
        changes no parameter. `chunk_size`: samples of a piece of the gradient; any gives the same step."""
        expect_that(chunk_size is None or chunk_size >= 1, "chunk_size", "be at least 1", chunk_size)
        config, apply = self.config, applied(self.policy_network, compile=self.compile)
        steps = _steps(batch, config)
        if self.reference is not None:
            steps = replace(steps, ref_logprobs=_log_probs(apply, self.reference, steps, chunk_size))
            now = _log_probs(apply, params, steps, chunk_size)
            assert steps.ref_logprobs is not None
            if float(estimate(now, steps.ref_logprobs).mean()) <= self.kl_dead_zone:
                config = config.model_copy(update={"beta": 0.0})
        loss, metrics, gradients = _gradients(apply, params, steps, config, chunk_size)
        norm = float(nn.utils.get_total_norm(gradients.values()))
        measurements = _measured(batch, steps, metrics, norm, config, self.kl_dead_zone)
        shrunk = min(1.0, config.max_grad_norm / (norm + 1e-6))  # as clip_grad_norm_ has it
        clipped = {name: shrunk * part for name, part in gradients.items()}
        number = opt_state.num_experiments + batch["num_experiments"]
        moved = replace(opt_state, num_experiments=number, update_step=self)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return dict(params), moved, measurements
        return (*_moved(params, clipped, moved, opt_state.num_experiments, config), measurements)

    def init(self, params: Params) -> OptimizerState:
        """The state before the first update."""
        zeros = {name: torch.zeros_like(each) for name, each in params.items()}
        return OptimizerState(means=zeros, squares=dict(zeros), update_step=self)


def create_grpo_trainer(
    policy_network: nn.Module, config: GRPOConfig, *, kl_dead_zone: float = 0.0, compile: bool = False
) -> tuple[UpdateStep, Callable[[Params], OptimizerState]]:
    """(update_step, optimizer_init), both pure functions.

    `kl_dead_zone`: below so many nats of KL (k3) there is no penalty; the reference is the network as it is
    now, and kept only where kl_penalty_coeff is above 0. `compile`: the forward pass by `torch.compile`.

    >>> update_step, optimizer_init = create_grpo_trainer(network, config)
    >>> params, opt_state, update = update_step(params, optimizer_init(params), batch)
    """
    expect_that(0 <= kl_dead_zone < math.inf, "kl_dead_zone", "be at least 0", kl_dead_zone)
    reference = initial_params(policy_network) if config.beta else None
    update_step = UpdateStep(policy_network, config, reference, kl_dead_zone, compile)
    return update_step, update_step.init


def memory_efficient_grpo_update(
    params: Params, opt_state: OptimizerState, large_batch: GRPOBatch, chunk_size: int = 16
) -> tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]:
    """One update, with the activations of `chunk_size` samples in memory at a time. Advantages are of whole
    groups, and the pieces' gradients make one step, that of the trainer whose `opt_state` it is."""
    return opt_state.update_step(params, opt_state, large_batch, chunk_size=chunk_size)


def compiled_grpo_update(
    params: Params, opt_state: OptimizerState, batch_data: GRPOBatch
) -> tuple[dict[str, Tensor], OptimizerState, GRPOUpdate]:
    """The update of the trainer whose `opt_state` it is, with its forward and backward pass compiled at the
    first call."""
    return replace(opt_state.update_step, compile=True)(params, opt_state, batch_data)


# ------------------------------------------------------------------------------------------ inside


def _steps(batch: GRPOBatch, config: GRPOConfig) -> StepBatch:
    """The batch as `minibatch_loss` wants it: each sample is an episode of one step."""
    number, rewards = len(batch["actions"]), torch.as_tensor(batch["rewards"])
    rule = f"be {number}, one for each sample"
    expect_that(rewards.shape == (number,), 'the number of batch["rewards"]', rule, tuple(rewards.shape))
    advantages = compute_advantages(_by_group(batch), config).reshape(-1)
    return StepBatch(
        observations=as_tensors(batch["states"].observations),
        masks=torch.from_numpy(batch["states"].mask),
        actions=batch["actions"],
        old_logprobs=batch["old_log_probs"],
        advantages=advantages.to(batch["old_log_probs"].dtype),
        trajectory_ids=torch.arange(number),
        lengths=torch.ones(number, dtype=torch.int64),
        max_length=1,
    )


def _by_group(batch: GRPOBatch) -> Tensor:
    """[S, G] rewards."""
    return torch.as_tensor(batch["rewards"]).reshape(int(batch["group_ids"].max()) + 1, -1)


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


def _measured(
    batch: GRPOBatch, steps: StepBatch, metrics: Metrics, norm: float, config: GRPOConfig, dead_zone: float
) -> GRPOUpdate:
    measured, rewards = metrics.to_dict(), _by_group(batch)
    entropy = measured["policy/entropy"]
    entropy_loss = -config.entropy_coef * entropy
    penalty = config.beta * max(0.0, measured.get("kl/reference", 0.0) - dead_zone)
    return GRPOUpdate(
        policy_loss=measured["loss/policy"],
        entropy_loss=entropy_loss,
        kl_penalty=penalty,
        total_loss=measured["loss/policy"] + entropy_loss + penalty,
        grad_norm=norm,
        group_baseline=float(rewards.mean(dim=1).mean()),
        mean_reward=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        mean_advantage=float(steps.advantages.mean()),
        advantage_std=float(steps.advantages.std(correction=0)),
        mean_entropy=entropy,
        approx_kl=measured["kl/old"],
        max_entropy=float(np.log(batch["states"].mask.sum(axis=1)).mean()),
    )


# ------------------------------------------------------------------------------------------ reuse
#
# Samples train several times; a manager says when new ones are due, and never changes itself. The log-probs
# of a batch are of the policy that chose its actions and stay so however often it is used; the ratio to
# them is what the clip bounds. `num_iterations` counts all uses, the first included.

Samples = GRPOBatch | Sequence[Any]
"""A batch, or samples of one's own, such as tuples of state, action, reward and log-prob."""
Collect = Callable[[], Samples]
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class SampleReuseManager:
    """Samples to train on, and how often they have been used."""

    current_samples: Samples
    """Empty before the first ones."""
    reuse_iteration: int
    """Uses of it so far."""
    max_iterations: int

    def should_collect_new_samples(self, required_size: int) -> bool:
        """True if there are too few samples, or if they have been used `max_iterations` times."""
        held = self.current_samples
        number = len(held["actions"]) if isinstance(held, Mapping) else len(held)
        return number < max(required_size, 1) or self.reuse_iteration >= self.max_iterations

    def update_for_reuse(self) -> SampleReuseManager:
        """The manager after one more use of its samples."""
        return replace(self, reuse_iteration=self.reuse_iteration + 1)

    def reset_with_new_samples(self, new_samples: Samples) -> SampleReuseManager:
        """The manager with new samples; their first use is counted already."""
        return replace(self, current_samples=new_samples, reuse_iteration=1)


def create_sample_reuse_manager(config: GRPOConfig) -> SampleReuseManager:
    """Empty, for `num_iterations` uses of each batch."""
    return SampleReuseManager((), 0, config.num_iterations)


def training_step_with_reuse(
    manager: SampleReuseManager, config: GRPOConfig, collect: Collect | None = None, *, log: Log = print
) -> tuple[Any, SampleReuseManager]:
    """The samples of this step, and the manager after this use: new ones of `collect` where they are due.

    Raises ConfigurationError where they are due and there is no `collect`.
    """
    if not manager.should_collect_new_samples(config.group_size):
        manager = manager.update_for_reuse()
        log(f"Reusing samples (iteration {manager.reuse_iteration})")
        return manager.current_samples, manager
    if collect is None:
        raise ConfigurationError(
            "new samples are due: write training_step_with_reuse(manager, config, collect), collect() being "
            "what makes them"
        )
    manager = manager.reset_with_new_samples(collect())
    log("Collected fresh samples")
    return manager.current_samples, manager


def collect_grpo_batch_with_reuse(
    policy_network: nn.Module,
    params: Params,
    states: States,
    scms: SCMs,
    surrogate_model: Surrogate | None,
    surrogate_params: Any,
    config: GRPOConfig,
    reward_config: RewardConfig | None,
    sample_reuse_manager: SampleReuseManager,
    key: int | torch.Generator,
    reward_scaling: RewardScaling = "tanh",
    reward_clip_value: float = 10.0,
) -> tuple[GRPOBatch, SampleReuseManager]:
    """`collect_grpo_batch` where new samples are due, else those that are held; and the manager after it."""
    before = (policy_network, params, states, scms, surrogate_model, surrogate_params, config, reward_config)
    collect = partial(collect_grpo_batch, *before, key, reward_scaling, reward_clip_value)
    samples, manager = training_step_with_reuse(sample_reuse_manager, config, collect, log=lambda line: None)
    rule, kind = "be a batch of collect_grpo_batch, which knows groups", type(samples).__name__
    expect_that(isinstance(samples, Mapping), "current_samples", rule, kind)
    batch: Any = samples
    return batch, manager


# ------------------------------------------------------------------------------------------ curriculum


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """One stage of a curriculum."""

    family: LinearFamily
    total_steps: int | None = None
    """Experiments of the stage; None: the configuration's total_steps."""
    num_scms: int = 1024
    """Models that are drawn for the stage."""
    entropy_scale: float = 1.0
    """Times entropy_coeff."""
    learning_rate_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("total_steps", "num_scms", "entropy_scale", "learning_rate_scale"):
            value = getattr(self, name)
            expect_that(value is None or 0 < value < math.inf, f"{name} of a difficulty", "be above 0", value)


def adjust_grpo_config_for_difficulty(difficulty: Difficulty, config: GRPOConfig | None = None) -> GRPOConfig:
    """The settings, by default the document's, with the stage's total_steps, entropy_coeff and
    learning_rate."""
    config = config or GRPOConfig()
    changes = {
        "total_steps": difficulty.total_steps or config.total_steps,
        "entropy_coef": difficulty.entropy_scale * config.entropy_coef,
        "learning_rate": difficulty.learning_rate_scale * config.learning_rate,
    }
    return config.model_copy(update=changes)


def generate_scms_for_difficulty(difficulty: Difficulty, *, key: int | torch.Generator = 0) -> Tasks:
    """The stage's models; a function of `key` alone."""
    return create_random_scm(key, difficulty.family, number=difficulty.num_scms)


generate_initial_states = create_acquisition_state
"""The document's name for many models at once."""

# ------------------------------------------------------------------------------------------ loops

LOG_EVERY, REUSE_EVERY = 100, 50
"""Updates between two lines of the log, and between two counts of how often samples were used."""


def enhanced_grpo_training_loop(
    config: GRPOConfig, initial_states: States, scms: SCMs, **settings: Any
) -> TrainingLoop:
    """Updates until `config.total_steps` experiments have been made; everything follows from `config.seed`.

    Each batch is of `config.num_groups` of the states, which the policy first plays on until as much of the
    budget is spent as chance says, so that starts, middles and ends are trained. `settings` are those of
    `TrainingLoop`, such as policy_network, surrogate_model and reward_config.
    """
    run = TrainingLoop(config=config, **settings)
    run.train(config, initial_states, scms, config.total_steps)
    return run


def curriculum_enhanced_grpo(
    curriculum_schedule: Sequence[Difficulty], *, config: GRPOConfig | None = None, **settings: Any
) -> TrainingLoop:
    """The loop over stages of rising difficulty. `settings` as in `enhanced_grpo_training_loop`.

    The policy takes any number of variables, so that stages may differ in size; AdamW's state goes on from
    one to the next.
    """
    expect_that(len(curriculum_schedule) > 0, "curriculum_schedule", "have a Difficulty", "none")
    stages = [adjust_grpo_config_for_difficulty(difficulty, config) for difficulty in curriculum_schedule]
    total, until = sum(stage.total_steps for stage in stages), 0
    run = TrainingLoop(config=stages[0], **settings)
    for index, (difficulty, stage) in enumerate(zip(curriculum_schedule, stages, strict=True)):
        scms = generate_scms_for_difficulty(difficulty, key=derive(stage.seed, "scms", index))
        until += stage.total_steps
        whole = stage.model_copy(update={"total_steps": total})  # by which the learning rate falls
        run.train(whole, generate_initial_states(scms), scms, until)
    return run


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A loop, under way or at its end: the one owner of its parameters, updates and counts."""

    config: GRPOConfig
    policy_network: nn.Module = field(default_factory=AcquisitionPolicyNetwork)
    """It gives its parameters and stays as it is: `load_into` changes it."""
    surrogate_model: Surrogate | None = None
    surrogate_params: Any = None
    reward_config: RewardConfig | None = None
    reward_scaling: RewardScaling = "tanh"
    reward_clip_value: float = 10.0
    """As in `collect_grpo_batch`."""
    exploration_strategy: ExplorationStrategy | None = None
    """Bonuses in the rewards, see `grpo_with_exploration`."""
    compile: bool = False
    log: Log = print
    """It gets a line every 100 updates, and every 50 one that says how often samples were used."""
    params: dict[str, Tensor] = field(init=False)
    opt_state: OptimizerState = field(init=False)
    updates: list[GRPOUpdate] = field(init=False, default_factory=list)
    num_experiments: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.params = initial_params(self.policy_network)
        self.opt_state = create_grpo_trainer(self.policy_network, self.config)[1](self.params)

    def train(self, config: GRPOConfig, initial_states: States, scms: SCMs, until: int) -> None:
        """Updates until so many experiments have been made in all."""
        states = joined_states(initial_states).believing(self.surrogate_model, self.surrogate_params)
        check_scms(scms, states)
        update_step, _ = create_grpo_trainer(self.policy_network, config, compile=self.compile)
        manager = create_sample_reuse_manager(config)
        while self.num_experiments < until or not manager.should_collect_new_samples(1):
            key = derive(config.seed, "functional", len(self.updates))
            collect = partial(self._collected, config, states, key)
            batch, manager = training_step_with_reuse(manager, config, collect, log=lambda line: None)
            self.params, self.opt_state, update = update_step(self.params, self.opt_state, batch)
            self.updates.append(update)
            self._say(manager)

    def load_into(self, policy_network: nn.Module) -> None:
        """Give a network these parameters."""
        policy_network.load_state_dict(self.params)

    def _collected(self, config: GRPOConfig, initial: AcquisitionState, key: int) -> GRPOBatch:
        """Samples of states that the policy meets."""
        random, size = np.random.default_rng(derive(key, "states")), len(initial)
        chosen = initial.take(random.choice(size, config.num_groups, replace=size < config.num_groups))
        states, walked = self._met(chosen, random, derive(key, "walk"))
        strategy = self.exploration_strategy
        collect = collect_grpo_batch if strategy is None else grpo_with_exploration(strategy)
        arguments = (self.policy_network, self.params, states, states.environment.tasks, None, None, config)
        how = (self.reward_config, derive(key, "actions"), self.reward_scaling, self.reward_clip_value)
        batch = collect(*arguments, *how, compile=self.compile)
        number = batch["num_experiments"] + walked
        self.num_experiments += number
        return {**batch, "num_experiments": number}

    def _met(
        self, states: AcquisitionState, random: np.random.Generator, key: int
    ) -> tuple[AcquisitionState, int]:
        """The states after the policy has played on until as much of the budget was spent as chance says,
        each still able to pay an experiment, and the number of experiments."""
        apply = applied(self.policy_network, compile=self.compile)
        least = states.environment.situation.left * (1.0 - random.random(len(states)))
        keys = action_keys(key, 0, len(states), 1)
        parts: list[AcquisitionState] = []
        number = step = 0
        while True:
            actions, _ = sampled(apply, self.params, states, uniforms(keys, step))
            after = states.after(actions)
            stays = (after.environment.situation.left < least) | ~after.goes_on
            parts.append(states.take(np.flatnonzero(stays)))
            rows = np.flatnonzero(~stays)
            if not len(rows):
                return parts[0].joined(parts[1:]), number
            number += len(rows)
            states, least, keys, step = after.take(rows), least[rows], keys[rows], step + 1

    def _say(self, manager: SampleReuseManager) -> None:
        number, update = len(self.updates), self.updates[-1]
        if number % LOG_EVERY == 0:
            self.log(
                f"update {number}: reward {update.mean_reward:.4f}, loss {update.total_loss:.4f}, entropy "
                f"{update.mean_entropy:.3f}, KL {update.approx_kl:.4f}, {self.num_experiments:,} experiments"
            )
        if number % REUSE_EVERY == 0:
            uses = f"use {manager.reuse_iteration} of {manager.max_iterations} of its samples"
            self.log(f"update {number}: {uses}")
