"""What played conversations show beyond their success: k tries, twins, broken rules, misses. Plain counting.

Every number is first taken within a scenario and then averaged over scenarios, each counting once; intervals
are over scenarios, too, for tries of one scenario are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.algorithms.intervals import mean_interval, pass_at_k, pass_hat_k, share_interval
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

__all__ = [
    "Estimate",
    "mean_of_scenarios",
    "passes",
    "success_of_scenarios",
    "tries_of",
    "twins_right",
    "user_misses",
    "violation_rates",
]

USER_MISS, VIOLATIONS = "user_miss", "violations"
"""Keys of a trajectory's metadata; an environment gives them by `Outcome.metadata`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over scenarios and how sure it is."""

    value: float
    interval: tuple[float, float] | None
    """95 %, over scenarios; None of a mean that is no share where no two scenarios differ."""
    n: int
    """Scenarios (for twins: pairs) behind it."""

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
    verdicts = [[one.success for one in own if one.success is not None] for own in tries]
    return [sum(own) / len(own) for own in verdicts if own]


def share(shares: Sequence[float]) -> Estimate | None:
    """None without any scenario."""
    if not shares:
        return None
    return Estimate(value=sum(shares) / len(shares), interval=share_interval(shares), n=len(shares))


def mean_of_scenarios(
    tries: Iterable[Sequence[Trajectory]], value: Callable[[Trajectory], float | None]
) -> Estimate | None:
    """The mean of a number of conversations; those of None don't count, None where all are."""
    given = [[number for one in own if (number := value(one)) is not None] for own in tries]
    means = [sum(own) / len(own) for own in given if own]
    if not means:
        return None
    return Estimate(value=sum(means) / len(means), interval=mean_interval(means), n=len(means))


def passes(
    tries: Iterable[Sequence[Trajectory]], num_tries: int
) -> tuple[Mapping[int, Estimate], Mapping[int, Estimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and `num_tries`; a scenario with fewer judged tries is left out
    of that k."""
    counts = []
    for own in tries:
        verdicts = [one.success for one in own if one.success is not None]
        counts.append((sum(verdicts), len(verdicts)))
    wanted = sorted(
        {num_tries, *(2**power for power in range(num_tries.bit_length()) if 2**power <= num_tries)}
    )
    at_least_one: dict[int, Estimate] = {}
    every_one: dict[int, Estimate] = {}
    for k in wanted:
        enough = [(successes, n) for successes, n in counts if n >= k]
        for found, estimator in ((at_least_one, pass_at_k), (every_one, pass_hat_k)):
            estimate = share([estimator(successes, n, k) for successes, n in enough])
            if estimate is not None:
                found[k] = estimate
    return at_least_one, every_one


def twins_right(tries: Iterable[Sequence[Trajectory]]) -> Estimate | None:
    """How often all twins of a pair succeed: scenarios with the same `context["pair"]`, which differ in one
    fact that turns the right answer round. Try k of one goes with try k of the other.

    None where no two played scenarios are twins. Who always gives in, or always refuses, has half of the
    scenarios right and none of the pairs.
    """
    pairs: dict[str, list[dict[int, bool]]] = defaultdict(list)
    for own in tries:
        pair = own[0].scenario.context.get("pair")
        verdicts = {one.member: one.success for one in own if one.success is not None}
        if pair is not None and verdicts:
            pairs[str(pair)].append(verdicts)
    shares = []
    for twins in pairs.values():
        members = set.intersection(*(set(verdicts) for verdicts in twins))
        if len(twins) > 1 and members:
            both = [all(verdicts[member] for verdicts in twins) for member in members]
            shares.append(sum(both) / len(both))
    return share(shares)


def violation_rates(tries: Iterable[Sequence[Trajectory]]) -> Mapping[str, Estimate]:
    """Rule -> the share of conversations in which it was broken, and under "any" that of at least one rule.

    Read from `metadata["violations"]`; empty where no environment gives that.
    """
    kept = [
        [broken for one in own if isinstance(broken := one.metadata.get(VIOLATIONS), Mapping)]
        for own in tries
    ]
    told = [own for own in kept if own]
    rules = sorted({str(rule) for own in told for broken in own for rule in broken})
    rates: dict[str, Estimate] = {}
    for rule in rules:
        rates[rule] = _expected(share([sum(bool(one.get(rule)) for one in own) / len(own) for own in told]))
    if rates or told:
        shares = [sum(any(one.values()) for one in own) / len(own) for own in told]
        rates["any"] = _expected(share(shares))
    return rates


def user_misses(tries: Iterable[Sequence[Trajectory]]) -> Estimate | None:
    """Replies of a conversation of which its user could make nothing; None where nobody counts them."""

    def misses(one: Trajectory) -> float | None:
        count = one.metadata.get(USER_MISS)
        return float(count) if isinstance(count, int | float) else None

    return mean_of_scenarios(tries, misses)


def _expected(estimate: Estimate | None) -> Estimate:
    assert estimate is not None  # there is a scenario
    return estimate
