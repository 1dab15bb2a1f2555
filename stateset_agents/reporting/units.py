"""Lines of a run's file that belong together, and which of them a page takes: whole and evenly spaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Unit", "count", "evenly", "size_of", "spread"]


@dataclass(slots=True)
class Unit:
    """Lines that are shown together: where they begin, and the bytes of all."""

    places: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, place: int, size: int) -> None:
        """One more line."""
        self.places.append(place)
        self.size += size


def spread(units: Sequence[Unit], lines: int, size: int) -> list[Unit]:
    """As many evenly spaced units, the first and the last among them, as the limits allow."""
    fewest, most = 0, len(units)
    while fewest < most:  # the largest number that fits
        number = (fewest + most + 1) // 2
        some = evenly(units, number)
        if count(some) <= lines and size_of(some) <= size:
            fewest = number
        else:
            most = number - 1
    return evenly(units, fewest)


def evenly(units: Sequence[Unit], number: int) -> list[Unit]:
    """That many, at most all, the first and the last among them."""
    number = min(number, len(units))
    if number < 2:
        return list(units[:number])
    return [units[round(at * (len(units) - 1) / (number - 1))] for at in range(number)]


def count(units: Iterable[Unit]) -> int:
    """Lines of all."""
    return sum(len(unit.places) for unit in units)


def size_of(units: Iterable[Unit]) -> int:
    """Bytes of all."""
    return sum(unit.size for unit in units)
