"""How often does each interval of the package hold the truth, and how often are equal agents told apart?

Simulations with known answers. The tables of docs/evidence/interval-coverage.md are made by

    .venv/bin/python scripts/interval_coverage.py --write    # 2 minutes on a core

and tests/unit/repository/test_interval_coverage.py holds every figure to its bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.algorithms.intervals import (
    crossed_interval,
    mean_interval,
    pass_at_k,
    pass_hat_k,
    share_interval,
    t_quantile,
)
from stateset_agents.algorithms.paired import paired_rewards, paired_shares, sign_flip_p
from stateset_agents.rewards.judge import kappa_interval

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "interval-coverage.md"
SIZES = (6, 12, 60)
"""Scenarios."""
VERDICT_SIZES = (6, 12, 20, 60)
Random = np.random.Generator
Values = NDArray[np.floating[Any]]
Draw = Callable[[Random, tuple[int, ...]], Values]
Interval = tuple[float, float] | None


# --- differences of two agents that are equally good in the mean --------------

EQUAL: dict[str, Draw] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "Student's t, 3 degrees of freedom": lambda draw, shape: draw.standard_t(3, size=shape),
    "exponential, centred": lambda draw, shape: draw.exponential(size=shape) - 1,
    "chi-squared, 1 degree of freedom, centred": lambda draw, shape: draw.chisquare(1, size=shape) - 1,
    "lognormal, sigma 0.5, centred": lambda draw, shape: (
        draw.lognormal(sigma=0.5, size=shape) - math.exp(0.125)
    ),
    "lognormal, sigma 1, centred": lambda draw, shape: draw.lognormal(size=shape) - math.exp(0.5),
    "+0.7 in 30 %, else -0.3": lambda draw, shape: draw.binomial(1, 0.3, size=shape) - 0.3,
    "+1 in 8 %, -0.25 in 32 %, else 0": lambda draw, shape: draw.choice(
        [1, -0.25, 0], p=[0.08, 0.32, 0.6], size=shape
    ),
    "+1 or -1 in 10 % each, else 0": lambda draw, shape: draw.choice(
        [1.0, -1.0, 0], p=[0.1, 0.1, 0.8], size=shape
    ),
    "+0.9 in 10 %, else -0.1": lambda draw, shape: draw.binomial(1, 0.1, size=shape) - 0.1,
}
UNSEEN = ("+0.9 in 10 %, else -0.1", "+0.9 in 10 %, else -0.1, with noise of 0.05")
"""In .9 ** n of the samples no scenario of the tenth was drawn: no test of a mean can know of it."""
EQUAL[UNSEEN[1]] = lambda draw, shape: EQUAL[UNSEEN[0]](draw, shape) + 0.05 * draw.normal(size=shape)


def told_apart(name: str, n: int, experiments: int, seed: int = 0) -> float:
    """The share of experiments in which `paired_rewards` calls one of two equal agents better."""
    return _rate(EQUAL[name], n, experiments, seed)


def power(name: str, shift: float, n: int, experiments: int, seed: int = 0) -> float:
    """The same where the difference is `shift` deviations in truth."""
    return _rate(lambda draw, shape: EQUAL[name](draw, shape) + shift, n, experiments, seed)


def _rate(differences: Draw, n: int, experiments: int, seed: int) -> float:
    samples = differences(np.random.default_rng([seed, n]), (experiments, n))
    return float(np.mean([paired_rewards(sample.tolist()).verdict != "unclear" for sample in samples]))


# --- success of two agents over tries -----------------------------------------

TRIES, RATES, SPREAD = (1, 2, 4, 8), (0.02, 0.3, 0.9), 0.2
Chances = Callable[[Random, float, tuple[int, ...]], tuple[Values, Values]]
"""(draw, rate, shape) -> how likely A and B solve each scenario."""


def _alike(draw: Random, rate: float, shape: tuple[int, ...]) -> tuple[Values, Values]:
    each = np.full(shape, rate)
    return each, each


def _alike_but_hard_and_easy(draw: Random, rate: float, shape: tuple[int, ...]) -> tuple[Values, Values]:
    each = _varied(draw, rate, shape)
    return each, each


def _equal_in_the_mean(draw: Random, rate: float, shape: tuple[int, ...]) -> tuple[Values, Values]:
    """B - A is normal with a deviation of .2 around 0 as far as both stay chances."""
    gap = SPREAD * draw.normal(size=shape)
    return np.clip(rate - gap / 2, 0, 1), np.clip(rate + gap / 2, 0, 1)


def _only_b_varies(draw: Random, rate: float, shape: tuple[int, ...]) -> tuple[Values, Values]:
    """Equal in the mean, and skewed: near 0 and 1 B is a little worse nearly everywhere, and much better
    where A hardly succeeds, or the other way round."""
    return np.full(shape, rate), _varied(draw, rate, shape)


def _varied(draw: Random, rate: float, shape: tuple[int, ...]) -> Values:
    """Beta with a deviation of .2, or nearly the largest there is."""
    variance = min(SPREAD**2, 0.98 * rate * (1 - rate))
    weight = rate * (1 - rate) / variance - 1
    return draw.beta(rate * weight, (1 - rate) * weight, size=shape)


def _better_by(gain: float) -> Chances:
    def chances(draw: Random, rate: float, shape: tuple[int, ...]) -> tuple[Values, Values]:
        a, b = _equal_in_the_mean(draw, rate, shape)
        return a, np.clip(b + gain, 0, 1)

    return chances


EQUAL_CHANCES: Mapping[str, Chances] = {
    "alike everywhere": _alike,
    "alike, scenarios hard and easy": _alike_but_hard_and_easy,
    "equal on average, by scenario +-.2": _equal_in_the_mean,
}
SKEWED_CHANCES: Mapping[str, Chances] = {"equal on average, B alone varies": _only_b_varies}
BETTER_CHANCES: Mapping[str, Chances] = {
    "B better by .15 on average, by scenario +-.2": _better_by(0.15),
    "B better by .15 everywhere": lambda draw, rate, shape: (
        np.full(shape, rate),
        np.full(shape, min(1.0, rate + 0.15)),
    ),
}


def successes_told_apart(
    chances: Chances, rate: float, tries: int, n: int, experiments: int, seed: int = 0
) -> float:
    """The share of experiments in which `paired_shares` calls one of two agents better."""
    draw = np.random.default_rng([seed, n, tries])
    a, b = chances(draw, rate, (experiments, n))
    wins = draw.binomial(tries, b) - draw.binomial(tries, a)
    return float(np.mean([sign_flip_p((row / tries).tolist()) <= 0.05 for row in wins]))


# --- other tests of a mean that could have been taken -------------------------


def candidates(values: Values, draw: Random) -> dict[str, NDArray[np.bool_]]:
    """Which rows [experiments, n] each test at 5 % calls different from 0; six values must differ."""
    n = values.shape[1]
    mean, deviation = values.mean(1), values.std(1, ddof=1)
    has_spread = deviation > 1e-12
    deviation = np.where(has_spread, deviation, 1)
    error = deviation / math.sqrt(n)
    t = t_quantile(0.975, n - 1)
    skewness = ((values - mean[:, None]) ** 3).mean(1) / deviation**3
    johnson = (
        mean + skewness * deviation / (6 * n) + skewness / (3 * deviation) * mean**2
    ) / error  # his t_1, Journal of the American Statistical Association 73, 1978
    ratio = mean / deviation
    hall = math.sqrt(n) * (ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * n))
    signs = draw.choice([-1.0, 1.0], size=(n, 1999))
    flipped = np.abs(values @ signs) / n >= np.abs(mean)[:, None] - 1e-12
    percentile, studentised = _bootstraps(values, draw)
    intervals = {
        "percentile bootstrap": (percentile[0] > 0) | (percentile[1] < 0),
        "Student's t": (np.abs(mean) > t * error) | ~has_spread,
        "Johnson's t": (np.abs(johnson) > t) | ~has_spread,
        "Hall's t": (np.abs(hall) > t) | ~has_spread,
        "bootstrap-t": (mean - studentised[1] * error > 0) | (mean - studentised[0] * error < 0),
        "sign flips": (flipped.sum(1) + 1) / 2000 <= 0.05,
    }
    intervals["Student's and Hall's"] = intervals["Student's t"] & intervals["Hall's t"]
    differ = (np.abs(values) > 1e-12).sum(1) >= 6
    return {name: rejects & differ for name, rejects in intervals.items()}


def _bootstraps(values: Values, draw: Random, resamples: int = 999) -> tuple[Values, Values]:
    """[2, experiments] each: the middle 95 % of the means, and of their t statistics, over resamples."""
    n = values.shape[1]
    means, statistics = [], []
    for start in range(0, len(values), 100):
        part = values[start : start + 100]
        drawn = part[:, draw.integers(n, size=(resamples, n))]
        of = drawn.mean(2)
        error = drawn.std(2, ddof=1) / math.sqrt(n)
        away = of - part.mean(1)[:, None]
        safe = np.where(error > 1e-12, error, 1.0)
        limit = np.where(np.abs(away) < 1e-12, 0.0, np.sign(away) * 1e9)
        means.append(np.quantile(of, [0.025, 0.975], axis=1))
        t = np.where(error > 1e-12, away / safe, limit)
        statistics.append(np.quantile(t, [0.025, 0.975], axis=1, method="closest_observation"))
    return np.concatenate(means, axis=1), np.concatenate(statistics, axis=1)


# --- how often an interval holds ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An interval of a population; `sample(draw, n)` is one experiment with n scenarios."""

    interval: str
    population: str
    truth: float
    sample: Callable[[Random, int], Interval]
    sizes: Sequence[int] = SIZES


