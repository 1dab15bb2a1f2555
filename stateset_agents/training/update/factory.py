"""Who makes a trainer's learner: ours here, TRL's in `training.trl.factory`."""

from __future__ import annotations

from typing import Any, Protocol

from stateset_agents.backends.base import TrainableBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.processes import Processes
from stateset_agents.training.update.base_model import base_model
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.protocol import PolicyLearner

__all__ = ["GRPOLearnerFactory", "LearnerFactory"]


class LearnerFactory(Protocol):
    """What differs between trainers that update by different libraries."""

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Raises ConfigurationError for settings that the learner cannot follow."""

    def make(
        self, agent: MultiTurnAgent, backend: TrainableBackend, config: TrainingConfig, processes: Processes
    ) -> PolicyLearner:
        """The learner of the agent's model. Blocking."""

    async def player(self, agent: MultiTurnAgent, learner: PolicyLearner) -> MultiTurnAgent:
        """Who plays the conversations: the agent itself, where nothing else samples."""

    def paths(self, backend: TrainableBackend, learner: PolicyLearner) -> dict[str, Any]:
        """By which way the model generates and the update lays out its rows, and why; for events.jsonl."""


class GRPOLearnerFactory:
    """Makes our own learner, which can follow every setting."""

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Every setting is followed."""

    def make(
        self, agent: MultiTurnAgent, backend: TrainableBackend, config: TrainingConfig, processes: Processes
    ) -> Learner:
        """A learner on a copy of the backend's model. Blocking."""
        model, exact = base_model(backend, config)
        return Learner(
            model,
            config,
            num_steps=config.num_steps(),
            exact_logprobs=exact,
            processes=processes,
            matmul_precision=backend.matmul_precision,
        )

    async def player(self, agent: MultiTurnAgent, learner: PolicyLearner) -> MultiTurnAgent:
        """The agent itself."""
        return agent

    def paths(self, backend: TrainableBackend, learner: PolicyLearner) -> dict[str, Any]:
        """The engine of the backend, and the update's row layout."""
        running = backend.running
        engine = {"engine": running.name, "why": running.why, "linears": running.linears}
        return {**engine, **learner.layout}
