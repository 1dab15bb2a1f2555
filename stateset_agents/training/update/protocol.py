"""The protocol of a trainer's learner, which holds the weights and updates them.

`training.update.learner.Learner` and `training.trl.learner.TrlLearner` implement it. Every call is made in
the trainer's worker thread, or while that is idle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from stateset_agents.backends.adapters import Adapter
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import CreditedBatch, Sample
from stateset_agents.types.trajectory import TokenLogprobs, TrajectoryGroup

Weights = Mapping[str, Tensor]
"""Tensors by their names in a model."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of a step's update."""

    metrics: dict[str, float]
    logprobs: Sequence[TokenLogprobs | None] = ()
    """[samples] where `log_learner_logprobs` asks for them, else empty; None where one was left out."""
    failure: str | None = None
    """The number that was not finite, so that weights did not move, and what to do; None where all was."""


def not_finite(
    loss: float, grad_norm: float, *, scaled: bool, metrics: Mapping[str, float] = MappingProxyType({})
) -> str | None:
    """Name the number that is not finite, and what to do; None where both are.

    `metrics`: the line names those that are not, either. `scaled`: under fp16's gradient scaler an infinite
    gradient is no error, it finds the scale.
    """
    if not math.isfinite(loss):
        others = ", ".join(f"{name} {value}" for name, value in metrics.items() if not math.isfinite(value))
        parts = f" ({others})" if others else ""
        return (
            f"has the loss {loss}{parts}: lower learning_rate, use precision fp32 or bf16, or look at this "
            "step's conversations"
        )
    if not (math.isfinite(grad_norm) or scaled):
        return f"has the gradient norm {grad_norm}: lower learning_rate, or look at this step's conversations"
    return None


class PolicyLearner(Protocol):
    """Scored groups in, better weights out."""

    @property
    def config(self) -> TrainingConfig: ...
    @property
    def base(self) -> Any: ...  # transformers' own model, without an adapter's wrapping
    @property
    def fingerprint(self) -> str: ...  # of the weights at the start
    @property
    def device(self) -> torch.device: ...  # where the weights lie
    @property
    def layout(self) -> Mapping[str, str]: ...  # `rows` of the update, packed or padded, and `why_rows`
    @property
    def midway(self) -> bool: ...  # has an update begun to move weights, and not ended: nothing to save
    @property
    def scales_gradients(self) -> bool: ...  # does fp16's gradient scaler look for its scale
    @property
    def num_updates(self) -> int: ...  # optimiser steps made, over all parts of a resumed run

    def set_num_steps(self, num_steps: int) -> None:
        """Give the learning rate's schedule this length, that of the whole run, from the next update on.

        Raises ConfigurationError where it cannot change any more.
        """

    def set_temperature(self, temperature: float) -> None:
        """Note the temperature of the rollouts that the next update learns from."""

    def credit(self, groups: Sequence[TrajectoryGroup]) -> CreditedBatch:
        """Credit a step's groups by `advantage_estimator`; the critic predicts first."""

    def learn(self, batch: CreditedBatch, *, step: int) -> Learned:
        """Update the policy, then the critic."""

    def losses(self, samples: Sequence[Sample], *, beta: float | None = None) -> dict[str, Tensor]:
        """The loss of these samples under the weights as they are; nothing steps."""

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by the names of a plain model: the live tensors, which the next update changes; with an
        adapter each is merged as it is read. All processes ask together where each holds a shard."""

    def adapter(self, state: Mapping[str, Any] | None = None) -> Adapter | None:
        """The live adapter, or that of a state that `state` gave; None where all weights train."""

    def base_weights(self) -> Mapping[str, Tensor]:
        """The frozen weights below the adapter, by the names of a plain model; each is made as it is read."""

    def state(self) -> dict[str, Any]:
        """The state of the optimiser, an adapter and the KL coefficient; tensors are the live ones."""

    def critic_state(self) -> dict[str, Tensor]:
        """The critic's head and optimiser, the live tensors; empty without a critic."""

    def restore(self, weights: Weights, state: Mapping[str, Any], critic: Weights | None = None) -> None:
        """Go on from a checkpoint, which has a tied tensor under one of its names only.

        Raises CheckpointError, before anything changes, when the weights are of another model.
        """

    def contribute_shards(self) -> None:
        """Take part, in a process that writes no checkpoint, while the first one gathers the shards."""

    def write_model_files(self, path: Path) -> None:
        """Write config and generation config, not the weights, to `path`; an adapter, its weights too, to
        `adapter/` beside it."""

    def close(self) -> None:
        """End what runs beside the trainer; the weights stay."""
