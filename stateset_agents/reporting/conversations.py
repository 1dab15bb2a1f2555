"""The conversations of a report, selected from rollouts.jsonl and packed; it can be read while it grows.

Lines that belong together are a `PlayedGroup`: in training the members of a group with their branches, else
one held-out scenario with all its conversations. Groups are selected whole, those with failures first
(`selection`). Of lines that are not selected only a few fields are parsed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from stateset_agents.algorithms.paired import paired_shares
from stateset_agents.reporting.distributions import broken_rules
from stateset_agents.reporting.html import CompressedSize
from stateset_agents.reporting.row_changes import row_changes
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RolloutLines, RolloutSummary

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
    """At most `number` groups in even distances, the first and the last among them."""
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
    """The lines of a group, with what decides how soon a page takes it."""

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
    taken = []
    while any(waiting):
        kind = min((at for at, groups in enumerate(waiting) if groups), key=sizes.__getitem__)
        group = waiting[kind].popleft()
        size = size_of(group)
        if sum(sizes) + size > limit:
            if sizes[kind]:  # else one that is too large would leave the page without its kind
                waiting[kind].clear()
            continue
        sizes[kind] += size
        taken.append(group)
    return taken


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
