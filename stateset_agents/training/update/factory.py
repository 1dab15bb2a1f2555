"""Makes a trainer's learner, on a copy of the agent's model: ours here, TRL's in `training.trl.learner`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from stateset_agents.backends.base import AdapterBackend, RunningBackend, TrainableBackend, picture_reader
from stateset_agents.backends.grammars import grammars_of
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.runs.optimizer import autocast_dtype
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.lora import quantized_copy, size_for_auto
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that


def is_quantized_training(config: TrainingConfig) -> bool:
    """True where an adapter is trained on weights that the agent does not begin with."""
    return config.lora is not None and config.lora.quantization is not None


def trainable_copy(backend: TrainableBackend, config: TrainingConfig) -> tuple[Any, bool]:
    """A model to train, and whether the log-probs of the backend's rollouts are exactly those of an update
    on it.

    The model is a copy of the backend's in fp32; to put an adapter on, a quantised one where that is asked
    for, and the backend's own weights where the update computes in their dtype or in less.

    Raises ConfigurationError where the library for quantised layers is missing.
    """
    if config.lora is None or config.lora.quantization is None:
        shared = None
        if config.lora is not None and isinstance(backend, AdapterBackend):
            shared = backend.share_model(partial(_computes_in, config, backend))
        return backend.master_model() if shared is None else shared, backend.is_exact
    source = backend.model_to_quantize()
    compute = autocast_dtype(config.precision, source.device) or torch.float32
    model = quantized_copy(source, config.lora.quantization, compute=compute)
    # 8 bits may round activations, too, which rollouts do not.
    return model, backend.is_exact and config.lora.quantization == "4bit"


def _computes_in(config: TrainingConfig, backend: TrainableBackend, model: Any) -> bool:
    """True if an update of these settings computes in the dtype of the model's weights, or in less."""
    size = size_for_auto(model, config, backend.matmul_precision)
    computed = autocast_dtype(config.precision, model.device, size) or torch.float32
    return torch.promote_types(computed, model.dtype) is model.dtype


MOST_KEPT = 512
"""Largest top_k of a training: the tokens that it keeps are carried with each sampled one."""


def refuse_truncated_sampling(scorer: str, agent: MultiTurnAgent) -> None:
    """Raises ConfigurationError for an agent with `top_k` or `top_p` set, whose replies `scorer` would score
    over the whole vocabulary."""
    top_k, top_p = agent.config.top_k, agent.config.top_p
    if top_k or top_p < 1:
        raise ConfigurationError(
            f"{scorer} scores the whole vocabulary: leave top_k at 0 and top_p at 1, got {top_k} and {top_p}"
        )


class LearnerFactory:
    """Makes and describes a trainer's learner; that of another library overrides it."""

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Raises ConfigurationError for settings that the learner cannot follow."""
        expect_that(
            agent.config.top_k <= MOST_KEPT,
            "AgentConfig.top_k",
            f"be at most {MOST_KEPT}",
            agent.config.top_k,
        )
        if config.call_bias and agent.config.constrain == "off":
            raise ConfigurationError(
                "call_bias is for replies under a grammar: set AgentConfig.constrain to calls, or "
                "leave it at 0"
            )
        if config.distillation is not None:
            refuse_truncated_sampling("a teacher", agent)

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
            grammars=grammars_of(backend.tokenizer),
        )

    async def player(self, agent: MultiTurnAgent, learner: PolicyLearner) -> MultiTurnAgent:
        """The agent that plays the conversations: `agent` itself, unless the learner's library samples."""
        return agent

    def paths(self, backend: RunningBackend, learner: PolicyLearner) -> dict[str, Any]:
        """The engine that generates, the update's row layout, and the reasons for both; for events.jsonl."""
        running = backend.running
        engine = {"engine": running.name, "why": running.why, "linears": running.linears}
        return {**engine, **learner.layout}
