"""The state of a curriculum: its stage, and how often scenarios and strata succeeded; a checkpoint keeps
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Status, TrajectoryGroup

Count = tuple[float, float]
"""Successes and conversations, older ones at a discount."""

_PRIOR = 2.0
"""Conversations that an expectation counts for, as in Laplace's rule of succession."""


@dataclass(frozen=True, slots=True)
class SuccessTable:
    """Successes counted by scenario and by stratum, and smoothed rates."""

    scenarios: Mapping[str, Count] = field(default_factory=dict)
    """Counts by the scenario's id."""
    strata: Mapping[str, Count] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SuccessTable:
        """The table that `asdict` gave, through JSON."""
        return cls(**{name: {key: (s, n) for key, (s, n) in table.items()} for name, table in values.items()})

    def rate(self, scenario: str, stratum: str) -> float:
        """The expected success of a scenario: of its own counts and of two conversations as its stratum's,
        whose rate is of its counts and of two conversations, one of them a success.

        >>> SuccessTable().rate("order 7", "refunds")
        0.5
        >>> SuccessTable(strata={"refunds": (7.0, 8.0)}).rate("order 7", "refunds")
        0.8
        >>> SuccessTable({"order 7": (0.0, 8.0)}, {"refunds": (7.0, 8.0)}).rate("order 7", "refunds")
        0.16
        """
        of_stratum = _smoothed(self.strata.get(stratum), 0.5)
        return _smoothed(self.scenarios.get(scenario), of_stratum)

    def after(
        self,
        groups: Sequence[TrajectoryGroup],
        stratum_of: Callable[[Scenario], str],
        memory: float,
    ) -> SuccessTable:
        """The table with what these groups showed. `memory`: the share of older counts that is kept of a
        scenario or stratum that was seen again; failed conversations, and those without a verdict, show
        nothing."""
        successes: Counter[tuple[str, str]] = Counter()
        conversations: Counter[tuple[str, str]] = Counter()
        for group in groups:
            for member in group.trajectories:
                if member.status is Status.FAILED or member.success is None:
                    continue
                for key in (("scenario", member.scenario.id), ("stratum", stratum_of(member.scenario))):
                    conversations[key] += 1
                    successes[key] += member.success

        def updated(kind: str, table: Mapping[str, Count]) -> dict[str, Count]:
            new = dict(table)
            for (of, name), number in conversations.items():
                if of == kind:
                    old_successes, old_number = table.get(name, (0.0, 0.0))
                    new[name] = (
                        memory * old_successes + successes[of, name],
                        memory * old_number + number,
                    )
            return new

        return SuccessTable(updated("scenario", self.scenarios), updated("stratum", self.strata))


def _smoothed(count: Count | None, expected: float) -> float:
    successes, number = count or (0.0, 0.0)
    return (successes + _PRIOR * expected) / (number + _PRIOR)


# How far a run's curriculum has come; a part of the run's state, so that a checkpoint keeps it.


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumState:
    """The progress of a run's curriculum."""

    stage: int = 0
    """Index of the present one."""
    streak: int = 0
    """Steps in a row, the last one included, in which the stage's condition held."""
    successes: SuccessTable = field(default_factory=SuccessTable)
    """Empty unless something follows from it."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CurriculumState:
        """The state that `asdict` gave, through JSON; {} is a run that had none."""
        return cls(**{**values, "successes": SuccessTable.from_json(values.get("successes", {}))})
