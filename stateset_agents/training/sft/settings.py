"""The settings of a supervised fine-tuning; names are TRL's where TRL has them."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from stateset_agents.algorithms.policy_losses import LIKELIHOOD_LOSS
from stateset_agents.runs.settings import OptimizerSettings, RunSettings
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.update import PassSettings


class SFTConfig(RunSettings, PassSettings, OptimizerSettings):
    """Settings of `SFTTrainer`."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = Field(default=2e-5, ge=0.0)
    """Peak of the schedule."""
    num_train_epochs: int = Field(default=3, ge=1)
    """Times that every conversation is shown."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps, instead of num_train_epochs."""
    per_device_train_batch_size: int = Field(default=8, ge=1)
    """Conversations of one step."""
    validation_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share held out, to measure the loss on, of the conversations that name no split."""
    eval_steps: int = Field(default=0, ge=0)
    """The held-out loss is measured every so many steps; 0: after each epoch."""
    load_best_at_end: bool = True
    """The agent ends with the weights of the lowest held-out loss instead of the last step's."""
    run_name: str = Field(default="sft", pattern=r"^[\w.-]+$")
    """Part of the run folder's name."""

    def num_steps(self, num_conversations: int) -> int:
        """Steps of a run over so many training conversations; an epoch's last step may be smaller."""
        return self.max_steps or self.num_train_epochs * self.steps_per_epoch(num_conversations)

    def steps_per_epoch(self, num_conversations: int) -> int:
        """Steps that show each of so many conversations once."""
        return -(-num_conversations // self.per_device_train_batch_size)

    def as_training(self, num_conversations: int) -> TrainingConfig:
        """The same as a learner of policies takes it.

        The log-likelihood of demonstrations is REINFORCE's objective with every advantage 1: their mean over
        a step's tokens, with no reference and no ratio.
        """
        names = ("seed", "per_device_train_batch_size", *OptimizerSettings.model_fields)
        shared: dict[str, Any] = {name: getattr(self, name) for name in (*names, *PassSettings.model_fields)}
        steps = self.num_steps(num_conversations)
        shared["importance"] = "none"  # nobody sampled them
        return TrainingConfig(**shared, max_steps=steps, loss_type=LIKELIHOOD_LOSS, beta=0.0)
