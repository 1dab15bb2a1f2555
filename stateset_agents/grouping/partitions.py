"""The part of a batch that each trajectory belongs to: by a key known before it acts, or by its outcome.

An outcome (its return, its length) is a result of the actions whose advantages are then compared within the
part: good members of the best quartile are pushed down. Such keys are for diagnosis.

returns [0, 1, 2, 3, 4] --quantile_parts, 2--> boundary 2 --> labels [0, 0, 0, 1, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect_one_of, expect_that

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Labels = NDArray[np.int64]

# ------------------------------------------------------------------------------------------ k-means
#
# A page draws the same clusters in JavaScript, bit for bit: the generator is written in 32-bit steps, and all
# sums run in the order of the rows, as a loop does there.

_WORD = 0xFFFFFFFF


def mulberry32(seed: int) -> Iterator[float]:
    """Numbers in [0, 1), each a multiple of 2**-32; `seed`: its lowest 32 bits count.

    Tommy Ettinger's mulberry32 (public domain). Seed 1 begins .62707394058816, .002735721180215478.
    """
    state = seed & _WORD
    while True:
        state = (state + 0x6D2B79F5) & _WORD
        mixed = ((state ^ (state >> 15)) * (state | 1)) & _WORD
        mixed ^= (mixed + ((mixed ^ (mixed >> 7)) * (mixed | 61) & _WORD)) & _WORD
        yield ((mixed ^ (mixed >> 14)) & _WORD) / 4294967296


MOST_CLUSTERS = 8
"""Old and new centres are matched by trying every order: 8! = 40,320."""
_ITERATIONS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """Result of k-means."""

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
    is_possible = 1 <= num_clusters <= MOST_CLUSTERS
    expect_that(is_possible, "the number of clusters", f"lie between 1 and {MOST_CLUSTERS}", num_clusters)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ConfigurationError(
            f"features must be finite numbers [trajectories, features], got {list(rows.shape)}"
            f"{'' if np.isfinite(rows).all() else ' with one that is none'}"
        )
    if len(rows) == 0:
        return Clusters(np.zeros((0, rows.shape[1])), np.zeros(0, dtype=np.int64), 0.0)
    means = first_centres(rows, num_clusters, seed=seed) if centres is None else centres.copy()
    labels = nearest_centres(rows, means)
    for _ in range(_ITERATIONS):
        counts = np.bincount(labels, minlength=len(means))
        sums = np.stack(
            [np.bincount(labels, weights=column, minlength=len(means)) for column in rows.T], axis=1
        )
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], means)
        before, labels = labels, nearest_centres(rows, means)
        if np.array_equal(before, labels):
            break
    distances = _squared_distances(rows, means)[np.arange(len(rows)), labels]
    return Clusters(means, labels, float(np.cumsum(distances)[-1]))


def first_centres(rows: Floats, num_clusters: int, *, seed: int) -> Floats:
    """k-means++: the first row by a uniform draw, each other by its squared distance to those chosen.

    A draw u takes the first row whose running sum of squared distances is above u times their total. Where
    all rows stand on a centre, there are no more.
    """
    draws = mulberry32(seed)
    indices = [int(next(draws) * len(rows))]
    while len(indices) < num_clusters:
        heights = np.cumsum(_squared_distances(rows, rows[indices]).min(axis=1))
        if heights[-1] == 0:
            break
        indices.append(int(np.searchsorted(heights, next(draws) * heights[-1], side="right")))
    return rows[indices]


def nearest_centres(rows: Floats, centres: Floats) -> Labels:
    """[n] the number of each row's nearest centre, the lowest where several are."""
    labels: Labels = _squared_distances(rows, centres).argmin(axis=1).astype(np.int64)
    return labels


