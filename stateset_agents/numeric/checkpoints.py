"""The checkpoints of a numeric training: weights, optimiser and how far it has come, saved and restored."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stateset_agents.runs.checkpoint_files import Checkpoint
from stateset_agents.runs.checkpoints import Checkpoints
from stateset_agents.runs.compatibility import Compatibility
from stateset_agents.runs.early_stopping import Best
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.types.errors import CheckpointError

_MAY_DIFFER = frozenset(
    f"training.{name}"
    for name in (
        *("output_dir", "run_name", "save_steps", "save_total_limit", "eval_steps", "eval_episodes"),
        *("early_stopping_patience", "early_stopping_threshold", "load_best_at_end", "progress"),
        *("report_to", "log_episodes", "gradient_cosines_every", "total_steps"),
    )
)
"""Settings that may change when a training resumes."""


_DEFAULTS: Mapping[str, Any] = {
    "training": {"group_strategy": "none", "n_groups": 4, "group_weight_method": "balanced"}
}
"""Values by which an older version acted that had no such settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The progress of a numeric training; the trainer alone replaces it."""

    step: int = 0
    """Environment steps taken."""
    updates: int = 0
    """Rollouts learned from; every random choice of the next one follows from the seed and this."""
    episodes: int = 0
    num_groups: int = 0
    """Number of groups of the next rollout."""
    failed_updates: int = 0
    """Updates in a row, up to the last one, from which nothing could be learned."""
    train_seconds: float = 0.0
    evaluated_step: int = 0
    partition: Mapping[str, Any] = field(default_factory=dict)
    """State of the partitioner before the next update, see `Partitioner.state`."""
    best: Best = field(default_factory=lambda: Best(metric="eval/reward"))
    repeatable: bool = True
    """False once the training went on with another machine or length."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ControlState:
        """From what `asdict` gave. Raises CheckpointError for a state of another version of this program."""
        try:
            return cls(**{**values, "best": Best(**values["best"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint keeps progress that this program does not know ({error}): use the "
                "stateset-agents that wrote it"
            ) from error


@dataclass(kw_only=True)
class ControlCheckpoints(Checkpoints[ControlState]):
    """Saves and restores one run's policy, optimiser and state."""

    policy: nn.Module
    optimization: Optimization
    midway: bool = field(default=False, init=False)
    """True from an update's begin to its end."""

    @property
    def _is_midway(self) -> bool:
        return self.midway

    @property
    def _compatibility(self) -> Compatibility:
        return Compatibility(may_differ=_MAY_DIFFER, defaults=_DEFAULTS)

    def _tensors(self) -> dict[str, Any]:
        return {"weights": self.policy.state_dict(), "optimizer": self.optimization.state()}

    def _write_model(self, path: Path, state: ControlState) -> None:
        """The network is the program's own: its weights are all there is."""

    def _load(self, checkpoint: Checkpoint) -> ControlState:
        state = ControlState.from_json(checkpoint.state["progress"])
        self.policy.load_state_dict(dict(checkpoint.weights))
        self.optimization.load(dict(checkpoint.optimizer))
        self.midway = False
        return state

    def _machine(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "threads": torch.get_num_threads(),
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        }

    def _other_length(self, training: Mapping[str, Any], state: ControlState) -> list[str]:
        """The learning rate falls towards the end, so another end is another course."""
        new = self.identity.settings["training"]
        length, kind = new["total_steps"], new["lr_scheduler_type"]
        if not state.step or training["total_steps"] == length or kind == "constant":
            return []
        return [
            f"the run was planned for {training['total_steps']} steps and is for {length} now; the "
            f"learning rate ({kind}) follows the length: the result is another"
        ]
