"""What a deployment says of itself: for `stateset-agents status`, and as JSON."""

from __future__ import annotations

from typing import Any

from stateset_agents.deployment.assignment import Arm
from stateset_agents.deployment.guards import RateGuard
from stateset_agents.deployment.journal import DeploymentRecord
from stateset_agents.deployment.ledger import Ledger


def status_of(record: DeploymentRecord, ledger: Ledger, now: float) -> dict[str, Any]:
    """Plain values. Wealths are evidence against "worse by the margin" and "as good": compare with
    `needed`."""
    state, evidence, alphas = ledger.state, ledger.evidence, record.plan.alphas
    interval = evidence.interval(record.plan.alpha)
    return {
        "id": record.id,
        "candidate": record.candidate,
        "baseline": record.baseline,
        "mode": state.mode,
        "share": state.share,
        "since": state.since,
        "seconds": now - state.since,
        "why": state.why,
        "moves": state.version,
        "evidence": {
            "outcomes": evidence.num_outcomes,
            "waiting": ledger.num_waiting,
            "timeouts": ledger.timeouts,
            "effect": None if interval is None else evidence.effect.estimate,
            "interval": None if interval is None else list(interval),
            "margin": evidence.margin,
            "promote": _evidence(evidence.promote.log_wealth, evidence.promote.p_value, alphas["promote"]),
            "roll_back": _evidence(
                evidence.roll_back.log_wealth, evidence.roll_back.p_value, alphas["roll_back"]
            ),
        },
        "arms": {
            "candidate": _arm(ledger, "candidate", evidence.candidate_sum, evidence.candidates),
            "baseline": _arm(ledger, "baseline", evidence.baseline_sum, evidence.baselines),
        },
        "agreement": _agreement(ledger),
        "violations": dict(ledger.unsafe),
        "brakes": {
            name: {"fires": brake.fires, "alpha": brake.alpha if isinstance(brake, RateGuard) else None}
            for name, brake in ledger.brakes.items()
        },
    }


def _evidence(log_wealth: float, p_value: float, alpha: float) -> dict[str, float]:
    return {"log_wealth": log_wealth, "p_value": p_value, "alpha": alpha, "needed": 1 / alpha}


def _agreement(ledger: Ledger) -> dict[str, int]:
    """Answers in shadow that could be compared with the baseline's, and how many did and said the same."""
    found = ledger.agreements
    return {
        "answers": found.total(),
        "same_calls": found["calls"] + found["reply"],
        "same_reply": found["reply"],
    }


def _arm(ledger: Ledger, arm: Arm, successes: float, outcomes: int) -> dict[str, float | int | None]:
    return {
        "conversations": ledger.assigned[arm],
        "outcomes": outcomes,
        "success": successes / outcomes if outcomes else None,
        "answers": ledger.answers[arm],
        "unsafe_answers": ledger.unsafe_answers[arm],
        "mean_seconds": _mean(*ledger.seconds[arm]),
        "mean_cost": _mean(*ledger.costs[arm]),
    }


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None
