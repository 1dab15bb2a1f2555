"""What played conversations show: success, k tries, matched pairs, broken rules, misses. Plain counting.

Every number is first taken within a scenario and then averaged over scenarios, each counting once; intervals
are over scenarios, too, for tries of one scenario are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from stateset_agents.algorithms.intervals import mean_interval, pass_at_k, pass_hat_k, share_interval
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

USER_MISS, VIOLATIONS = "user_miss", "violations"
"""Keys of a trajectory's metadata; an environment gives them by `Outcome.metadata`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean over scenarios and how sure it is."""

    value: float
    interval: tuple[float, float] | None
    """95 %, over scenarios; None of a mean that is no share where no two scenarios differ."""
    n: int
    """Scenarios (for matched pairs: pairs) behind it."""

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"value": self.value, "interval": self.interval and list(self.interval), "n": self.n}


def tries_of(groups: Sequence[TrajectoryGroup]) -> dict[str, list[Trajectory]]:
    """Scenario id -> its conversations that were played to an end; none failed ones."""
    tries: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.status is not Status.FAILED:
                tries[trajectory.scenario.id].append(trajectory)
    return dict(tries)


def success_of_scenarios(tries: Iterable[Sequence[Trajectory]]) -> list[float]:
    """The share of judged tries that succeeded, of each scenario that has any."""
    verdicts = map(_verdicts, tries)
    return [sum(judged) / len(judged) for judged in verdicts if judged]


def _verdicts(tries: Sequence[Trajectory]) -> list[bool]:
    return [trajectory.success for trajectory in tries if trajectory.success is not None]


def share(shares: Sequence[float]) -> MeanEstimate | None:
    """None without any scenario."""
    if not shares:
        return None
    return MeanEstimate(value=sum(shares) / len(shares), interval=share_interval(shares), n=len(shares))


def mean_of_scenarios(
    tries: Iterable[Sequence[Trajectory]], value: Callable[[Trajectory], float | None]
) -> MeanEstimate | None:
    """The mean of a number of conversations; those of None don't count, None where all are."""
    numbers = [[number for t in attempts if (number := value(t)) is not None] for attempts in tries]
    means = [sum(known) / len(known) for known in numbers if known]
    if not means:
        return None
    return MeanEstimate(value=sum(means) / len(means), interval=mean_interval(means), n=len(means))


def passes(
    tries: Iterable[Sequence[Trajectory]], num_tries: int
) -> tuple[Mapping[int, MeanEstimate], Mapping[int, MeanEstimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and `num_tries`; a scenario with fewer judged tries is left out
    of that k."""
    counts = [(sum(verdicts), len(verdicts)) for verdicts in map(_verdicts, tries)]
    wanted = sorted({num_tries, *(2**power for power in range(num_tries.bit_length()))})
    at_least_one: dict[int, MeanEstimate] = {}
    every_one: dict[int, MeanEstimate] = {}
    for k in wanted:
        enough = [(successes, n) for successes, n in counts if n >= k]
        for found, estimator in ((at_least_one, pass_at_k), (every_one, pass_hat_k)):
            estimate = share([estimator(successes, n, k) for successes, n in enough])
            if estimate is not None:
                found[k] = estimate
    return at_least_one, every_one


def matched_pairs_right(tries: Iterable[Sequence[Trajectory]]) -> MeanEstimate | None:
    """How often both scenarios of a matched pair succeed: those with the same `context["pair"]`, which differ
    in one fact that changes the right answer. Try k of one goes with try k of the other.

    None without a pair of which both were played. An agent that always agrees, or always refuses, has half of
    the scenarios right and none of the pairs.
    """
    pairs: dict[str, list[dict[int, bool]]] = defaultdict(list)
    for attempts in tries:
        pair = attempts[0].scenario.context.get("pair")
        verdicts = {attempt.member: attempt.success for attempt in attempts if attempt.success is not None}
        if pair is not None and verdicts:
            pairs[str(pair)].append(verdicts)
    shares = []
    for scenarios in pairs.values():
        members = set.intersection(*map(set, scenarios))
        if len(scenarios) > 1 and members:
            both = [all(verdicts[member] for verdicts in scenarios) for member in members]
            shares.append(sum(both) / len(both))
    return share(shares)


def violation_rates(tries: Iterable[Sequence[Trajectory]]) -> Mapping[str, MeanEstimate]:
    """Rule -> the share of conversations in which it was broken, and under "any" that of at least one rule.

    Read from `metadata["violations"]`; empty where no environment gives that.
    """
    reported = [
        [counts for t in attempts if isinstance(counts := t.metadata.get(VIOLATIONS), Mapping)]
        for attempts in tries
    ]
    reported = [counts_of_tries for counts_of_tries in reported if counts_of_tries]

    def rate(is_broken: Callable[[Mapping[str, Any]], object]) -> MeanEstimate:
        estimate = share([sum(bool(is_broken(c)) for c in counts) / len(counts) for counts in reported])
        assert estimate is not None  # some scenario reports
        return estimate

    rules = sorted(
        {str(rule) for counts_of_tries in reported for counts in counts_of_tries for rule in counts}
    )
    rates = {rule: rate(methodcaller("get", rule)) for rule in rules}
    return {**rates, "any": rate(lambda counts: any(counts.values()))} if reported else {}


def user_misses(tries: Iterable[Sequence[Trajectory]]) -> MeanEstimate | None:
    """Replies of a conversation of which its user could make nothing; None where nobody counts them."""

    def misses(trajectory: Trajectory) -> float | None:
        count = trajectory.metadata.get(USER_MISS)
        return float(count) if isinstance(count, int | float) else None

    return mean_of_scenarios(tries, misses)
