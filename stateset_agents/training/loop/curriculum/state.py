"""How far a run's curriculum has come; a part of the run's state, so that a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.training.loop.curriculum.success_table import SuccessTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumState:
    """How far a run's curriculum has come."""

    stage: int = 0
    """Index of the present one."""
    streak: int = 0
    """Steps in a row, the last one included, in which the stage's condition held."""
    successes: SuccessTable = field(default_factory=SuccessTable)
    """Empty unless something follows from it."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CurriculumState:
        """From what `asdict` gave, through JSON; {} is a run that had none."""
        return cls(**{**values, "successes": SuccessTable.from_json(values.get("successes", {}))})
