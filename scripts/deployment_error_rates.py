"""How often a deployment decides wrongly, and how fast rightly: simulated deployments with a known truth.

    .venv/bin/python scripts/deployment_error_rates.py            print the tables
    .venv/bin/python scripts/deployment_error_rates.py --write    into docs/evidence/deployment-decisions.md

Each deployment has 8,000 conversations and a ramp of 5 %, 25 % from conversation 501 and 50 % from 1,501, and
every rule looks after every conversation. `decisions` and `brake_actions` are twins of the package's steps
for many deployments at once: running sums take the place of the steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stateset_agents.deployment.guards import rate_bets
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.sequential import BETS, MIN_OUTCOMES, SEQUENCE_PRIOR

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "deployment-decisions.md"
BEGIN, END = "<!-- scripts/deployment_error_rates.py --write -->\n", "<!-- end -->\n"
CONVERSATIONS, ACTIONS = 8_000, 10_000
MARGIN, ALPHA = 0.02, 0.05
LIMIT = 0.1
"""Of the unsafe actions."""
CHUNK = 20
"""Deployments at once: few enough for a processor's cache."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Success of the baseline from the first conversation to the last, and what the candidate's differs
    by."""

    name: str
    effect: float
    first: float = 0.8
    last: float = 0.8
    counted: str
    """promote or roll_back: the decision whose share and median is shown."""


TRUTHS = (
    Truth(name="equal", effect=0.0, counted="roll_back"),
    Truth(name="2 points worse (the margin)", effect=-0.02, counted="promote"),
    Truth(name="equal, everyone's rate drifts .6 → .9", effect=0.0, first=0.6, last=0.9, counted="roll_back"),
    Truth(name="margin, rate drifts .6 → .9", effect=-0.02, first=0.6, last=0.9, counted="promote"),
    Truth(name="equal, rate drifts .9 → .6", effect=0.0, first=0.9, last=0.6, counted="roll_back"),
    Truth(name="5 points worse", effect=-0.05, counted="roll_back"),
    Truth(name="10 points worse", effect=-0.10, counted="roll_back"),
    Truth(name="5 points better", effect=0.05, counted="promote"),
    Truth(name="equal", effect=0.0, counted="promote"),
)
RATES = (0.03, 0.05, 0.06, 0.08, 0.10, 0.12, 0.15, 0.20)
"""Shares of unsafe actions, of which a tenth is allowed."""
RULES = {
    "z_peeked": "z-test, a look after each",
    "z_once": "z-test once, at the end",
    "pooled": "confidence sequence of pooled rates",
    "aipw": "AIPW confidence sequence",
    "betting": "**betting** (shipped)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Simulated conversations: [deployments, conversations]."""

    probability: Array
    """[conversations] of the candidate."""
    is_candidate: NDArray[np.bool_]
    outcome: Array


def ramp(conversations: int = CONVERSATIONS) -> Array:
    """[conversations] the candidate's share."""
    index = np.arange(conversations)
    return np.select([index < 500, index < 1500], [0.05, 0.25], 0.5)


def traffic(truth: Truth, deployments: int, draw: np.random.Generator, conversations: int) -> Traffic:
    """Independent conversations."""
    probability = ramp(conversations)
    rate = np.linspace(truth.first, truth.last, conversations)
    is_candidate = draw.random((deployments, conversations)) < probability
    success = draw.random((deployments, conversations)) < rate + truth.effect * is_candidate
    return Traffic(probability=probability, is_candidate=is_candidate, outcome=success.astype(np.float64))


def _before(sums: Array) -> Array:
    """Running sums of what came before each conversation."""
    return np.concatenate([np.zeros_like(sums[:, :1]), sums[:, :-1]], axis=1)


def wealth(values: Array, bets: Sequence[float] = BETS) -> Array:
    """[deployments, conversations] log of the mean wealth after each value: the twin of `EProcess.step`."""
    wealths = [np.log1p(bet * values).cumsum(axis=1) for bet in bets]
    mean: Array = np.logaddexp.reduce(wealths) - math.log(len(bets))
    return mean