def coverage(case: Case, n: int, experiments: int, seed: int = 0) -> tuple[float, float]:
    """The share of the experiments with an interval in which it holds the truth, and of those with one."""
    draw = np.random.default_rng([seed, n])
    intervals = [case.sample(draw, n) for _ in range(experiments)]
    known = [interval for interval in intervals if interval is not None]
    num_holding = sum(low - 1e-9 <= case.truth <= high + 1e-9 for low, high in known)
    return (num_holding / len(known) if known else math.nan), len(known) / experiments


CHANCES: dict[str, Draw] = {
    "always or never, and between": lambda draw, shape: draw.beta(0.5, 0.5, size=shape),
    "all alike, half": lambda draw, shape: np.full(shape, 0.5),
    "around three quarters": lambda draw, shape: draw.beta(6, 2, size=shape),
    "near 1": lambda draw, shape: draw.beta(20, 1, size=shape),
    "near 1, but 3 % never": lambda draw, shape: np.where(
        draw.random(shape) < 0.03, 0.0, draw.beta(20, 1, size=shape)
    ),
    "near 0": lambda draw, shape: draw.beta(1, 20, size=shape),
}
"""How likely each scenario is solved in one try."""


@cache
def _million_chances(population: str) -> Values:
    return CHANCES[population](np.random.default_rng(0), (1_000_000,))


