"""The plan by which a candidate is promoted or rolled back, and the decisions that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from stateset_agents.deployment.guards import FailureGuard, Guard, LimitGuard, RateGuard, WindowGuard
from stateset_agents.deployment.sequential import Evidence
from stateset_agents.deployment.state import Deployment, Mode, Move
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings

RATE_PART = 0.2
"""Part of alpha for the rate of unsafe answers: it is seen within hundreds of answers also with a small part,
where a few points of success take thousands of conversations."""


class GuardPlan(Settings):
    """Limits that the candidate's answers must keep. An answer that failed is unsafe in any case."""

    latency: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """seconds; an answer that takes longer is unsafe"""
    cost: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """of one answer; one that costs more is unsafe"""
    rate: float | None = Field(default=0.1, gt=0, lt=1)
    """evidence that more than this share of the candidate's answers is unsafe rolls back; null: no such
    rule"""
    window: int | None = Field(default=None, ge=1)
    """a fast brake: the last so many answers, of which more than `window_share` were unsafe, roll back; its
    false alarms are many"""
    window_share: float = Field(default=0.1, ge=0, lt=1)
    """of the window"""

    def checks(self) -> tuple[Guard, ...]:
        """The guards of a single answer."""
        guards: list[Guard] = [FailureGuard()]
        if self.latency is not None:
            guards.append(LimitGuard("latency", self.latency))
        if self.cost is not None:
            guards.append(LimitGuard("cost", self.cost))
        return tuple(guards)


