"""Forwards of a model of less than fp32 as they would be without its rounding; for correctness_check.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def fp32_forwards(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, the forwards of a model whose weights are of `dtype` compute in fp32.

    One layer at a time has its weights widened, so that the memory of a whole copy is not needed.
    """
    narrow: dict[nn.Module, list[tuple[nn.Module, dict[str, nn.Parameter | None]]]] = {}

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value

    def widen(unit: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        narrow[unit] = [(module, dict(module._parameters)) for module in unit.modules()]
        for module, parameters in narrow[unit]:
            for name, parameter in parameters.items():
                if parameter is not None and parameter.dtype is dtype:
                    module._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
        # What comes before a layer may round to the weights that it had.
        return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}

    def restore(unit: nn.Module, *_: Any) -> None:
        for module, parameters in narrow.pop(unit):
            module._parameters.update(parameters)

    with contextlib.ExitStack() as hooks:
        for unit in _units(model):
            before = unit.register_forward_pre_hook(widen, with_kwargs=True)
            after = unit.register_forward_hook(restore, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Layers whole, for their parts may read each other's weights, and what else has weights of its own."""
    if module._parameters:
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _units(child)
