"""Which settings of a grid to take, of those that were measured: nothing between two cells is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.algorithms.intervals import stratified_interval
from stateset_agents.numeric.studies.study_folder import Cell
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One combination of settings, over its seeds."""

    settings: Mapping[str, Any]
    num_seeds: int
    iqm: float | None
    """None where it was not measured."""
    interval: tuple[float, float] | None
    cpu_seconds: float
    """Of a run, in the mean."""


def grid(cells: Sequence[Cell], axes: Mapping[str, Sequence[Any]]) -> list[GridCell]:
    """Every combination of the axes' values, in their order, with what its cells measured.

    `axes`: setting -> values; a cell belongs where its arm's settings have those values.
    """
    if not axes:
        raise ConfigurationError("a grid needs at least one setting with its values")
    combinations: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        combinations = [{**known, name: value} for known in combinations for value in values]
    found = []
    for settings in combinations:
        own = [
            cell
            for cell in cells
            if all(cell.settings.get(name) == value for name, value in settings.items())
        ]
        scores = [cell.final["scores"] for cell in own]
        iqm, interval = stratified_interval({"": scores}) if own else (None, None)
        found.append(
            GridCell(
                settings=settings,
                num_seeds=len(own),
                iqm=iqm,
                interval=interval,
                cpu_seconds=sum(cell.cpu_seconds for cell in own) / len(own) if own else 0.0,
            )
        )
    return found


def recommend(cells: Sequence[GridCell]) -> tuple[GridCell | None, str]:
    """The cheapest combination whose interval overlaps the best one's, and why.

    None where no combination has an interval, and where none is above 0, a random policy's score.
    Combinations without one take no part: fewer than three seeds say too little.
    """
    measured = [cell for cell in cells if cell.interval is not None and cell.iqm is not None]
    left_out = len(cells) - len(measured)
    if not measured:
        return None, "no combination has three seeds or more: nothing is recommended."
    best = max(measured, key=lambda cell: (cell.iqm or 0.0, -cell.cpu_seconds))
    assert best.interval is not None
    low = best.interval[0]
    if low <= 0:
        return None, (
            f"the best has IQM {best.iqm:.3f} [{low:.3f}, {best.interval[1]:.3f}], not shown above a random "
            "policy's 0: nothing was learned, and nothing is recommended."
        )
    equals = [cell for cell in measured if cell.interval is not None and cell.interval[1] >= low]
    chosen = min(equals, key=lambda cell: cell.cpu_seconds)
    words = ", ".join(f"{name} {value}" for name, value in chosen.settings.items())
    reason = f"{words}: IQM {chosen.iqm:.3f} [{chosen.interval[0]:.3f}, {chosen.interval[1]:.3f}]"  # type: ignore[index]  # measured
    if chosen is best:
        reason += ", the best"
    else:
        reason += (
            f", whose interval overlaps the best one's ({best.iqm:.3f}), at {chosen.cpu_seconds:.1f} CPU s"
        )
        reason += f" in place of {best.cpu_seconds:.1f}"
    if left_out:
        reason += f"; {left_out} of {len(cells)} combinations are not measured"
    return chosen, reason + "."
