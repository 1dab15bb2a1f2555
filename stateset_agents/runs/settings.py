"""The settings of any training: its optimiser, and its run folder with checkpoints and evaluations."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field, field_validator

from stateset_agents.runs.trackers import TrackerName
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings, expect, expect_that

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]
"""Course of the learning rate after the warm-up."""


def schedule(
    step: int,
    num_steps: int,
    *,
    kind: Schedule,
    warmup_ratio: float,
    min_ratio: float = 0.0,
) -> float:
    """Factor on the learning rate for the update number `step` (0-based) of `num_steps`.

    Rises in a line over the first `warmup_ratio` of the updates (the first update is never at 0), then
    stays, falls in a line, in a half cosine, or as 1/sqrt(n) with n counted from the end of the warm-up in
    units of its length. A line and a cosine fall to `min_ratio`, which the update after the last would
    have; all of the fall is scaled to end there.

    With 10 updates and a warm-up of .2, linear: 1/2, 1, 1, 7/8, 6/8, ... 1/8.
    """
    warmup = math.ceil(warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    since = step - warmup
    done = min(1.0, since / max(1, num_steps - warmup))
    if kind == "constant":
        height = 1.0
    elif kind == "linear":
        height = 1.0 - done
    elif kind == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        height = math.sqrt(max(1, warmup) / (max(1, warmup) + since))
    return min_ratio + (1.0 - min_ratio) * height


CADENCE = frozenset(
    {
        *("save_steps", "save_total_limit", "eval_steps", "eval_episodes", "load_best_at_end"),
        *("early_stopping_patience", "early_stopping_threshold"),
    }
)
"""Settings that every trainer reads anew between two steps."""


class OptimizerSettings(Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=5e-6, ge=0.0)
    """Peak of the schedule."""
    lr_scheduler_type: Schedule = "cosine"
    """After warm-up: constant, down in a line or a half cosine, or as 1/sqrt(n). The alias
    constant_with_warmup is accepted: all of them warm up, and with warmup_ratio 0 none does."""
    lr_min_ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """End of the fall, as a share of learning_rate."""
    warmup_ratio: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the steps spent warming up."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """AdamW's, on matrices only (not norms or biases)."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of AdamW's mean gradient."""
    adam_beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of its squared gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this global norm."""

    def lr_factor(self, step: int, num_steps: int) -> float:
        """Factor on `learning_rate` for the update number `step` (0-based) of `num_steps`, see `schedule`."""
        return schedule(
            step,
            num_steps,
            kind=self.lr_scheduler_type,
            warmup_ratio=self.warmup_ratio,
            min_ratio=self.lr_min_ratio,
        )

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _constant_warms_up(cls, value: Any) -> Any:
        return "constant" if value == "constant_with_warmup" else value


class RunSettings(Settings):
    """The run's folder, its checkpoints and evaluations, and when it stops early."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random choice of the run."""
    output_dir: str = "runs"
    """Folder in which numbered run folders go."""
    run_name: str = Field(default="run", pattern=r"^[\w.-]+$")
    """Part of the run folder's name."""
    save_steps: int = Field(default=50, ge=0)
    """Checkpoint every so many steps; 0 only at the end."""
    save_total_limit: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    eval_steps: int = Field(default=0, ge=0)
    """Evaluate on the validation split every so many steps."""
    eval_episodes: int = Field(default=100, ge=1)
    """Most validation scenarios, or conversations, of one such evaluation."""
    early_stopping_patience: int = Field(default=0, ge=0)
    """Evaluations in a row without improvement that end the training; 0 never does."""
    early_stopping_threshold: float = Field(default=0.0, ge=0.0)
    """An improvement is more than this above the best so far."""
    load_best_at_end: bool = False
    """The agent ends with the best evaluation's weights instead of the last step's."""
    progress: bool = True
    """Print step, reward, success and time left: a live line on a terminal, about twenty lines a run
    elsewhere. A program prints them on stderr, the command on stdout."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the metrics, too: tensorboard, wandb, trackio, mlflow; opentelemetry gets the
    conversations as spans. One alone needs no list, and none is the empty one. See docs/trackers.md."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker_alone(cls, value: Any) -> Any:
        if value == "none":  # as TRL has it
            return ()
        return (value,) if isinstance(value, str) else value


def changed_settings(
    old: Settings, new: Settings, *, may_change: Collection[str] | None = None
) -> dict[str, Any]:
    """Name -> value of each setting of a trainer in which `new` differs from `old`.

    `may_change`: what the trainer reads anew between two steps; None before it is made ready, when only
    `report_to` has been read. Raises ConfigurationError for any other that differs, and for a value that
    cannot be.
    """
    expect("config", new, type(old), "write trainer.config.model_copy(update={...})")
    values = {name: getattr(new, name) for name in type(new).model_fields}
    valid = type(new)(**values)  # model_copy checks nothing
    changes = {name: value for name, value in values.items() if value != getattr(old, name)}
    allowed = type(old).model_fields.keys() - {"report_to"} if may_change is None else may_change
    if refused := [name for name in changes if name not in allowed]:
        differing = ", ".join(f"{name} from {getattr(old, name)!r} to {changes[name]!r}" for name in refused)
        raise ConfigurationError(
            f"this trainer was made with its settings and cannot change {differing}: make another trainer"
            + (f"; {', '.join(sorted(allowed))} can change between steps" if may_change else "")
        )
    for name, value in changes.items():
        expect_that(getattr(valid, name) == value, name, f"be {getattr(valid, name)!r}", value)
    return changes
