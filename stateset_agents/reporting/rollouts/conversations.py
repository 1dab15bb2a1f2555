"""The conversations of a report, selected from rollouts.jsonl and packed; it can be read while it grows.

Lines that belong together are a `LineGroup`: in training the members of a group with their branches, else one
held-out scenario with all its conversations. Groups are selected whole, evenly spaced in the order written,
as many as the limits allow. Of lines that are not selected only the first fields are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stateset_agents.algorithms.paired import paired_shares
from stateset_agents.reporting.rollouts.distributions import broken_rules
from stateset_agents.reporting.rollouts.line_groups import (
    LineGroup,
    num_bytes,
    num_lines,
    within_limits,
)
from stateset_agents.reporting.rollouts.row_changes import row_changes
from stateset_agents.tracking.jsonl import GrowingFile
from stateset_agents.tracking.run_folder import RunFolder

__all__ = ["MAX_CONVERSATIONS", "Conversations", "Transitions", "pack"]

MAX_CONVERSATIONS = 3000
"""Default limit of a page."""
_BYTES_PER_CONVERSATION = 8_000
"""Of rollouts.jsonl, on average: of longer conversations fewer are shown."""

_TEXT = rb'"(?:[^"\\]|\\.)*"'
_FIRST_FIELDS = re.compile(
    rb'\{"step":(?P<step>-?\d+),"stage":(?P<stage>%s),"group":(?P<group>%s),"weight":[^,]+,'
    rb'"branch_of":(?:null|\[\d+,\d+\]),"scenario":(?P<scenario>%s),' % (_TEXT, _TEXT, _TEXT)
)
"""The first fields of a line, as the tracker writes them."""
_FIELDS = (
    *("step", "stage", "group", "branch_of", "scenario", "family", "member", "seed", "status", "error"),
    *("success", "reward", "breakdown", "changes", "context", "opening", "messages", "turns", "token_ids"),
)
"""Fields that the page shows unchanged."""

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transitions:
    """How results on the held-out scenarios changed between the evaluations before and after training."""

    n: int
    """Tries that both evaluations have; with one try each, the scenarios."""
    scenarios: int
    gained: int
    """Failed before, succeeded after."""
    lost: int
    difference: float | None
    """Success after minus before, over scenarios; None where none was played twice."""
    interval: tuple[float, float] | None
    """95 % of it, see `paired_shares`."""


class Conversations:
    """What a report shows of a run's rollouts.jsonl."""

    def __init__(self, folder: RunFolder, limit: int = MAX_CONVERSATIONS) -> None:
        """`limit`: conversations in one page; also at most 8,000 bytes of the file for each on average."""
        self._lines = GrowingFile(folder.rollouts)
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._training: dict[_Key, LineGroup] = {}
        self._held_out: dict[_Key, LineGroup] = {}
        self._success: dict[str, dict[tuple[str, int], bool | None]] = {"before": {}, "after": {}}
        self._packed: dict[int, dict[str, Any]] = {}
        """By offset: the conversations of the last selection."""

    @property
    def total(self) -> int:
        """Conversations read so far, branches included."""
        return num_lines((*self._training.values(), *self._held_out.values()))

    def read(self) -> None:
        """Read the lines that were added, or all again if the file was truncated.

        Raises ConfigurationError on another schema version.
        """
        if self._lines.was_truncated():
            self._reset()
        for offset, line in self._lines.new_lines():
            self._add(offset, line)

    def transitions(self) -> Transitions:
        """Over all held-out scenarios, also those that the page leaves out."""
        before, after = self._success["before"], self._success["after"]
        pairs = [(before[key], after[key]) for key in before if key in after]
        tries: dict[str, list[tuple[bool, bool]]] = {}
        for key in before.keys() & after.keys():
            tries.setdefault(key[0], []).append((before[key] is True, after[key] is True))
        shares = [
            (_share(old for old, _ in found), _share(new for _, new in found)) for found in tries.values()
        ]
        change = paired_shares([new - old for old, new in shares]) if shares else None
        return Transitions(
            difference=change.mean if change else None,
            interval=change.interval if change else None,
            n=len(pairs),
            scenarios=len({scenario for scenario, _ in before.keys() & after.keys()}),
            gained=sum(new is True and old is not True for old, new in pairs),
            lost=sum(old is True and new is not True for old, new in pairs),
        )

    def select(self, token_texts: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
        """The page's conversations, packed, in the order written.

        `token_texts`: what token ids say, for what is told of conversations of several rows (`row_changes`).
        Held-out scenarios and training groups get half of the limits each, and what the others leave.
        """
        max_bytes = self._limit * _BYTES_PER_CONVERSATION
        held_out, training = list(self._held_out.values()), list(self._training.values())
        selected = within_limits(training, self._limit // 2, max_bytes // 2)
        shown = within_limits(held_out, self._limit - num_lines(selected), max_bytes - num_bytes(selected))
        selected = within_limits(training, self._limit - num_lines(shown), max_bytes - num_bytes(shown))
        offsets = sorted(offset for group in (*shown, *selected) for offset in group.offsets)
        packed = {offset: self._packed[offset] for offset in offsets if offset in self._packed}
        new = [offset for offset in offsets if offset not in packed]
        if new:
            for offset, record in zip(new, self._lines.records_at(new), strict=True):
                packed[offset] = pack(record, token_texts or {})
        self._packed = packed
        return [packed[offset] for offset in offsets]

    def _add(self, offset: int, line: bytes) -> None:
        match = _FIRST_FIELDS.match(line)
        if match:
            step, stage, group, scenario = map(json.loads, match.groups())
        else:
            record = self._lines.parse(line, offset)
            step, stage, group, scenario = (record[name] for name in ("step", "stage", "group", "scenario"))
        if stage in self._success:
            record = self._lines.parse(line, offset)
            self._success[stage][scenario, record["member"]] = record["success"]
        groups, key = (
            (self._training, (str(step), group)) if stage == "train" else (self._held_out, (scenario,))
        )
        groups.setdefault(key, LineGroup()).add(offset, len(line))


def pack(record: Mapping[str, Any], token_texts: Mapping[int, str]) -> dict[str, Any]:
    """A line of rollouts.jsonl without repetition: `logprobs` [sampled tokens], and as runs of [value, count]
    `mask` [T], `versions` and `advantages` [sampled tokens]; with its `rows` where it has several."""
    sampled = [index for index, bit in enumerate(record["mask"]) if bit]
    advantages = record["advantages"]
    rows = row_changes(record, token_texts)
    return {
        **{name: record.get(name) for name in _FIELDS},
        "mask": _runs(record["mask"]),
        "logprobs": [record["logprobs"][index] for index in sampled],
        "versions": _runs(record["versions"][index] for index in sampled),
        "advantages": None if advantages is None else _runs(advantages),
        "broken": broken_rules(record),
        **({} if rows is None else {"rows": rows}),
    }


def _share(succeeded: Iterable[bool]) -> float:
    flags = list(succeeded)
    return sum(flags) / len(flags)


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, len(list(same))] for value, same in groupby(values)]
