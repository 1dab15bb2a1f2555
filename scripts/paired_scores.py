"""Policies and rules side by side: what each earned from the same starts, and the paired differences.

Equal seeds mean equal noise from outside, so the difference of two episodes from one seed is due to their
actions, and its interval is many times narrower than that of either mean. A `Score` is kept as JSON by
`scripts/autoscaling_seeds.py`; for evaluations at hand there is `numeric.evaluation.paired_difference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.algorithms.paired import PairedMean, paired_rewards
from stateset_agents.numeric.evaluation import ControlEvaluation
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Rewards of one policy or rule: an evaluation without its steps, so that hundreds can be kept."""

    seeds: tuple[int, ...]
    rewards: NDArray[np.float64]
    """[N] mean reward of a step; nan where the episode failed."""
    components: Mapping[str, NDArray[np.float64]]
    """[N] each: mean of a step."""

    @classmethod
    def of(cls, evaluation: ControlEvaluation) -> Self:
        """Per step, so that workloads of several lengths can be compared."""
        rollout = evaluation.rollout
        lengths = np.where(rollout.failed, np.nan, np.maximum(rollout.lengths, 1))
        return cls(
            seeds=evaluation.seeds,
            rewards=rollout.returns / lengths,
            components={
                name: part.sum(axis=0, where=rollout.alive) / lengths
                for name, part in rollout.components.items()
            },
        )

    @property
    def mean(self) -> float:
        """Over the episodes that did not fail; nan where all did."""
        return _mean(self.rewards)

    def part(self, name: str) -> float:
        """The mean of a component."""
        return _mean(self.components[name])


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def difference(score: Score, than: Score) -> PairedMean:
    """`score` minus `than`, start by start; episodes that failed in either are left out.

    Raises ConfigurationError where the starts differ, or none is left.
    """
    if score.seeds != than.seeds:
        raise ConfigurationError("the two scores have other seeds: play both from the same ones")
    differences = score.rewards - than.rewards
    differences = differences[np.isfinite(differences)]
    if not len(differences):
        raise ConfigurationError("every episode failed in one of the two: look at the environment")
    return paired_rewards(differences.tolist())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Scores by name, each against the reference."""

    scores: Mapping[str, Score]
    reference: str
    bound: str | None = None
    """The name of what is as good as can be expected: shares of the gap to it are given."""

    def difference(self, name: str) -> PairedMean:
        """`name` minus the reference."""
        return difference(self.scores[name], self.scores[self.reference])

    def gap_closed(self, name: str, bound: str | None = None) -> float | None:
        """(name - reference) / (bound - reference), of the means; None without a bound that is better."""
        aim = bound or self.bound
        if aim is None:
            return None
        gap = difference(self.scores[aim], self.scores[self.reference]).mean
        return self.difference(name).mean / gap if gap > 0 else None

    def rows(self) -> list[dict[str, Any]]:
        """One record for each name, the best first; JSON."""
        rows = []
        for name, score in sorted(self.scores.items(), key=lambda item: -item[1].mean):
            row: dict[str, Any] = {
                "name": name,
                "reward": score.mean,
                "components": {part: score.part(part) for part in score.components},
                "difference": None,
                "interval": None,
                "gap_closed": None,
            }
            if name != self.reference:
                gain = self.difference(name)
                row |= {"difference": gain.mean, "interval": gain.interval}
                row["gap_closed"] = self.gap_closed(name)
            rows.append(row)
        return rows

    def table(self, columns: Sequence[str] = ()) -> str:
        """Markdown. `columns`: the components to show, all when empty."""
        rows = self.rows()
        shown = list(columns) or sorted({part for row in rows for part in row["components"]})
        heads = ["policy", "reward", *shown, f"against {self.reference}, paired 95 %"]
        if self.bound is not None:
            heads.append(f"of the gap to {self.bound}")
        lines = [_line(heads), "|" + "---|" * len(heads)]
        for row in rows:
            cells = [row["name"], f"{row['reward']:.3f}"]
            cells += [f"{row['components'].get(part, float('nan')):.3f}" for part in shown]
            cells.append(_signed(row["difference"], row["interval"]))
            if self.bound is not None:
                share = row["gap_closed"]
                cells.append("-" if share is None else f"{share:.0%}")
            lines.append(_line(cells))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _signed(mean: float | None, interval: tuple[float, float] | None) -> str:
    """ "+0.071 [0.058, 0.084]"."""
    if mean is None:
        return "-"
    return f"{mean:+.3f}{interval_text(interval, '.3f')}"


def compare(scores: Mapping[str, Score], reference: str, *, bound: str | None = None) -> Comparison:
    """Set scores from the same starts against one of them. Raises ConfigurationError for an unknown name."""
    for role, name in (("reference", reference), ("bound", bound)):
        if name is not None and name not in scores:
            raise ConfigurationError(f"{role} must be one of {', '.join(sorted(scores))}, got {name!r}")
    seeds = scores[reference].seeds
    for name, score in scores.items():
        if score.seeds != seeds:
            raise ConfigurationError(
                f"{name} was played from other seeds than {reference}: play all from the same ones"
            )
    return Comparison(scores=dict(scores), reference=reference, bound=bound)
