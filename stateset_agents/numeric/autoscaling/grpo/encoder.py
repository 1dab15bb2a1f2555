"""A window of metrics as one vector or a sequence of them: the document's InfrastructureStateEncoder.

metrics_history [B, T, M] -> two LSTMs -> attention over the T steps, none later than one's own
each attended step with current_metrics [B, M] behind it -> Linear, LayerNorm, ReLU, Linear
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stateset_agents.types.errors import ConfigurationError

_LSTM_LAYERS = 2
_HEADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class CarriedState:
    """What a live loop keeps between its steps in place of a window."""

    memory: tuple[tuple[Tensor, Tensor], ...]
    """Hidden and cell state of each LSTM, [1, B, hidden_dim]."""
    outputs: Tensor  # [B, T, hidden_dim]
    """Of the last LSTM, for the last `history_length` steps at most."""


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
        for name, value in (("num_metrics", num_metrics), ("history_length", history_length)):
            if value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value!r}")
        if hidden_dim < _HEADS or hidden_dim % _HEADS:
            raise ConfigurationError(f"hidden_dim must be a multiple of {_HEADS}, got {hidden_dim!r}")
        self.num_metrics, self.hidden_dim, self.history_length = num_metrics, hidden_dim, history_length
        widths = [num_metrics, *[hidden_dim] * (_LSTM_LAYERS - 1)]
        self.lstms = nn.ModuleList(nn.LSTM(width, hidden_dim, batch_first=True) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.attention = nn.MultiheadAttention(hidden_dim, _HEADS, dropout=dropout, batch_first=True)
        self.current = nn.Linear(num_metrics, hidden_dim)
        self.joined = nn.Sequential(
            nn.Linear(2 * hidden_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
        )
        self.train(self.training)

    def train(self, mode: bool = True) -> InfrastructureStateEncoder:
        """As of any module; the LSTMs, which have no dropout of their own, stay in training mode, since
        cuDNN's gradient needs it."""
        super().train(mode)
        self.lstms.train(True)
        return self

    def forward(self, metrics_history: Tensor, current_metrics: Tensor) -> Tensor:
        """[B, T, M] oldest first and [B, M] -> [B, hidden_dim]."""
        return self.sequence(metrics_history, current_metrics)[:, -1]

    def sequence(self, metrics_history: Tensor, current_metrics: Tensor) -> Tensor:
        """[B, T, M] and [B, M] -> [B, T, hidden_dim]; raises ConfigurationError for other shapes."""
        self._check(metrics_history, current_metrics)
        outputs, _ = self._through_lstms(metrics_history, None)
        return self._encoded(outputs, current_metrics)

    def carry(
        self, metrics: Tensor, current_metrics: Tensor, carried: CarriedState | None = None
    ) -> tuple[Tensor, CarriedState]:
        """One more step, [B, M] -> what `sequence` gives for the window with it, and what to carry on.

        Equal to the window as long as that begins where the carrying began; later the LSTMs remember more
        than a window has. It costs one LSTM step in place of T.
        """
        self._check(metrics[:, None], current_metrics)
        outputs, memory = self._through_lstms(metrics[:, None], carried.memory if carried else None)
        if carried is not None:
            outputs = torch.cat([carried.outputs, outputs], dim=1)[:, -self.history_length :]
        return self._encoded(outputs, current_metrics), CarriedState(memory, outputs)

    def _through_lstms(
        self, steps: Tensor, memory: tuple[tuple[Tensor, Tensor], ...] | None
    ) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        left = []
        for index, lstm in enumerate(self.lstms):
            steps, state = lstm(
                steps if index == 0 else self.dropout(steps), memory[index] if memory else None
            )
            left.append(state)
        return steps, tuple(left)

    def _encoded(self, outputs: Tensor, current_metrics: Tensor) -> Tensor:
        length = outputs.shape[1]
        attended, _ = self.attention(
            outputs, outputs, outputs, attn_mask=causal_mask(length, outputs.device), need_weights=False
        )
        now = self.current(current_metrics)[:, None].expand(-1, length, -1)
        encoded: Tensor = self.joined(torch.cat([attended, now], dim=-1))
        return encoded

    def _check(self, metrics_history: Tensor, current_metrics: Tensor) -> None:
        shape, width = tuple(metrics_history.shape), self.num_metrics
        if len(shape) != 3 or shape[2] != width or not 1 <= shape[1] <= self.history_length:
            raise ConfigurationError(
                f"metrics_history must be [rows, 1 to {self.history_length} steps, {width} metrics], got "
                f"{list(shape)}: give the encoder the history's num_metrics and history_length"
            )
        if tuple(current_metrics.shape) != (shape[0], width):
            raise ConfigurationError(
                f"current_metrics must be [{shape[0]}, {width}], got {list(current_metrics.shape)}"
            )


def causal_mask(length: int, device: torch.device) -> Tensor:
    """[T, T] True where a step may not look: at those after it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
