"""A run's conversations under another reward: which advantages would have been different?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stateset_agents.algorithms.advantages import Scaling, group_advantages
from stateset_agents.core.reward import Reward, RewardResult, as_reward, score_trajectories
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.trajectory import Status, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A conversation that one reward encourages and the other discourages."""

    step: int
    scenario: str
    member: int
    old_reward: float
    new_reward: float
    old_advantage: float
    new_advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """The effect of the other reward, over conversations that both scored."""

    n: int
    old_mean: float
    new_mean: float
    rank_correlation: float | None
    """Spearman's, of the two rewards over the conversations; None where one of them is constant."""
    within_groups: float | None
    """The same within each group, averaged over groups in which both vary: what training compares."""
    encouraged: int
    """Advantages that turn from below 0 to above."""
    discouraged: int
    """Advantages that turn from above 0 to below."""
    silenced: int
    """Advantages that become 0."""
    awakened: int
    """Advantages that were 0 and are another number."""

    @property
    def flipped(self) -> float:
        """The share of the conversations whose advantage changes its sign."""
        return (self.encouraged + self.discouraged) / self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A run under another reward."""

    all: RewardChange
    families: Mapping[str, RewardChange]
    flips: Sequence[Flip]
    """Conversations whose advantage changes its sign, the largest change first."""
    num_groups: int
    num_failed: int
    """Conversations that failed and have no reward under any."""
    only_old: int
    """Conversations that the run scored and the other reward does not."""
    only_new: int
    failure: str | None
    """The reason why the other reward could not score the first one that it failed on."""

    def summary(self) -> dict[str, Any]:
        """The comparison as plain JSON."""
        return {
            "all": {**asdict(self.all), "flipped": self.all.flipped},
            "families": {
                name: {**asdict(change), "flipped": change.flipped} for name, change in self.families.items()
            },
            "num_groups": self.num_groups,
            "num_failed": self.num_failed,
            "only_old": self.only_old,
            "only_new": self.only_new,
            "failure": self.failure,
            "flips": [asdict(flip) for flip in self.flips],
        }


@dataclass(frozen=True, slots=True)
class _ScoredTwice:
    """One conversation under both rewards."""

    group: int
    family: str
    flip: Flip


async def rescore(
    steps: Iterable[tuple[int, Sequence[TrajectoryGroup]]],
    reward_fn: Reward,
    *,
    baseline: str = "group_mean",
    scaling: Scaling = "population",
    reward_clip: float = 10.0,
    reward_timeout: float | None = 300.0,
) -> Rescored:
    """Ask another reward about each step's recorded groups (`recorded.groups_of`), as training would have:
    groups together, and statistics of the reward moved when a step is over.

    Advantages are those of whole conversations against their group (`group_advantages`), under both rewards,
    with the settings given. Raises ConfigurationError where no conversation is scored by both.
    """
    reward = as_reward(reward_fn)
    pairs: list[_ScoredTwice] = []
    num_groups = num_failed = only_old = only_new = 0
    failure: str | None = None
    for step, groups in steps:
        played = [[t for t in group.trajectories if t.status is not Status.FAILED] for group in groups]
        num_failed += sum(len(group.trajectories) for group in groups) - sum(map(len, played))
        results = await gather_or_cancel(
            score_trajectories(reward, members, seconds=reward_timeout) for members in played
        )
        flat = [result for group_results in results for result in group_results]
        failure = failure or next((str(result) for result in flat if isinstance(result, RewardFailure)), None)
        reward.observe([r for r in flat if isinstance(r, RewardResult) and r.score is not None])
        old = [[trajectory.reward for trajectory in members] for members in played]
        new = [[None if isinstance(r, RewardFailure) else r.score for r in group] for group in results]
        credit = [
            group_advantages(_clipped(rewards, reward_clip), baseline=baseline, scaling=scaling)
            for rewards in (old, new)
        ]
        for index, members in enumerate(played):
            for member, trajectory in enumerate(members):
                before, after = old[index][member], new[index][member]
                only_old += before is not None and after is None
                only_new += before is None and after is not None
                if before is not None and after is not None:
                    old_advantage, new_advantage = (side[index][member] or 0.0 for side in credit)
                    flip = Flip(
                        step=step,
                        scenario=trajectory.scenario.id,
                        member=trajectory.member,
                        old_reward=before,
                        new_reward=after,
                        old_advantage=old_advantage,
                        new_advantage=new_advantage,
                    )
                    pairs.append(_ScoredTwice(num_groups + index, trajectory.scenario.family, flip))
        num_groups += len(groups)
    if not pairs:
        why = failure or "look at what the other one needs in the scenarios"
        raise ConfigurationError(f"no conversation is scored by both rewards: {why}")
    families = sorted({scored.family for scored in pairs})
    flips = [
        flip
        for flip in (scored.flip for scored in pairs)
        if _sign(flip.old_advantage) * _sign(flip.new_advantage) < 0
    ]
    return Rescored(
        all=_reward_change(pairs),
        families={
            name: _reward_change([scored for scored in pairs if scored.family == name]) for name in families
        },
        flips=sorted(flips, key=lambda flip: -abs(flip.new_advantage - flip.old_advantage)),
        num_groups=num_groups,
        num_failed=num_failed,
        only_old=only_old,
        only_new=only_new,
        failure=failure,
    )


def _clipped(rewards: Sequence[Sequence[float | None]], bound: float) -> list[list[float | None]]:
    return [
        [None if reward is None else max(-bound, min(bound, reward)) for reward in group] for group in rewards
    ]


def _reward_change(pairs: Sequence[_ScoredTwice]) -> RewardChange:
    flips = [scored.flip for scored in pairs]
    old, new = [flip.old_reward for flip in flips], [flip.new_reward for flip in flips]
    groups: dict[int, list[Flip]] = defaultdict(list)
    for scored in pairs:
        groups[scored.group].append(scored.flip)
    within = [
        rank_correlation([flip.old_reward for flip in members], [flip.new_reward for flip in members])
        for members in groups.values()
    ]
    correlations = [value for value in within if value is not None]
    signs = [(_sign(flip.old_advantage), _sign(flip.new_advantage)) for flip in flips]
    return RewardChange(
        n=len(flips),
        old_mean=math.fsum(old) / len(old),
        new_mean=math.fsum(new) / len(new),
        rank_correlation=rank_correlation(old, new),
        within_groups=math.fsum(correlations) / len(correlations) if correlations else None,
        encouraged=signs.count((-1, 1)),
        discouraged=signs.count((1, -1)),
        silenced=signs.count((1, 0)) + signs.count((-1, 0)),
        awakened=signs.count((0, 1)) + signs.count((0, -1)),
    )


def _sign(value: float) -> int:
    return 0 if abs(value) < 1e-9 else (1 if value > 0 else -1)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation (1904), ties sharing their mean rank; None where one side is constant.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    if len(a) != len(b):
        raise ValueError(f"both must be of one length, got {len(a)} and {len(b)}")
    x, y = _ranks(a) - (len(a) + 1) / 2, _ranks(b) - (len(b) + 1) / 2
    spread = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / spread if spread else None


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """1 for the smallest; [3, 1, 3] -> [2.5, 1, 2.5]."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return ranks[places]
