"""Compares two agents on the same scenarios with the same users, pair by pair.

How often equal agents are told apart is measured by scripts/interval_coverage.py:
see docs/evidence/interval-coverage.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateset_agents.algorithms.paired import Verdict, paired_rewards, paired_shares
from stateset_agents.evaluation.evaluator import Evaluation, measured, success_of_scenarios, tries_of
from stateset_agents.evaluation.recorded import groups_of
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory


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
    """95 % of the difference, see `paired_shares`."""
    p_value: float
    """p-value of no difference, see `sign_flip_p`; with one try of each scenario McNemar's."""
    wins: int
    """Scenarios where B succeeded (with several tries: more often than A)."""
    losses: int
    ties: int
    verdict: Verdict
    """Better (worse) where `p_value` is at most 5 %: `interval` then lies above (below) 0, else holds it."""
    reason: str
    """The reason why it is unclear; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Agent B against agent A."""

    success: Paired | None
    """Comparison by success; None where the environment gives no verdict."""
    families: Mapping[str, Paired]
    reward: float | None
    """Mean of B's reward minus A's over the pairs where both are scored; None without any."""
    reward_interval: tuple[float, float] | None
    """95 % of that mean, see `paired_rewards`; None for a single pair and where no two differ."""
    reward_verdict: Verdict
    """Verdict on the rewards, by `paired_rewards`."""
    reward_reason: str
    """The reason why that is unclear; else empty."""
    num_rewards_differ: int
    """Pairs in which one of them was paid more."""
    num_pairs: int
    """Scenarios that both played."""
    num_left_out: int
    """Scenarios that one of them did not: its conversation failed."""
    temperature: float

    @property
    def verdict(self) -> Verdict:
        """The verdict on B, by success, or by the reward where the environment gives no verdict."""
        return self.reward_verdict if self.success is None else self.success.verdict

    @property
    def reason(self) -> str:
        """The reason why the verdict is unclear; else empty."""
        return self.reward_reason if self.success is None else self.success.reason

    def summary(self) -> dict[str, Any]:
        """The comparison as plain JSON."""
        return {
            **asdict(self),
            "verdict": self.verdict,
            "reason": self.reason,
        }


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
    reward = paired_rewards(rewards) if rewards else None
    families = sorted({family for family, _, _ in judged})
    return Comparison(
        success=_paired([(share_a, share_b) for _, share_a, share_b in judged]) if judged else None,
        families={
            name: _paired([(share_a, share_b) for family, share_a, share_b in judged if family == name])
            for name in families
        },
        reward=reward.mean if reward else None,
        reward_interval=reward.interval if reward else None,
        reward_verdict=reward.verdict if reward else "unclear",
        reward_reason=reward.reason if reward else "no reward was given in both",
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
                f"scenario {name} is another in {b.folder.path} than in {a.folder.path}: give --replay"
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


def _paired(shares: Sequence[tuple[float, float]]) -> Paired:
    """The comparison of A's and B's shares of successful tries of each scenario."""
    n = len(shares)
    wins, losses = sum(b > a for a, b in shares), sum(a > b for a, b in shares)
    result = paired_shares([b - a for a, b in shares])
    assert result.interval is not None  # shares always have one
    return Paired(
        n=n,
        a=math.fsum(a for a, _ in shares) / n,
        b=math.fsum(b for _, b in shares) / n,
        difference=result.mean,
        interval=result.interval,
        p_value=result.p_value,
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
        verdict=result.verdict,
        reason=result.reason,
    )
