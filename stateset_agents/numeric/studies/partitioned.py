"""PPO with partitioned advantages under the name of its document, GRPO, over `ControlTrainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from torch import nn

from stateset_agents.numeric.environments.base import BatchedEnvironment, Tasked
from stateset_agents.numeric.evaluation import ControlEvaluation
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.rollout import Rollout
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.task_policy import TaskPolicy
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.numeric.update import UpdateResult, update
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError

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
"""Of `ControlConfig`, where they differ: PPO plays single episodes and asks a critic."""


class GRPO:
    """PPO with partitioned advantages: not DeepSeekMath's GRPO, which has groups of one prompt and no critic.

    GAE over each trajectory, then centred and scaled within the trajectory's part, each part counting by its
    weight in the clipped loss. With one part (`group_strategy` none) it is PPO, bit for bit.

    >>> async with GRPO(mix({"cart_pole": 1.0, "acrobot": 0.01}), group_strategy="task") as grpo:
    ...     await grpo.train()
    """

    def __init__(
        self,
        environment: BatchedEnvironment,
        group_strategy: str = "auto",
        n_groups: int = 4,
        group_weight_method: str = "balanced",
        *,
        policy: nn.Module | None = None,
        value_normalization: ValueNormalization | None = None,
        run: RunFolder | None = None,
        callbacks: Sequence[object] = (),
        **ppo_kwargs: Any,
    ) -> None:
        """`policy`: a new one when absent, by `value_normalization`: task where the environment has several;
        `ppo_kwargs`: fields of `ControlConfig`. Raises ConfigurationError for settings that cannot be."""
        parts = {
            "group_strategy": group_strategy,
            "n_groups": n_groups,
            "group_weight_method": group_weight_method,
        }
        config = ControlConfig(**{**PPO_DEFAULTS, **parts, **ppo_kwargs})
        self.policy = policy or policy_for(
            environment, value_normalization=value_normalization, seed=config.seed
        )
        self.trainer = ControlTrainer(self.policy, environment, config, run=run, callbacks=callbacks)
        self._optimization: Optimization | None = None
        self._position = self._updates_before = 0
        self._partition: Mapping[str, Any] = {}

    @property
    def config(self) -> ControlConfig:
        """The settings, as they were given; `trainer.config` may get another length or cadence."""
        return self.trainer.config

    async def train(self) -> nn.Module:
        """See `ControlTrainer.train`."""
        return await self.trainer.train()

    async def evaluate(self, seeds: Sequence[int] | None = None) -> ControlEvaluation:
        """See `ControlTrainer.evaluate`."""
        return await self.trainer.evaluate(seeds)

    def update(self, rollout: Rollout) -> UpdateResult:
        """Learn from a rollout of a loop of one's own; blocking, and apart from what `train` does."""
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
        return result

    async def __aenter__(self) -> Self:
        await self.trainer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.trainer.__aexit__(*exc)


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
