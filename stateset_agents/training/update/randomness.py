"""Dropout of an update: on or off, and drawn from the step's own stream. The learner calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["own_randomness", "set_mode"]


def set_mode(model: nn.Module, *, dropout: bool) -> None:
    """Training mode, or evaluation mode in which layers still recompute their activations if told to.

    transformers' layers recompute in training mode only: without dropout just the layers themselves are
    put into it, and a rate that such a layer applies by its own hand is set to 0.
    """
    model.train(dropout)
    if dropout:
        return
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in list(vars(module).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


@contextlib.contextmanager
def own_randomness(key: int, device: torch.device) -> Iterator[None]:
    """Dropout drawn from this step's own stream; the process's generators are left as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
