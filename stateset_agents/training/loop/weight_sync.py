"""Weight sync: the learner's weights are pushed to the agent after each update, and where it has others."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from stateset_agents.backends.base import (
    AdapterBackend,
    Backend,
    SharedBackend,
    exclusive,
    new_weights,
    weights_token,
)
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.model_card import Origin
from stateset_agents.runs.checkpoint_files import Checkpoint
from stateset_agents.runtime.tasks import Worker, shielded
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.update.protocol import PolicyLearner


def initial_tokens(backend: Backend, *, is_quantized: bool) -> tuple[object, object]:
    """`token` and `base` of a `WeightSync` whose learner begins with the backend's weights, or with quantised
    ones, which the backend never had."""
    if is_quantized:
        return object(), None
    base = None
    if isinstance(backend, AdapterBackend) and not backend.has_adapter:  # else it begins with merged weights
        base = backend.base
    return weights_token(backend), base


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
    is_sharded: bool
    """True where each process has a part of the weights."""
    owner: object
    """The trainer, as `exclusive` takes it."""
    token: object
    """Identity of the weights that were pushed last; at first of those that the learner began with, a new
    object where the backend never had them."""
    base: object
    """The backend's `base` while that is the learner's, below an adapter; else None."""
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
        self.token = await self._update_backend(state.version)
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

    async def publish(self, checkpoint: Checkpoint) -> None:
        """Let the agent sample with the weights of a checkpoint; the learner keeps its own."""
        await self._update_backend(checkpoint.step, checkpoint)
        self.name_origin(checkpoint.step)

    def name_origin(self, step: int) -> None:
        """Note where the agent's weights come from, for its model card."""
        base = self.learner.base.name_or_path
        self.agent.origin = Origin(base=base, run=self.run, step=step)

    async def _update_backend(self, version: int, checkpoint: Checkpoint | None = None) -> object:
        """Hand over the learner's weights, or a checkpoint's; returns the token of the new ones. The first
        process updates a server that all of them share."""
        backend = self.agent.backend
        shared = backend if isinstance(backend, SharedBackend) else None
        adapter = self.learner.adapter(None if checkpoint is None else checkpoint.optimizer)
        if adapter is not None and isinstance(backend, AdapterBackend):
            if backend.base is not self.base:  # it had none of ours, or another trainer's weights
                await backend.update_weights(self.learner.base_weights(), version)
                self.base = backend.base
            await backend.update_adapter(adapter, version)
        else:
            if checkpoint is not None:
                weights = checkpoint.weights
            elif self.is_sharded:  # all processes gather their shards, which takes a while
                weights = await self.worker.run(self.learner.weights)
            else:
                weights = self.learner.weights()
            if self.group.processes.is_first or shared is None:
                await backend.update_weights(weights, version)
        if shared is not None and not self.group.processes.is_alone:
            in_use = await self.group.barrier("the weights in use", shared.weights_in_use())
            shared.follow(in_use[0])
        return new_weights(backend)
