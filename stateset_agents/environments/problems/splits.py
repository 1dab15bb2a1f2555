"""Which split a problem belongs to: its text decides, so that no problem stands in two, whatever the seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive

_OF_TEN: dict[int, Split] = {0: "validation", 1: "test"}
_TRIES = 400
"""Draws for each scenario wanted, after which the family is found too small."""
EACH: dict[str, int] = {"validation": 50, "test": 100}
"""Held-out problems of each level."""


def split_of(key: str) -> Split:
    """One problem in ten is for validation, one for the test, by its text's digest.

    >>> split_of("2 + 3 * 4 - 1")
    'train'
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return _OF_TEN.get(int.from_bytes(digest, "big") % 10, "train")


Drawn = tuple[str, Scenario]
"""What makes a problem the same as another, and the problem."""


def draw_scenarios(
    split: Split,
    levels: Sequence[int],
    draw: Callable[[random.Random, int], Drawn | None],
    *,
    family: str,
    num_train: int,
    seed: int,
) -> list[Scenario]:
    """Different problems of a split, as many of each level, in turn; `draw` may give None and is asked again.

    The seed chooses those to train on; the held-out ones are the same for every seed. Raises
    ConfigurationError where there are not so many.
    """
    number = num_train if split == "train" else EACH[split] * len(levels)
    rng = random.Random(derive(seed if split == "train" else 0, "problems", family, split, *levels))
    seen: set[str] = set()
    scenarios: list[Scenario] = []
    for _ in range(_TRIES * number):
        level = levels[len(scenarios) % len(levels)]
        drawn = draw(rng, level)
        if drawn is None or drawn[0] in seen or split_of(drawn[0]) != split:
            continue
        seen.add(drawn[0])
        scenarios.append(drawn[1])
        if len(scenarios) == number:
            return scenarios
    raise ConfigurationError(
        f"{family} has only {len(scenarios)} different {split} problems, {number} were asked for: ask for "
        "fewer, or allow larger numbers"
    )


def at_least(least: int, **settings: int) -> None:
    """Raises ConfigurationError for a setting that is no whole number from `least` on."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name} must be a whole number from {least} on, got {value!r:.60}")
