"""Is one agent better than another? Both play the same scenarios with the same users, pair by pair.

How often equal agents are told apart is measured by scripts/interval_coverage.py; docs/measuring.md has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stateset_agents.algorithms.intervals import exact_mcnemar, mean_interval, paired_interval
from stateset_agents.evaluation.evaluator import Evaluation, measured
from stateset_agents.evaluation.measures import success_of_scenarios, tries_of
from stateset_agents.evaluation.recorded import groups_of
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory

__all__ = [
    "Comparison",
    "Paired",
    "Verdict",
    "compare",
    "compare_runs",
    "exact_mcnemar",
    "mean_interval",
    "mean_verdict",
    "paired_interval",
    "recorded_evaluation",
]

Verdict = Literal["better", "worse", "unclear"]
"""Of B, against A."""
_FEWEST = 20
"""Scenarios whose means must differ for a verdict by the mean: with 12, lognormal differences of no mean pass
for one in 5 % of the cases, and rare ones that were not met in 28 %."""
_ALIKE = 59
"""Scenarios that must differ by the very same amount for a verdict: .95 ** 59 < 5 %, so that what is seen in
none of them is in fewer than one scenario of twenty."""
_SURE = 0.98
"""Of the interval that decides by the mean: at 95 % lognormal differences of no mean pass for one in 9 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Success of two agents on the same scenarios; wins, losses and ties are B's."""

    n: int
    """Scenarios."""
    a: float
    """Share of A's successes."""
    b: float
    difference: float
    """b - a."""
    interval: tuple[float, float]
    """95 % of the difference, see `paired_interval`."""
    p_value: float
    """Of as many wins as losses, see `exact_mcnemar`."""
    wins: int
    """Scenarios where B succeeded (with several tries: more often than A)."""
    losses: int
    ties: int
    verdict: Verdict
    """With one try of each scenario better (worse) where `interval` lies above (below) 0 and `p_value` is at
    most 5 %; with several where `mean_verdict` and `interval` say so."""
    reason: str
    """Why it is unclear; else empty."""

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Agent B against agent A."""

    success: Paired | None
    """None where the environment gives no verdict."""
    families: Mapping[str, Paired]
    reward: float | None
    """Mean of B's reward minus A's over the pairs where both are scored; None without any."""
    reward_interval: tuple[float, float] | None
    """95 % of that mean, see `mean_interval`; None for a single pair and where no two differ."""
    reward_verdict: Verdict
    """By `mean_verdict`."""
    reward_reason: str
    """Why that is unclear; else empty."""
    num_rewards_differ: int
    """Pairs in which one of them was paid more."""
    num_pairs: int
    """Scenarios that both played."""
    num_left_out: int
    """Scenarios that one of them did not: its conversation failed."""
    temperature: float

    @property
    def verdict(self) -> Verdict:
        """Is B better than A? Going by success, or by the reward where the environment gives no verdict."""
        return self.reward_verdict if self.success is None else self.success.verdict

    @property
    def reason(self) -> str:
        """Why that is unclear; else empty."""
        return self.reward_reason if self.success is None else self.success.reason

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **asdict(self),
            "verdict": self.verdict,
            "reason": self.reason,
            "success": None if self.success is None else self.success.summary(),
            "families": {name: result.summary() for name, result in self.families.items()},
        }


def mean_verdict(differences: Sequence[float]) -> tuple[Verdict, str]:
    """Is the mean of one difference for each scenario above (below) 0? And why that is unclear, or nothing.

    Better (worse) where the 98 % `mean_interval` lies above (below) 0 and at least twenty scenarios differ
    from 0, or fifty-nine where all differ by the same amount.
    """
    num_differ = sum(difference != 0 for difference in differences)
    if num_differ < _FEWEST:
        return "unclear", f"{num_differ} of {len(differences)} scenarios differ, {_FEWEST} must"
    interval = mean_interval(differences, confidence=_SURE)
    if interval is None and num_differ < _ALIKE:
        return "unclear", f"all {num_differ} differ by {differences[0]:+.3g}: {_ALIKE} must for a verdict"
    low, high = interval or (differences[0], differences[0])
    if low <= 0 <= high:
        return "unclear", f"the {_SURE:.0%} interval of the mean, [{low:+.3f}, {high:+.3f}], holds 0"
    return ("better" if low > 0 else "worse"), ""


def compare(a: Evaluation, b: Evaluation) -> Comparison:
    """Pair two evaluations by scenario; tries of one scenario are taken together.

    Raises ConfigurationError where they are of other scenarios, temperatures or numbers of tries, or no
    scenario was played by both.
    """
    if _scenarios(a) != _scenarios(b):
        raise ConfigurationError("two agents are compared on the same scenarios: evaluate both on those")
    for condition, of_a, of_b in (
        ("at the same temperature", a.temperature, b.temperature),
        ("on equally many tries", a.tries, b.tries),
    ):
        if of_a != of_b:
            raise ConfigurationError(f"two agents are compared {condition}, got {of_a} and {of_b}")
    by_scenario_a, by_scenario_b = tries_of(a.groups), tries_of(b.groups)
    pairs = [(by_scenario_a[name], by_scenario_b[name]) for name in by_scenario_a if name in by_scenario_b]
    if not pairs:
        raise ConfigurationError("no scenario was played by both agents: look at what failed")
    judged = []
    for tries_a, tries_b in pairs:
        shares = success_of_scenarios([tries_a]), success_of_scenarios([tries_b])
        if all(shares):
            judged.append((tries_a[0].scenario.family, shares[0][0], shares[1][0]))
    rewards = [
        reward_b - reward_a
        for tries_a, tries_b in pairs
        if (reward_a := _mean_reward(tries_a)) is not None and (reward_b := _mean_reward(tries_b)) is not None
    ]
    reward_verdict, reward_reason = mean_verdict(rewards)
    families = sorted({family for family, _, _ in judged})
    # A scenario may have been given twice.
    single = all(len(tries_a) == len(tries_b) == 1 for tries_a, tries_b in pairs)
    return Comparison(
        success=_paired([(share_a, share_b) for _, share_a, share_b in judged], single) if judged else None,
        families={
            name: _paired(
                [(share_a, share_b) for family, share_a, share_b in judged if family == name], single
            )
            for name in families
        },
        reward=math.fsum(rewards) / len(rewards) if rewards else None,
        reward_interval=mean_interval(rewards) if rewards else None,
        reward_verdict=reward_verdict,
        reward_reason=reward_reason,
        num_rewards_differ=sum(difference != 0 for difference in rewards),
        num_pairs=len(pairs),
        num_left_out=len(_scenarios(a)) - len(pairs),
        temperature=a.temperature,
    )


def compare_runs(a: RunLog, b: RunLog) -> Comparison:
    """Pair what two runs recorded of their evaluations after training; nothing is played.

    Raises ConfigurationError as `compare` and `recorded_evaluation` do, and where a scenario of one name is
    another one in the other run.
    """
    of_a, of_b = recorded_evaluation(a), recorded_evaluation(b)
    scenarios_a, scenarios_b = (
        {name: tries[0].scenario for name, tries in tries_of(side.groups).items()} for side in (of_a, of_b)
    )
    for name in scenarios_a.keys() & scenarios_b.keys():
        if scenarios_a[name] != scenarios_b[name]:
            raise ConfigurationError(
                f"the scenario {name} is another one in {b.folder.path} than in {a.folder.path}: play both "
                "on one environment with --replay"
            )
    return compare(of_a, of_b)


def recorded_evaluation(log: RunLog) -> Evaluation:
    """A run's evaluation after training, from its conversations.

    Raises ConfigurationError where the run was not evaluated, has not ended, or kept no conversation.
    """
    with damage_named(log.folder.path):
        summary = log.summary().get("after")
        groups = [group for _, of_step in groups_of(log.rollouts("after")) for group in of_step]
        if summary is not None and groups:
            return measured(groups, tries=summary["tries"], temperature=summary["temperature"])
    raise ConfigurationError(
        f"{log.folder.path} has no held-out conversations from after its training: it needs an "
        "`evaluation` section, an end, and `training.log_rollouts`; --replay plays its newest checkpoint"
    )


def _scenarios(evaluation: Evaluation) -> set[str]:
    return {trajectory.scenario.id for group in evaluation.groups for trajectory in group.trajectories}


def _mean_reward(tries: Sequence[Trajectory]) -> float | None:
    rewards = [trajectory.reward for trajectory in tries if trajectory.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _paired(shares: Sequence[tuple[float, float]], single: bool) -> Paired:
    """Of each scenario A's and B's share of successful tries; 0 or 1 each where there was a single one."""
    n = len(shares)
    wins, losses = sum(b > a for a, b in shares), sum(a > b for a, b in shares)
    interval, p_value = paired_interval(shares), exact_mcnemar(wins, losses)
    verdict, reason = _by_coin(wins, losses, p_value) if single else mean_verdict([b - a for a, b in shares])
    if not reason and interval[0] <= 0 <= interval[1]:
        verdict, reason = "unclear", "the 95 % interval of the difference holds 0"
    return Paired(
        n=n,
        a=math.fsum(a for a, _ in shares) / n,
        b=math.fsum(b for _, b in shares) / n,
        difference=math.fsum(b - a for a, b in shares) / n,
        interval=interval,
        p_value=p_value,
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
        verdict=verdict,
        reason=reason,
    )


def _by_coin(wins: int, losses: int, p_value: float) -> tuple[Verdict, str]:
    if p_value > 0.05:
        return "unclear", f"a coin falls so, {wins} to {losses}, in {p_value:.0%} of the cases"
    return ("better" if wins > losses else "worse"), ""
