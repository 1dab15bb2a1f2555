"""The model that a trainer trains: a copy of the agent's own, in fp32, or under an adapter in few bits."""

from __future__ import annotations

from typing import Any

import torch

from stateset_agents.backends.base import TrainableBackend
from stateset_agents.runs.optimizer import autocast_dtype
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.quantization import quantized_copy

__all__ = ["base_model", "is_quantized_training"]


def is_quantized_training(config: TrainingConfig) -> bool:
    """Does the policy stand on weights that the agent does not begin with?"""
    return config.lora is not None and config.lora.quantization is not None


def base_model(backend: TrainableBackend, config: TrainingConfig) -> tuple[Any, bool]:
    """The trainer's copy; and are the backend's log-probs exactly those of an update on it?

    Raises ConfigurationError where a library for few bits is missing.
    """
    if config.lora is None or config.lora.quantization is None:
        return backend.master_model(), backend.is_exact
    source = backend.model_to_quantize()
    compute = autocast_dtype(config.precision, source.device) or torch.float32
    model = quantized_copy(source, config.lora.quantization, compute=compute)
    # 8 bits may round activations, too, which rollouts do not.
    return model, backend.is_exact and config.lora.quantization == "4bit"
