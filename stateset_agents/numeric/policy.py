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

from stateset_agents.numeric.environments.base import (
    BoolArray,
    IntArray,
    Observations,
    Spec,
    map_observations,
)
from stateset_agents.types.errors import ConfigurationError

TensorObservations = Any
"""A tensor [B, ...], or several of them by name."""
Logits = Callable[[Observations], NDArray[np.floating[Any]]]
"""[B, ...] observations -> [B, A]."""

_FEW_ROWS = 100
"""Number of rows up to which torch's calls cost more than their arithmetic; above, its products are the
faster ones."""


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
class ArrayPolicy(Protocol):
    """A policy that can act without torch, for rollouts of few rows."""

    def on_arrays(self) -> Logits | None:
        """A function that gives the logits by the present weights; None where only torch can."""


@runtime_checkable
class ScaledCritic(Protocol):
    """A policy whose values are learned in deviations of the return, so that no task's error outweighs."""

    def value_scales(self, observations: TensorObservations) -> Tensor:
        """[B] the deviations by which the errors of the values are divided."""

    def follow_returns(self, observations: TensorObservations, returns: Tensor) -> None:
        """Move the means and deviations towards these returns [B], and keep every value as it is."""


@runtime_checkable
class ObservingPolicy(Protocol):
    """A policy that keeps statistics of its observations; a trainer shows it those of each update."""

    def follow_observations(self, observations: Observations) -> None:
        """Take these [N, ...] into the statistics."""


class ObservationNormalizer(nn.Module):
    """Running mean and deviation of each observed number, over all that was seen; saved with the weights.

    As VecNormalize of stable-baselines3: what is given is (x - mean) / deviation within ±10, and x itself
    before the first observation.
    """

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(width, dtype=torch.float64))
        """Mean squared distance from the mean."""
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, flat: Tensor) -> Tensor:
        """[B, width] -> [B, width]"""
        shift, deviation = self.statistics()
        return ((flat - shift) / deviation).clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)

    def on_array(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """`forward` by numpy."""
        shift, deviation = (part.numpy() for part in self.statistics())
        normalized: NDArray[np.float32] = (flat - shift) / deviation
        return normalized.clip(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """[width] mean and deviation, in fp32; 0 and 1 before the first observation."""
        if not self.count:
            return torch.zeros_like(self.mean).float(), torch.ones_like(self.mean).float()
        return self.mean.float(), self.square.sqrt().clamp(min=_SMALLEST_DEVIATION).float()

    @torch.no_grad()
    def follow(self, flat: Tensor) -> None:
        """Take [N, width] in, as if all had come at once (Chan et al.)."""
        values = flat.double()
        if not len(values):  # every row of the rollout failed
            return
        total = self.count + len(values)
        apart = values.mean(dim=0) - self.mean
        share = len(values) / total
        spread = values.var(dim=0, correction=0)
        self.square += share * (spread - self.square) + share * (1 - share) * apart.square()
        self.mean += share * apart
        self.count += len(values)


_MOST_DEVIATIONS = 10.0
_SMALLEST_DEVIATION = 1e-8
"""Deviation of a number that never changes."""


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
        normalize_observations: bool = False,
        seed: int = 0,
    ) -> None:
        """`hidden`: the layers' widths; `normalize_observations`: by an `ObservationNormalizer`; `seed`: of
        the weights, which are a function of it alone."""
        super().__init__()
        shape = spec.observation_shape
        self.names = sorted(shape) if isinstance(shape, Mapping) else None
        sizes = [math.prod(shape[name]) for name in self.names or ()] if isinstance(shape, Mapping) else []
        width = sum(sizes) if isinstance(shape, Mapping) else math.prod(shape)
        self.normalizer = ObservationNormalizer(width) if normalize_observations else None
        generator = torch.Generator().manual_seed(seed)
        self.actor = _layers(width, hidden, spec.num_actions, 0.01, generator)
        self.critic = _layers(width, hidden, 1, 1.0, generator) if critic else None

    def forward(self, observations: TensorObservations) -> Tensor:
        """[B, num_actions] logits."""
        return _through(self.actor, self._flat(observations))

    def on_arrays(self) -> Logits | None:
        """The same logits by numpy; None for a subclass with a `forward` of its own, and for weights that are
        not fp32 in the processor's memory."""
        if type(self).forward is not MlpPolicy.forward or self._forward_hooks or self._forward_pre_hooks:
            return None
        if any(part.dtype != torch.float32 or part.device.type != "cpu" for part in self.actor.parameters()):
            return None
        layers = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy())
            for layer in self.actor
            if isinstance(layer, nn.Linear)
        ]
        last_weight, last_bias = layers.pop()

        def logits(observations: Observations) -> NDArray[np.floating[Any]]:
            values = self._flat_array(observations)
            for weight, bias in layers:
                values = values @ weight
                values += bias
                np.tanh(values, out=values)
            last: NDArray[np.float32] = values @ last_weight + last_bias
            return last

        return logits

    def values(self, observations: TensorObservations) -> Tensor:
        """[B] the return that is expected; raises ConfigurationError without a critic."""
        if self.critic is None:
            raise ConfigurationError("this MlpPolicy has no critic: make it with critic=True")
        return _through(self.critic, self._flat(observations)).squeeze(-1)

    def follow_observations(self, observations: Observations) -> None:
        """Take these [N, ...] into the statistics that the next ones are normalised by, where it does so."""
        if self.normalizer is not None:
            self.normalizer.follow(self._raw(as_tensors(observations)))

    def _flat(self, observations: TensorObservations) -> Tensor:
        flat: Tensor = self._raw(observations)
        return flat if self.normalizer is None else self.normalizer(flat)

    def _flat_array(self, observations: Observations) -> NDArray[np.float32]:
        flat: NDArray[np.float32] = self._raw(observations)
        return flat if self.normalizer is None else self.normalizer.on_array(flat)

    def _raw(self, observations: Any) -> Any:
        """[B, width] numbers of tensors or of arrays."""
        if self.names is None:
            return observations.reshape(len(observations), -1)
        parts = [observations[name].reshape(len(observations[name]), -1) for name in self.names]
        return torch.cat(parts, dim=1) if isinstance(parts[0], Tensor) else np.concatenate(parts, axis=1)


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
        layers.append(linear_layer(width, size, math.sqrt(2), generator))
        width = size
    return nn.ModuleList([*layers, linear_layer(width, num_outputs, last_gain, generator)])


