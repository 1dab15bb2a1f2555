"""Groups of lines of a JSONL file, selected for a page: whole and evenly spaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


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
