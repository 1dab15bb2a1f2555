"""Read a run's growing JSONL file, and select groups of its lines for a page: whole and evenly spaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stateset_agents.tracking.jsonl import read_lines

__all__ = ["GrowingFile", "LineGroup", "evenly_spaced", "num_bytes", "num_lines", "within_limits"]


class GrowingFile:
    """The lines that were appended to a file since the last call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._num_read = 0  # bytes

    def was_truncated(self) -> bool:
        """Is the file shorter than what was read, as a resumed run leaves it? Then all of it is new."""
        is_shorter = self._file.exists() and self._file.stat().st_size < self._num_read
        if is_shorter:
            self._num_read = 0
        return is_shorter

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each complete new line, without the header.

        Raises ConfigurationError on another schema version.
        """
        if not self._file.exists():
            return
        if self._num_read == 0:
            next(read_lines(self._file), None)  # checks the header
        with self._file.open("rb") as stream:
            stream.seek(self._num_read)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                if self._num_read:  # else it is the header
                    yield self._num_read, line
                self._num_read += len(line)


@dataclass(slots=True)
class LineGroup:
    """Lines that are shown together."""

    offsets: list[int] = field(default_factory=list)
    """Where each line begins in the file."""
    size: int = 0
    """Bytes of all lines."""

    def add(self, offset: int, size: int) -> None:
        """Add a line."""
        self.offsets.append(offset)
        self.size += size


def within_limits(groups: Sequence[LineGroup], max_lines: int, max_bytes: int) -> list[LineGroup]:
    """As many evenly spaced groups, the first and the last among them, as the limits allow."""
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
    """At most `number` groups, the first and the last among them."""
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
