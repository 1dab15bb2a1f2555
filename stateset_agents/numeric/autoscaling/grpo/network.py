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
from stateset_agents.numeric.autoscaling.grpo.encoder import InfrastructureStateEncoder, causal_mask
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.numeric.policy import logits_of, sample_actions
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

_FIRST_GAIN, _LAST_GAIN = math.sqrt(2), 0.01


class GRPOPolicyNetwork(nn.Module):
    """Logits of every action, and optionally a value, from a window of metrics and the metrics of now.

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
        use_value_head: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            state_dim: Width of encoder and transformer, a multiple of num_heads and of 4.
            action_dim: Number of actions, by default those of the action space.
            hidden_dim: Width of the heads and of the transformer's feed-forward layers.
            num_heads: Of the transformer.
            num_layers: Of the transformer.
            dropout: Share of the values that training mode drops.
            action_space: What the actions are; all 539 by default.
            num_metrics: Width of a step.
            history_length: Most steps of a window.
            use_value_head: Also learn a value, for `advantage_estimator: gae`.
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
                f"action_dim is {action_dim} and the action space has {num_actions} actions: leave "
                "action_dim out"
            )
        if num_heads < 1 or state_dim % num_heads:
            raise ConfigurationError(
                f"state_dim must be a multiple of num_heads {num_heads}, got {state_dim!r}"
            )
        self.action_dim, self.state_dim = action_dim, state_dim
        with torch.device("meta"):  # drawing weights from the global generator would move it
            self.encoder = InfrastructureStateEncoder(num_metrics, state_dim, history_length, dropout=dropout)
            self.layers = nn.ModuleList(
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

    def forward(self, metrics_history: Tensor, current_metrics: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, T, M] oldest first, and [B, M] -> [B, action_dim] logits, and [B] values or None."""
        state = self._state(metrics_history, current_metrics)
        value = None if self.value_head is None else self.value_head(state).squeeze(-1)
        return self.policy_head(state), value

    def values(self, metrics_history: Tensor, current_metrics: Tensor) -> Tensor:
        """[B] the return that is expected; raises ConfigurationError without a value head."""
        if self.value_head is None:
            raise ConfigurationError("this GRPOPolicyNetwork has no value: make it with use_value_head=True")
        value: Tensor = self.value_head(self._state(metrics_history, current_metrics)).squeeze(-1)
        return value

    def get_action(
        self, metrics_history: ArrayLike, current_metrics: ArrayLike, deterministic: bool = False
    ) -> tuple[Any, Any]:
        """An action drawn from the policy and its log-prob, or the likeliest one; dropout is off.

        Of one state ([T, M] and [M]) an int and a float, of rows ([B, T, M] and [B, M]) two arrays [B].
        """
        history = np.asarray(metrics_history, dtype=np.float32)
        current = np.asarray(current_metrics, dtype=np.float32)
        is_single = history.ndim == 2
        observations = {
            "metrics_history": history[None] if is_single else history,
            "current_metrics": current[None] if is_single else current,
        }
        uniforms = None if deterministic else self._draws.random(len(observations["metrics_history"]))
        was_training = self.training
        self.train(False)
        try:
            logits = logits_of(NetworkPolicy(self), len(history))(observations)
            drawn: tuple[IntArray, NDArray[np.float32]] = sample_actions(logits, None, uniforms)
        finally:
            self.train(was_training)
        actions, logprobs = drawn
        return (int(actions[0]), float(logprobs[0])) if is_single else (actions, logprobs)

    def _state(self, metrics_history: Tensor, current_metrics: Tensor) -> Tensor:
        """[B, state_dim] the transformer's last step."""
        steps = self.encoder.sequence(metrics_history, current_metrics)
        mask = causal_mask(steps.shape[1], steps.device)
        for layer in self.layers:
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
        logits, _ = self.network(*self._parts(observations))
        moved: Tensor = logits.cpu()
        return moved

    def values(self, observations: Any) -> Tensor:
        """[B] values, on the CPU; raises ConfigurationError for a network without a value head."""
        return self.network.values(*self._parts(observations)).cpu()

    def _parts(self, observations: Any) -> tuple[Tensor, Tensor]:
        device = next(self.network.parameters()).device
        return observations["metrics_history"].to(device), observations["current_metrics"].to(device)
