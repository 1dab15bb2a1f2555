"""The progress of a run: one frozen value, which the trainer alone replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.runs.early_stopping import Best
from stateset_agents.training.loop.curriculum.state import CurriculumState
from stateset_agents.types.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The progress of a run."""

    step: int = 0
    """Steps finished."""
    version: int = 0
    """Version of the policy that the backend samples with."""
    frontier: int = 0
    """Episodes played: the index of the next one in the scenario order."""
    replaced: int = 0
    """Groups without signal, of these episodes, that others replaced."""
    failed_steps: int = 0
    """Steps in a row, the last one included, that could not train."""
    train_seconds: float = 0.0
    repeatable: bool = True
    """False once something happened that another run need not repeat: a retry, another machine."""
    reward: Mapping[str, Any] = field(default_factory=dict)
    """Running statistics of the reward (`RewardFunction.state`)."""
    temperature: float | None = None
    """Sampling temperature of the next rollout, where a schedule moves it."""
    template_date: str | None = None
    """The day that the chat template tells in this run, as 2026-11-22; None where it tells none."""
    evaluated_step: int = 0
    """Step after which the validation split was last played."""
    best: Best = field(default_factory=Best)
    curriculum: CurriculumState = field(default_factory=CurriculumState)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunState:
        """The state that `asdict` gave. Raises CheckpointError for a state of another version of this
        program."""
        try:
            best = Best(**values.get("best", {}))
            curriculum = CurriculumState.from_json(values.get("curriculum", {}))
            return cls(**{**values, "best": best, "curriculum": curriculum})
        except TypeError as error:
            raise CheckpointError(
                f"the checkpoint keeps unknown progress ({error}): use the stateset-agents that wrote it"
            ) from error

    @property
    def num_trained(self) -> int:
        """Episodes that steps were made of."""
        return self.frontier - self.replaced
