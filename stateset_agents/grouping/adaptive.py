"""Partitions that follow a training: clusters over its last trajectories, and two scales at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.grouping.advantages import normalise_by_part
from stateset_agents.grouping.clustering import kmeans, matched, nearest, standardised
from stateset_agents.grouping.partitions import Labels, Parts
from stateset_agents.types.errors import ConfigurationError

Floats = NDArray[np.float64]


class AdaptiveGrouper:
    """Online k-means over features known before acting, whose part numbers keep their meaning.

    Each call clusters the last `history_window` trajectories twice, from k-means++ and from the centres
    before, keeps what fits better, and numbers the new centres by the old ones that they are nearest to.
    """

    def __init__(self, n_groups: int = 4, history_window: int = 1000, *, seed: int = 0) -> None:
        if history_window < 1:
            raise ConfigurationError(f"history_window must be at least 1, got {history_window!r}")
        self.n_groups, self.history_window, self.seed = n_groups, history_window, seed
        self._window: deque[list[float]] = deque(maxlen=history_window)
        self._centres: Floats | None = None

    @property
    def num_remembered(self) -> int:
        """Trajectories in the window."""
        return len(self._window)

    def update_groups(self, features: Floats) -> Parts:
        """Remember these trajectories' features [n, d] and say their parts."""
        if not len(features) and self._centres is None:
            return Parts(labels=np.zeros(0, dtype=np.int64), num_parts=self.n_groups, key="online")
        self._window.extend(features.astype(np.float64).tolist())
        rows, means, spreads = standardised(np.array(self._window))
        old = None if self._centres is None else (self._centres - means) / spreads
        centres = self._fitted(rows, old)
        self._centres = centres * spreads + means
        labels = nearest((features.astype(np.float64) - means) / spreads, centres)
        return Parts(labels=labels, num_parts=self.n_groups, key="online", centres=self._centres)

    def _fitted(self, rows: Floats, old: Floats | None) -> Floats:
        """[K, d] centres of the window in the order of the old ones."""
        fresh = kmeans(rows, self.n_groups, seed=self.seed)
        if old is None or len(old) < len(fresh.centres):  # there was nothing to tell so many apart
            return fresh.centres
        warm = kmeans(rows, self.n_groups, centres=old)
        if len(old) > len(fresh.centres) or warm.inertia <= fresh.inertia:
            return warm.centres
        return fresh.centres[list(matched(old, fresh.centres))]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {
            "window": list(self._window),
            "centres": None if self._centres is None else self._centres.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._window = deque(state["window"], maxlen=self.history_window)
        self._centres = None if state["centres"] is None else np.array(state["centres"], dtype=np.float64)


def finer_parts(coarse: Parts, fine: Parts) -> Parts:
    """Each part of `coarse` divided by `fine`: part c * fine.num_parts + f."""
    return Parts(
        labels=coarse.labels * fine.num_parts + fine.labels,
        num_parts=coarse.num_parts * fine.num_parts,
        key=f"{coarse.key}, {fine.key}",
        outcome=coarse.outcome or fine.outcome,
        names=tuple(
            f"{coarse.name(c)}, {fine.name(f)}"
            for c in range(coarse.num_parts)
            for f in range(fine.num_parts)
        ),
    )


def hierarchical_advantages(
    advantages: Floats,
    scales: Sequence[Labels],
    shares: Sequence[float],
    mask: NDArray[np.bool_] | None = None,
) -> Floats:
    """The advantages normalised at each scale, added by `shares`, which are positive and sum to 1.

    With tasks as the first scale and clusters of starts within them as the second, a step is compared with
    its task and with what began like it.
    """
    if len(scales) != len(shares) or not scales:
        raise ConfigurationError(f"shares must be one per scale, {len(scales)}, got {len(shares)}")
    if min(shares) <= 0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ConfigurationError(f"shares must be positive and sum to 1, got {list(shares)}")
    total = np.zeros(advantages.shape)
    for labels, share in zip(scales, shares, strict=True):
        total += share * normalise_by_part(advantages, labels, mask)
    return total
