"""Policies over discrete actions: what the trainer asks of one, and a small network for flat observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from stateset_agents.control.environments.base import (
    BoolArray,
    IntArray,
    Observations,
    Spec,
    map_observations,
)
from stateset_agents.types.errors import ConfigurationError

__all__ = [
    "MlpPolicy",
    "NumericPolicy",
    "ScaledCritic",
    "ValuedPolicy",
    "allowed_logits",
    "as_tensors",
    "sample_actions",
]

TensorObservations = Any
"""A tensor [B, ...], or several of them by name."""


class NumericPolicy(Protocol):
    """A torch module that gives each row its logits."""

    def __call__(self, observations: TensorObservations) -> Tensor:
        """[B, num_actions] logits."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...


@runtime_checkable
class ValuedPolicy(Protocol):
    """A policy with a critic, for `advantage_estimator: gae`."""

    def values(self, observations: TensorObservations) -> Tensor:
        """[B] the return that is expected from here on."""


@runtime_checkable
class ScaledCritic(Protocol):
    """A policy whose values are learned in deviations of the return, so that no task's error outweighs."""

    def value_scales(self, observations: TensorObservations) -> Tensor:
        """[B] the deviations by which the errors of the values are divided."""

    def follow_returns(self, observations: TensorObservations, returns: Tensor) -> None:
        """Move the means and deviations towards these returns [B], and keep every value as it is."""


class MlpPolicy(nn.Module):
    """Two networks of tanh layers, one for the logits and, with `critic`, one for the value.

    Weights are orthogonal with gain root 2, the logits' last layer with .01, so that the first policy is
    nearly uniform. Several observations are laid behind one another in the order of their names.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        hidden: Sequence[int] = (64, 64),
        critic: bool = False,
        seed: int = 0,
    ) -> None:
        """`hidden`: the layers' widths; `seed`: of the weights, which are a function of it alone."""
        super().__init__()
        shape = spec.observation_shape
        self.names = sorted(shape) if isinstance(shape, Mapping) else None
        sizes = [math.prod(shape[name]) for name in self.names or ()] if isinstance(shape, Mapping) else []
        width = sum(sizes) if isinstance(shape, Mapping) else math.prod(shape)
        generator = torch.Generator().manual_seed(seed)
        self.actor = _layers(width, hidden, spec.num_actions, 0.01, generator)
        self.critic = _layers(width, hidden, 1, 1.0, generator) if critic else None

    def forward(self, observations: TensorObservations) -> Tensor:
        """[B, num_actions] logits."""
        return _through(self.actor, self._flat(observations))

    def values(self, observations: TensorObservations) -> Tensor:
        """[B] the return that is expected; raises ConfigurationError without a critic."""
        if self.critic is None:
            raise ConfigurationError("this MlpPolicy has no critic: make it with critic=True")
        return _through(self.critic, self._flat(observations)).squeeze(-1)

    def _flat(self, observations: TensorObservations) -> Tensor:
        if self.names is None:
            flat: Tensor = observations if observations.dim() == 2 else observations.flatten(1)
            return flat
        return torch.cat([observations[name].flatten(1) for name in self.names], dim=1)


def _through(layers: nn.ModuleList, values: Tensor) -> Tensor:
    """Linear layers with tanh between them; called for every step of a rollout, where calls of modules would
    cost more than their arithmetic."""
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        assert isinstance(layer, nn.Linear)
        values = functional.linear(values, layer.weight, layer.bias)
        values = values if index == last else torch.tanh(values)
    return values


def _layers(
    width: int, hidden: Sequence[int], num_outputs: int, last_gain: float, generator: torch.Generator
) -> nn.ModuleList:
    layers = []
    for size in hidden:
        layers.append(_linear(width, size, math.sqrt(2), generator))
        width = size
    return nn.ModuleList([*layers, _linear(width, num_outputs, last_gain, generator)])


def _linear(num_inputs: int, num_outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")  # no global generator
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


# ------------------------------------------------------------------------------------------ sampling


def as_tensors(observations: Observations) -> TensorObservations:
    """Tensors that share the arrays' memory."""
    return map_observations(torch.from_numpy, observations)


def allowed_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """[B, A] with -inf where `mask` forbids an action, in fp32 or wider."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def sample_actions(
    policy: Callable[[TensorObservations], Tensor],
    observations: Observations,
    mask: BoolArray | None,
    uniforms: NDArray[np.float64] | None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """[B] actions and their log-probs. `uniforms`: [B] in [0, 1), one per row; None: the likeliest action.

    The call is the caller's to put under `torch.inference_mode()`.
    """
    logits = policy(as_tensors(observations))
    logprobs = torch.log_softmax(
        allowed_logits(logits, None if mask is None else torch.from_numpy(mask)), dim=-1
    ).numpy()
    if uniforms is None:
        actions = logprobs.argmax(axis=1)
    else:
        heights = np.exp(logprobs.astype(np.float64)).cumsum(axis=1)
        actions = (heights <= (uniforms * heights[:, -1])[:, None]).sum(axis=1)
    return actions, logprobs[np.arange(len(actions)), actions]
