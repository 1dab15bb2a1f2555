"""A LoRA adapter (https://arxiv.org/abs/2106.09685) as a sampler applies it: beside frozen weights.

An adapted layer computes x W' + (x A') B' * scaling. Merging B A into weights of half precision would lose
most of a young adapter, whose changes are smaller than a rounding of W, and would need a copy of all weights
at each hand-over. So engines compute the second product; merged weights are made for files alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, eq=False)
class LayerAdapter:
    """The adapter of one linear layer."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scaling: float
    """alpha / rank."""

    def fits(self, other: LayerAdapter) -> bool:
        """True where the other's tensors can be written into these."""
        shapes = (self.a.shape, self.b.shape) == (other.a.shape, other.b.shape)
        return shapes and self.scaling == other.scaling

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], computed in the dtype of x as an update's autocast does."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * self.scaling

    @torch.no_grad()
    def merged(self, weight: Tensor, *, is_transposed: bool) -> Tensor:
        """The layer's weight plus B A times the scaling, in at least fp32; `is_transposed`: the weight is
        [inputs, outputs], as GPT-2 has it."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        delta = (self.b.to(dtype) @ self.a.to(dtype)) * self.scaling
        return weight.to(dtype) + (delta.t() if is_transposed else delta)


Adapter: TypeAlias = Mapping[str, LayerAdapter]
"""The name of each adapted layer, as `named_modules` of the plain model has it, and its adapter."""


class LazyWeights(Mapping[str, Tensor]):
    """A model's weights by name, each made when it is read, so that no copy of all of them is needed."""

    def __init__(self, like: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        """`like`: by name a tensor of the same shape and dtype, on any device; tied weights have one."""
        self.like, self._make = like, make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def shapes_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the weights' shapes; of lazy ones without making any."""
    return weights.like if isinstance(weights, LazyWeights) else weights


def is_transposed(layer: nn.Module) -> bool:
    """True for GPT-2's linear layers, whose weight is [inputs, outputs]."""
    return type(layer).__name__ == "Conv1D"


def identity(tensor: Tensor) -> int:
    """Equal for tied tensors: where the data lies, or which object it is where there are none."""
    return tensor.data_ptr() or id(tensor)


class AdaptedModel:
    """Adds an adapter to the forwards of a transformers model, by a hook on each adapted layer.

    An engine that runs no modules (fused.py) gets the adapter by `set_adapter`, too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.adapter: dict[str, LayerAdapter] = {}
        """The adapter in use, in fp32; empty without one."""
        self._hooks: dict[str, Any] = {}

    @torch.no_grad()
    def set(self, adapter: Adapter) -> None:
        """Add a copy of this adapter from now on, in place of the one before; an empty one adds nothing."""
        for name, old in list(self.adapter.items()):
            if name not in adapter or not old.fits(adapter[name]):
                self._hooks.pop(name).remove()
                del self.adapter[name]
        for name, layer in adapter.items():
            if name not in self.adapter:
                module = self._model.get_submodule(name)
                a, b = (torch.empty_like(part, device=module.weight.device) for part in (layer.a, layer.b))
                self.adapter[name] = LayerAdapter(a, b, layer.scaling)
                self._hooks[name] = module.register_forward_hook(partial(self._add, name))
            self.adapter[name].a.copy_(layer.a)
            self.adapter[name].b.copy_(layer.b)

    def _add(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + self.adapter[name](inputs[0])

    def merged_copy(self, dtype: torch.dtype) -> Any:
        """A copy of the model of this dtype, the adapter in its weights."""
        merged = copy.deepcopy(self._model)
        for name, hook in self._hooks.items():
            merged.get_submodule(name)._forward_hooks.pop(hook.id)
        merged.to(dtype)
        for name, layer in self.adapter.items():
            module = merged.get_submodule(name)
            weight = self._model.get_submodule(name).weight
            changed = layer.merged(weight, is_transposed=is_transposed(module))
            module.weight.data = changed.to(dtype)
        return merged


def give_own_parameters(model: nn.Module) -> None:
    """Replace the parameters that another model shares by copies, tied ones by one; those that train stay."""
    own: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                if parameter not in own:
                    own[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                module._parameters[name] = own[parameter]
