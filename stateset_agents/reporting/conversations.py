"""The conversations of a report, from rollouts.jsonl: their distributions, a selection of them, a timeline.

Lines that belong together are a `PlayedGroup`: in training the members of a group with their branches, else
one held-out scenario with all its conversations. Groups are selected whole, those with failures first
(`selection`). Of lines that are not selected only a few fields are parsed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from stateset_agents.algorithms.paired import paired_shares
from stateset_agents.reporting.html import CompressedSize
from stateset_agents.reporting.row_changes import row_changes
from stateset_agents.tracking.jsonl import GrowingFile, dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import MetricLine, RolloutLines, RolloutSummary, RunLog
from stateset_agents.types.messages import finite_json

# ------------------------------------------------------------------------------ distributions
#
# Rewards by step and by length, and failures by step, as heatmaps.
#
# Read from rollouts.jsonl, which may still grow; all conversations of training count, branches do not.

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


# ------------------------------------------------------------------------------ the selection of groups


@dataclass(slots=True)
class LineGroup:
    """Lines that are shown together."""

    offsets: list[int] = field(default_factory=list)
    """The byte at which each line begins in the file."""
    size: int = 0
    """Bytes of all lines."""

    def add(self, offset: int, size: int) -> None:
        """Add a line."""
        self.offsets.append(offset)
        self.size += size


def within_limits(groups: Sequence[LineGroup], max_lines: int, max_bytes: int) -> list[LineGroup]:
    """The most evenly spaced groups that the limits allow, the first and the last among them."""
    low, high = 0, len(groups)
    while low < high:  # the largest number that fits
        number = (low + high + 1) // 2
        selected = evenly_spaced(groups, number)
        if num_lines(selected) <= max_lines and num_bytes(selected) <= max_bytes:
            low = number
        else:
            high = number - 1
    return evenly_spaced(groups, low)


def evenly_spaced(groups: Sequence[LineGroup], number: int) -> list[LineGroup]:
    """Up to `number` groups in even distances, the first and the last among them."""
    number = min(number, len(groups))
    if number < 2:
        return list(groups[:number])
    return [groups[round(index * (len(groups) - 1) / (number - 1))] for index in range(number)]


def num_lines(groups: Iterable[LineGroup]) -> int:
    """Lines of all groups."""
    return sum(len(group.offsets) for group in groups)


def num_bytes(groups: Iterable[LineGroup]) -> int:
    """Bytes of all groups."""
    return sum(group.size for group in groups)


@dataclass(slots=True)
class PlayedGroup(LineGroup):
    """The lines of a group, and what ranks it where a page has not room for all groups."""

    step: int | None = None
    """The training step; None for a held-out scenario, which is played in several."""
    failures: int = 0
    """Conversations that failed."""
    lowest: float = math.inf
    highest: float = -math.inf
    """Rewards."""

    def add_result(self, success: bool | None, reward: float | None) -> None:
        """Count a conversation; branches are not."""
        self.failures += success is False
        if reward is not None:
            self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)


def take(
    kinds: Sequence[Sequence[PlayedGroup]], limit: float, size_of: Callable[[PlayedGroup], float]
) -> list[PlayedGroup]:
    """The groups of all kinds, by interest, as far as the limit goes.

    The kind with the smaller sum of sizes is next, so each has an equal part, and what one leaves goes to the
    others. `size_of` is called once for each group, in the order in which they are tried.
    """
    waiting = [deque(by_interest(groups)) for groups in kinds]
    sizes = [0.0] * len(kinds)
    selection = []
    while any(waiting):
        kind = min((at for at, groups in enumerate(waiting) if groups), key=sizes.__getitem__)
        group = waiting[kind].popleft()
        size = size_of(group)
        if sum(sizes) + size > limit:
            if sizes[kind]:  # else one that is too large would leave the page without its kind
                waiting[kind].clear()
            continue
        sizes[kind] += size
        selection.append(group)
    return selection


def by_interest(groups: Sequence[PlayedGroup]) -> list[PlayedGroup]:
    """Groups with failures, then those whose rewards differ, then the others.

    Of those with failures each step's worst comes first, then each step's second, and so on. Of equal ones
    the first and the last come first, and any beginning of the list is spread over the run.
    """
    failed: dict[int | None, list[PlayedGroup]] = {}
    for group in groups:
        if group.failures:
            failed.setdefault(group.step, []).append(group)
    ranks: dict[int, list[PlayedGroup]] = {}
    for step, of_step in failed.items():
        for place, group in enumerate(sorted(of_step, key=lambda group: -group.failures)):
            ranks.setdefault(0 if step is None else place, []).append(group)
    differ = [group for group in groups if not group.failures and group.lowest < group.highest]
    alike = [group for group in groups if not group.failures and group.lowest >= group.highest]
    return [rank[place] for rank in (*ranks.values(), differ, alike) for place in _spread_out(len(rank))]


def _spread_out(count: int) -> list[int]:
    """0 to count - 1, ordered by their reversed bits (van der Corput) behind the first and the last.

    >>> _spread_out(6)
    [0, 5, 4, 2, 1, 3]
    """
    if not count:
        return []
    bits = (count - 1).bit_length()
    reversed_bits = (int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(2**bits))
    return list(dict.fromkeys([0, count - 1, *(place for place in reversed_bits if place < count)]))


# ------------------------------------------------------------------------------ the page's conversations

_MAX_LIVE_BYTES = 12_000_000
"""The bytes of rollouts.jsonl that a live page fetches at once, and again while the run goes on."""

_FIELDS = (
    *("step", "stage", "group", "branch_of", "scenario", "family", "member", "seed", "status", "error"),
    *("success", "reward", "breakdown", "changes", "context", "opening", "messages", "turns", "token_ids"),
)
"""Fields that the page shows unchanged."""

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transitions:
    """The changes of held-out results between the evaluations before and after training."""

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
    """The part of a run's rollouts.jsonl that a report shows."""

    def __init__(self, folder: RunFolder, limit: int | None = None) -> None:
        """`limit`: conversations in one page, whatever their bytes; None: see `select`."""
        self._lines = RolloutLines(folder.rollouts)
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._training: dict[_Key, PlayedGroup] = {}
        self._held_out: dict[_Key, PlayedGroup] = {}
        self._success: dict[str, dict[tuple[str, int], bool | None]] = {"before": {}, "after": {}}
        self._counts: Counter[tuple[str, int, str, bool | None]] = Counter()
        self._packed: dict[int, dict[str, Any]] = {}
        """The conversations of the last selection, by offset."""

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
        for summary in self._lines.new_summaries():
            self._add(summary)

    def transitions(self) -> Transitions:
        """Over all held-out scenarios, also those that the page leaves out."""
        before, after = self._success["before"], self._success["after"]
        pairs = [(before[key], after[key]) for key in before if key in after]
        tries: dict[str, list[tuple[bool, bool]]] = {}
        for key in before.keys() & after.keys():
            tries.setdefault(key[0], []).append((before[key] is True, after[key] is True))
        shares = [
            (_share(old for old, _ in results), _share(new for _, new in results))
            for results in tries.values()
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
        self._packed = {
            offset: packed[offset]
            for offset in sorted(offset for group in selected for offset in group.offsets)
        }
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
        packed: dict[int, dict[str, Any]] = {}
        for group in selected:
            packed |= self._pack(group, token_texts)
        return [packed[offset] for offset in sorted(packed)]

    def _pack(self, group: PlayedGroup, token_texts: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """The group's conversations by offset, read from the file where the last selection lacks them."""
        if all(offset in self._packed for offset in group.offsets):
            return {offset: self._packed[offset] for offset in group.offsets}
        records = self._lines.records_at(group.offsets)
        return {
            offset: pack(record, token_texts) for offset, record in zip(group.offsets, records, strict=True)
        }

    def _add(self, rollout: RolloutSummary) -> None:
        stage, success, offset = rollout.stage, rollout.success, rollout.offset
        if stage in self._success:
            member = self._lines.parse(rollout.line, offset)["member"]
            self._success[stage][rollout.scenario, member] = success
        if stage == "train":
            key: _Key = (str(rollout.step), rollout.group)
            group = self._training.setdefault(key, PlayedGroup(step=rollout.step))
        else:
            group = self._held_out.setdefault((rollout.scenario,), PlayedGroup())
        group.add(offset, len(rollout.line))
        if rollout.branch_of is None:
            group.add_result(success, rollout.reward)
            self._counts[stage, rollout.step, rollout.family, success] += 1


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


# ------------------------------------------------------------------------------ the timeline of a step
#
# Its conversations, group by group, and the updates of that time.
#
# Read from `timeline.jsonl`, which may still grow, and from the updates in `events.jsonl`, which have the
# same clock. Steps are selected whole and evenly spaced over the run; a line is parsed if its step is
# selected.

TICKS = 10_000
"""Per second: the file's four decimals as whole numbers."""
_MAX_STEPS, _MAX_BYTES = 40, 750_000
"""The most steps and bytes of timeline.jsonl in one page; the page takes an eighth of these bytes."""
_FIRST_FIELD = re.compile(rb'\{"step":(\d+),')

_Updates = Mapping[int, tuple[float, float, int]]


class Timeline:
    """The part of a run's timeline.jsonl that a report shows."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lines = GrowingFile(folder.timeline)
        self._steps: dict[int, LineGroup] = {}

    def read(self) -> None:
        """Read the lines that were added, or all again if the file was truncated."""
        if self._lines.was_truncated():
            self._steps = {}
        for offset, line in self._lines.new_lines():
            match = _FIRST_FIELD.match(line)
            step = int(match[1]) if match else self._lines.parse(line, offset)["step"]
            self._steps.setdefault(step, LineGroup()).add(offset, len(line))

    def select(self) -> dict[str, Any]:
        """`steps` as the page shows them, and the `total` that the run has."""
        if not self._steps:
            return {"total": 0, "steps": []}
        number = {id(group): step for step, group in self._steps.items()}
        groups = evenly_spaced(list(self._steps.values()), _MAX_STEPS)
        selected = within_limits(groups, num_lines(groups), _MAX_BYTES) or groups[-1:]
        log = RunLog(self._folder)
        updates, rows = _updates(log.events()), _rows(log.metrics())
        steps = []
        for group in selected:
            lines, step = list(self._lines.records_at(group.offsets)), number[id(group)]
            steps.append(_step_data(step, lines, updates) | {"rows": rows.get(step)})
        return {"total": len(self._steps), "steps": steps}


def _rows(lines: Iterable[MetricLine]) -> dict[int, tuple[float, float]]:
    """Step -> rows of its conversations, mean and largest, where one has several."""
    names = ("rollout/rows", "rollout/rows_max")
    logged = {
        line.step: (line.values[names[0]], line.values[names[1]])
        for line in lines
        if line.values.keys() >= {*names}
    }
    return {step: rows for step, rows in logged.items() if rows[1] > 1}


def _updates(events: Iterable[Mapping[str, Any]]) -> _Updates:
    """Step -> begin and end of its update by the monotonic clock, and the number of the run's session: after
    a resume the clock may be another."""
    begin_times: dict[int, float] = {}
    updates: dict[int, tuple[float, float, int]] = {}
    session = 0
    for event in events:
        session += event["event"] == "resumed"
        if "monotonic" not in event:
            continue
        if event["event"] == "update begun":
            begin_times[event["step"]] = event["monotonic"]
        elif event["event"] == "update ended" and event["step"] in begin_times:
            updates[event["step"]] = (begin_times[event["step"]], event["monotonic"], session)
    return updates


def _step_data(step: int, lines: Sequence[Mapping[str, Any]], updates: _Updates) -> dict[str, Any]:
    """A step in ticks from the beginning of its first conversation to the end of its update."""
    lines = [line for line in lines if line["spans"]]
    origin = min((line["begin"] for line in lines), default=0.0)
    ends = [line["begin"] + sum(seconds for _, seconds in line["spans"]) for line in lines]
    last_session = max((session for _, _, session in updates.values()), default=0)
    _, update_end, session_of_step = updates.get(step, (0.0, origin, last_session))
    end = max([*ends, update_end], default=origin)
    groups: list[dict[str, Any]] = []
    last_member = -1
    for line in lines:
        is_repeated = not line["branch_of"] and line["member"] <= last_member  # a scenario drawn twice
        if not groups or groups[-1]["group"] != line["group"] or is_repeated:
            groups.append({"group": line["group"], "rows": []})
        last_member = last_member if line["branch_of"] else line["member"]
        groups[-1]["rows"].append(_row(line, origin))
    return {
        "step": step,
        "length": _ticks(end - origin),
        "updates": [
            {"step": number, "begin": _ticks(begin - origin), "end": _ticks(stop - origin)}
            for number, (begin, stop, session) in updates.items()
            if session == session_of_step and stop > origin and begin < end
        ],
        "groups": groups,
    }


def _row(line: Mapping[str, Any], origin: float) -> dict[str, Any]:
    """`did` has the first letter of each thing that the conversation did, `ticks` its duration."""
    return {
        "member": line["member"],
        "branch_of": line["branch_of"],
        "begin": _ticks(line["begin"] - origin),
        "did": "".join(doing[0] for doing, _ in line["spans"]),
        "ticks": [_ticks(seconds) for _, seconds in line["spans"]],
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
