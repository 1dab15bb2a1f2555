"""How a training's conversations are distributed: rewards by step and by length, and what went wrong when.

Read from rollouts.jsonl, which may still grow; all conversations of training count, branches do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from stateset_agents.tracking.jsonl import GrowingFile
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.json_text import finite_json

_MAX_COLUMNS, _ROWS = 50, 20
"""Of a heatmap: steps or lengths, and rewards."""
_NO_RULE = "none"
"""The kind of a failure in which no rule was broken and no limit was met."""

_PLACE = re.compile(rb'\{"step":(\d+),"stage":"(\w+)",')
_BRANCH = re.compile(rb'"branch_of":\[')
RESULT = re.compile(
    rb'"status":"(\w+)","error":(?:null|"(?:[^"\\]|\\.)*"),"success":(true|false|null),'
    rb'"reward":(null|-?[\d.eE+-]+),"breakdown":'
)
"""Status, success and reward of a line, as the tracker writes them."""
_SAMPLED = re.compile(rb'"sampled_tokens":(\d+)')
_VIOLATIONS = re.compile(rb'"violations":(\{[^{}]*\})')


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Counts of conversations by column and row."""

    title: str
    note: str
    columns: Sequence[tuple[float, float]]
    """Lowest and highest step, or number of tokens."""
    column_name: str
    rows: Sequence[tuple[float, float] | str]
    """Lowest and highest reward, or a kind of failure; the last one is drawn on top."""
    counts: Sequence[Sequence[int]]  # [columns][rows]
    totals: Sequence[int]
    """Conversations of each column."""


@dataclass(frozen=True, slots=True)
class _Played:
    step: int
    reward: float | None
    tokens: int
    kinds: tuple[str, ...]
    """Of a failure; empty without one."""


class Distributions:
    """What a report shows of the spread of a run's conversations."""

    def __init__(self, folder: RunFolder) -> None:
        self._lines = GrowingFile(folder.rollouts)
        self._played: list[_Played] = []

    def read(self) -> None:
        """Read the lines that were added, or all again if the file was truncated."""
        if self._lines.was_truncated():
            self._played = []
        for offset, line in self._lines.new_lines():
            place = _PLACE.match(line)
            if (place is None or place[2] == b"train") and (played := self._read(line, offset)):
                self._played.append(played)

    def _read(self, line: bytes, offset: int) -> _Played | None:
        """A conversation of training; its line is parsed only where it is not as the tracker writes it."""
        place, result = _PLACE.match(line), RESULT.search(line)
        if place is None or result is None:
            record = self._lines.parse(line, offset)
            if record["stage"] != "train" or record.get("branch_of"):
                return None
            step, status, success = record["step"], record["status"], record["success"]
            reward, rules = record["reward"], broken_rules(record)
            tokens = sum(turn["sampled_tokens"] for turn in record["turns"])
        else:
            if _BRANCH.search(line, 0, result.start()):
                return None
            step, status = int(place[1]), result[1].decode()
            success, reward = finite_json(result[2]), finite_json(result[3])
            tokens = sum(int(number) for number in _SAMPLED.findall(line, result.end()))
            found = _VIOLATIONS.findall(line, result.end())
            rules = broken_rules({"metadata": {"violations": finite_json(found[-1])}}) if found else []
        kinds = [] if status == "terminated" else [status]
        if success is False:
            kinds += rules or ([] if kinds else [_NO_RULE])
        return _Played(step, reward, tokens, tuple(kinds))

    def select(self) -> list[dict[str, Any]]:
        """The heatmaps that there is something to see in."""
        scored = [one for one in self._played if one.reward is not None]
        steps = _bins([one.step for one in self._played], whole=True)
        found = []
        rewards = _bins([one.reward for one in scored if one.reward is not None], _ROWS)
        lengths = _bins([one.tokens for one in scored], whole=True)
        if len(rewards) > 1:
            for title, columns, name, of in (
                ("Reward by step", steps, "step", lambda one: one.step),
                ("Reward by length", lengths, "tokens of the agent", lambda one: one.tokens),
            ):
                found.append(
                    _heatmap(
                        scored, title, columns, name, of, rewards, lambda one: [_at(rewards, one.reward)]
                    )
                )
        kinds = sorted({kind for one in self._played for kind in one.kinds})
        if kinds:
            found.append(
                _heatmap(
                    self._played,
                    "What went wrong by step",
                    steps,
                    "step",
                    lambda one: one.step,
                    kinds,
                    lambda one: [kinds.index(kind) for kind in one.kinds],
                )
            )
        return [asdict(heatmap) for heatmap in found]


def broken_rules(record: Mapping[str, Any]) -> list[str]:
    """The rules that a conversation broke, as its environment counts them."""
    violations = (record.get("metadata") or {}).get("violations")
    return sorted(rule for rule, count in violations.items() if count) if isinstance(violations, dict) else []


def _heatmap(
    played: Sequence[_Played],
    title: str,
    columns: Sequence[tuple[float, float]],
    column_name: str,
    column_of: Callable[[_Played], float],
    rows: Sequence[tuple[float, float] | str],
    rows_of: Callable[[_Played], Sequence[int]],
) -> Heatmap:
    counts = [[0] * len(rows) for _ in columns]
    totals = [0] * len(columns)
    for one in played:
        column = _at(columns, column_of(one))
        totals[column] += 1
        for row in rows_of(one):
            counts[column][row] += 1
    return Heatmap(
        title=title,
        note=f"{sum(totals):,} conversations of training",
        columns=columns,
        column_name=column_name,
        rows=rows,
        counts=counts,
        totals=totals,
    )


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


def _at(bins: Sequence[tuple[float, float]], value: float | None) -> int:
    """The bin of a value that lies in one of them."""
    assert value is not None
    low, high = bins[0][0], bins[-1][1]
    if isinstance(low, int):
        return int((value - low) // (bins[0][1] - low + 1))
    return min(len(bins) - 1, int((value - low) / ((high - low) / len(bins)))) if high > low else 0