def _tries_case(kind: str, k: int, tries: int, population: str) -> Case:
    estimate = pass_at_k if kind == "pass@" else pass_hat_k
    values = [estimate(successes, tries, k) for successes in range(tries + 1)]
    chances = _million_chances(population)
    truth = float((1 - (1 - chances) ** k if kind == "pass@" else chances**k).mean())

    def sample(draw: Random, n: int) -> Interval:
        successes = draw.binomial(tries, CHANCES[population](draw, (n,)))
        return share_interval([values[number] for number in successes])

    return Case(
        interval=f"{kind}{k} of {tries} tries",
        population=f"{population} ({truth:.3f})",
        truth=truth,
        sample=sample,
    )


def _share_case(share: float) -> Case:
    def sample(draw: Random, n: int) -> Interval:
        return share_interval((draw.random(n) < share).astype(float).tolist())

    return Case(
        interval="success, twins, broken rules: one try (Wilson)",
        population=f"{share:.0%} of the scenarios",
        truth=share,
        sample=sample,
    )


def _twins_case(population: str) -> Case:
    chances = CHANCES[population](np.random.default_rng(0), (1_000_000, 2))
    truth = float(chances.prod(1).mean())

    def sample(draw: Random, n: int) -> Interval:
        successes = draw.random((4, n, 2)) < CHANCES[population](draw, (n, 2))
        return share_interval(successes.all(2).mean(0).tolist())

    return Case(
        interval="twins: four tries", population=f"{population} ({truth:.3f})", truth=truth, sample=sample
    )