def matched(old: Floats, new: Floats) -> tuple[int, ...]:
    """The number of each old centre's successor among the new ones: the order with the least sum of squared
    distances, of several the first in lexicographic order.

    >>> matched(np.array([[0.0], [5.0]]), np.array([[5.1], [0.2]]))
    (1, 0)
    """
    if old.shape != new.shape or len(old) > MOST_CLUSTERS:
        raise ConfigurationError(
            f"centres must be as many, at most {MOST_CLUSTERS}, got {list(old.shape)} and {list(new.shape)}"
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


_log = get_logger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """Facts about n trajectories, as arrays."""

    returns: Floats  # [n]
    lengths: Labels  # [n] steps
    tasks: Labels | None = None
    """[n] number of each one's task; None where there is one task, or nobody knows."""
    task_names: tuple[str, ...] = ()
    features: Floats | None = None
    """[n, d] known before acting: the first observation, a task's indicator, earlier success of its start."""

    def __len__(self) -> int:
        return len(self.returns)


def extract_features(trajectories: Sequence[Any]) -> Floats:
    """[n, d] numbers that are known before each trajectory acts: its first observation, of `observations`
    [T, ...] or several by name. Raises ConfigurationError for one without."""
    rows = []
    for trajectory in trajectories:
        observed = getattr(trajectory, "observations", None)
        if observed is None:
            raise ConfigurationError(
                f"{type(trajectory).__name__} has no observations, and parts by starts need what is known "
                "before acting: give it observations [T, ...], or take task"
            )
        several = observed if isinstance(observed, Mapping) else {"": observed}
        rows.append(np.concatenate([np.ravel(several[name][0]) for name in sorted(several)]))
    return np.array(rows, dtype=np.float64)


def described(trajectories: Sequence[Any], *, starts: bool = False) -> Trajectories:
    """The facts of a list of trajectories: objects with `rewards` [T], and with `task` where parts are by it.

    `starts`: with their features. Raises ConfigurationError for one without rewards.
    """
    strange = next((each for each in trajectories if not hasattr(each, "rewards")), None)
    if strange is not None:
        raise ConfigurationError(f"a trajectory needs rewards [T], got {type(strange).__name__} without")
    rewards = [np.asarray(each.rewards, dtype=np.float64) for each in trajectories]
    tasks = [getattr(each, "task", None) for each in trajectories]
    names = () if None in tasks else tuple(sorted(map(str, set(tasks))))
    return Trajectories(
        returns=np.array([part.sum() for part in rewards], dtype=np.float64),
        lengths=np.array([len(part) for part in rewards], dtype=np.int64),
        tasks=np.array([names.index(str(task)) for task in tasks]) if names else None,
        task_names=names,
        features=extract_features(trajectories) if starts else None,
    )


def scores_within(returns: Floats) -> Floats:
    """[n] from 0 at the lowest of these returns to 1 at the highest; 0 where all are equal."""
    span = returns.max() - returns.min()
    return (returns - returns.min()) / span if span else np.zeros(len(returns))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """A partition: every trajectory is in exactly one part, and a part may be empty."""

    labels: Labels  # [n], 0 to num_parts - 1
    num_parts: int
    key: str
    """Name of the key: one of STRATEGIES, or the caller's."""
    outcome: bool = False
    """True if the key is a result of the actions; it is then for diagnosis."""
    names: tuple[str, ...] = ()
    """Display name of each part; its number if empty."""
    boundaries: Floats | None = None  # [num_parts - 1], of quantiles
    centres: Floats | None = None  # [K, d], of clusters, in the units of the features

    @property
    def sizes(self) -> Labels:
        """[num_parts] trajectories in each."""
        return np.bincount(self.labels, minlength=self.num_parts)

    def name(self, part: int) -> str:
        return self.names[part] if self.names else str(part)


def quantile_boundaries(values: Floats, num_parts: int) -> Floats:
    """[num_parts - 1] quantiles k / num_parts: between the sorted values at (n - 1) k / num_parts, in a line.

    Raises ConfigurationError for no part, no value, or a value that is no finite number.
    """
    expect_that(num_parts >= 1, "the number of parts", "be at least 1", num_parts)
    if not len(values) or not np.isfinite(values).all():
        raise ConfigurationError("quantiles need at least one value, and only finite numbers")
    ordered = np.sort(values.astype(np.float64))
    places = (len(ordered) - 1) * np.arange(1, num_parts) / num_parts
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (places - below)


def quantile_parts(
    values: Floats, num_parts: int = 4, *, key: str = "quantile", outcome: bool = True
) -> Parts:
    """The label is the number of boundaries below the value, so that one on a boundary belongs below it.

    Ties may leave parts empty: with returns 0 and 1 half and half the quartiles are 0, .5 and 1, and the
    labels 0 and 2.
    """
    if not len(values):
        return Parts(labels=np.zeros(0, dtype=np.int64), num_parts=num_parts, key=key, outcome=outcome)
    boundaries = quantile_boundaries(values, num_parts)
    labels = np.searchsorted(boundaries, values, side="left").astype(np.int64)
    return Parts(labels=labels, num_parts=num_parts, key=key, outcome=outcome, boundaries=boundaries)


def key_parts(keys: Sequence[Any], names: Sequence[str] | None = None, *, key: str = "task") -> Parts:
    """One part per name, or per different key in sorted order; keys are texts, or numbers of names.

    Raises ConfigurationError for a key that no name stands for.
    """
    texts = [str(each) for each in keys]
    if names is None:
        names = sorted(set(texts))
    elif texts and all(isinstance(each, int | np.integer) for each in keys):
        texts = [names[each] if 0 <= each < len(names) else str(each) for each in keys]
    places = {name: place for place, name in enumerate(names)}
    strange = next((text for text in texts if text not in places), None)
    if strange is not None:
        raise ConfigurationError(f"{key} must be one of {', '.join(names)}, got {strange!r}")
    labels = np.array([places[text] for text in texts], dtype=np.int64)
    return Parts(labels=labels, num_parts=max(1, len(names)), key=key, names=tuple(names))


def kmeans_parts(
    features: Floats, num_parts: int = 4, *, seed: int = 0, key: str = "auto", outcome: bool = False
) -> Parts:
    """Clusters of the features, each less its mean and by its deviation over the batch.

    Where fewer trajectories differ than parts are asked for, the last parts are empty.
    """
    if not len(features):
        return Parts(labels=np.zeros(0, dtype=np.int64), num_parts=num_parts, key=key, outcome=outcome)
    rows, means, spreads = standardised(features.astype(np.float64))
    clusters = kmeans(rows, num_parts, seed=seed)
    return Parts(
        labels=clusters.labels,
        num_parts=num_parts,
        key=key,
        outcome=outcome,
        centres=clusters.centres * spreads + means,
    )


def random_parts(number: int, num_parts: int = 4, *, seed: int = 0) -> Parts:
    """The control of any other partition: each trajectory's part is drawn, floor(u * num_parts)."""
    labels = np.array([int(u * num_parts) for u in islice(mulberry32(seed), number)], dtype=np.int64)
    return Parts(labels=labels, num_parts=num_parts, key="random")


def create_group_masks(groups: Labels, num_parts: int | None = None) -> NDArray[np.bool_]:
    """[num_parts, ...] True where the label is that part's; labels of any shape, by default as many parts as
    the highest label says."""
    labels = np.asarray(groups)
    num_parts = int(labels.max(initial=-1)) + 1 if num_parts is None else num_parts
    parts = np.arange(num_parts).reshape(-1, *[1] * labels.ndim)
    masks: NDArray[np.bool_] = labels[None] == parts
    return masks


# ------------------------------------------------------------------------------------------ strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One entry of STRATEGIES."""

    parts: Callable[[Trajectories, int, int], Parts]
    """(trajectories, number of parts, seed) -> parts."""
    outcome: bool = False
    """True if it uses results of the actions."""


def _by_task(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    if trajectories.tasks is None:
        raise ConfigurationError(
            "parts by task need the task of each trajectory: give tasks, or take group_strategy auto"
        )
    return key_parts(trajectories.tasks.tolist(), trajectories.task_names or None)


def _by_features(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    if trajectories.features is None:
        raise ConfigurationError(
            "parts by auto need features that are known before acting: give features [trajectories, d]"
        )
    return kmeans_parts(trajectories.features, num_parts, seed=seed)


def _by_outcomes(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    outcomes = np.stack([trajectories.returns, trajectories.lengths.astype(np.float64)], axis=1)
    return kmeans_parts(outcomes, num_parts, seed=seed, key="auto_outcome", outcome=True)


def _by_return(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    return quantile_parts(trajectories.returns, num_parts, key="difficulty")


def _by_length(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    return quantile_parts(trajectories.lengths.astype(np.float64), num_parts, key="length")


def _by_chance(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    return random_parts(len(trajectories), num_parts, seed=seed)


def _none(trajectories: Trajectories, num_parts: int, seed: int) -> Parts:
    return Parts(labels=np.zeros(len(trajectories), dtype=np.int64), num_parts=1, key="none")


STRATEGIES: Mapping[str, Strategy] = {
    "none": Strategy(parts=_none),
    "task": Strategy(parts=_by_task),
    "auto": Strategy(parts=_by_features),
    "random": Strategy(parts=_by_chance),
    "difficulty": Strategy(parts=_by_return, outcome=True),
    "length": Strategy(parts=_by_length, outcome=True),
    "auto_outcome": Strategy(parts=_by_outcomes, outcome=True),
}
"""Ways to divide a batch, by name; a new one is a line here."""


class GroupingStrategy:
    """One of STRATEGIES with its settings.

    >>> GroupingStrategy("difficulty", n_groups=4).group_trajectories(rollouts)  # {part: [trajectory, ...]}
    """

    def __init__(self, strategy_type: str = "auto", n_groups: int = 4, *, seed: int = 0) -> None:
        """`n_groups`: parts, for strategies that do not know how many there are. Raises ConfigurationError
        for an unknown name or a number below 1; a key that is an outcome is said in a warning, once."""
        expect_one_of("group_strategy", strategy_type, STRATEGIES)
        expect_that(n_groups >= 1, "n_groups", "be at least 1", n_groups)
        self.strategy_type, self.n_groups, self.seed = strategy_type, n_groups, seed
        if STRATEGIES[strategy_type].outcome and strategy_type not in _warned:
            _warned.add(strategy_type)
            _log.warning(
                f"parts by {strategy_type} are made by outcomes of the actions: advantages within them are "
                "biased (good members of the best part are pushed down); take task or auto to train"
            )

    def parts(self, trajectories: Trajectories) -> Parts:
        """The part of each. Raises ConfigurationError where the strategy's key is not known."""
        return STRATEGIES[self.strategy_type].parts(trajectories, self.n_groups, self.seed)

    def group_trajectories(self, rollouts: Sequence[Any]) -> dict[Any, list[Any]]:
        """{part: its trajectories in their order}, without empty parts; a part by task has the task's name,
        others a number.

        A trajectory is any object with `rewards` [T]; for `task` with `task`, for `auto` with `observations`
        [T, ...]. Raises as `parts` does.
        """
        facts = described(rollouts, starts=self.strategy_type == "auto")
        parts = self.parts(facts)
        groups: dict[Any, list[Any]] = {}
        for part in np.unique(parts.labels).tolist():
            members = np.flatnonzero(parts.labels == part).tolist()
            groups[parts.names[part] if parts.names else part] = [rollouts[member] for member in members]
        return groups