def evidence(seen: Traffic) -> dict[str, Array]:
    """[deployments, conversations] each: the twin of `Evidence.step`, and the rules it is compared with.

    Log wealth `promote` and `roll_back`; `low`, `high` of the AIPW sequence; `z_promote`, `z_roll_back`;
    `pooled_low`, `pooled_high`; counts of both arms.
    """
    p, weight = seen.probability, seen.probability * (1 - seen.probability)
    arm, y = seen.is_candidate.astype(np.float64), seen.outcome
    n1, n0 = arm.cumsum(axis=1), (1 - arm).cumsum(axis=1)
    s1, s0 = (arm * y).cumsum(axis=1), ((1 - arm) * y).cumsum(axis=1)
    m1, m0 = (_before(s1) + 0.5) / (_before(n1) + 1), (_before(s0) + 0.5) / (_before(n0) + 1)
    mean = (_before(s1) + _before(s0) + 0.5) / (_before(n1) + _before(n0) + 1)
    gain = np.where(seen.is_candidate, (y - mean) * (1 - p), -(y - mean) * p)
    x = weight * (m1 - m0) + np.where(seen.is_candidate, (y - m1) * (1 - p), -(y - m0) * p)
    found = {
        "promote": wealth(gain + MARGIN * weight),
        "roll_back": wealth(-gain),
        "candidates": n1,
        "baselines": n0,
    }
    weights, squared = weight.cumsum(), (weight * weight).cumsum()
    estimate = x.cumsum(axis=1) / weights
    spread = (x * x).cumsum(axis=1) - 2 * estimate * (x * weight).cumsum(axis=1) + estimate**2 * squared
    half = _half_width(np.maximum(spread, 0.0), SEQUENCE_PRIOR) / weights
    found |= {"low": estimate - half, "high": estimate + half}
    with np.errstate(divide="ignore", invalid="ignore"):
        r1, r0 = s1 / n1, s0 / n0
        variance = r1 * (1 - r1) / n1 + r0 * (1 - r0) / n0
        deviation = np.sqrt(variance)
        found |= {"z_promote": (r1 - r0 + MARGIN) / deviation, "z_roll_back": (r0 - r1) / deviation}
        information = 1 / variance
        half = _half_width(information, _POOLED_PRIOR) / information
        found |= {"pooled_low": r1 - r0 - half, "pooled_high": r1 - r0 + half}
    return found


_POOLED_PRIOR = 177.0
"""As `SEQUENCE_PRIOR`, for 1 / variance of the difference of pooled rates at conversation 1,500."""


def _half_width(variance: Array, prior: float) -> Array:
    width: Array = np.sqrt((variance + prior) * np.log((variance / prior + 1) / ALPHA**2))
    return width


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Of one rule in many deployments."""

    at: Array
    """[deployments] the conversation of the first decision; inf: never."""
    candidates: Array
    """[deployments] how many of the conversations until then were the candidate's."""

    @property
    def share(self) -> float:
        return float(np.isfinite(self.at).mean())

    @property
    def median(self) -> float:
        return float(np.median(self.at))


def decisions(found: Mapping[str, Array], alpha: float = ALPHA) -> dict[tuple[str, str], Decision]:
    """(rule, decision) -> when it was first reached, whatever the other decision said."""
    enough = np.minimum(found["candidates"], found["baselines"]) >= MIN_OUTCOMES
    last = np.zeros(enough.shape[1], dtype=bool)
    last[-1] = True
    limit = -math.log(alpha)
    z = 1.6448536269514722  # 95 %, one-sided
    reached = {
        ("betting", "promote"): found["promote"] >= limit,
        ("betting", "roll_back"): found["roll_back"] >= limit,
        ("aipw", "promote"): enough & (found["low"] > -MARGIN),
        ("aipw", "roll_back"): enough & (found["high"] < 0),
        ("pooled", "promote"): enough & (found["pooled_low"] > -MARGIN),
        ("pooled", "roll_back"): enough & (found["pooled_high"] < 0),
        ("z_peeked", "promote"): enough & (found["z_promote"] > z),
        ("z_peeked", "roll_back"): enough & (found["z_roll_back"] > z),
    }
    reached["default", "roll_back"] = found["roll_back"] >= -math.log(DeploymentPlan().alphas["roll_back"])
    reached |= {("z_once", kind): last & reached["z_peeked", kind] for kind in ("promote", "roll_back")}
    return {key: _first(when, found["candidates"]) for key, when in reached.items()}


def _first(reached: NDArray[np.bool_], candidates: Array) -> Decision:
    index, ever = reached.argmax(axis=1), reached.any(axis=1)
    until = np.take_along_axis(candidates, index[:, None], axis=1)[:, 0]
    return Decision(at=np.where(ever, index + 1.0, np.inf), candidates=until)


@lru_cache(maxsize=16)
def _simulated(effect: float, first: float, last: float, deployments: int) -> dict[tuple[str, str], Decision]:
    truth = Truth(name="", effect=effect, first=first, last=last, counted="")
    return simulated(truth, deployments)


def simulated(
    truth: Truth, deployments: int, *, conversations: int = CONVERSATIONS, alpha: float = ALPHA, seed: int = 0
) -> dict[tuple[str, str], Decision]:
    """Decisions of every rule on the same deployments."""
    parts = []
    key = [round(1000 * (1 + value)) for value in (truth.effect, truth.first, truth.last)]
    for number, count in enumerate(_chunks(deployments)):
        draw = np.random.default_rng([seed, *key, number])
        parts.append(decisions(evidence(traffic(truth, count, draw, conversations)), alpha))
    return {
        key: Decision(
            at=np.concatenate([part[key].at for part in parts]),
            candidates=np.concatenate([part[key].candidates for part in parts]),
        )
        for key in parts[0]
    }


