"""The document's GRPOPolicyNetwork: an encoder of metrics, a transformer over its steps, and heads.

It is built whole and tested, and costs about a thousand times a small MLP of the last metrics: take
`control.policy.MlpPolicy` first. `NetworkPolicy` gives it to `ControlTrainer`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.numeric.policy import logits_of, sample_actions
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that

# ------------------------------------------------------------------------------------------ encoder
#
# metrics_history [B, T, M] -> two LSTMs -> attention over the T steps, none later than one's own
# each attended step with current_state [B, M] behind it -> Linear, LayerNorm, ReLU, Linear

_LSTM_LAYERS = 2
_HEADS = 4


class InfrastructureStateEncoder(nn.Module):
    """Two LSTM layers and causal self-attention over a window of metrics, joined with the metrics of now.

    `forward` gives the last step's vector, `sequence` all of them. Weights are made uninitialised: the
    network that owns the encoder fills them (`network.initialize`).
    """

    def __init__(
        self, num_metrics: int = 20, hidden_dim: int = 128, history_length: int = 60, *, dropout: float = 0.1
    ) -> None:
        """`hidden_dim`: width of every layer and of what comes out, a multiple of 4, the attention's heads;
        `history_length`: most steps of a window. Raises ConfigurationError for a width or length that cannot
        be."""
        super().__init__()
        expect_that(num_metrics >= 1, "num_metrics", "be at least 1", num_metrics)
        expect_that(history_length >= 1, "history_length", "be at least 1", history_length)
        if hidden_dim < _HEADS or hidden_dim % _HEADS:
            raise ConfigurationError(f"hidden_dim must be a multiple of {_HEADS}, got {hidden_dim!r}")
        self.num_metrics, self.hidden_dim, self.history_length = num_metrics, hidden_dim, history_length
        widths = [num_metrics, *[hidden_dim] * (_LSTM_LAYERS - 1)]
        self.temporal_encoder = nn.ModuleList(
            nn.LSTM(width, hidden_dim, batch_first=True) for width in widths
        )
        self.dropout = nn.Dropout(dropout)
        self.attention = nn.MultiheadAttention(hidden_dim, _HEADS, dropout=dropout, batch_first=True)
        self.current = nn.Linear(num_metrics, hidden_dim)
        self.encoder = nn.Sequential(
            nn.Linear(2 * hidden_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
        )
        self.train(self.training)

    def train(self, mode: bool = True) -> InfrastructureStateEncoder:
        """Set the mode, as in any module; the LSTMs, which have no dropout of their own, stay in training
        mode, since cuDNN's gradient needs it."""
        super().train(mode)
        self.temporal_encoder.train(True)
        return self

    def forward(self, metrics_history: Tensor, current_state: Tensor) -> Tensor:
        """[B, T, M] oldest first and [B, M] -> [B, hidden_dim]."""
        return self.sequence(metrics_history, current_state)[:, -1]

    def sequence(self, metrics_history: Tensor, current_state: Tensor) -> Tensor:
        """[B, T, M] and [B, M] -> [B, T, hidden_dim]; raises ConfigurationError for other shapes."""
        self._check(metrics_history, current_state)
        steps = metrics_history
        for index, lstm in enumerate(self.temporal_encoder):
            steps, _ = lstm(steps if index == 0 else self.dropout(steps))
        length = steps.shape[1]
        attended, _ = self.attention(
            steps, steps, steps, attn_mask=causal_mask(length, steps.device), need_weights=False
        )
        now = self.current(current_state)[:, None].expand(-1, length, -1)
        encoded: Tensor = self.encoder(torch.cat([attended, now], dim=-1))
        return encoded

    def _check(self, metrics_history: Tensor, current_state: Tensor) -> None:
        shape, width = tuple(metrics_history.shape), self.num_metrics
        if len(shape) != 3 or shape[2] != width or not 1 <= shape[1] <= self.history_length:
            raise ConfigurationError(
                f"metrics_history must be [rows, 1 to {self.history_length} steps, {width} metrics], got "
                f"{list(shape)}: give the encoder the history's num_metrics and history_length"
            )
        if tuple(current_state.shape) != (shape[0], width):
            raise ConfigurationError(
                f"current_state must be [{shape[0]}, {width}], got {list(current_state.shape)}"
            )


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[T, T] True where a step may not look: at those after it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


