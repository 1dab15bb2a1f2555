"""What happens next, as pure functions of the plan, the state and what is known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stateset_agents.deployment.guards import RateGuard, WindowGuard
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.sequential import Evidence
from stateset_agents.deployment.state import Deployment, Mode, Move

PROGRAM = "stateset-agents"
"""Who moved, where nobody did by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a decision looks at."""

    evidence: Evidence
    brakes: Mapping[str, WindowGuard | RateGuard]
    shadow_answers: int
    """Of the candidate, in shadow."""
    counts: Mapping[str, int]
    """Rows of the journal by table, kept with each move: fewer of them later are missing ones."""

    def snapshot(self, alpha: float) -> dict[str, float | int | None]:
        """What the journal keeps with a move. Wealths are logarithms."""
        evidence = self.evidence
        low, high = evidence.interval(alpha) or (None, None)
        return {
            "outcomes": evidence.num_outcomes,
            "candidates": evidence.candidates,
            "baselines": evidence.baselines,
            "effect": evidence.effect.estimate,
            "low": low,
            "high": high,
            "log_wealth_promote": evidence.promote.log_wealth,
            "log_wealth_roll_back": evidence.roll_back.log_wealth,
            **{f"{table}_rows": count for table, count in self.counts.items()},
        }


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
    """What speaks against giving the candidate this share now, by hand; empty where nothing does."""
    found = []
    following = plan.next_share(state.share)
    if share >= 1:
        promote, alpha = known.evidence.promote, plan.alphas["promote"]
        if not promote.has_reached(alpha):
            found.append(f"evidence to promote is {_odds(promote.log_peak)} of {1 / alpha:.3g}")
    else:
        found += _hold(plan, state, known, now)
        if share > following:
            found.append(f"the stage {following:g} is left out")
    return tuple(found)


def _hold(plan: DeploymentPlan, state: Deployment, known: Known, now: float) -> list[str]:
    """What the present stage still lacks."""
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
