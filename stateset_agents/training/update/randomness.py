"""Dropout of an update: on or off, and drawn from a random stream of its own. The learners call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def set_mode(model: nn.Module, *, dropout: bool) -> None:
    """Training mode, or evaluation mode in which layers with gradient checkpointing still recompute.

    transformers' layers recompute in training mode only: without dropout only these layers are put into it,
    and the dropout rates that they apply themselves are set to 0.
    """
    model.train(dropout)
    if dropout:
        return
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            clear_dropout_rates(module)


def clear_dropout_rates(module: nn.Module) -> None:
    """Set to 0 the rates that a layer hands to `F.dropout` itself."""
    for name, value in list(vars(module).items()):
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


@contextlib.contextmanager
def seeded_rng(key: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws from a generator seeded by `key`; the process's generators stay as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
