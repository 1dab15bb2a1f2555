"""The conversations of a report: which of a run's, packed small. It goes on as rollouts.jsonl grows.

What belongs together is a *unit*: in training the members of a group with their branches, else one held-out
scenario with all the times it was played. Units are taken whole, evenly spaced in the order written, as many
as the limits allow. Lines of training and validation are read by their beginning alone until they are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stateset_agents.reporting.units import Unit, count, size_of, spread
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError

__all__ = ["MOST_CONVERSATIONS", "Conversations", "Transitions", "pack"]

MOST_CONVERSATIONS = 3000
"""In one page, unless asked for more."""
_BYTES_EACH = 8_000
"""Of rollouts.jsonl for each of them, on average; longer conversations are fewer."""

_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rb'\{"step":(?P<step>-?\d+),"stage":(?P<stage>%s),"group":(?P<group>%s),"weight":[^,]+,'
    rb'"branch_of":(?:null|\[\d+,\d+\]),"scenario":(?P<scenario>%s),' % (_TEXT, _TEXT, _TEXT)
)
"""How the tracker begins a line."""
_KEPT = (
    *("step", "stage", "group", "branch_of", "scenario", "family", "member", "seed", "status", "error"),
    *("success", "reward", "breakdown", "changes", "context", "opening", "messages", "turns", "token_ids"),
)
"""Fields that the page shows as they are."""

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transitions:
    """How the held-out scenarios moved between the measurements before and after training, try by try."""

    n: int
    """Tries that both measurements have; with one try each, the scenarios."""
    scenarios: int
    gained: int
    """Failed before, succeeded after."""
    lost: int


class Conversations:
    """What a report shows of a run's rollouts.jsonl."""

    def __init__(self, folder: RunFolder, most: int = MOST_CONVERSATIONS) -> None:
        """`most`: conversations in one page; at most 8,000 bytes of the file for each on average, too."""
        self._file = folder.rollouts
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._end = 0  # bytes read
        self._training: dict[_Key, Unit] = {}
        self._held_out: dict[_Key, Unit] = {}
        self._verdicts: dict[str, dict[tuple[str, int], bool | None]] = {"before": {}, "after": {}}
        self._packed: dict[int, dict[str, Any]] = {}

    @property
    def total(self) -> int:
        """Conversations read so far, branches included."""
        return sum(len(unit.places) for unit in (*self._training.values(), *self._held_out.values()))

    def read(self) -> None:
        """Take in the lines that were added; all again where the file was cut, as a resumed run does.

        Raises ConfigurationError on another schema version.
        """
        if not self._file.exists():
            return
        if self._file.stat().st_size < self._end:
            self._begin()
        if self._end == 0:
            next(read_lines(self._file), None)  # checks the header
        with self._file.open("rb") as stream:
            stream.seek(self._end)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                if self._end:  # else the header
                    self._add(self._end, line)
                self._end += len(line)

    def transitions(self) -> Transitions:
        """Over all held-out scenarios, those that the page leaves out included."""
        before, after = self._verdicts["before"], self._verdicts["after"]
        both = [(before[key], after[key]) for key in before if key in after]
        return Transitions(
            n=len(both),
            scenarios=len({scenario for scenario, _ in before.keys() & after.keys()}),
            gained=sum(new is True and old is not True for old, new in both),
            lost=sum(old is True and new is not True for old, new in both),
        )

    def chosen(self) -> list[dict[str, Any]]:
        """The page's conversations, packed, in the order written.

        Held-out scenarios and training groups get half of the room each, and what the others leave.
        """
        half = (self._most // 2, self._most * _BYTES_EACH // 2)
        pools = [list(self._held_out.values()), list(self._training.values())]
        taken = [spread(pool, *half) for pool in pools]
        for own, other in ((0, 1), (1, 0)):
            rest = (self._most - count(taken[other]), self._most * _BYTES_EACH - size_of(taken[other]))
            taken[own] = spread(pools[own], *rest)
        places = sorted(place for units in taken for unit in units for place in unit.places)
        new = [place for place in places if place not in self._packed]
        packed = {place: self._packed[place] for place in places if place in self._packed}
        if new:
            with self._file.open("rb") as stream:
                for place in new:
                    stream.seek(place)
                    packed[place] = pack(self._parse(stream.readline()))
        self._packed = packed
        return [packed[place] for place in places]

    def _add(self, place: int, line: bytes) -> None:
        head = _HEAD.match(line)
        step, stage, group, scenario = (
            [json.loads(part) for part in head.groups()] if head else _start(self._parse(line))
        )
        if stage in self._verdicts:
            record = self._parse(line)
            self._verdicts[stage][scenario, record["member"]] = record["success"]
        pool, key = (
            (self._training, (str(step), group)) if stage == "train" else (self._held_out, (scenario,))
        )
        pool.setdefault(key, Unit()).add(place, len(line))

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(
                f"{self._file}: not JSON: {line[:50].decode(errors='replace')!r}; remove that line"
            ) from error
        return record


def pack(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of rollouts.jsonl without what repeats: log-probs [sampled tokens], the rest of the tokens' data
    as runs of [value, count]: `mask` [T], `versions` and `advantages` [sampled tokens]."""
    sampled = [at for at, bit in enumerate(record["mask"]) if bit]
    advantages = record["advantages"]
    return {
        **{name: record.get(name) for name in _KEPT},
        "mask": _runs(record["mask"]),
        "logprobs": [record["logprobs"][at] for at in sampled],
        "versions": _runs(record["versions"][at] for at in sampled),
        "advantages": None if advantages is None else _runs(advantages),
    }


def _start(record: Mapping[str, Any]) -> list[Any]:
    return [record["step"], record["stage"], record["group"], record["scenario"]]


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, len(list(same))] for value, same in groupby(values)]