def linear_layer(num_inputs: int, num_outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """A layer with orthogonal weights of this gain, drawn from `generator`, and biases of 0."""
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


def logits_of(policy: NumericPolicy, num_rows: int) -> Logits:
    """The fastest function for the logits of so many rows; valid until the weights change. Blocking calls
    without gradient."""
    if num_rows <= _FEW_ROWS and isinstance(policy, ArrayPolicy) and (by_numpy := policy.on_arrays()):
        return by_numpy

    def by_torch(observations: Observations) -> NDArray[np.floating[Any]]:
        with torch.inference_mode():
            return allowed_logits(policy(as_tensors(observations)), None).numpy()

    return by_torch


def sample_actions(
    logits: NDArray[np.floating[Any]],
    mask: BoolArray | None,
    uniforms: NDArray[np.float64] | None,
) -> tuple[IntArray, NDArray[np.float32]]:
    """[B] actions by logits [B, A], and their log-probs.

    `mask` [B, A] forbids actions where it is False. `uniforms`: [B] in [0, 1), one per row; None: the
    likeliest action.
    """
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    with np.errstate(invalid="ignore"):  # of a policy that has run away: its log-probs are no numbers
        logits = logits - logits.max(axis=1, keepdims=True)
    shares = np.exp(logits)
    if uniforms is None:
        actions = logits.argmax(axis=1)
    else:
        heights = shares.cumsum(axis=1, dtype=np.float64)
        actions = (heights <= (uniforms * heights[:, -1])[:, None]).sum(axis=1)
    logprobs = logits[np.arange(len(actions)), actions] - np.log(shares.sum(axis=1))
    return actions, logprobs.astype(np.float32, copy=False)
