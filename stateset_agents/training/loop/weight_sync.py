"""Weight sync: the learner's weights are pushed to the agent after each update, and where it has others."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import torch

from stateset_agents.backends.base import SharedBackend, exclusive, new_weights, weights_token
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.model_card import Origin
from stateset_agents.runtime.tasks import Worker, shielded
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.update.protocol import PolicyLearner


@dataclass
class WeightSync:
    """Pushes the learner's weights to the agent's backend, and knows whether they are the ones it has."""

    agent: MultiTurnAgent
    learner: PolicyLearner
    group: ProcessGroup
    worker: Worker
    run: Path
    """The run folder, for the origin of the agent's weights."""
    _: KW_ONLY
    is_live: bool
    """True where `learner.weights` returns its live tensors, False where it merges an adapter or gathers
    shards."""
    owner: object
    """The trainer, as `exclusive` takes it."""
    token: object
    """Identity of the weights that were pushed last; at first of those that the learner began with, a new
    object where the backend never had them."""
    versions: list[int] = field(default_factory=lambda: [0], init=False)
    """Versions of the policies so far, ascending."""

    @property
    def is_current(self) -> bool:
        """True where the backend has the weights that were pushed last, and not the best step's or another
        trainer's."""
        return weights_token(self.agent.backend) is self.token

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no other trainer may train the agent's model."""
        return exclusive(self.agent.backend, self.owner)

    async def push(self, state: RunState) -> None:
        """Let the agent sample with the learner's weights; the processes do it together."""
        self._pin_date(state)
        await self.group.barrier("the hand-over of the weights")
        self.token = object()  # a push that fails leaves unknown weights: the next one pushes again
        # Merging adapters and gathering shards take a while, so the worker does it.
        weights = self.learner.weights() if self.is_live else await self.worker.run(self.learner.weights)
        self.token = await self._update_backend(weights, state.version)
        self.versions = [*(earlier for earlier in self.versions if earlier < state.version), state.version]
        self.name_origin(state.step)

    async def ensure_current(self, state: RunState) -> None:
        """Push where the agent has other weights."""
        self._pin_date(state)
        if not self.is_current:
            await shielded(self.push(state))

    def _pin_date(self, state: RunState) -> None:
        """Let the agent tell the day of this run: it was loaded on another, or trained by another run."""
        if state.template_date is not None:
            self.agent.pin_date(datetime.date.fromisoformat(state.template_date))

    async def publish(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Let the agent sample with the weights of a checkpoint; the learner keeps its own."""
        await self._update_backend(weights, step)
        self.name_origin(step)

    def name_origin(self, step: int) -> None:
        """Note where the agent's weights come from, for its model card."""
        base = self.learner.base.name_or_path
        self.agent.origin = Origin(base=base, run=self.run, step=step)

    async def _update_backend(self, weights: Mapping[str, torch.Tensor], version: int) -> object:
        """Returns the token of the new weights. The first process updates a server that all of them share."""
        backend = self.agent.backend
        shared = backend if isinstance(backend, SharedBackend) else None
        if self.group.processes.is_first or shared is None:
            await backend.update_weights(weights, version)
        if shared is not None and not self.group.processes.is_alone:
            in_use = await self.group.barrier("the weights in use", shared.weights_in_use())
            shared.follow(in_use[0])
        return new_weights(backend)
