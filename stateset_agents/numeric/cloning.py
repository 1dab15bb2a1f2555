"""Warm start: a policy that does as a rule does, learned from the rule's own episodes by cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stateset_agents.numeric.environments.base import BatchedEnvironment, Rule, map_observations
from stateset_agents.numeric.policy import ObservingPolicy, allowed_logits, as_tensors
from stateset_agents.numeric.rollout import Rollout, collect_by
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.runs.settings import OptimizerSettings
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloned:
    """Agreement of policy and rule in states that the rule meets from held-out starts."""

    agreement: float
    """Share of steps at which the policy's likeliest action is the rule's."""
    commonest: float
    """Share of the rule's commonest action: what a policy reaches that always takes it."""
    cross_entropy: float
    """Mean of -log of the probability of the rule's action."""
    num_steps: int
    """Environment steps that the rule played, those held out included."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    """Steps of a rule, N of them."""

    observations: Any  # [N, ...]
    masks: Tensor | None  # [N, A]
    actions: Tensor  # [N]

    def logits(self, policy: nn.Module, indices: Tensor) -> Tensor:
        observations = map_observations(lambda part: part[indices], self.observations)
        return allowed_logits(policy(observations), None if self.masks is None else self.masks[indices])


def clone(
    policy: nn.Module,
    rule: Rule,
    environment: BatchedEnvironment,
    *,
    num_episodes: int = 64,
    num_passes: int = 20,
    minibatch_size: int = 1024,
    learning_rate: float = 1e-2,
    seed: int = 0,
) -> Cloned:
    """Train `policy` to act as `rule`, from `num_episodes` that the rule plays; a quarter as many more are
    held out for the measurement. Blocking.

    The learning rate falls to 0 in a line. A rule that remembers what the observations do not tell cannot be
    followed in everything; the agreement says how far. Raises ConfigurationError where no step can be
    learned from.
    """
    expect_that(num_episodes >= 1, "num_episodes", "be at least 1", num_episodes)
    expect_that(num_passes >= 1, "num_passes", "be at least 1", num_passes)
    expect_that(minibatch_size >= 1, "minibatch_size", "be at least 1", minibatch_size)
    starts = [derive(seed, "clone", index) for index in range(num_episodes)]
    held_out = [derive(seed, "clone held out", index) for index in range(max(1, num_episodes // 4))]
    train, train_steps = _played(rule, environment, starts)
    validation, validation_steps = _played(rule, environment, held_out)
    policy.train(False)
    if isinstance(policy, ObservingPolicy):
        policy.follow_observations(map_observations(np.asarray, train.observations))
    generator = torch.Generator().manual_seed(derive(seed, "clone order") % 2**63)
    number = len(train.actions)
    settings = OptimizerSettings(
        learning_rate=learning_rate, lr_scheduler_type="linear", warmup_ratio=0.0, weight_decay=0.0
    )
    optimization = Optimization(policy, settings, num_updates=num_passes * number)
    for done in range(num_passes):
        order = torch.randperm(number, generator=generator)
        for begin in range(0, number, minibatch_size):
            indices = order[begin : begin + minibatch_size]
            loss = functional.cross_entropy(train.logits(policy, indices), train.actions[indices])
            optimization.backward(loss)
            optimization.step(position=done * number + begin)
    with torch.no_grad():
        logits = validation.logits(policy, torch.arange(len(validation.actions)))
    counts = torch.bincount(validation.actions)
    return Cloned(
        agreement=float((logits.argmax(dim=1) == validation.actions).float().mean()),
        commonest=float(counts.max()) / len(validation.actions),
        cross_entropy=float(functional.cross_entropy(logits, validation.actions)),
        num_steps=train_steps + validation_steps,
    )


def _played(rule: Rule, environment: BatchedEnvironment, seeds: Sequence[int]) -> tuple[_Shown, int]:
    rollout: Rollout = collect_by(rule, environment, seeds)
    alive = rollout.alive
    if not alive.any():
        raise ConfigurationError(
            f"{environment.spec.name}: all {len(seeds)} episodes of the rule failed: look at the environment"
        )
    demonstrations = _Shown(
        observations=as_tensors(rollout.seen()),
        masks=None if rollout.masks is None else torch.from_numpy(rollout.masks[alive]),
        actions=torch.from_numpy(rollout.actions[alive]),
    )
    return demonstrations, rollout.num_steps
