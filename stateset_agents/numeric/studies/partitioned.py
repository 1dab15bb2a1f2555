"""PPO, and PPO with partitioned advantages under the name of its document, GRPO, over `ControlTrainer`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stateset_agents.grouping.advantages import GroupAdvantageNormalizer
from stateset_agents.grouping.partitions import GroupingStrategy
from stateset_agents.grouping.weights import GroupWeightCalculator
from stateset_agents.numeric.credit import credit
from stateset_agents.numeric.environments.base import BatchedEnvironment, Spec, Tasked
from stateset_agents.numeric.evaluation import ControlEvaluation
from stateset_agents.numeric.policy import MlpPolicy, TensorObservations
from stateset_agents.numeric.rollout import Rollout, joined
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.numeric.update import UpdateResult, critic_values, episodes_loss, update
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect, expect_that

# ------------------------------------------------------------------------------------------ task policy
#
# Its critic has an output for each task, in that task's own units (PopArt).
#
# https://arxiv.org/abs/1602.07714 for one task, https://arxiv.org/abs/1809.04474 for several: a value is
# mean + deviation * output. As the statistics of the returns move, the last layer is changed so that every
# value stays, and errors are learned in deviations, so that a task of small rewards is not drowned.

_STEP = 0.1
"""Step of the moving averages of the returns and their squares in an update."""
_SMALLEST = 1e-6
"""Least deviation: a task whose returns never differ has no scale."""


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


ValueNormalization = Literal["task", "none"]
"""A critic with an output and a scale per task (`TaskPolicy`), or with one in units of return."""

PPO_DEFAULTS: Mapping[str, Any] = {
    "advantage_estimator": "gae",
    "num_groups": 64,
    "group_size": 1,
    "steps_per_rollout": 4096,
    "minibatch_size": 1024,
    "num_iterations": 8,
    "learning_rate": 2e-3,
    "entropy_coef": 0.01,
}
"""Settings of `ControlConfig` with other defaults: PPO plays single episodes and asks a critic."""


class PolicyLoss(float):
    """The policy loss of an update's last pass, a number: 0 where nobody was better than expected, nan where
    nothing could be learned."""

    metrics: Mapping[str, float]
    """See `UpdateResult`."""
    failure: str | None
    """Why nothing could be learned; None where it was."""

    def __new__(cls, result: UpdateResult) -> Self:
        self = super().__new__(cls, math.nan if result.failure else result.metrics.get("loss/policy", 0.0))
        self.metrics, self.failure = result.metrics, result.failure
        return self


class PPO:
    """PPO with a critic: over `ControlTrainer` with an environment, or on episodes of a loop of one's own.

    >>> async with PPO(BatchedCartPole(), total_steps=60_000) as ppo:
    ...     await ppo.train()
    """

    def __init__(
        self,
        environment: BatchedEnvironment | None = None,
        *,
        policy: nn.Module | None = None,
        value_normalization: ValueNormalization | None = None,
        run: RunFolder | None = None,
        callbacks: Sequence[object] = (),
        **settings: Any,
    ) -> None:
        """`policy`: made when absent, by `value_normalization`: task where the environment has several tasks;
        `settings`: fields of `ControlConfig`. Raises ConfigurationError for settings that cannot be."""
        self._config = ControlConfig(**{**PPO_DEFAULTS, **settings})
        self.environment, self._settings = environment, settings
        self.policy: Any = policy
        """The network that learns, a torch module; None where there is no environment to make one for."""
        self._trainer = None
        if environment is not None:
            self.policy = policy or policy_for(
                environment, value_normalization=value_normalization, seed=self._config.seed
            )
            self._trainer = ControlTrainer(
                self.policy, environment, self._config, run=run, callbacks=callbacks
            )
        self._optimization: Optimization | None = None
        self._position = self._updates_before = 0
        self._partition: Mapping[str, Any] = {}

    @property
    def config(self) -> ControlConfig:
        """The settings, as they were given; `trainer.config` may get another length or cadence."""
        return self._config if self._trainer is None else self._trainer.config

    @property
    def trainer(self) -> ControlTrainer:
        """What trains in the environment. Raises ConfigurationError without one."""
        if self._trainer is None:
            name = type(self).__name__
            raise ConfigurationError(
                f"this {name} has no environment to play in: write {name}(environment=...)"
            )
        return self._trainer

    async def train(self) -> nn.Module:
        """See `ControlTrainer.train`."""
        return await self.trainer.train()

    async def evaluate(self, seeds: Sequence[int] | None = None) -> ControlEvaluation:
        """See `ControlTrainer.evaluate`."""
        return await self.trainer.evaluate(seeds)

    def update(self, rollouts: Rollout | Sequence[Rollout]) -> PolicyLoss:
        """Learn from a rollout, or a list of episodes, of a loop of one's own, all passes and steps of the
        optimiser; blocking, and apart from what `train` does. The loss is a number without a gradient."""
        rollout = self._rollout(rollouts)
        if self._optimization is None:
            self._optimization = Optimization(self.policy, self.config, num_updates=self.config.total_steps)
        result = update(
            self.policy,
            self._optimization,
            rollout,
            self.config,
            position=self._position,
            partition=self._partition,
            updates_before=self._updates_before,
        )
        self._position, self._partition = self._position + rollout.num_steps, result.partition
        self._updates_before += 1
        return PolicyLoss(result)

    def compute_gae(self, rollouts: Rollout | Sequence[Rollout]) -> NDArray[np.float64]:
        """[steps] advantages by the policy's critic, before any normalisation, episode after episode."""
        rollout, config = self._rollout(rollouts), self.config
        raw = credit(
            rollout,
            "gae",
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            scaling="none",
            values=critic_values(self.policy, rollout),
        ).advantages
        return raw.T[rollout.alive.T]

    def _rollout(self, rollouts: Rollout | Sequence[Rollout]) -> Rollout:
        hint = "give policy=, the one that played, or environment="
        expect("policy", self.policy, nn.Module, hint)
        return rollouts if isinstance(rollouts, Rollout) else joined(rollouts)

    async def __aenter__(self) -> Self:
        await self.trainer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.trainer.__aexit__(*exc)


