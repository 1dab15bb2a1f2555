"""Advantages normalised within parts, what that did to them, and GAE over rows that begin again in mid-batch.

advantages [1, 3, 100, 300], parts [0, 0, 1, 1] --normalise_by_part--> [-1, 1, -1, 1]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stateset_agents.algorithms.group_arrays import deviation_array
from stateset_agents.grouping.partitions import Bools, Floats, Labels, Parts, create_group_masks
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

_EPS = 1e-8


def normalise_by_part(
    advantages: Floats,
    labels: Labels,
    mask: Bools | None = None,
    *,
    eps: float = _EPS,
    ddof: int = 0,
    centred: bool = True,
) -> Floats:
    """Less the part's mean and by its deviation + eps; all arrays of one shape, 0 where `mask` is False.

    A part whose advantages are all equal, one of a single step among them, gets exactly 0. `ddof`: 1 for the
    sample deviation. `centred=False` leaves the mean in. With one part this is PPO's normalisation.
    """
    shape = list(advantages.shape)
    expect_that(list(labels.shape) == shape, "labels", f"be one per advantage, {shape}", list(labels.shape))
    step_mask = np.ones(advantages.shape, dtype=np.bool_) if mask is None else mask
    result = np.zeros(advantages.shape)
    for part in np.unique(labels[step_mask]):
        within = step_mask & (labels == part)
        values = advantages[within]
        if values.max() == values.min():
            continue
        centre = float(values.mean()) if centred else 0.0
        spread = float(deviation_array(advantages, within))
        if ddof:
            spread *= float(np.sqrt(len(values) / (len(values) - ddof)))
        result[within] = (values - centre) / (spread + eps)
    return result


def sign_flip_share(
    raw: Floats, normalised: Floats, tasks: Labels | None = None, mask: Bools | None = None
) -> float:
    """The share of steps whose normalised advantage has another sign than the raw one less its task's mean.

    Such a step is pushed the wrong way. A 0 on either side has no sign; without a step the share is 0.
    """
    step_mask = np.ones(raw.shape, dtype=np.bool_) if mask is None else mask
    of_task = np.zeros(raw.shape, dtype=np.int64) if tasks is None else tasks
    reference = np.zeros(raw.shape)
    for task in np.unique(of_task[step_mask]):
        within = step_mask & (of_task == task)
        reference[within] = raw[within] - raw[within].mean()
    flipped = (np.sign(reference) * np.sign(normalised) < 0) & step_mask
    return float(flipped.sum() / step_mask.sum()) if step_mask.any() else 0.0


def absolute_shares(advantages: Floats, labels: Labels, num_parts: int, mask: Bools | None = None) -> Floats:
    """[num_parts] each part's share of the sum of |advantage|; all 0 where that sum is 0."""
    step_mask = np.ones(advantages.shape, dtype=np.bool_) if mask is None else mask
    sums = np.bincount(labels[step_mask], weights=np.abs(advantages[step_mask]), minlength=num_parts)
    total = sums.sum()
    return sums / total if total else np.zeros(num_parts)


class PartStatistics(NamedTuple):
    """Statistics of one part's advantages."""

    num_steps: int
    mean: float
    std: float
    """Deviation of the population; 0 for an empty part, as the mean is."""
    absolute_share: float


def part_statistics(
    advantages: Floats, labels: Labels, num_parts: int, mask: Bools | None = None
) -> list[PartStatistics]:
    """The statistics of each part, empty ones too."""
    step_mask = np.ones(advantages.shape, dtype=np.bool_) if mask is None else mask
    shares = absolute_shares(advantages, labels, num_parts, mask)
    statistics = []
    for within, share in zip(create_group_masks(labels, num_parts), shares, strict=True):
        values = advantages[within & step_mask]
        mean, std = (float(values.mean()), float(values.std())) if len(values) else (0.0, 0.0)
        statistics.append(PartStatistics(len(values), mean, std, float(share)))
    return statistics


class GroupAdvantageNormalizer:
    """`normalise_by_part` with its settings."""

    def __init__(self, *, eps: float = _EPS, ddof: int = 0) -> None:
        if ddof not in (0, 1):
            raise ConfigurationError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
        self.eps, self.ddof = eps, ddof

    def normalize(
        self, advantages: Floats, group_id: Labels | Parts | int | str, mask: Bools | None = None
    ) -> Floats:
        """Advantages [n] or [T, n], by the part of each: one label for all, an array of that shape, one per
        column [n], or the `Parts` of the columns."""
        advantages = np.asarray(advantages, dtype=np.float64)
        labels = group_id.labels if isinstance(group_id, Parts) else group_id
        labels = np.broadcast_to(labels, advantages.shape)
        return normalise_by_part(advantages, labels, mask, eps=self.eps, ddof=self.ddof)


# ------------------------------------------------------------------------------------------ GAE


class BatchGae(NamedTuple):
    """The result of GAE over a batch."""

    advantages: Floats  # [T, N]
    returns: Floats  # [T, N]
    """Advantage + value."""


def gae_batch(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: Bools,
    ended: Bools,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> BatchGae:
    """GAE over rows [T, N] in which one episode may follow another.

    delta = r + gamma (1 - terminated) V' - V; A = delta + gamma lam (1 - ended) A'. A cut (ended, not
    terminated) goes on by V' and ends the recursion; the row after the last one counts as ended.
    `next_values`: of the state after the step, before the row begins again.
    """
    shapes = {array.shape for array in (rewards, values, next_values, terminated, ended)}
    names = "rewards, values, next_values, terminated and ended"
    expect_that(len(shapes) == 1, names, "have one shape", sorted(shapes))
    rewards = rewards.astype(np.float64)  # integers would be cut
    deltas = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    advantages = np.zeros(rewards.shape)
    following = np.zeros(rewards.shape[1:])
    for step in range(len(rewards) - 1, -1, -1):
        following = deltas[step] + gamma * lam * np.where(ended[step], 0.0, following)
        advantages[step] = following
    return BatchGae(advantages, advantages + values)


def compute_group_advantages_vectorized(
    values: Floats,
    rewards: Floats,
    dones: Bools,
    groups: Labels,
    *,
    next_values: Floats | None = None,
    terminated: Bools | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Floats:
    """[T, N] GAE of every trajectory, then normalised by part; `groups`: [N] or [T, N] labels. Or [T] of all:
    trajectories behind one another, each ended by its `dones`.

    GAE comes first: a part's mask over rewards and values would cut trajectories where they leave the part,
    and count states after it as worth nothing. Without `next_values` each is the value a row below, so that
    all rows must end terminated. Raises ConfigurationError where a cut has no value to go on by.
    """
    values, rewards = np.asarray(values, dtype=np.float64), np.asarray(rewards)
    dones = np.asarray(dones).astype(np.bool_)
    is_terminated = dones if terminated is None else np.asarray(terminated).astype(np.bool_)
    if next_values is None:
        ends_here = dones.copy()
        ends_here[-1:] = True
        goes_on = ~is_terminated & ends_here
        if goes_on.any():
            raise ConfigurationError(
                f"next_values is needed: {int(goes_on.sum())} rows are cut and go on by the value after it"
            )
        next_values = np.concatenate([values[1:], np.zeros((1, *values.shape[1:]))])
    estimate = gae_batch(rewards, values, next_values, is_terminated, dones, gamma=gamma, lam=lam)
    return normalise_by_part(estimate.advantages, np.broadcast_to(groups, estimate.advantages.shape))
