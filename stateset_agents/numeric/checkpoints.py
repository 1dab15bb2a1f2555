"""The checkpoints of a numeric training: weights, optimiser and how far it has come, saved and restored."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    load_checkpoint,
    mark_best,
    prune,
    save_checkpoint,
)
from stateset_agents.runs.compatibility import Compatibility, Identity, as_json
from stateset_agents.runs.early_stopping import Best
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runs.resuming import (
    checkpoint_at,
    newest_checkpoint,
    other_machine,
    repair,
    truncate_run,
)
from stateset_agents.types.errors import CheckpointError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

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
"""What an older version did that had no such settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """How far a numeric training has come; the trainer alone replaces it."""

    step: int = 0
    """Environment steps taken."""
    updates: int = 0
    """Rollouts learned from; every random choice of the next one follows from the seed and this."""
    episodes: int = 0
    num_groups: int = 0
    """Of the next rollout."""
    failed_updates: int = 0
    """In a row, up to the last one: nothing could be learned."""
    train_seconds: float = 0.0
    evaluated_step: int = 0
    partition: Mapping[str, Any] = field(default_factory=dict)
    """What the parts of the next update go on from, see `Partitioner.state`."""
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


@dataclass(slots=True, kw_only=True)
class ControlCheckpoints:
    """Saves and restores one run's policy, optimiser and state. Its methods block."""

    policy: nn.Module
    optimization: Optimization
    recorder: RunRecorder
    identity: Identity
    settings: Mapping[str, Any]
    """As config.yaml has them."""
    limit: int
    """Of checkpoints that are kept, beside the best."""
    saved: ControlState | None = field(default=None, init=False)
    """What the newest checkpoint of this run has."""

    def save(self, state: ControlState) -> Path:
        """Write `checkpoints/step-NNNNNN`; older ones beyond the limit are removed, but not the best.

        Raises CheckpointError when the disk cannot take it.
        """
        self.recorder.tracker.sync()
        checkpoint = Checkpoint(
            step=state.step,
            weights=self.policy.state_dict(),
            optimizer=self.optimization.state(),
            state={
                "progress": asdict(state),
                "identity": as_json(asdict(self.identity)),
                "machine": _machine(),
            },
        )
        folder = self.recorder.run.checkpoints
        path = save_checkpoint(folder, checkpoint, write_model=lambda path: None)
        mark_best(folder, state.best.step)
        prune(folder, self.limit)
        self.saved = state
        return path

    def restore(self, path: str | Path | None) -> tuple[Path, ControlState] | None:
        """Load a checkpoint, of a run folder the newest; without `path` this run's newest, None where it has
        none yet.

        Raises CheckpointError, with nothing changed, for a damaged checkpoint or one of another run. Another
        machine or length of the run is allowed and logged: the result is then not bit-equal.
        """
        run = self.recorder.run
        repair(run)
        found = newest_checkpoint(run) if path is None else checkpoint_at(Path(path))
        if found is None:
            return None
        checkpoint = load_checkpoint(found)
        Compatibility(may_differ=_MAY_DIFFER, defaults=_DEFAULTS).check(
            found, checkpoint.state["identity"], self.identity
        )
        state = ControlState.from_json(checkpoint.state["progress"])
        self.policy.load_state_dict(dict(checkpoint.weights))
        self.optimization.load(dict(checkpoint.optimizer))
        training = checkpoint.state["identity"]["settings"]["training"]
        changes = [other_machine(checkpoint.state["machine"], _machine()), self._other_length(training)]
        for change in filter(None, changes):
            _log.warning(change)
        state = replace(state, repeatable=state.repeatable and not any(changes))
        self.saved = state if found.parent == run.checkpoints else None
        return found, state

    def truncate_after(self, state: ControlState) -> None:
        """Drop what the run folder has of later steps."""
        truncate_run(
            self.recorder.run,
            self.settings,
            step=state.step,
            evaluated_step=state.evaluated_step,
            best_step=state.best.step,
        )

    def change_settings(
        self, training: ControlConfig, settings: Mapping[str, Any], state: ControlState
    ) -> ControlState:
        """Save from now on with these settings; `settings`: as config.yaml has them. The state, not
        repeatable where the learning rate fell in view of another end so far. Says so."""
        old = self.identity.settings["training"]
        named = {**self.identity.settings, "training": training.model_dump(mode="json")}
        self.identity = replace(self.identity, settings=named)
        self.settings, self.limit = settings, training.save_total_limit
        self.optimization.length = training.total_steps
        change = self._other_length(old) if state.step else None
        if change:
            _log.warning(change)
        return replace(state, repeatable=state.repeatable and not change)

    def _other_length(self, old: Mapping[str, Any]) -> str | None:
        """Did the learning rate fall in view of another end?"""
        new = self.identity.settings["training"]
        if old["total_steps"] == new["total_steps"] or new["lr_scheduler_type"] == "constant":
            return None
        return (
            f"the run was planned for {old['total_steps']} steps and is for {new['total_steps']} now; the "
            f"learning rate ({new['lr_scheduler_type']}) follows the length: the result is another"
        )


def _machine() -> dict[str, Any]:
    """What bit-equality depends on beside seed and settings: versions, threads, kind of processor."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
