"""Seeded k-means whose numbers a page can draw again: k-means++ by mulberry32, then Lloyd's iterations.

All sums run in the order of the rows, as a loop in JavaScript does, so that labels are identical there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from stateset_agents.grouping.mulberry32 import mulberry32
from stateset_agents.types.errors import ConfigurationError

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

MOST_CLUSTERS = 8
"""Old and new centres are matched by trying every order: 8! = 40,320."""
_ITERATIONS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """What k-means found."""

    centres: Floats  # [K, d]; fewer than were asked for where fewer rows differ
    labels: Labels  # [n]
    inertia: float
    """Sum of the squared distances to the nearest centres."""


def kmeans(rows: Floats, num_clusters: int, *, seed: int = 0, centres: Floats | None = None) -> Clusters:
    """Clusters of `rows` [n, d], from k-means++ (Arthur and Vassilvitskii 2007), or from given `centres`.

    Lloyd's iterations until no label changes, at most 100. A tie goes to the lower number; a cluster that
    lost its rows keeps its centre. Raises ConfigurationError for a number that cannot be, or a row that is
    no finite number.
    """
    if not 1 <= num_clusters <= MOST_CLUSTERS:
        raise ConfigurationError(
            f"the number of clusters must lie between 1 and {MOST_CLUSTERS}, got {num_clusters!r}"
        )
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ConfigurationError(
            f"features must be finite numbers [trajectories, features], got {list(rows.shape)}"
            f"{'' if np.isfinite(rows).all() else ' with one that is none'}"
        )
    if len(rows) == 0:
        return Clusters(np.zeros((0, rows.shape[1])), np.zeros(0, dtype=np.int64), 0.0)
    found = first_centres(rows, num_clusters, seed=seed) if centres is None else centres.copy()
    labels = nearest(rows, found)
    for _ in range(_ITERATIONS):
        counts = np.bincount(labels, minlength=len(found))
        sums = np.stack(
            [np.bincount(labels, weights=column, minlength=len(found)) for column in rows.T], axis=1
        )
        found = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], found)
        before, labels = labels, nearest(rows, found)
        if np.array_equal(before, labels):
            break
    distances = _squared_distances(rows, found)[np.arange(len(rows)), labels]
    return Clusters(found, labels, float(np.cumsum(distances)[-1]))


def first_centres(rows: Floats, num_clusters: int, *, seed: int) -> Floats:
    """k-means++: the first row by a uniform draw, each other by its squared distance to those chosen.

    A draw u takes the first row whose running sum of squared distances is above u times their total. Where
    all rows stand on a centre, there are no more.
    """
    draws = mulberry32(seed)
    chosen = [int(next(draws) * len(rows))]
    while len(chosen) < num_clusters:
        heights = np.cumsum(_squared_distances(rows, rows[chosen]).min(axis=1))
        if heights[-1] == 0:
            break
        chosen.append(int(np.searchsorted(heights, next(draws) * heights[-1], side="right")))
    return rows[chosen]


def nearest(rows: Floats, centres: Floats) -> Labels:
    """[n] the number of each row's nearest centre, the lowest where several are."""
    labels: Labels = _squared_distances(rows, centres).argmin(axis=1).astype(np.int64)
    return labels


def matched(old: Floats, new: Floats) -> tuple[int, ...]:
    """For each old centre the new one that is its successor: the order with the least sum of squared
    distances, of several the first in lexicographic order.

    >>> matched(np.array([[0.0], [5.0]]), np.array([[5.1], [0.2]]))
    (1, 0)
    """
    if old.shape != new.shape or len(old) > MOST_CLUSTERS:
        raise ConfigurationError(
            f"only as many centres as before, at most {MOST_CLUSTERS}, can be matched, got {list(old.shape)} "
            f"and {list(new.shape)}"
        )
    distances = _squared_distances(old, new)
    orders = _orders(len(old))
    costs = distances[np.arange(len(old)), orders].sum(axis=1)
    return tuple(orders[costs.argmin()].tolist())


def standardised(rows: Floats) -> tuple[Floats, Floats, Floats]:
    """Each feature less its mean and by its population deviation (1 where that is 0); both follow."""
    means = np.cumsum(rows, axis=0)[-1] / len(rows)
    spreads = np.sqrt(np.cumsum(np.square(rows - means), axis=0)[-1] / len(rows))
    spreads = np.where(spreads > 1e-12 * np.maximum(1.0, np.abs(means)), spreads, 1.0)
    return (rows - means) / spreads, means, spreads


def _squared_distances(rows: Floats, centres: Floats) -> Floats:
    """[n, K], summed feature by feature."""
    total = np.zeros((len(rows), len(centres)))
    for column, places in zip(rows.T, centres.T, strict=True):
        total += np.square(column[:, None] - places[None])
    return total


@lru_cache(maxsize=MOST_CLUSTERS + 1)
def _orders(number: int) -> Labels:
    """[number!, number] every order, in lexicographic order."""
    return np.array(list(permutations(range(number))), dtype=np.int64).reshape(-1, number)
