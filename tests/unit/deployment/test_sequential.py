"""Evidence: by hand, against its twin for many deployments, and its error rates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts import deployment_error_rates as rates
from stateset_agents.deployment.guards import RateGuard, WindowGuard
from stateset_agents.deployment.sequential import BETS, EProcess, Evidence, PairedEvidence
from stateset_agents.types.errors import ConfigurationError

FIVE = [(True, 1.0), (False, 1.0), (True, 0.0), (False, 0.0), (True, 1.0)]
"""Candidate or not, and the outcome; the mean before each is 1/2, 3/4, 5/6, 5/8, 1/2."""


def test_wealth_after_five_outcomes_is_what_a_hand_computes() -> None:
    evidence = Evidence(margin=0.02)
    for is_candidate, outcome in FIVE:
        evidence = evidence.step(is_candidate=is_candidate, probability=0.5, outcome=outcome)
    gains = [0.25, -0.125, -5 / 12, 0.3125, 0.25]
    against = [math.prod(1 - bet * gain for gain in gains) for bet in BETS]
    assert evidence.roll_back.wealth == pytest.approx(sum(against) / 3, rel=1e-12)
    forward = [math.prod(1 + bet * (gain + 0.02 * 0.25) for gain in gains) for bet in BETS]
    assert evidence.promote.wealth == pytest.approx(sum(forward) / 3, rel=1e-12)
    assert evidence.roll_back.wealth == pytest.approx(0.907748, abs=1e-6)
    assert (evidence.candidates, evidence.baselines, evidence.candidate_sum) == (3, 2, 2.0)
    assert evidence.interval(0.05) is None  # of fewer than 50 outcomes an arm


def test_the_share_and_the_outcome_must_be_some() -> None:
    with pytest.raises(ConfigurationError, match=r"probability must be between 0 and 1.*got 1\.0"):
        Evidence(margin=0.02).step(is_candidate=True, probability=1.0, outcome=1.0)
    with pytest.raises(ConfigurationError, match=r"an outcome must be from 0 to 1, got nan"):
        Evidence(margin=0.02).step(is_candidate=True, probability=0.5, outcome=math.nan)


def test_wealth_neither_overflows_nor_comes_to_nothing() -> None:
    winning = losing = EProcess()
    for _ in range(3000):
        winning, losing = winning.step(1.0), losing.step(-1.0)
    assert winning.wealth == math.inf
    assert winning.has_reached(1e-300)
    assert losing.p_value == 1.0
    for _ in range(20_000):
        losing = losing.step(1.0)
    assert losing.has_reached(0.05)  # it came back from 1e-90


def test_the_twin_of_the_tables_is_the_shipped_step() -> None:
    truth = rates.Truth(name="x", effect=-0.05, first=0.6, last=0.9, counted="roll_back")
    seen = rates.traffic(truth, 1, np.random.default_rng(1), 1700)  # over all three stages
    twin = rates.evidence(seen)
    for row in range(1):
        evidence = Evidence(margin=rates.MARGIN)
        for t in range(1700):
            evidence = evidence.step(
                is_candidate=bool(seen.is_candidate[row, t]),
                probability=float(seen.probability[t]),
                outcome=float(seen.outcome[row, t]),
            )
            assert evidence.promote.log_wealth == pytest.approx(twin["promote"][row, t], rel=1e-12, abs=1e-12)
            assert evidence.roll_back.log_wealth == pytest.approx(
                twin["roll_back"][row, t], rel=1e-12, abs=1e-12
            )
            interval = evidence.interval(rates.ALPHA)
            if interval is not None:
                ends = (twin["low"][row, t], twin["high"][row, t])
                assert interval == pytest.approx(ends, rel=1e-12, abs=1e-12)


def test_the_twins_of_the_brakes_are_the_shipped_ones() -> None:
    unsafe = np.random.default_rng(2).random((2, 400)) < 0.11
    fires = rates.window_fires(unsafe)
    wealth = rates.wealth(unsafe - 0.1, rates.rate_bets(0.1))
    for row in range(2):
        window, rate = WindowGuard(), RateGuard()
        for t in range(400):
            window, rate = (brake.step(is_unsafe=bool(unsafe[row, t])) for brake in (window, rate))
            assert window.fires == fires[row, t]
            assert rate.evidence is not None
            assert rate.evidence.log_wealth == pytest.approx(wealth[row, t], rel=1e-12, abs=1e-12)


ERRORS = [truth for truth in rates.TRUTHS if rates._is_error(truth)]


@pytest.mark.parametrize("truth", ERRORS, ids=lambda truth: truth.name)
def test_a_look_after_every_conversation_of_a_ramp_errs_seldom(truth: rates.Truth) -> None:
    decision = rates.simulated(truth, 100, conversations=2500, seed=3)["betting", truth.counted]
    assert decision.share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)


@pytest.mark.long
@pytest.mark.parametrize("truth", ERRORS, ids=lambda truth: truth.name)
def test_two_thousand_deployments_err_no_more_than_alpha(truth: rates.Truth) -> None:
    decision = rates.simulated(truth, 2000)["betting", truth.counted]
    assert decision.share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize(("name", "most"), [("5 points worse", 2700), ("10 points worse", 1200)])
def test_a_drop_is_rolled_back_in_time(name: str, most: int) -> None:
    [truth] = [truth for truth in rates.TRUTHS if truth.name == name]
    decision = rates.simulated(truth, 100, conversations=4000)["betting", "roll_back"]
    assert decision.median <= most


def test_the_window_fires_without_cause_and_the_rate_guard_does_not() -> None:
    window, rate = rates.brake_actions(0.05, 100, actions=3000)
    assert np.isfinite(window).mean() > 0.6  # at half the allowed rate
    assert np.isfinite(rate).mean() == 0.0
    _, surely = rates.brake_actions(0.2, 100, actions=1000)
    assert np.median(surely) < 150


def test_pairs_are_bet_on_as_a_hand_does_and_a_large_difference_counts_as_one() -> None:
    evidence = PairedEvidence(margin=0.1, alpha=0.5)
    for difference in (0.4, -3.0, 0.2, 9.0):
        evidence = evidence.step(difference)
    found = [0.4, -1.0, 0.2, 1.0]
    assert (evidence.count, evidence.mean) == (4, pytest.approx(0.15))
    as_good = [math.prod(1 + bet * (each + 0.1) for each in found) for bet in BETS]
    worse = [math.prod(1 - bet * each for each in found) for bet in BETS]
    assert evidence.as_good.wealth == pytest.approx(sum(as_good) / 3)
    assert evidence.worse.wealth == pytest.approx(sum(worse) / 3)
    assert not evidence.is_as_good
    assert not evidence.is_worse
    for wrong in ({"margin": 1.0}, {"alpha": 0.0}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must be"):
            PairedEvidence(**wrong)
    with pytest.raises(ConfigurationError, match="must be a number, got nan"):
        evidence.step(math.nan)


def test_what_was_worse_once_is_never_as_good_again() -> None:
    evidence = PairedEvidence()
    for _ in range(10):
        evidence = evidence.step(-1.0)
    assert (evidence.is_worse, evidence.is_as_good) == (True, False)
    for _ in range(100):
        evidence = evidence.step(1.0)
    assert (evidence.is_worse, evidence.is_as_good) == (True, False)
    assert evidence.as_good.has_reached(0.05)


def test_pairs_err_as_rarely_as_they_say() -> None:
    """100 candidates of each kind with 60 pairs: alpha .05 and three standard deviations more."""
    drawn = np.random.default_rng(0).normal(0, 0.4, (100, 60)).clip(-1, 1)

    def decided(shift: float, what: str) -> int:
        number = 0
        for row in drawn:
            evidence = PairedEvidence(margin=0.05)
            for difference in row:
                evidence = evidence.step(float(difference) + shift)
            number += getattr(evidence, what)
        return number

    assert decided(0.0, "is_worse") <= 5 + 3 * math.sqrt(100 * 0.05 * 0.95)
    assert decided(-0.05, "is_as_good") <= 5 + 3 * math.sqrt(100 * 0.05 * 0.95)
    assert decided(-0.3, "is_worse") > 95
    assert decided(0.3, "is_as_good") > 95
