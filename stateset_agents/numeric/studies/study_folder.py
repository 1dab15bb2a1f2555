"""A study's folder, read: what was to be run, and one line for each cell that was.

study.yaml    what is compared, with which settings and seeds, and each task's references
cells.jsonl   a header, then one record per finished cell: a suite, an arm, a seed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stateset_agents.runtime.yaml_files import read_sections
from stateset_agents.tracking.jsonl import damage_named, read_lines
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training: an arm on a suite with a seed. Scores are 0 for a random policy, 1 for a solved task."""

    suite: str
    tasks: Sequence[str]
    arm: str
    seed: int
    steps: int
    """Environment steps that it took."""
    curve: Mapping[str, Sequence[Any]]
    """steps, and per step returns and scores by task, null where one had no episode; at most 200 points."""
    final: Mapping[str, Sequence[float]]
    """returns and scores by task, after the training, from starts that it did not play."""
    worst_task: float
    """The lowest final score."""
    fairness: float
    """The lowest final score by their mean, see `group_fairness`."""
    sign_flips: float | None
    """Mean over the updates of the share of steps pushed the other way."""
    absolute_shares: Sequence[float | None]
    """Per task, mean over the updates of its share of the sum of |advantage|."""
    weights: Mapping[str, Sequence[Any]]
    """names of the parts, steps, and per step values by part; empty with one part."""
    parts: Mapping[str, Any]
    """key, and whether it is an outcome."""
    settings: Mapping[str, Any]
    """What the arm sets."""
    cpu_seconds: float
    command: str
    """What runs the cell again."""
    gradient_cosines: Sequence[Sequence[float | None]] = ()
    """[tasks][tasks] cosines between their gradients, means over the updates that compared them; null where a
    pair never had gradients. Empty for one task, and in cells of versions that did not compare them."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.suite, self.arm, self.seed

    @property
    def score(self) -> float:
        """The mean of the final scores."""
        return sum(self.final["scores"]) / len(self.final["scores"])

    def to_json(self) -> dict[str, Any]:
        """As a line of cells.jsonl has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """Where a study is. Nothing here writes."""

    path: Path

    @property
    def study(self) -> Path:
        return self.path / "study.yaml"

    @property
    def cells_file(self) -> Path:
        return self.path / "cells.jsonl"

    def settings(self) -> dict[str, Any]:
        """What study.yaml says. Raises ConfigurationError where there is none."""
        if not self.study.is_file():
            raise ConfigurationError(
                f"{self.path} is no study folder, it has no study.yaml: write stateset-agents study run "
                f"{self.path}"
            )
        return read_sections(self.study)

    def cells(self) -> list[Cell]:
        """Those that were finished, in the order of suite, arm and seed of study.yaml, whatever the order in
        which they were run. Raises ConfigurationError for a line that is no cell, or one that stands twice.
        """
        if not self.cells_file.is_file():
            return []
        found: dict[tuple[str, str, int], Cell] = {}
        for _, record in read_lines(self.cells_file):
            if "schema_version" in record:
                continue
            with damage_named(self.cells_file):
                cell = Cell(**record)
            if cell.key in found:
                raise ConfigurationError(f"{self.cells_file} has {cell.key} twice: remove one of the lines")
            found[cell.key] = cell
        settings = self.settings()
        suites, arms = list(settings["suites"]), list(settings["arms"])

        def place(cell: Cell) -> tuple[int, int, int]:
            try:
                return suites.index(cell.suite), arms.index(cell.arm), cell.seed
            except ValueError as error:
                raise ConfigurationError(
                    f"{self.cells_file} has a cell of {cell.suite} and {cell.arm}, which {self.study} does "
                    "not name"
                ) from error

        return sorted(found.values(), key=place)