_FIRST_GAIN, _LAST_GAIN = math.sqrt(2), 0.01


class GRPOPolicyNetwork(nn.Module):
    """Logits of every action and a value, from a window of metrics and the metrics of now.

        encoder -> [B, T, state_dim] -> causal transformer -> the last step -> three linear layers -> logits
                                                                            -> two -> value

    Weights are orthogonal with gain root 2 and biases 0; the logits' last layer has gain .01, so that the
    first policy is nearly uniform. Dropout acts in training mode, which neither `get_action` nor a trainer
    of this package switches on: log-probs of one policy would differ from call to call.
    """

    def __init__(
        self,
        state_dim: int = 128,
        action_dim: int | None = None,
        hidden_dim: int = 256,
        num_heads: int = 8,
        num_layers: int = 4,
        dropout: float = 0.1,
        *,
        action_space: InfrastructureActionSpace | None = None,
        num_metrics: int = 20,
        history_length: int = 60,
        use_value_head: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            state_dim: Width of encoder and transformer, a multiple of num_heads and of 4.
            action_dim: Number of actions, by default those of the action space: 539 where the document has
                49, its own space without traffic.
            hidden_dim: Width of the heads and of the transformer's feed-forward layers.
            num_heads: Of the transformer.
            num_layers: Of the transformer.
            dropout: Share of the values that training mode drops.
            action_space: What the actions are; all 539 by default.
            num_metrics: Width of a step.
            history_length: Most steps of a window.
            use_value_head: Also give a value, which `advantage_estimator: gae` alone trains.
            seed: Of the weights, which are a function of it alone, and of `get_action`'s draws.

        Raises ConfigurationError where action_dim is not the space's number of actions, and for widths that
        cannot be.
        """
        super().__init__()
        num_actions = (action_space or InfrastructureActionSpace()).total_actions
        if action_dim is None:
            action_dim = num_actions
        if action_space is not None and action_dim != num_actions:
            raise ConfigurationError(
                f"action_dim is {action_dim} and the action space has {num_actions} actions: leave it out"
            )
        is_multiple = num_heads >= 1 and state_dim % num_heads == 0
        expect_that(is_multiple, "state_dim", f"be a multiple of num_heads {num_heads}", state_dim)
        self.action_dim, self.state_dim = action_dim, state_dim
        with torch.device("meta"):  # drawing weights from the global generator would move it
            self.state_encoder = InfrastructureStateEncoder(
                num_metrics, state_dim, history_length, dropout=dropout
            )
            self.transformer = nn.ModuleList(
                nn.TransformerEncoderLayer(state_dim, num_heads, hidden_dim, dropout, batch_first=True)
                for _ in range(num_layers)
            )
            self.policy_head = nn.Sequential(
                nn.Linear(state_dim, hidden_dim),
                nn.ReLU(),
                nn.Linear(hidden_dim, hidden_dim),
                nn.ReLU(),
                nn.Linear(hidden_dim, action_dim),
            )
            self.value_head = (
                nn.Sequential(nn.Linear(state_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 1))
                if use_value_head
                else None
            )
        self.to_empty(device="cpu")
        self._initialize(torch.Generator().manual_seed(seed))
        self._draws = np.random.default_rng(derive(seed, "actions"))

    def forward(self, metrics_history: Tensor, current_state: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, M] oldest first, and [B, M] -> [B, action_dim] logits, and [B, 1] values, None without a
        head."""
        state = self._state(metrics_history, current_state)
        return self.policy_head(state), None if self.value_head is None else self.value_head(state)

    def logits(self, metrics_history: Tensor, current_state: Tensor) -> Tensor:
        """[B, action_dim] alone."""
        logits: Tensor = self.policy_head(self._state(metrics_history, current_state))
        return logits

    def values(self, metrics_history: Tensor, current_state: Tensor) -> Tensor:
        """[B] the return that is expected; raises ConfigurationError without a value head."""
        if self.value_head is None:
            raise ConfigurationError("this GRPOPolicyNetwork has no value: make it with use_value_head=True")
        value: Tensor = self.value_head(self._state(metrics_history, current_state)).squeeze(-1)
        return value

    def get_action(
        self,
        metrics_history: ArrayLike | Tensor,
        current_state: ArrayLike | Tensor,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """An action drawn from the policy and its log-prob, or the likeliest one; dropout is off.

        Of one state ([T, M] and [M], or [1, T, M] and [1, M]) an int and a float, of more rows ([B, T, M] and
        [B, M]) two arrays [B].
        """
        history, current = (
            torch.as_tensor(part, dtype=torch.float32).numpy(force=True)
            for part in (metrics_history, current_state)
        )
        if history.ndim == 2:
            history, current = history[None], current[None]
        observations = {"metrics_history": history, "current_metrics": current}
        uniforms = None if deterministic else self._draws.random(len(history))
        was_training = self.training
        self.train(False)
        try:
            logits = logits_of(NetworkPolicy(self), len(history))(observations)
            drawn: tuple[IntArray, NDArray[np.float32]] = sample_actions(logits, None, uniforms)
        finally:
            self.train(was_training)
        actions, logprobs = drawn
        return (int(actions[0]), float(logprobs[0])) if len(history) == 1 else (actions, logprobs)

    def _state(self, metrics_history: Tensor, current_state: Tensor) -> Tensor:
        """[B, state_dim] the transformer's last step."""
        steps = self.state_encoder.sequence(metrics_history, current_state)
        mask = causal_mask(steps.shape[1], steps.device)
        for layer in self.transformer:
            steps = layer(steps, src_mask=mask, is_causal=True)
        return steps[:, -1]

    def _initialize(self, generator: torch.Generator) -> None:
        """Fill every weight from this generator."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, _FIRST_GAIN, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.MultiheadAttention):
                nn.init.xavier_uniform_(module.in_proj_weight, generator=generator)
                nn.init.zeros_(module.in_proj_bias)
            elif isinstance(module, nn.LSTM):
                for name, weight in module.named_parameters():
                    if weight.ndim == 1:
                        nn.init.zeros_(weight)
                    else:
                        gain = _FIRST_GAIN if name.startswith("weight_ih") else 1.0
                        nn.init.orthogonal_(weight, gain, generator=generator)
        last = self.policy_head[-1]
        assert isinstance(last, nn.Linear)
        nn.init.orthogonal_(last.weight, _LAST_GAIN, generator=generator)
        if self.value_head is not None:
            value = self.value_head[-1]
            assert isinstance(value, nn.Linear)
            nn.init.orthogonal_(value.weight, 1.0, generator=generator)


class NetworkPolicy(nn.Module):
    """A GRPOPolicyNetwork as `ControlTrainer` asks for it, on the CPU or on another device.

    It reads `metrics_history` and `current_metrics` of an observation, takes them to the network's device,
    and brings logits and values back.
    """

    def __init__(self, network: GRPOPolicyNetwork) -> None:
        super().__init__()
        self.network = network
        self.training = network.training

    def forward(self, observations: Any) -> Tensor:
        """[B, action_dim] logits, on the CPU."""
        return self.network.logits(*self._parts(observations)).cpu()

    def values(self, observations: Any) -> Tensor:
        """[B] values, on the CPU; raises ConfigurationError for a network without a value head."""
        return self.network.values(*self._parts(observations)).cpu()

    def _parts(self, observations: Any) -> tuple[Tensor, Tensor]:
        device = next(self.network.parameters()).device
        return observations["metrics_history"].to(device), observations["current_metrics"].to(device)