def _mean_case(interval: str, population: str, truth: float, values: Draw) -> Case:
    return Case(
        interval=interval,
        population=population,
        truth=truth,
        sample=lambda draw, n: mean_interval(values(draw, (n,)).tolist()),
    )


def _paired_case(tries: int, a: float, b: float) -> Case:
    """A solves scenario i with a chance around `a`, B around `b`; what is hard for one is for the other."""

    def sample(draw: Random, n: int) -> Interval:
        hard = draw.random(n)
        sides = [
            draw.binomial(tries, np.clip(mean + (hard - 0.5) * min(mean, 1 - mean), 0, 1)) / tries
            for mean in (a, b)
        ]
        return paired_shares((sides[1] - sides[0]).tolist()).interval

    return Case(
        interval=f"compare's difference of success: {'one try' if tries == 1 else f'{tries} tries'}",
        population=f"{a:.0%} against {b:.0%}",
        truth=b - a,
        sample=sample,
    )


def _crossed_case(seeds: int, of_seeds: float, of_scenarios: float) -> Case:
    def sample(draw: Random, n: int) -> Interval:
        rows = of_seeds * draw.normal(size=(seeds, 1)) + of_scenarios * draw.normal(size=(1, n))
        return crossed_interval((rows + draw.normal(size=(seeds, n))).tolist())

    return Case(
        interval=f"{seeds} training runs (crossed_interval)",
        population=f"deviation {of_seeds:g} between runs, {of_scenarios:g} between scenarios, 1 else",
        truth=0.0,
        sample=sample,
        sizes=(12, 60, 120),
    )


def _kappa_case(agree: float, right_share: float) -> Case:
    """So many of the conversations are right; the judge errs in 1 - `agree` of either kind."""

    def sample(draw: Random, n: int) -> Interval:
        right, errs = draw.random(n) < right_share, draw.random(n) >= agree
        judged = right ^ errs
        counts = [
            (int(j and r), int(j and not r), int(r and not j), int(not j and not r))
            for j, r in zip(judged, right, strict=True)
        ]
        return kappa_interval(counts, 400)

    judged_share = right_share * agree + (1 - right_share) * (1 - agree)
    by_chance = right_share * judged_share + (1 - right_share) * (1 - judged_share)
    truth = (agree - by_chance) / (1 - by_chance)
    population = f"kappa {truth:.2f}, {right_share:.0%} right"
    return Case(interval="judge's kappa", population=population, truth=truth, sample=sample)


def _band_case(of_scenarios: float) -> Case:
    """The report's band of a step's mean reward; so much of the variance is between groups of eight."""

    def sample(draw: Random, n: int) -> Interval:
        scenarios = math.sqrt(of_scenarios) * draw.normal(size=(n, 1))
        rewards = scenarios + math.sqrt(1 - of_scenarios) * draw.normal(size=(n, 8))
        return mean_interval(rewards.mean(1).tolist())

    return Case(
        interval="band of the report's reward curve, groups of 8",
        population=f"{of_scenarios:.0%} of the variance between scenarios",
        truth=0.0,
        sample=sample,
    )


