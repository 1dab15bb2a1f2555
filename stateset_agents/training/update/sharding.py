"""FSDP2 (torch's `fully_shard`): a model cut into one shard for each process. Called by policy and learner.

A layer's weights are gathered while it computes, forward and backward, and no longer; its gradient is summed
over the processes as it is sharded. Optimiser states are those of the shards. What is outside the layers
(embeddings, norm, head) is gathered while `ShardedModel` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_T = TypeVar("_T")


class ShardedModel(nn.Module):
    """Calls what it is given; meanwhile the model's weights are gathered, layer by layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], _T]) -> _T:
        return work()


def shard(model: Any, count: int) -> ShardedModel:
    """Cut the model into `count` shards, of which each process keeps one; all processes do it together."""
    from torch.distributed.device_mesh import init_device_mesh  # with fsdp it takes as long to load as torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (count,))
    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    outer = ShardedModel(model)
    fully_shard(outer, mesh=mesh, reshard_after_forward=True)
    for module in outer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are shares of one sum
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled one
    return outer


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor with all its shards; any other as it is. All processes ask together."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, not gathered; tied tensors are one object."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in model.state_dict()}


def gather_state_dict(model: nn.Module, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
    """A sharded model's state dict with full tensors; tied tensors are one object.

    One tensor at a time is full on the device; `keep` says what of it stays, by default a copy on the CPU.
    """
    copies: dict[int, Tensor] = {}
    weights = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = keep(full_tensor(tensor.detach()))
        weights[name] = copies[id(tensor)]
    return weights


def gather_optimizer_state(
    optimizer: Mapping[str, Any], keep: Callable[[Tensor], Tensor] = Tensor.cpu
) -> dict[str, Any]:
    """An optimiser's state dict with full tensors, kept as `gather_state_dict` keeps them."""
    return _map_state(
        optimizer, lambda _, value: keep(full_tensor(value)) if isinstance(value, Tensor) else value
    )


def shard_like(optimizer: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state that `gather_optimizer_state` gave, sharded as the parameters are."""
    return _map_state(optimizer, lambda index, value: _shard_like(value, parameters[index]))


def _map_state(optimizer: Mapping[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    states = {
        index: {name: change(index, value) for name, value in entry.items()}
        for index, entry in optimizer["state"].items()
    }
    return {**optimizer, "state": states}


def empty_tensor(tensor: Tensor) -> Tensor:
    """Keeps nothing, in a process that only contributes its shards to another one's full tensors."""
    return tensor.new_empty(0)


@torch.no_grad()
def load_full_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy full weights into a sharded model, by name; a tied tensor may have one name only."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, weight in weights.items():
        if name in tensors:
            tensors[name].copy_(_shard_like(weight, tensors[name]))


def _shard_like(value: Any, like: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    local = value.to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
