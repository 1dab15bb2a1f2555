"""One GRPO update as a function: (parameters, optimiser state, batch) -> new ones and what happened.

The loss is `control.update.minibatch_loss`, the clip and AdamW are torch's, the schedule is the house's: the
object form, `ControlTrainer`, does the same with the same numbers. The group's mean is the baseline, and
there is no critic (https://arxiv.org/abs/2402.03300).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from stateset_agents.algorithms.aggregation import Denominators, Metrics
from stateset_agents.algorithms.kl.penalty import estimate
from stateset_agents.numeric.acquisition.functional.batch import (
    Apply,
    GRPOBatch,
    Params,
    applied,
    compute_advantages,
    initial_params,
)
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.environments.base import map_observations
from stateset_agents.numeric.policy import allowed_logits
from stateset_agents.numeric.update import Batch, minibatch_loss
from stateset_agents.runs.learning_rate import schedule
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOUpdate:
    """What one update did; losses are of the parameters before it."""

    policy_loss: float
    entropy_loss: float
    """- entropy_coeff * mean_entropy."""
    kl_penalty: float
    """kl_penalty_coeff * max(0, KL to the reference - the dead zone)."""
    total_loss: float
    """The sum of the three."""
    grad_norm: float
    """Before clipping."""
    group_baseline: float
    """Mean over the states of what their samples earned on average."""
    mean_reward: float
    reward_std: float
    """Of all rewards: how large advantages are before they are scaled, where states are alike."""
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
    """Of the batches that were seen, every use counted: by them the learning rate falls."""


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
    if not 0 <= kl_dead_zone < math.inf:
        raise ConfigurationError(f"kl_dead_zone must be at least 0, got {kl_dead_zone}")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigurationError(f"chunk_size must be at least 1, got {chunk_size}")
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
        seen = _seen(batch, steps, metrics, norm, chosen, kl_dead_zone)
        shrunk = min(1.0, config.max_grad_norm / (norm + 1e-6))  # as clip_grad_norm_ has it
        clipped = {name: shrunk * part for name, part in gradients.items()}
        moved = replace(opt_state, num_experiments=opt_state.num_experiments + batch.num_experiments)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return dict(params), moved, seen
        return (*_moved(params, clipped, moved, opt_state.num_experiments, config), seen)

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


def _steps(batch: GRPOBatch, config: GRPOConfig) -> Batch:
    """The batch as `minibatch_loss` wants it: each sample is an episode of one step."""
    size = batch.group_size
    advantages = compute_advantages(batch.rewards.reshape(-1, size), config).reshape(-1)
    return Batch(
        observations=batch.states,
        masks=batch.masks,
        actions=batch.actions,
        old_logprobs=batch.old_log_probs,
        advantages=advantages.to(batch.old_log_probs.dtype),
        trajectory_ids=torch.arange(len(batch)),
        lengths=torch.ones(len(batch), dtype=torch.int64),
        max_length=1,
    )


def _pieces(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Of `size` samples each; their trajectories keep their numbers in the whole."""
    if size is None or size >= len(batch):
        yield batch
        return
    for begin in range(0, len(batch), size):
        part = slice(begin, begin + size)

        def cut(tensor: Any, part: slice = part) -> Any:
            return tensor[part]

        yield replace(
            batch,
            observations=map_observations(cut, batch.observations),
            masks=None if batch.masks is None else batch.masks[part],
            actions=batch.actions[part],
            old_logprobs=batch.old_logprobs[part],
            advantages=batch.advantages[part],
            trajectory_ids=batch.trajectory_ids[part],
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[part],
        )


def _log_probs(apply: Apply, params: Params, batch: Batch, size: int | None) -> Tensor:
    """[N] of the actions."""
    with torch.no_grad():
        found = [
            torch.log_softmax(allowed_logits(apply(params, piece.observations), piece.masks), dim=-1)
            .gather(1, piece.actions[:, None])
            .squeeze(1)
            for piece in _pieces(batch, size)
        ]
    return torch.cat(found)


def _gradients(
    apply: Apply, params: Params, batch: Batch, config: GRPOConfig, size: int | None
) -> tuple[float, Metrics, dict[str, Tensor]]:
    """The loss, its metrics, and the gradient, summed over the pieces."""
    live = {name: each.detach().requires_grad_() for name, each in params.items()}
    whole: Denominators = batch.denominators()
    total, metrics, sums = 0.0, Metrics(), None
    for piece in _pieces(batch, size):
        loss, found = minibatch_loss(
            lambda observations: apply(live, observations), piece, config, denominators=whole
        )
        parts = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        filled = [
            torch.zeros_like(each) if part is None else part
            for part, each in zip(parts, live.values(), strict=True)
        ]
        sums = filled if sums is None else [a + b for a, b in zip(sums, filled, strict=True)]
        total, metrics = total + float(loss.detach()), metrics + found
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
    batch: GRPOBatch, steps: Batch, metrics: Metrics, norm: float, config: GRPOConfig, dead_zone: float
) -> GRPOUpdate:
    found, rewards = metrics.to_dict(), batch.rewards
    entropy = found["policy/entropy"]
    entropy_loss = -config.entropy_coef * entropy
    penalty = config.beta * max(0.0, found.get("kl/reference", 0.0) - dead_zone)
    return GRPOUpdate(
        policy_loss=found["loss/policy"],
        entropy_loss=entropy_loss,
        kl_penalty=penalty,
        total_loss=found["loss/policy"] + entropy_loss + penalty,
        grad_norm=norm,
        group_baseline=float(rewards.reshape(-1, batch.group_size).mean(dim=1).mean()),
        mean_reward=float(rewards.mean()),
        reward_std=float(rewards.std(correction=0)),
        mean_advantage=float(steps.advantages.mean()),
        advantage_std=float(steps.advantages.std(correction=0)),
        mean_entropy=entropy,
        approx_kl=found["kl/old"],
    )