CASES: Sequence[Case] = (
    *(_share_case(share) for share in (0.03, 0.1, 0.5, 0.9, 0.97)),
    *(
        _tries_case(kind, k, tries, population)
        for kind, k, tries in (("pass@", 1, 4), ("pass@", 2, 4), ("pass@", 4, 8), ("pass^", 2, 4))
        for population in CHANCES
    ),
    *(_twins_case(population) for population in ("around three quarters", "near 1")),
    *(
        _mean_case("mean reward", name, 0.0, EQUAL[name])
        for name in EQUAL
        if name.startswith(("normal", "exp", "logn", "chi"))
    ),
    _mean_case(
        "mean reward", "1 in 95 %, else 0", 0.95, lambda draw, shape: draw.binomial(1, 0.95, size=shape) * 1.0
    ),
    _mean_case(
        "user_miss", "Poisson, mean 0.2", 0.2, lambda draw, shape: draw.poisson(0.2, size=shape) * 1.0
    ),
    _mean_case("user_miss", "Poisson, mean 2", 2.0, lambda draw, shape: draw.poisson(2.0, size=shape) * 1.0),
    *(
        _paired_case(tries, a, b)
        for tries in (1, 4)
        for a, b in ((0.5, 0.5), (0.3, 0.6), (0.9, 0.97), (0.03, 0.1))
    ),
    *(
        _crossed_case(seeds, *spread)
        for seeds in (2, 3, 5)
        for spread in ((0.0, 1.0), (0.1, 0.5), (0.3, 0.5), (1.0, 0.3))
    ),
    *(_kappa_case(agree, right) for agree in (0.7, 0.9, 0.97) for right in (0.5, 0.2)),
    *(_band_case(share) for share in (0.0, 0.5)),
)


# --- the page -----------------------------------------------------------------


