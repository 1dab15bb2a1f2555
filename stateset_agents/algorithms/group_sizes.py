"""Sizes of groups, in conversations: by a label, or by how likely the members are to differ.

A group whose members all succeed, or all fail, has no advantage. With success p a group of G is mixed with
the probability m = 1 - p^G - (1 - p)^G, which is the same for p and 1 - p:

    p           .5    .7    .8    .9    .95
    G = 8      .99   .94   .83   .57   .34
    m >= .8      4     5     8    16    16 (.56)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

SMALLEST, LARGEST = 4, 16
"""Bounds of groups that are sized by success: fewer than 4 say little, and at p = .98 even 16 are alike three
times in four."""

_FACTORS: Mapping[object, float] = {"easy": 0.75, "medium": 1.0, "hard": 1.5}


def adaptive_group_size(problem_difficulty: object, base_size: int = 8) -> int:
    """Members of a group by a label: easy three quarters of `base_size`, hard one and a half times; else
    `base_size`. Fractions are cut off, down to 1.

    A rule of thumb without a paper. It takes conversations from scenarios that nearly always succeed, where a
    group is as rarely mixed as where they nearly always fail; `group_sizes` treats both alike.

    >>> [adaptive_group_size(label) for label in ("easy", "medium", "hard", "unknown")]
    [6, 8, 12, 8]
    """
    expect_that(base_size >= 1, "base_size", "be at least 1", base_size)
    factor = _FACTORS.get(problem_difficulty, 1.0) if isinstance(problem_difficulty, str) else 1.0
    return max(1, int(base_size * factor))


def mixed_probability(success: float, size: int) -> float:
    """The chance that a group of this size has both a success and a failure, each at the probability
    `success`.

    >>> round(mixed_probability(0.9, 8), 2), round(mixed_probability(0.1, 8), 2)
    (0.57, 0.57)
    """
    return 1.0 - success**size - (1.0 - success) ** size


def success_group_size(success: float, *, mixed: float = 0.8) -> int:
    """The smallest size from `SMALLEST` to `LARGEST` that is mixed with the probability `mixed`; else the
    largest.

    >>> [success_group_size(success) for success in (0.5, 0.3, 0.2, 0.9, 0.98)]
    [4, 5, 8, 16, 16]
    """
    if not 0.0 <= success <= 1.0:
        raise ConfigurationError(f"a probability of success lies between 0 and 1, got {success!r}")
    sizes = range(SMALLEST, LARGEST)
    return next((size for size in sizes if mixed_probability(success, size) >= mixed), LARGEST)


def group_sizes(successes: Sequence[float], budget: int) -> list[int]:
    """A size from `SMALLEST` to `LARGEST` for each group, together `budget` conversations, so that as many
    groups as possible are expected to be mixed.

    Each member goes where it raises that number most, the first of equals; as a group gains less by every
    further member, no other sizes are better. Those of `success_group_size`, cut to the budget, can even be
    worse than eight each: at .5, .6, .7, .9, .9, .95, .3 and .2 and 64 conversations 6.16 groups are mixed,
    with eight each 6.17, by this function 6.30.

    Raises ConfigurationError for a budget that no sizes make.

    >>> group_sizes([0.5, 0.9], 16)
    [5, 11]
    """
    number = len(successes)
    if not number * SMALLEST <= budget <= number * LARGEST:
        raise ConfigurationError(
            f"{number} groups of {SMALLEST} to {LARGEST} members cannot make {budget} conversations: set "
            f"num_generations between {SMALLEST} and {LARGEST}"
        )
    sizes = [SMALLEST] * number

    def gain(index: int) -> float:
        size, success = sizes[index], successes[index]
        return mixed_probability(success, size + 1) - mixed_probability(success, size)

    for _ in range(budget - sum(sizes)):
        able = [index for index, size in enumerate(sizes) if size < LARGEST]
        sizes[max(able, key=gain)] += 1
    return sizes
