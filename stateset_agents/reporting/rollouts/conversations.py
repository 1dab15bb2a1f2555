"""The conversations of a report, selected from rollouts.jsonl and packed; it can be read while it grows.

Lines that belong together are a `PlayedGroup`: in training the members of a group with their branches, else
one held-out scenario with all its conversations. Groups are selected whole, those with failures first
(`selection`). Of lines that are not selected only a few fields are parsed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stateset_agents.algorithms.paired import paired_shares
from stateset_agents.reporting.html import CompressedSize
from stateset_agents.reporting.rollouts.distributions import RESULT, broken_rules
from stateset_agents.reporting.rollouts.line_groups import num_lines
from stateset_agents.reporting.rollouts.row_changes import row_changes
from stateset_agents.reporting.rollouts.selection import PlayedGroup, take
from stateset_agents.tracking.jsonl import GrowingFile, dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.json_text import finite_json

_MAX_LIVE_BYTES = 12_000_000
"""Of rollouts.jsonl: what a live page fetches at once, and again while the run goes on."""

_TEXT = rb'"(?:[^"\\]|\\.)*"'
_FIRST_FIELDS = re.compile(
    rb'\{"step":(?P<step>-?\d+),"stage":(?P<stage>%s),"group":(?P<group>%s),"weight":[^,]+,'
    rb'"branch_of":(?P<branch_of>null|\[\d+,\d+\]),"scenario":(?P<scenario>%s),"family":(?P<family>%s),'
    % (_TEXT, _TEXT, _TEXT, _TEXT)
)
"""The first fields of a line, as the tracker writes them."""
_FIELDS = (
    *("step", "stage", "group", "branch_of", "scenario", "family", "member", "seed", "status", "error"),
    *("success", "reward", "breakdown", "changes", "context", "opening", "messages", "turns", "token_ids"),
)
"""Fields that the page shows unchanged."""

_SELECTED_BY = ("step", "stage", "group", "scenario", "family", "success", "reward")

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

    def __init__(self, folder: RunFolder, limit: int | None = None) -> None:
        """`limit`: conversations in one page, whatever their bytes; None: see `select`."""
        self._lines = GrowingFile(folder.rollouts)
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._training: dict[_Key, PlayedGroup] = {}
        self._held_out: dict[_Key, PlayedGroup] = {}
        self._success: dict[str, dict[tuple[str, int], bool | None]] = {"before": {}, "after": {}}
        self._counts: Counter[tuple[str, int, str, bool | None]] = Counter()
        self._packed: dict[int, dict[str, Any]] = {}
        """By offset: the conversations of the last selection."""

    @property
    def total(self) -> int:
        """Conversations read so far, branches included."""
        return num_lines((*self._training.values(), *self._held_out.values()))

    @property
    def counts(self) -> list[tuple[str, int, str, bool | None, int]]:
        """Conversations of each stage, step, family and success, branches left out."""
        return [(*key, count) for key, count in self._counts.items()]

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

    def select(
        self, token_texts: Mapping[int, str] | None = None, *, page_bytes: float | None = None
    ) -> list[dict[str, Any]]:
        """The page's conversations, packed, in the order written.

        `token_texts`: what token ids say, for what is told of conversations of several rows (`row_changes`).
        `page_bytes`: what they may take in a file, compressed; None: as many as a live page fetches at once.
        Held-out scenarios and training groups get half each, and what the others leave.
        """
        packed: dict[int, dict[str, Any]] = {}
        texts, size_of_text = token_texts or {}, CompressedSize()

        def compressed_size(group: PlayedGroup) -> int:
            packed.update(self._pack(group, texts))
            return size_of_text(",".join(dump(packed[offset]) for offset in group.offsets))

        kinds = [list(self._training.values()), list(self._held_out.values())]
        if self._limit is not None:
            selected = take(kinds, self._limit, lambda group: len(group.offsets))
        elif page_bytes is None:
            selected = take(kinds, _MAX_LIVE_BYTES, lambda group: group.size)
        else:
            selected = take(kinds, page_bytes, compressed_size)
        for group in selected:
            if group.offsets[0] not in packed:
                packed.update(self._pack(group, texts))
        self._packed = {offset: packed[offset] for offset in sorted(_offsets(selected))}
        return list(self._packed.values())

    def of_steps(
        self, stage: str, steps: tuple[float, float], token_texts: Mapping[int, str]
    ) -> list[dict[str, Any]]:
        """The groups of these steps, both included, or the scenarios of a stage other than `train`, packed.

        Both where `stage` is empty; those that the last selection left out, as many as a live page fetches
        at once.
        """
        first, last = steps
        of_steps = [group for (step, _), group in self._training.items() if first <= int(step) <= last]
        kinds = [
            [group for group in groups if group.offsets[0] not in self._packed]
            for groups in (of_steps, self._held_out.values())
        ]
        if stage:
            kinds = kinds[:1] if stage == "train" else kinds[1:]
        selected = take(kinds, _MAX_LIVE_BYTES, lambda group: group.size)
        packed = {offset: one for group in selected for offset, one in self._pack(group, token_texts).items()}
        return [packed[offset] for offset in sorted(packed)]

    def _pack(self, group: PlayedGroup, token_texts: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """By offset; the file is read where the last selection did not have the group."""
        if all(offset in self._packed for offset in group.offsets):
            return {offset: self._packed[offset] for offset in group.offsets}
        records = self._lines.records_at(group.offsets)
        return {
            offset: pack(record, token_texts) for offset, record in zip(group.offsets, records, strict=True)
        }

    def _add(self, offset: int, line: bytes) -> None:
        match, result = _FIRST_FIELDS.match(line), RESULT.search(line)
        if match and result:
            step, stage, group, branch_of, scenario, family = map(finite_json, match.groups())
            success, reward = map(finite_json, result.groups()[1:])
        else:
            record = self._lines.parse(line, offset)
            step, stage, group, scenario, family, success, reward = (record[name] for name in _SELECTED_BY)
            branch_of = record.get("branch_of")
        if stage in self._success:
            self._success[stage][scenario, self._lines.parse(line, offset)["member"]] = success
        groups, key = (
            (self._training, (str(step), group)) if stage == "train" else (self._held_out, (scenario,))
        )
        lines = groups.setdefault(key, PlayedGroup(step=step if stage == "train" else None))
        lines.add(offset, len(line))
        if branch_of is None:
            lines.add_result(success, reward)
            self._counts[stage, step, family, success] += 1


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


def _offsets(groups: Iterable[PlayedGroup]) -> Iterator[int]:
    return (offset for group in groups for offset in group.offsets)


def _share(succeeded: Iterable[bool]) -> float:
    flags = list(succeeded)
    return sum(flags) / len(flags)


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, len(list(same))] for value, same in groupby(values)]
