"""One update of a numeric policy: passes over a rollout in minibatches, with the registry's losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stateset_agents.algorithms.losses import (
    Denominators,
    LossInputs,
    LossOutput,
    Metrics,
    entropy_loss,
    entropy_of,
    policy_loss,
    value_loss,
)
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.grouping.partitioner import Partitioner
from stateset_agents.numeric.credit import ESTIMATORS, StepCredit, Values, credit
from stateset_agents.numeric.environments.base import map_observations
from stateset_agents.numeric.policy import (
    NumericPolicy,
    ScaledCritic,
    ValuedPolicy,
    allowed_logits,
    as_tensors,
)
from stateset_agents.numeric.rollout import Rollout
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

Policy = Callable[[Any], Tensor]
"""[B, ...] observations -> [B, A] logits: a `NumericPolicy`, or one whose parameters are given."""


_OF_STEPS = (
    *("masks", "actions", "old_logprobs", "advantages", "trajectory_ids"),
    *("ref_logprobs", "old_values", "returns"),
)
"""Fields of a batch that have a value for each step, beside the observations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """Steps that train, episode after episode, so that a group is one slice of a rollout's; N of them."""

    observations: Any  # [N, ...], or several by name
    masks: Tensor | None  # [N, A]
    actions: Tensor  # [N]
    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    trajectory_ids: Tensor  # [N] of the episode, counted over those in the batch
    lengths: Tensor  # [episodes] steps of each that are in the batch
    ref_logprobs: Tensor | None = None  # [N]
    old_values: Tensor | None = None  # [N]
    returns: Tensor | None = None  # [N]
    max_length: int
    """Length of the longest episode."""

    def __len__(self) -> int:
        return len(self.actions)

    def at(self, indices: Tensor | slice) -> StepBatch:
        """The batch of these steps; `trajectory_ids`, `lengths` and `max_length` stay those of the whole."""

        def part(tensor: Any) -> Any:
            return None if tensor is None else tensor[indices]

        of_steps = {name: part(getattr(self, name)) for name in _OF_STEPS}
        return replace(self, observations=map_observations(part, self.observations), **of_steps)

    def denominators(self) -> Denominators:
        """The counts of this batch as one optimiser step."""
        return Denominators(
            tokens_per_trajectory=self.lengths,
            num_trajectories=len(self.lengths),
            num_tokens=len(self),
            max_length=self.max_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of an update."""

    metrics: Mapping[str, float]
    """Metrics of the last pass, except policy/first_ratio_max: of the first minibatch, where the ratio is
    1."""
    failure: str | None
    """Why nothing could be learned; None where it was."""
    partition: Mapping[str, Any] = field(default_factory=dict)
    """State from which the parts of the next update go on."""


def update(
    policy: NumericPolicy,
    optimization: Optimization,
    rollout: Rollout,
    config: ControlConfig,
    *,
    reference: NumericPolicy | None = None,
    credited: StepCredit | None = None,
    position: int = 0,
    partition: Mapping[str, Any] | None = None,
    updates_before: int = 0,
) -> UpdateResult:
    """Credit the rollout and learn from it. Blocking; dropout is off.

    `reference`: what the KL is to, where beta is above 0; `credited`: the rollout's credit, where it is known
    already; `position`: environment steps before the rollout,
    by which the learning rate falls and the minibatches are drawn; `partition`: of the update before;
    `updates_before`: by which the tasks' gradients are compared now and then. A minibatch whose loss or
    gradient is not finite moves no weight. Raises ConfigurationError for a policy without values where the
    estimator is gae.
    """
    policy.train(False)
    values = critic_values(policy, rollout) if config.advantage_estimator == "gae" else None
    partitioner = _partitioner(rollout, config, position, partition)
    credited = credited or credit(
        rollout,
        config.advantage_estimator,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        scaling=config.advantage_normalization,
        lone_steps=config.lone_steps,
        values=values,
        partitioner=partitioner,
    )
    remembered = {} if partitioner is None else partitioner.state()
    metrics = dict(credited.metrics)
    if not credited.trained.any():
        failed = int(rollout.failed.sum())
        return UpdateResult(
            metrics=metrics,
            failure=f"has no group with enough members: {failed} of {len(rollout.failed)} rows failed with "
            "an observation or a reward that is no finite number",
            partition=remembered,
        )
    if not credited.advantages.any() and not config.beta and not config.entropy_coef:
        return UpdateResult(metrics=metrics, failure=None, partition=remembered)  # all were equally good
    batch = _batch(rollout, credited, values)
    if reference is not None and config.beta:
        batch = replace(batch, ref_logprobs=action_logprobs(reference, batch))
    if batch.returns is not None and isinstance(policy, ScaledCritic):
        policy.follow_returns(batch.observations, batch.returns)
    every = config.gradient_cosines_every
    if every and updates_before % every == 0 and rollout.tasks is not None:
        ids = torch.from_numpy(rollout.tasks.ids[np.nonzero(credited.trained.T)[0]])
        metrics |= gradient_cosines(policy, batch, ids, rollout.tasks.names, config)
    draw = _drawing(rollout, credited, config, position)
    sums: dict[str, float] = {}
    skipped = number = 0
    first_ratio = 0.0
    result = None
    for iteration in range(config.num_iterations):
        is_last = iteration == config.num_iterations - 1
        for indices in draw():
            part = _selected(batch, indices)
            loss, part_metrics = minibatch_loss(policy, part, config, measure=is_last or number == 0)
            if number == 0:
                first_ratio = float(part_metrics.maxima["policy/ratio_max"])
            optimization.backward(loss)
            result = optimization.step(usable=math.isfinite(float(loss.detach())), position=position)
            skipped += not result.stepped
            number += 1
            if is_last:
                for name, value in part_metrics.to_dict().items():
                    is_top = name in part_metrics.maxima
                    before = sums.get(name, 0.0)
                    sums[name] = max(before, value) if is_top else before + value * len(part) / len(batch)
                sums["optimizer/grad_norm"] = result.grad_norm
    assert result is not None
    return UpdateResult(
        metrics={
            **metrics,
            **sums,
            "policy/first_ratio_max": first_ratio,
            "optimizer/learning_rate": result.learning_rate,
            "optimizer/skipped": float(skipped),
            "optimizer/steps": float(number),
        },
        failure=f"has no finite loss in any of its {number} minibatches: lower learning_rate"
        if skipped == number
        else None,
        partition=remembered,
    )


def minibatch_loss(
    policy: Policy,
    batch: StepBatch,
    config: ControlConfig,
    *,
    measure: bool = True,
    denominators: Denominators | None = None,
) -> tuple[Tensor, Metrics]:
    """The loss of one optimiser step, with gradient, and its metrics where they are measured.

    `denominators`: of the whole step, where `batch` is a piece of it; the shares of all pieces add up.
    """
    denominators = denominators or batch.denominators()
    log_p, output = _policy_loss(policy, batch, config, denominators, measure=measure)
    loss, metrics = output.loss, output.metrics
    if config.entropy_coef or measure:
        averaging = LOSSES[config.loss_type].averaging
        bonus = entropy_loss(
            entropy_of(log_p, any_forbidden=batch.masks is not None),
            batch.trajectory_ids,
            denominators,
            averaging=averaging,
        )
        loss, metrics = loss + config.entropy_coef * bonus.loss, metrics + bonus.metrics
    if batch.returns is not None and batch.old_values is not None:
        assert isinstance(policy, ValuedPolicy)
        predictions = (policy.values(batch.observations), batch.old_values, batch.returns)
        if isinstance(policy, ScaledCritic):
            scales = policy.value_scales(batch.observations)
            predictions = (predictions[0] / scales, predictions[1] / scales, predictions[2] / scales)
        error = value_loss(
            *predictions,
            batch.trajectory_ids,
            denominators,
            value_clip=config.value_clip,
        )
        loss, metrics = loss + config.value_coef * error.loss, metrics + error.metrics
    return loss, metrics


def _policy_loss(
    policy: Policy, batch: StepBatch, config: ControlConfig, denominators: Denominators, *, measure: bool
) -> tuple[Tensor, LossOutput]:
    """[N, A] log-probs, and the loss of what was done, with the KL where the batch has a reference's."""
    log_p = torch.log_softmax(allowed_logits(policy(batch.observations), batch.masks), dim=-1)
    return log_p, policy_loss(
        config.loss_type,
        LossInputs(
            log_p.gather(1, batch.actions[:, None]).squeeze(1),
            batch.old_logprobs,
            batch.advantages,
            batch.trajectory_ids,
            denominators,
            ref_logprobs=batch.ref_logprobs,
        ),
        clip_ratio=config.clip_ratio,
        clip_ratio_high=config.clip_ratio_high,
        dual_clip=config.dual_clip,
        beta=config.beta if batch.ref_logprobs is not None else 0.0,
        kl_estimator=config.kl_estimator,
        measure=measure,
    )


def episodes_loss(
    policy: NumericPolicy, rollout: Rollout, advantages: NDArray[np.float64], config: ControlConfig
) -> Tensor:
    """The policy loss with these advantages [T, B], with gradient; without KL, entropy and critic."""
    batch = _batch(rollout, StepCredit(advantages, rollout.alive, None, {}), None)
    return _policy_loss(policy, batch, config, batch.denominators(), measure=False)[1].loss


def gradient_cosines(
    policy: NumericPolicy, batch: StepBatch, tasks: Tensor, names: Sequence[str], config: ControlConfig
) -> dict[str, float]:
    """`gradient_cosine/ONE+OTHER` of each two tasks: how far their policy losses, each the mean over its own
    steps, pull the weights the same way. Without KL, entropy and critic.

    `tasks` [N]: of each step. A task without a step or a gradient has none.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    directions: dict[str, Tensor] = {}
    for task, name in enumerate(names):
        indices = (tasks == task).nonzero()[:, 0]
        if not len(indices):
            continue
        of_task = replace(_selected(batch, indices), ref_logprobs=None)
        _, output = _policy_loss(policy, of_task, config, of_task.denominators(), measure=False)
        parts = torch.autograd.grad(output.loss, parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in parts]).double()
        size = float(gradient.norm())
        if size > 0 and math.isfinite(size):
            directions[name] = gradient / size
    return {
        f"gradient_cosine/{one}+{other}": float(directions[one] @ directions[other])
        for one, other in itertools.combinations(directions, 2)
    }


def minibatches(
    groups: Sequence[slice], minibatch_size: int, generator: np.random.Generator
) -> Iterator[Tensor]:
    """Indices of whole groups in a new order, at least `minibatch_size` steps each; what is left over at the
    end goes into the last one."""
    order = generator.permutation(len(groups))
    left = sum(group.stop - group.start for group in groups)
    chunks: list[Tensor] = []
    size = 0
    for index in order:
        group = groups[index]
        chunks.append(torch.arange(group.start, group.stop))
        size += group.stop - group.start
        left -= group.stop - group.start
        if size >= minibatch_size and (left >= minibatch_size or not left):
            yield torch.cat(chunks)
            chunks, size = [], 0
    if chunks:
        yield torch.cat(chunks)


def step_minibatches(num_steps: int, minibatch_size: int, generator: np.random.Generator) -> Iterator[Tensor]:
    """Indices of steps in a new order, each minibatch's in the batch's; at least `minibatch_size` each."""
    order = generator.permutation(num_steps)
    for part in np.array_split(order, max(1, num_steps // minibatch_size)):
        part.sort()
        yield torch.from_numpy(part)


def _drawing(
    rollout: Rollout, credited: StepCredit, config: ControlConfig, position: int
) -> Callable[[], Iterator[Tensor]]:
    """A function that draws the minibatches of one pass.

    They are of single steps where nobody is compared and the loss is a mean over steps: the steps of one long
    episode are alike, and would be a minibatch by themselves.
    """
    generator = np.random.default_rng(derive(config.seed, "minibatches", position))
    compares = ESTIMATORS[config.advantage_estimator].in_group
    if not compares and LOSSES[config.loss_type].averaging == "token":
        return partial(step_minibatches, int(credited.trained.sum()), config.minibatch_size, generator)
    return partial(minibatches, _group_slices(rollout, credited), config.minibatch_size, generator)


def _partitioner(
    rollout: Rollout, config: ControlConfig, position: int, state: Mapping[str, Any] | None
) -> Partitioner | None:
    """The partitioner; None if nothing is divided and there is no task to report on."""
    if config.group_strategy == "none" and rollout.tasks is None:
        return None
    seed = derive(config.seed, "parts", position)
    return Partitioner(
        config.group_strategy, config.n_groups, config.group_weight_method, seed=seed, state=state
    )


def _batch(rollout: Rollout, credited: StepCredit, values: Values | None) -> StepBatch:
    rows, steps = np.nonzero(credited.trained.T)  # episode after episode
    _, ids, lengths = np.unique(rows, return_inverse=True, return_counts=True)

    def taken(array: Any) -> Any:
        return torch.from_numpy(array[steps, rows])

    def single(array: Any) -> Tensor:
        tensor: Tensor = taken(array).to(torch.float32)
        return tensor

    return StepBatch(
        observations=map_observations(taken, rollout.observations),
        masks=None if rollout.masks is None else taken(rollout.masks),
        actions=taken(rollout.actions),
        old_logprobs=single(rollout.logprobs),
        advantages=single(credited.advantages),
        trajectory_ids=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths),
        old_values=None if values is None else single(values.before),
        returns=None if credited.returns is None else single(credited.returns),
        max_length=len(rollout.alive),
    )


def _group_slices(rollout: Rollout, credited: StepCredit) -> list[slice]:
    """Positions in the batch of each group with a trained step."""
    counts = rollout.grouped(credited.trained.sum(axis=0)).sum(axis=1)
    ends = np.cumsum(counts)
    return [slice(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True) if count]


def _selected(batch: StepBatch, indices: Tensor) -> StepBatch:
    """The batch of these steps alone, in its order, with their episodes counted anew."""
    if len(indices) == len(batch):
        return batch
    part = batch.at(indices)
    _, ids, lengths = torch.unique_consecutive(part.trajectory_ids, return_inverse=True, return_counts=True)
    return replace(part, trajectory_ids=ids, lengths=lengths)


def action_logprobs(policy: Policy, batch: StepBatch) -> Tensor:
    """[N] log-probs of the batch's actions, without gradient."""
    with torch.no_grad():
        logits = allowed_logits(policy(batch.observations), batch.masks)
        return torch.log_softmax(logits, dim=-1).gather(1, batch.actions[:, None]).squeeze(1)


def critic_of(policy: object) -> ValuedPolicy:
    """The policy with its values. Raises ConfigurationError for one without."""
    if not isinstance(policy, ValuedPolicy):
        raise ConfigurationError(
            f"gae needs a critic, and {type(policy).__name__} has no values: give it one, or take step_group"
        )
    return policy


def critic_values(policy: NumericPolicy, rollout: Rollout) -> Values:
    """The critic's values of all states that were met. Raises ConfigurationError for a policy without."""
    critic = critic_of(policy)
    before = np.zeros(rollout.alive.shape)
    final = np.zeros(rollout.alive.shape[1])
    with torch.no_grad():
        before[rollout.alive] = critic.values(as_tensors(rollout.seen())).double().numpy()
        cut = np.flatnonzero(rollout.truncated)
        if len(cut):
            ends = map_observations(lambda part: part[cut], rollout.final_observations)
            final[cut] = critic.values(as_tensors(ends)).double().numpy()
    return Values(before, final)
