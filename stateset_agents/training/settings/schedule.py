"""The settings of a training that say how long it is, and how much of it is one step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stateset_agents.types.settings import Settings


class ScheduleSettings(Settings):
    """Episodes, steps and processes."""

    num_episodes: int = Field(
        default=1000, ge=1, description="Scenarios to play, each `num_generations` times."
    )
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps; overrides num_episodes.")
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="Episodes of one forward-backward pass of one process."
    )
    gradient_accumulation_steps: int = Field(
        default=4, ge=1, description="Passes summed into one optimiser step."
    )
    num_processes: int = Field(
        default=1,
        ge=1,
        description="Processes that train together, each with its share of a step; as many as torchrun or "
        "accelerate must have started, see docs/several-gpus.md.",
    )
    parallelism: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="Of several processes: each holds all weights (ddp), or weights, gradients and "
        "optimiser are cut into shards, one for each (fsdp2).",
    )

    def episodes_per_step(self) -> int:
        """Scenarios of one step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes

    def num_steps(self) -> int:
        """Steps of the run: `max_steps`, or as many as `num_episodes` fill (the last may be short)."""
        if self.max_steps is not None:
            return self.max_steps
        return -(-self.num_episodes // self.episodes_per_step())
