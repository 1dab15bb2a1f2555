"""The distribution of a training's conversations: rewards by step and by length, and failures by step.

Read from rollouts.jsonl, which may still grow; all conversations of training count, branches do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RolloutLines, RolloutSummary
from stateset_agents.types.messages import finite_json

_MAX_COLUMNS, _ROWS = 50, 20
"""The most columns (steps or lengths) and rows (rewards) of a heatmap."""
_NO_RULE = "none"
"""The kind of a failure in which no rule was broken and no limit was met."""

_SAMPLED = re.compile(rb'"sampled_tokens":(\d+)')
_VIOLATIONS = re.compile(rb'"violations":(\{[^{}]*\})')


@dataclass(frozen=True, slots=True)
class _Played:
    step: int
    reward: float | None
    tokens: int
    kinds: tuple[str, ...]
    """The kinds of its failure; empty without one."""


class Distributions:
    """The heatmaps of a run's conversations."""

    def __init__(self, folder: RunFolder) -> None:
        self._lines = RolloutLines(folder.rollouts)
        self._played: list[_Played] = []

    def read(self) -> None:
        """Read the lines that were added, or all again if the file was truncated."""
        if self._lines.was_truncated():
            self._played = []
        for rollout in self._lines.new_summaries():
            if rollout.stage == "train" and not rollout.branch_of:
                self._played.append(self._measured(rollout))

    def _measured(self, rollout: RolloutSummary) -> _Played:
        """The conversation's tokens and failures, from its line without parsing it."""
        tokens = sum(map(int, _SAMPLED.findall(rollout.rest)))
        kinds = [] if rollout.status == "terminated" else [rollout.status]
        if rollout.success is False:
            violations = _VIOLATIONS.findall(rollout.rest)
            counts = finite_json(violations[-1]) if violations else {}
            rules = broken_rules({"metadata": {"violations": counts}})
            kinds += rules or ([] if kinds else [_NO_RULE])
        return _Played(rollout.step, rollout.reward, tokens, tuple(kinds))

    def select(self) -> list[dict[str, Any]]:
        """The heatmaps that there is something to see in."""
        scored = [(played, played.reward) for played in self._played if played.reward is not None]
        steps = _bins([played.step for played in self._played], whole=True)
        lengths = _bins([played.tokens for played, _ in scored], whole=True)
        rewards = _bins([reward for _, reward in scored], _ROWS)
        heatmaps = []
        if len(rewards) > 1:
            by_step = [(_at(steps, played.step), [_at(rewards, reward)]) for played, reward in scored]
            by_length = [(_at(lengths, played.tokens), [_at(rewards, reward)]) for played, reward in scored]
            heatmaps = [
                _heatmap("Reward by step", "step", steps, rewards, by_step),
                _heatmap("Reward by length", "tokens of the agent", lengths, rewards, by_length),
            ]
        kinds = sorted({kind for played in self._played for kind in played.kinds})
        if kinds:
            failures = [
                (_at(steps, played.step), [kinds.index(kind) for kind in played.kinds])
                for played in self._played
            ]
            heatmaps.append(_heatmap("What went wrong by step", "step", steps, kinds, failures))
        return heatmaps


def broken_rules(record: Mapping[str, Any]) -> list[str]:
    """The rules that a conversation broke, as its environment counts them."""
    violations = (record.get("metadata") or {}).get("violations")
    return sorted(rule for rule, count in violations.items() if count) if isinstance(violations, dict) else []


def _heatmap(
    title: str,
    column_name: str,
    columns: Sequence[tuple[float, float]],
    rows: Sequence[tuple[float, float] | str],
    places: Sequence[tuple[int, Sequence[int]]],
) -> dict[str, Any]:
    """Counts of conversations by column and row, as the page draws them.

    `columns`: lowest and highest step, or number of tokens; `rows`: lowest and highest reward, or a kind of
    failure, of which the last one is drawn on top; `places`: each conversation's column and rows.
    """
    counts = [[0] * len(rows) for _ in columns]
    totals = [0] * len(columns)
    for column, rows_of_one in places:
        totals[column] += 1
        for row in rows_of_one:
            counts[column][row] += 1
    return {
        "title": title,
        "note": f"{len(places):,} conversations of training",
        "columns": columns,
        "column_name": column_name,
        "rows": rows,
        "counts": counts,
        "totals": totals,
    }


def _bins(
    values: Sequence[float], number: int = _MAX_COLUMNS, *, whole: bool = False
) -> list[tuple[float, float]]:
    """Equally wide ones over all values, of whole numbers where asked; one for equal values."""
    if not values:
        return []
    low, high = min(values), max(values)
    if whole:
        size = -(-(int(high) - int(low) + 1) // number)  # rounded up
        return [(start, min(int(high), start + size - 1)) for start in range(int(low), int(high) + 1, size)]
    if low == high:
        return [(low, high)]
    width = (high - low) / number
    edges = [float(f"{low + index * width:.6g}") for index in range(number)] + [high]
    return list(pairwise(edges))


def _at(bins: Sequence[tuple[float, float]], value: float) -> int:
    """The bin of a value that lies in one of them."""
    low, high = bins[0][0], bins[-1][1]
    if isinstance(low, int):
        return int((value - low) // (bins[0][1] - low + 1))
    return min(len(bins) - 1, int((value - low) / ((high - low) / len(bins)))) if high > low else 0
