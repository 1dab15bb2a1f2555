"""Makes a trainer's learner, on a copy of the agent's model: ours here, TRL's in `training.trl.learner`."""

from __future__ import annotations

from typing import Any

import torch

from stateset_agents.backends.base import RunningBackend, TrainableBackend, picture_reader
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.runs.optimizer import autocast_dtype
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.lora import quantized_copy
from stateset_agents.training.update.protocol import PolicyLearner


def is_quantized_training(config: TrainingConfig) -> bool:
    """True where an adapter is trained on weights that the agent does not begin with."""
    return config.lora is not None and config.lora.quantization is not None


def trainable_copy(backend: TrainableBackend, config: TrainingConfig) -> tuple[Any, bool]:
    """A copy of the backend's model in fp32, or quantised under an adapter; and are the log-probs of the
    backend's rollouts exactly those of an update on it?

    Raises ConfigurationError where the library for quantised layers is missing.
    """
    if config.lora is None or config.lora.quantization is None:
        return backend.master_model(), backend.is_exact
    source = backend.model_to_quantize()
    compute = autocast_dtype(config.precision, source.device) or torch.float32
    model = quantized_copy(source, config.lora.quantization, compute=compute)
    # 8 bits may round activations, too, which rollouts do not.
    return model, backend.is_exact and config.lora.quantization == "4bit"


class LearnerFactory:
    """Makes and describes a trainer's learner; that of another library overrides it."""

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Raises ConfigurationError for settings that the learner cannot follow: ours follows all."""

    def make(
        self, agent: MultiTurnAgent, backend: TrainableBackend, config: TrainingConfig, processes: Processes
    ) -> PolicyLearner:
        """A learner on a copy of the backend's model. Blocking."""
        model, exact = trainable_copy(backend, config)
        return Learner(
            model,
            config,
            num_steps=config.num_steps(),
            exact_logprobs=exact,
            processes=processes,
            matmul_precision=backend.matmul_precision,
            pictures=picture_reader(backend),
        )

    async def player(self, agent: MultiTurnAgent, learner: PolicyLearner) -> MultiTurnAgent:
        """The agent that plays the conversations: `agent` itself, unless the learner's library samples."""
        return agent

    def paths(self, backend: RunningBackend, learner: PolicyLearner) -> dict[str, Any]:
        """The engine that generates, the update's row layout, and the reasons for both; for events.jsonl."""
        running = backend.running
        engine = {"engine": running.name, "why": running.why, "linears": running.linears}
        return {**engine, **learner.layout}