def _chunks(deployments: int) -> Iterator[int]:
    for start in range(0, deployments, CHUNK):
        yield min(CHUNK, deployments - start)


def window_fires(unsafe: NDArray[np.bool_], size: int = 100, share: float = 0.1) -> NDArray[np.bool_]:
    """[deployments, actions] the twin of `WindowGuard`."""
    sums = np.concatenate([np.zeros((len(unsafe), 1)), unsafe.cumsum(axis=1)], axis=1)
    fires = np.zeros(unsafe.shape, dtype=bool)
    fires[:, size - 1 :] = (sums[:, size:] - sums[:, :-size]) / size > share
    return fires


def brake_actions(rate: float, runs: int, *, actions: int = ACTIONS, seed: int = 0) -> tuple[Array, Array]:
    """[runs] the action at which each brake first fires, window and rate; inf: never."""
    parts = []
    for number, count in enumerate(_chunks(runs)):
        unsafe = np.random.default_rng([seed, round(rate * 1000), number]).random((count, actions)) < rate
        log_wealth = wealth(unsafe.astype(np.float64) - LIMIT, rate_bets(LIMIT))
        counts = np.broadcast_to(np.arange(1.0, actions + 1), unsafe.shape)
        both = (window_fires(unsafe), log_wealth >= -math.log(ALPHA))
        parts.append([_first(fires, counts).at for fires in both])
    window, evident = (np.concatenate(times) for times in zip(*parts, strict=True))
    return window, evident


# --- the page ------------------------------------------------------------------


def decisions_table(deployments: int) -> list[str]:
    """Markdown: each truth by rule."""
    heads = " | ".join(RULES.values())
    lines = [f"| truth | what is counted | {heads} |", "|---" * (len(RULES) + 2) + "|"]
    for truth in TRUTHS:
        found = _simulated(truth.effect, truth.first, truth.last, deployments)
        is_error = _is_error(truth)
        kind = "promoted" if truth.counted == "promote" else "rolled back"
        cells = []
        for rule in RULES:
            decision = found[rule, truth.counted]
            text = f"{decision.share:.3f}"
            if is_error and decision.share > ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / deployments):
                text = f"**{text}**"
            if not is_error:
                text += f", {_count(decision.median)}"
            cells.append(text)
        what = f"false: {kind}" if is_error else f"{kind}, median conversations"
        lines.append(f"| {truth.name} | {what} | {' | '.join(cells)} |")
    return lines


def _is_error(truth: Truth) -> bool:
    return truth.effect >= 0 if truth.counted == "roll_back" else truth.effect <= -MARGIN


def brakes_table(runs: int) -> list[str]:
    """Markdown: each rate of unsafe actions by brake."""
    lines = [
        f"| rate of unsafe actions | {' | '.join(f'{rate:.2f}' for rate in RATES)} |",
        "|---" * (len(RATES) + 1) + "|",
    ]
    rows: dict[str, list[str]] = {
        "the window fires (median action)": [],
        "`RateGuard` fires (median action)": [],
    }
    for rate in RATES:
        for cells, at in zip(rows.values(), brake_actions(rate, runs), strict=True):
            share = float(np.isfinite(at).mean())
            text = f"**{share:.3f}**" if rate <= 0.1 and share > ALPHA else f"{share:.3f}"
            cells.append(text + (f" ({_count(float(np.median(at)))})" if share > 0.5 else ""))
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def cost_lines(deployments: int) -> list[str]:
    """Markdown: what a drop costs until it is rolled back."""
    lines = [
        "| drop | alpha of the rollback | rolled back | median conversations | of them the candidate's | "
        "failures more |",
        "|---|---|---|---|---|---|",
    ]
    for truth in TRUTHS:
        if truth.counted != "roll_back" or truth.effect >= 0:
            continue
        found = _simulated(truth.effect, truth.first, truth.last, deployments)
        for rule, alpha in (("betting", ALPHA), ("default", DeploymentPlan().alphas["roll_back"])):
            decision = found[rule, "roll_back"]
            harmed = float(np.median(decision.candidates[np.isfinite(decision.at)]))
            lines.append(
                f"| {truth.name} | {alpha:g} | {decision.share:.3f} | {_count(decision.median)} | "
                f"{_count(harmed)} | {harmed * -truth.effect:.0f} |"
            )
    return lines


def _count(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else "never"


def section(deployments: int) -> str:
    """Markdown."""
    parts: Sequence[Sequence[str]] = (
        [f"{deployments:,} deployments for each row.", ""],
        decisions_table(deployments),
        [
            "",
            f"{deployments:,} runs of {ACTIONS:,} actions for each column, of which a tenth may be unsafe:",
            "",
        ],
        brakes_table(deployments),
        ["", "What a drop costs until the shipped rule has rolled it back:", ""],
        cost_lines(deployments),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployments", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="into docs/evidence/deployment-decisions.md")
    args = parser.parse_args()
    text = section(args.deployments)
    print(text)
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
