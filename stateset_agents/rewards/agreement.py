"""How far a judge agrees with a check: measure it before you train on the judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateset_agents.algorithms.intervals import share_interval
from stateset_agents.core.scoring.base import RewardResult, score_trajectories
from stateset_agents.core.scoring.function_reward import Reward, as_reward
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory

Counts = tuple[int, int, int, int]
"""Conversations that both pass, only the judge, only the check, neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two verdicts on the same conversations."""

    n: int
    """Conversations on which both have one."""
    accuracy: float
    """The share on which they agree."""
    accuracy_interval: tuple[float, float]
    """95 %, over scenarios with all their conversations (`algorithms.intervals.share_interval`)."""
    kappa: float | None
    """Agreement beyond chance, see `cohens_kappa`; None where both always say the same one thing."""
    kappa_interval: tuple[float, float] | None
    """95 %, see `kappa_interval`."""
    both: int
    only_judge: int
    """The judge passed what the check did not: what training would find."""
    only_check: int
    neither: int
    num_unscored: int
    """Conversations that the judge could not score, or the check has nothing to say about."""

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def cohens_kappa(both: int, only_a: int, only_b: int, neither: int) -> float | None:
    """(p_o - p_e) / (1 - p_e): 1 is full agreement, 0 that of two who answer by their own rates at random.

    Cohen, Educational and Psychological Measurement 20, 1960. None where chance alone would agree always, and
    for no case.

    >>> cohens_kappa(20, 5, 10, 15)
    0.4
    """
    n = both + only_a + only_b + neither
    if n == 0:
        return None
    a, b = (both + only_a) / n, (both + only_b) / n
    expected = a * b + (1 - a) * (1 - b)
    if expected == 1:
        return None
    return round(((both + neither) / n - expected) / (1 - expected), 12)


async def measure_agreement(
    judge: Reward,
    check: Reward,
    trajectories: Sequence[Trajectory],
    *,
    judge_passes: float = 0.5,
    check_passes: float = 0.5,
    resamples: int = 2000,
) -> Agreement:
    """Let both score the conversations; one passes where its score is at least its threshold.

        agreement = await measure_agreement(judge, create_correctness_reward(), trajectories)

    Take conversations of which about half are right: on others a judge that always says yes agrees, too,
    and only kappa shows it. Raises ConfigurationError where no conversation has both verdicts.
    """
    verdicts, failures = [], []
    for reward, threshold in ((as_reward(judge), judge_passes), (as_reward(check), check_passes)):
        results = await score_trajectories(reward, trajectories)
        scores = [result.score if isinstance(result, RewardResult) else None for result in results]
        failures += [str(result) for result in results if isinstance(result, RewardFailure)]
        verdicts.append([None if score is None else score >= threshold for score in scores])
    by_scenario: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for trajectory, judged, checked in zip(trajectories, *verdicts, strict=True):
        if judged is not None and checked is not None:
            by_scenario[trajectory.scenario.id].append((judged, checked))
    if not by_scenario:
        why = failures[0] if failures else "look at what they need in the scenarios"
        raise ConfigurationError(f"no conversation has a verdict of judge and check: {why}")
    counts = [_counts(pairs) for pairs in by_scenario.values()]
    total = _added(counts)
    n = sum(total)
    accuracy = (total[0] + total[3]) / n
    return Agreement(
        n=n,
        accuracy=accuracy,
        accuracy_interval=share_interval(_linear_shares(counts, accuracy)),
        kappa=cohens_kappa(*total),
        kappa_interval=await in_thread(kappa_interval, counts, resamples),
        both=total[0],
        only_judge=total[1],
        only_check=total[2],
        neither=total[3],
        num_unscored=len(trajectories) - n,
    )


def _counts(pairs: Sequence[tuple[bool, bool]]) -> Counts:
    judged_checked = ((True, True), (True, False), (False, True), (False, False))
    both, only_judge, only_check, neither = (pairs.count(kind) for kind in judged_checked)
    return both, only_judge, only_check, neither


def _added(counts: Sequence[Counts]) -> Counts:
    both, only_judge, only_check, neither = (sum(column) for column in zip(*counts, strict=True))
    return both, only_judge, only_check, neither


def _linear_shares(counts: Sequence[Counts], accuracy: float) -> list[float]:
    """A share for each scenario, whose mean and spread are those of the share of all conversations.

    With equally many conversations the scenario's own; else the ratio's linearisation (Cochran, Sampling
    Techniques, 1977, section 6.3).
    """
    mean_size = sum(map(sum, counts)) / len(counts)
    return [accuracy + (count[0] + count[3] - accuracy * sum(count)) / mean_size for count in counts]


def kappa_interval(counts: Sequence[Counts], resamples: int = 2000) -> tuple[float, float] | None:
    """95 % of kappa from each scenario's counts; None without a kappa.

    On each side the wider of two: the percentile bootstrap over scenarios, and the interval of the agreement
    with what chance alone would agree taken as known. The bootstrap knows nothing of disagreements that it
    has hardly met: near 1 it holds the truth in 31 % of the cases with 12 scenarios.
    """
    import numpy as np

    table = np.asarray(counts)  # [scenarios, 4]
    draw = np.random.default_rng(derive(0, "agreement", len(counts)))
    drawn = table[draw.integers(len(table), size=(resamples, len(table)))].sum(1)  # [resamples, 4]
    found = [cohens_kappa(*map(int, row)) for row in drawn]
    kappas = [kappa for kappa in found if kappa is not None]
    if not kappas:
        return None
    drawn_low, drawn_high = np.quantile(kappas, [0.025, 0.975])
    both, only_judge, only_check, neither = total = _added(counts)
    n = sum(total)
    judge, check = (both + only_judge) / n, (both + only_check) / n
    expected = judge * check + (1 - judge) * (1 - check)
    if expected == 1:
        return float(drawn_low), float(drawn_high)
    low, high = (
        (bound - expected) / (1 - expected)
        for bound in share_interval(_linear_shares(counts, (both + neither) / n))
    )
    return min(low, float(drawn_low)), max(high, float(drawn_high))
