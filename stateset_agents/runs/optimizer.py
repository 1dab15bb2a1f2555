"""One optimiser step: precision, clipping and the learning-rate schedule, in the right order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stateset_agents.backends.linears import auto_dtype
from stateset_agents.runs.settings import OptimizerSettings
from stateset_agents.types.errors import ConfigurationError


def autocast_dtype(precision: str, device: torch.device, num_parameters: int = 0) -> torch.dtype | None:
    """The dtype of autocast for a model of this size, None for fp32.

    Raises ConfigurationError for what the device cannot do.
    """
    if precision == "auto":
        dtype = auto_dtype(device, lambda: num_parameters)
        return None if dtype is torch.float32 else dtype
    if precision == "fp16" and device.type == "cpu":
        raise ConfigurationError("precision fp16 needs a GPU: use fp32 or bf16 on the CPU")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


_AS_TORCH = 1e-6
"""torch adds it to the norm that it divides by."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an optimiser step."""

    grad_norm: float
    """Norm of the gradient before clipping."""
    stepped: bool
    """False when the gradient or the loss was not finite: weights and schedule stayed."""
    learning_rate: float


class Optimization:
    """AdamW with its schedule and, for fp16, its gradient scaler.

    Norms and biases get no weight decay. The scaler is used for fp16 alone, gradients are unscaled
    before they are clipped, and a skipped step does not move the schedule.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerSettings, *, num_updates: int, scale: bool = False
    ) -> None:
        """`num_updates`: of the whole run, the schedule's length (in other units where `step` is given a
        position in them); `scale`: multiply the loss (fp16)."""
        self._config = config
        self.length = num_updates
        """Length of the schedule in updates; a new value holds from the next step on."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        decayed = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        undecayed = [parameter for parameter in self._parameters if parameter.ndim < 2]
        self.trained_parameters: Sequence[Tensor] = (*decayed, *undecayed)
        """The trained parameters in the order of the optimiser's state."""
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
        self.scaler = torch.amp.GradScaler(self._parameters[0].device.type, enabled=scale)
        self.num_updates = 0
        """Steps made, the skipped ones not counted: where the schedule stands."""

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradient."""
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self, *, usable: bool = True, position: int | None = None) -> StepResult:
        """Unscale, clip, step, advance the schedule, clear the gradients; not `usable`: no weight moves.

        `position`: where in the schedule's length this step stands, where that is not counted in updates.
        """
        factor = self._config.lr_factor(self.num_updates if position is None else position, self.length)
        learning_rate = self._config.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.unscale_(self.optimizer)  # max_grad_norm bounds the gradient itself, not its multiple
        gradients = [part.grad for part in self._parameters if part.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        whole = total.full_tensor() if hasattr(total, "full_tensor") else total  # over all shards
        norm = float(whole)
        if not norm + _AS_TORCH <= self._config.max_grad_norm:  # else the gradients would be multiplied by 1
            nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, total)
        stepped = usable and math.isfinite(norm)
        if stepped:
            self.scaler.step(self.optimizer)
            self.num_updates += 1
        self.scaler.update()
        self.zero_grad()
        return StepResult(grad_norm=norm, stepped=stepped, learning_rate=learning_rate)

    def zero_grad(self) -> None:
        """Forget the gradients added so far."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Everything a resume needs; tensors are the live ones."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "num_updates": self.num_updates,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.num_updates = int(state["num_updates"])