class DeploymentPlan(Settings):
    """The way of a candidate from shadow to full, or back."""

    stages: tuple[float, ...] = Field(default=(0.05, 0.25, 0.5), min_length=1)
    """shares of new conversations, one after the other"""
    shadow_answers: int = Field(default=100, ge=0)
    """answers of the candidate in shadow before the first stage may begin"""
    hold_outcomes: int = Field(default=500, ge=0)
    """outcomes in a stage before the next may begin"""
    hold_seconds: float = Field(default=3600.0, ge=0, allow_inf_nan=False)
    """seconds of shadow, and of each stage"""
    margin: float = Field(default=0.02, ge=0, lt=1)
    """how much lower the candidate's success may be; it is promoted once it is surely above that"""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """probability of a promotion of a candidate that is worse by the margin or more, and of a rollback of one
    that is as good as the baseline and as safe as `guards.rate`"""
    outcome_timeout: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """seconds from a conversation's first request after which no outcome counts as a failure"""
    guards: GuardPlan = Field(default_factory=GuardPlan)
    """what each answer must keep"""
    salt: str | None = Field(default=None, min_length=8)
    """key of the assignment; unset: drawn at random, as it should be"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not 0 < share < 1 for share in self.stages):
            raise ConfigurationError(f"stages must be between 0 and 1, got {list(self.stages)}")
        if list(self.stages) != sorted(set(self.stages)):
            raise ConfigurationError(f"stages must grow from one to the next, got {list(self.stages)}")
        return self

    @property
    def alphas(self) -> dict[str, float]:
        """Error probability of each decision. What may roll back shares `alpha` (Bonferroni); promotion has
        its own.

        >>> DeploymentPlan().alphas
        {'promote': 0.05, 'roll_back': 0.04, 'rate': 0.01}
        """
        if self.guards.rate is None:
            return {"promote": self.alpha, "roll_back": self.alpha}
        rate = RATE_PART * self.alpha
        return {"promote": self.alpha, "roll_back": self.alpha - rate, "rate": rate}

    def brakes(self) -> dict[str, WindowGuard | RateGuard]:
        """The brakes that count unsafe answers, by name."""
        brakes: dict[str, WindowGuard | RateGuard] = {}
        if self.guards.rate is not None:
            brakes["rate"] = RateGuard(limit=self.guards.rate, alpha=self.alphas["rate"])
        if self.guards.window is not None:
            brakes["window"] = WindowGuard(size=self.guards.window, share=self.guards.window_share)
        return brakes

    def next_share(self, share: float) -> float:
        """The stage after this share, or 1.0 after the last.

        >>> DeploymentPlan().next_share(0.05), DeploymentPlan().next_share(0.5)
        (0.25, 1.0)
        """
        return next((stage for stage in self.stages if stage > share), 1.0)


def read_plan(path: Path) -> DeploymentPlan:
    """Reads a plan from a YAML file of its fields. Raises ConfigurationError."""
    data: Any = read_yaml(path)
    if data is None:
        data = {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"{path} must hold the fields of a plan, such as stages: [0.05, 0.25, 0.5]")
    return DeploymentPlan(**data)


# --- decisions, as pure functions of the plan, the state and the facts ---

PROGRAM = "stateset-agents"
"""Author of moves that nobody makes by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The facts that a decision looks at."""

    evidence: Evidence
    brakes: Mapping[str, WindowGuard | RateGuard]
    shadow_answers: int
    """Answers of the candidate in shadow."""
    counts: Mapping[str, int]
    """Rows of the journal by table, kept with each move: fewer of them later are missing ones."""

    def snapshot(self, alpha: float) -> dict[str, float | int | None]:
        """The values that the journal keeps with a move."""
        rows = {f"{table}_rows": count for table, count in self.counts.items()}
        return {**self.evidence.snapshot(alpha), **rows}


def next_move(plan: DeploymentPlan, state: Deployment, known: Known, now: float) -> Move | None:
    """The move that the plan asks for now, or None. What rolls back comes first."""

    def move(mode: Mode, share: float, why: str) -> Move:
        evidence = known.snapshot(plan.alpha)
        return Move(mode=mode, share=share, at=now, who=PROGRAM, why=why, evidence=evidence)

    if state.mode == "rolled_back":
        return None
    for name, brake in known.brakes.items():
        if brake.fires:
            return move("rolled_back", 0.0, f"{name}: {_firing(brake)}")
    evidence, alphas = known.evidence, plan.alphas
    if evidence.roll_back.has_reached(alphas["roll_back"]):
        odds = _odds(evidence.roll_back.log_peak)
        why = f"success is lower: evidence {odds} of {1 / alphas['roll_back']:.3g}"
        return move("rolled_back", 0.0, why)
    if state.mode == "gradual" and evidence.promote.has_reached(alphas["promote"]):
        why = (
            f"success is not {plan.margin:g} lower: evidence {_odds(evidence.promote.log_peak)} of "
            f"{1 / alphas['promote']:.3g}"
        )
        return move("full", 1.0, why)
    share = plan.next_share(state.share)
    if state.mode != "full" and share < 1 and not _hold(plan, state, known, now):
        return move("gradual", share, "shadow is over" if state.mode == "shadow" else "the stage is over")
    return None


def objections(
    plan: DeploymentPlan, state: Deployment, known: Known, share: float, now: float
) -> tuple[str, ...]:
    """Objections to giving the candidate this share now, by hand; empty where nothing does."""
    reasons = []
    following = plan.next_share(state.share)
    if share >= 1:
        promote, alpha = known.evidence.promote, plan.alphas["promote"]
        if not promote.has_reached(alpha):
            reasons.append(f"evidence to promote is {_odds(promote.log_peak)} of {1 / alpha:.3g}")
    else:
        reasons += _hold(plan, state, known, now)
        if share > following:
            reasons.append(f"the stage {following:g} is left out")
    return tuple(reasons)


def _hold(plan: DeploymentPlan, state: Deployment, known: Known, now: float) -> list[str]:
    """Conditions that the present stage still lacks."""
    lacking = []
    if now - state.since < plan.hold_seconds:
        lacking.append(f"{now - state.since:.0f} of {plan.hold_seconds:g} seconds are over")
    if state.mode == "shadow":
        if known.shadow_answers < plan.shadow_answers:
            lacking.append(f"shadow has {known.shadow_answers} of {plan.shadow_answers} answers")
    elif (outcomes := known.evidence.num_outcomes - state.outcomes) < plan.hold_outcomes:
        lacking.append(f"the stage has {outcomes} of {plan.hold_outcomes} outcomes")
    return lacking


def _firing(brake: WindowGuard | RateGuard) -> str:
    if isinstance(brake, WindowGuard):
        return f"{sum(brake.recent)} of the last {len(brake.recent)} answers were unsafe"
    return f"surely more than {brake.limit:g} of the answers are unsafe"


def _odds(log_wealth: float) -> str:
    return f"{math.exp(min(log_wealth, 700)):.3g}"
