"""Which groups of conversations a page takes where it cannot take all: whole groups, failures first."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stateset_agents.reporting.rollouts.line_groups import LineGroup


@dataclass(slots=True)
class PlayedGroup(LineGroup):
    """The lines of a group, with what decides how soon a page takes it."""

    step: int | None = None
    """Of training; None of a held-out scenario, which is played in several."""
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