def candidates_table(experiments: int) -> list[str]:
    """Size and power of each test of a mean, in per cent."""
    columns: list[tuple[str, Draw, int]] = [
        (f"{called}, n = {n}", EQUAL[name], n)
        for name, called in (
            ("normal", "normal"),
            ("exponential, centred", "exponential"),
            ("lognormal, sigma 1, centred", "lognormal"),
        )
        for n in SIZES
    ]
    shifted: list[tuple[str, Draw, int]] = [
        (f"power, n = {n}", lambda draw, shape, shift=shift: draw.normal(size=shape) + shift, n)  # type: ignore[misc]  # a default binds the loop's value
        for n, shift in ((12, 1.0), (20, 1.0), (60, 0.5))
    ]
    rows: dict[str, list[str]] = {}
    for _, values, n in (*columns, *shifted):
        draw = np.random.default_rng([1, n])
        sample = values(draw, (experiments, n))
        intervals = candidates(sample, draw)
        intervals["taken for rewards: `paired_rewards`"] = np.array(
            [paired_rewards(values.tolist()).verdict != "unclear" for values in sample]
        )
        for name, rejects in intervals.items():
            rows.setdefault(name, []).append(f"{100 * rejects.mean():.1f}")
    heads = [head for head, _, _ in (*columns, *shifted)]
    lines = [f"| says a difference, % | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def verdicts_table(experiments: int) -> list[str]:
    """How often equal agents are told apart, in per cent."""
    lines = [
        f"| equal agents told apart, % | {' | '.join(f'n = {n}' for n in VERDICT_SIZES)} |",
        "|---" * (len(VERDICT_SIZES) + 1) + "|",
    ]
    for name in EQUAL:
        rates = [f"{100 * told_apart(name, n, experiments):.1f}" for n in VERDICT_SIZES]
        lines.append(f"| by reward; differences {name} | {' | '.join(rates)} |")
    return lines


def tries_table(experiments: int) -> list[str]:
    """Of success, for each number of scenarios the verdicts with 1, 2, 4 and 8 tries, in per cent."""
    tries = ", ".join(map(str, TRIES))
    lines = [
        f"| by success: {tries} tries | both succeed in | "
        + " | ".join(f"n = {n}" for n in VERDICT_SIZES)
        + " |",
        "|---" * (2 + len(VERDICT_SIZES)) + "|",
    ]
    for name, chances in (*EQUAL_CHANCES.items(), *SKEWED_CHANCES.items(), *BETTER_CHANCES.items()):
        for rate in RATES:
            if rate == 0.9 and name in BETTER_CHANCES:
                continue  # B cannot be better by .15
            cells = [
                ", ".join(
                    f"{100 * successes_told_apart(chances, rate, number, n, experiments):.1f}"
                    for number in TRIES
                )
                for n in VERDICT_SIZES
            ]
            lines.append(
                f"| {name} | {'A: ' if name in BETTER_CHANCES else ''}{rate:.0%} | {' | '.join(cells)} |"
            )
    return lines


def coverage_table(experiments: int) -> list[str]:
    """How often each interval holds, in per cent."""
    lines = ["| interval | of | holds the truth, % |", "|---|---|---|"]
    for case in CASES:
        cells = []
        for n in case.sizes:
            holding, known = coverage(case, n, experiments)
            without = f" (none in {100 * (1 - known):.0f} %)" if known < 0.995 else ""
            cells.append(f"{100 * holding:.1f} at {n}{without}")
        lines.append(f"| {case.interval} | {case.population} | {', '.join(cells)} |")
    return lines


TITLE, BEFORE = "## Simulations with known answers", "## The rules of a verdict"
"""The section of the page, and the one that it stands before."""
INTRODUCTION = """\
`.venv/bin/python scripts/interval_coverage.py --write` makes this section: {experiments:,} experiments
with a known answer for each figure, so that 95 % may come out as 94 or 96; n is the number of scenarios.
`make test-long` holds every figure to its bound.
"""
LIMITS = """
What is in no scenario that was played is in no interval. In the last rows by reward one scenario of ten
pays 0.9 more and the others 0.1 less: in 12 % of the draws of 20 scenarios none of that tenth is there,
and no test of a mean can know of them (in 0.2 % of those of 60). Take 60 scenarios where rare ones
count.
"""
TRIES_NOTE = """
Agents that are alike, and those whose difference is as often one's as the other's, are told apart in at
most 5 % of the cases, whatever the number of tries; more tries of the same scenarios find more. "B alone
varies" is where sign flips may err: the difference is skewed, its middle is not its mean. At 2 % A succeeds
in 2 % of the tries of every scenario, B always in one scenario of fifty and never in the others: where none
of the fiftieth was played, many tries show A ahead. More scenarios cure that, more tries do not.
"""
CHOICE = """
All are at 5 % and need six scenarios that differ; power is for normal differences of one deviation (half
of one at n = 60). A verdict by success is that of sign flips: exact for agents that are alike, the one of
these that never loses by more tries, and the one that knows perfect separation when it sees it, where the
others have no spread to go by. A verdict by reward must also be that of Student's and Hall's t together at
2 %, for at least 20 scenarios that differ, unless no scenario disagrees: rewards have no bounds, and may be
skewed.
"""


def section(experiments: int) -> str:
    """Markdown."""
    parts = [
        TITLE,
        "",
        INTRODUCTION.format(experiments=experiments),
        *tries_table(experiments),
        TRIES_NOTE,
        *verdicts_table(experiments),
        LIMITS,
        *candidates_table(experiments),
        CHOICE,
        *coverage_table(experiments),
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="into docs/evidence/interval-coverage.md")
    args = parser.parse_args()
    text = section(args.experiments)
    print(text)
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        head, _, after_title = page.partition(TITLE) if TITLE in page else page.partition(BEFORE)
        tail = after_title.partition(BEFORE)[2] if TITLE in page else after_title
        PAGE.write_text(f"{head}{text}\n{BEFORE}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