class GRPO(PPO):
    """PPO with partitioned advantages: not DeepSeekMath's GRPO, which has groups of one prompt and no critic.

    GAE over each trajectory, then centred and scaled within the trajectory's part, each part counting by its
    weight in the clipped loss. With one part (`group_strategy` none) it is PPO, bit for bit.

    >>> environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    >>> async with GRPO(group_strategy="task", environment=environment) as grpo:
    ...     await grpo.train()
    """

    def __init__(
        self,
        group_strategy: str = "auto",
        n_groups: int = 4,
        group_weight_method: str = "balanced",
        **ppo_kwargs: Any,
    ) -> None:
        """`ppo_kwargs`: of `PPO`, `environment` and `policy` among them."""
        expect("group_strategy", group_strategy, str, "give an environment by its name, environment=...")
        parts: dict[str, Any] = {
            "group_strategy": group_strategy,
            "n_groups": n_groups,
            "group_weight_method": group_weight_method,
        }
        super().__init__(**parts, **ppo_kwargs)

    @cached_property
    def base_ppo(self) -> PPO:
        """PPO without parts over the same policy and environment, with an optimiser of its own."""
        names = ("group_strategy", "n_groups", "group_weight_method")
        plain = {name: value for name, value in self._settings.items() if name not in names}
        return PPO(self.environment, policy=self.policy, **plain)

    @property
    def grouping_strategy(self) -> GroupingStrategy:
        """How the next `update` divides, where the strategy has one key: not online or hierarchical."""
        seed = derive(self.config.seed, "parts", self._position)
        return GroupingStrategy(self.config.group_strategy, self.config.n_groups, seed=seed)

    @cached_property
    def group_normalizer(self) -> GroupAdvantageNormalizer:
        """How `update` normalises within a part."""
        return GroupAdvantageNormalizer()

    @cached_property
    def group_weight_calculator(self) -> GroupWeightCalculator:
        """How `update` weighs parts; this one remembers what it was asked, `update` what it learned from."""
        return GroupWeightCalculator(self.config.group_weight_method, self.config.n_groups)

    def compute_group_policy_loss(
        self, group_data: Rollout | Sequence[Rollout], group_advantages: NDArray[np.float64]
    ) -> Tensor:
        """The clipped policy loss of a part, with gradient: the mean over its steps with these advantages
        [steps], episode after episode. `update` minimises the sum of weight times this."""
        rollout = self._rollout(group_data)
        flat = np.asarray(group_advantages, dtype=np.float64).reshape(-1)
        steps = int(rollout.alive.sum())
        expect_that(len(flat) == steps, "group_advantages", f"be one per step, {steps}", len(flat))
        advantages = np.zeros(rollout.alive.shape)
        advantages.T[rollout.alive.T] = flat
        return episodes_loss(self.policy, rollout, advantages, self.config)


def policy_for(
    environment: BatchedEnvironment,
    *,
    value_normalization: ValueNormalization | None = None,
    hidden: Sequence[int] = (64, 64),
    normalize_observations: bool = False,
    seed: int = 0,
) -> MlpPolicy | TaskPolicy:
    """A policy with a critic; `value_normalization`: task, or by default task where there are several.

    Raises ConfigurationError where `task` is asked for and the environment has none, or with
    `normalize_observations`.
    """
    if value_normalization is None:
        value_normalization = "task" if isinstance(environment, Tasked) else "none"
    if value_normalization == "none":
        return MlpPolicy(
            environment.spec,
            hidden=hidden,
            critic=True,
            normalize_observations=normalize_observations,
            seed=seed,
        )
    if normalize_observations:
        raise ConfigurationError(
            "normalize_observations goes with value_normalization none: each task's numbers are its own, and "
            "one normaliser of all would mix them"
        )
    if not isinstance(environment, Tasked):
        raise ConfigurationError(
            f"value_normalization task needs an environment of several tasks, and {environment.spec.name} is "
            "one: leave it out, or make a TaskMix"
        )
    environment.reset([0])
    return TaskPolicy(environment.spec, len(environment.task_rows().names), hidden=hidden, seed=seed)
