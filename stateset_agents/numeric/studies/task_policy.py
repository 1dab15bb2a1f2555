"""A policy for several tasks whose critic has an output for each, in that task's own units (PopArt).

https://arxiv.org/abs/1602.07714 for one task, https://arxiv.org/abs/1809.04474 for several: a value is
mean + deviation * output. As the statistics of the returns move, the last layer is changed so that every
value stays, and errors are learned in deviations, so that a task of small rewards is not drowned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stateset_agents.numeric.environments.base import Spec
from stateset_agents.numeric.policy import MlpPolicy, TensorObservations
from stateset_agents.types.errors import ConfigurationError

_STEP = 0.1
"""Of the moving averages of the returns and their squares, by update."""
_SMALLEST = 1e-6
"""Of a deviation: a task whose returns never differ has no scale."""


class TaskPolicy(nn.Module):
    """`MlpPolicy` with a critic of one output per task, whose values follow each task's scale.

    Observations end with an indicator of the task, as `TaskMix` gives them.
    """

    return_mean: Tensor
    return_square: Tensor
    updates: Tensor

    def __init__(
        self, spec: Spec, num_tasks: int, *, hidden: Sequence[int] = (64, 64), seed: int = 0
    ) -> None:
        """`hidden`: the layers' widths of both networks; `seed`: of the weights."""
        super().__init__()
        shape = spec.observation_shape
        if num_tasks < 1 or not isinstance(shape, tuple) or len(shape) != 1 or shape[0] <= num_tasks:
            raise ConfigurationError(
                f"{spec.name}: observations must end with an indicator of {num_tasks} tasks, got the shape "
                f"{shape!r}: make the environment a TaskMix"
            )
        self.num_tasks = num_tasks
        self.actor = MlpPolicy(spec, hidden=hidden, seed=seed)
        outputs = replace(spec, num_actions=max(2, num_tasks), action_names=())
        self.critic = MlpPolicy(outputs, hidden=hidden, seed=seed + 1)
        self.register_buffer("return_mean", torch.zeros(num_tasks, dtype=torch.float64))
        self.register_buffer("return_square", torch.ones(num_tasks, dtype=torch.float64))
        self.register_buffer("updates", torch.zeros(num_tasks, dtype=torch.float64))

    def forward(self, observations: TensorObservations) -> Tensor:
        """[B, num_actions] logits."""
        logits: Tensor = self.actor(observations)
        return logits

    def values(self, observations: TensorObservations) -> Tensor:
        """[B] the return that is expected, in the task's own rewards."""
        tasks = self._tasks(observations)
        outputs = self.critic(observations).gather(1, tasks[:, None]).squeeze(1)
        values: Tensor = outputs * self._deviations()[tasks].float() + self.return_mean[tasks].float()
        return values

    def value_scales(self, observations: TensorObservations) -> Tensor:
        """[B] the deviation of the task's returns."""
        return self._deviations()[self._tasks(observations)].float()

    @torch.no_grad()
    def follow_returns(self, observations: TensorObservations, returns: Tensor) -> None:
        """Move each task's statistics, and its output's weights so that its values stay."""
        tasks, old_mean, old_deviation = (
            self._tasks(observations),
            self.return_mean.clone(),
            self._deviations(),
        )
        for task in range(self.num_tasks):
            met = returns[tasks == task].double()
            if not len(met):
                continue
            self.updates[task] += 1
            step = max(_STEP, 1.0 / float(self.updates[task]))  # the first returns are taken as they are
            self.return_mean[task] += step * (met.mean() - self.return_mean[task])
            self.return_square[task] += step * (met.square().mean() - self.return_square[task])
        deviation = self._deviations()
        last = self.critic.actor[-1]
        assert isinstance(last, nn.Linear)
        shrink = old_deviation / deviation
        shift = (old_mean - self.return_mean) / deviation
        last.weight[: self.num_tasks] *= shrink[:, None].to(last.weight.dtype)
        last.bias[: self.num_tasks] = (last.bias[: self.num_tasks] * shrink + shift).to(last.bias.dtype)

    def _tasks(self, observations: TensorObservations) -> Tensor:
        tasks: Tensor = observations[:, -self.num_tasks :].argmax(dim=1)
        return tasks

    def _deviations(self) -> Tensor:
        variance = self.return_square - self.return_mean.square()
        return variance.clamp(min=_SMALLEST**2).sqrt()
