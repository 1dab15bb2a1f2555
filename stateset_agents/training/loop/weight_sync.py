"""The agent speaks with the trainer's weights: handed over after each update, and where it has others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stateset_agents.core.model_card import Origin
from stateset_agents.runtime.tasks import uninterrupted
from stateset_agents.training.loop.training_lock import edition, new_edition
from stateset_agents.training.loop.training_run import TrainingRun

__all__ = ["Speaking"]


class Speaking(TrainingRun):
    """Knows whose weights the agent has."""

    async def _hand_over(self) -> None:
        """Let the agent speak with this trainer's weights; the processes do it together."""
        await self._all("the hand-over of the weights")
        version = self._state.version
        self._edition = object()  # where it fails nobody knows whose weights these are: hand over again
        made = self.config.lora is not None or self.config.parallelism == "fsdp2"  # not in the event loop
        weights = await self._worker.run(self.learner.weights) if made else self.learner.weights()
        await self._give(weights, version)
        self._versions = [*(earlier for earlier in self._versions if earlier < version), version]
        self._edition = new_edition(self.agent.backend)
        self._say_origin(self._state.step)

    def _say_origin(self, step: int) -> None:
        self.agent.origin = Origin(base=self.learner.base.name_or_path, run=self.run.path, step=step)

    async def _give(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Update the agent's model; one that all processes share is updated by the first, for all."""
        backend: Any = self.agent.backend
        is_shared = getattr(backend, "is_shared", False)
        if self.processes.is_first or not is_shared:
            await backend.update_weights(weights, version)
        if is_shared and not self.processes.is_alone:
            in_use = await self._all("the weights in use", backend.weights_in_use())
            backend.follow(in_use[0])

    async def _speak_as_itself(self) -> None:
        """Hand the weights over where the agent has others: the best step's, or another trainer's."""
        if edition(self.agent.backend) is not self._edition:
            await uninterrupted(self._hand_over())
