"""FSDP2 (torch's `fully_shard`): a model cut into one shard for each process. Called by policy and learner.

A layer's weights are whole while it computes, forward and backward, and no longer; its gradient is summed
over the processes as it is cut. Optimiser states are those of the shards. What stands outside the layers
(embeddings, norm, head) is whole while `Whole` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["Whole", "cut_like", "dropped", "fill", "gathered", "gathered_states", "named", "shard", "whole"]

_T = TypeVar("_T")


class Whole(nn.Module):
    """What runs under it finds a sharded model's weights whole, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], _T]) -> _T:
        return work()


def shard(model: Any, count: int) -> Whole:
    """Cut the model into `count` shards, of which this process keeps its own; all processes do it."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (count,))
    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    outer = Whole(model)
    fully_shard(outer, mesh=mesh, reshard_after_forward=True)
    for module in outer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are shares of one sum
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled one
    return outer


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards; any other as it is. All processes ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named(model: nn.Module) -> dict[str, Tensor]:
    """What a model's state dict has, not gathered; what has two names is one object."""
    kept = model.state_dict().keys()
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in kept}


def gathered(model: nn.Module, put: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
    """A sharded model's state dict with whole tensors; what has two names is one tensor.

    One after the other is whole on the device, and is `put` away: into memory, unless said otherwise.
    """
    of: dict[int, Tensor] = {}
    weights = {}
    for name, tensor in named(model).items():
        if id(tensor) not in of:
            of[id(tensor)] = put(whole(tensor.detach()))
        weights[name] = of[id(tensor)]
    return weights


def gathered_states(
    optimizer: Mapping[str, Any], put: Callable[[Tensor], Tensor] = Tensor.cpu
) -> dict[str, Any]:
    """An optimiser's state dict with whole tensors, `put` away as of `gathered`."""
    states = {
        index: {
            name: put(whole(value)) if isinstance(value, Tensor) else value for name, value in entry.items()
        }
        for index, entry in optimizer["state"].items()
    }
    return {**optimizer, "state": states}


def dropped(tensor: Tensor) -> Tensor:
    """Nothing of it, for a process that only helps another one to gather."""
    return tensor.new_empty(0)


def cut_like(optimizer: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """What `gathered_states` gave, cut as the parameters are."""
    states = {
        index: {name: _cut(value, parameters[index]) for name, value in entry.items()}
        for index, entry in optimizer["state"].items()
    }
    return {**optimizer, "state": states}


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put whole weights into a sharded model, by name; what has two names may stand under one of them."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in weights.items():
        if name in own:
            own[name].copy_(_cut(tensor, own[name]))


def _cut(value: Any, like: Tensor) -> Any:
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    here = value.to(like.device)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
