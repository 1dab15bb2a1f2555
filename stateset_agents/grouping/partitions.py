"""Which part of a batch each trajectory belongs to: by a key that is known before it acts, or by its outcome.

An outcome (its return, its length) is a result of the actions whose advantages are then compared within the
part: good members of the best quartile are pushed down. Such keys are for diagnosis.

returns [0, 1, 2, 3, 4] --quantile_parts, 2--> boundary 2 --> labels [0, 0, 0, 1, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.grouping.clustering import kmeans, standardised
from stateset_agents.grouping.mulberry32 import mulberry32
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import nearest

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

_log = get_logger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """What is known of n trajectories, as arrays."""

    returns: Floats  # [n]
    lengths: Labels  # [n] steps
    tasks: Labels | None = None
    """[n] number of each one's task; None where there is one task, or nobody knows."""
    task_names: tuple[str, ...] = ()
    features: Floats | None = None
    """[n, d] known before acting: the first observation, a task's indicator, earlier success of its start."""

    def __len__(self) -> int:
        return len(self.returns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """A partition: every trajectory is in exactly one part, and a part may be empty."""

    labels: Labels  # [n], 0 to num_parts - 1
    num_parts: int
    key: str
    """By what: a name of STRATEGIES, or the caller's."""
    outcome: bool = False
    """Is the key a result of the actions? Then it is for diagnosis."""
    names: tuple[str, ...] = ()
    """For people, one per part; numbers where there are none."""
    boundaries: Floats | None = None  # [num_parts - 1], of quantiles
    centres: Floats | None = None  # [K, d], of clusters, in the units of the features

    @property
    def sizes(self) -> Labels:
        """[num_parts] trajectories in each."""
        sizes: Labels = np.bincount(self.labels, minlength=self.num_parts)
        return sizes

    def name(self, part: int) -> str:
        return self.names[part] if self.names else str(part)


def quantile_boundaries(values: Floats, num_parts: int) -> Floats:
    """[num_parts - 1] quantiles k / num_parts: between the sorted values at (n - 1) k / num_parts, in a line.

    Raises ConfigurationError for no part, no value, or a value that is no finite number.
    """
    if num_parts < 1:
        raise ConfigurationError(f"the number of parts must be at least 1, got {num_parts!r}")
    if not len(values) or not np.isfinite(values).all():
        raise ConfigurationError("quantiles need at least one value, and only finite numbers")
    ordered = np.sort(values.astype(np.float64))
    places = (len(ordered) - 1) * np.arange(1, num_parts) / num_parts
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    boundaries: Floats = ordered[below] + (ordered[above] - ordered[below]) * (places - below)
    return boundaries


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
    found = kmeans(rows, num_parts, seed=seed)
    return Parts(
        labels=found.labels,
        num_parts=num_parts,
        key=key,
        outcome=outcome,
        centres=found.centres * spreads + means,
    )


def random_parts(number: int, num_parts: int = 4, *, seed: int = 0) -> Parts:
    """The control of any other partition: each trajectory's part is drawn, floor(u * num_parts)."""
    labels = np.array([int(u * num_parts) for u in islice(mulberry32(seed), number)], dtype=np.int64)
    return Parts(labels=labels, num_parts=num_parts, key="random")


def create_group_masks(labels: Labels, num_parts: int) -> NDArray[np.bool_]:
    """[num_parts, ...] True where the label is that part's; of any shape of labels."""
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
    """Does it look at what came of the actions?"""


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

    >>> GroupingStrategy("difficulty", n_groups=4).group_trajectories(trajectories).labels
    """

    def __init__(self, strategy: str = "auto", n_groups: int = 4, *, seed: int = 0) -> None:
        """`n_groups`: parts, for strategies that do not know how many there are. Raises ConfigurationError
        for an unknown name or a number below 1; a key that is an outcome is said in a warning, once."""
        if strategy not in STRATEGIES:
            names = ", ".join(STRATEGIES)
            raise ConfigurationError(
                f"group_strategy must be one of {names}, got {strategy!r}{nearest(strategy, STRATEGIES)}"
            )
        if n_groups < 1:
            raise ConfigurationError(f"n_groups must be at least 1, got {n_groups!r}")
        self.strategy, self.n_groups, self.seed = strategy, n_groups, seed
        if STRATEGIES[strategy].outcome and strategy not in _warned:
            _warned.add(strategy)
            _log.warning(
                f"parts by {strategy} are made by outcomes of the actions: advantages within them are biased "
                "(good members of the best part are pushed down); take task or auto to train"
            )

    def group_trajectories(self, trajectories: Trajectories) -> Parts:
        """The part of each. Raises ConfigurationError where the strategy's key is not known."""
        return STRATEGIES[self.strategy].parts(trajectories, self.n_groups, self.seed)
