"""Evidence that may be looked at after every conversation, while the candidate's share changes.

Conversation t goes to the candidate with probability p, drawn independently of all else; y is its outcome in
[0, 1], and c the mean outcome before it. Then

    g = (y - c)(1 - p)  for the candidate,    g = -(y - c) p  for the baseline

has the mean p(1 - p) effect_t, whatever c is and however everybody's rate drifts. Rates pooled over a ramp do
not: a candidate whose share grows while all conversations get better looks better than it is.

    roll back  where "the candidate is at least as good" is refuted: bets on v = -g
    promote    where "the candidate is worse by the margin" is refuted: bets on v = g + margin p(1 - p)

A bettor who stakes the share b of the wealth w on v has w (1 + b v) afterwards. If v's mean is at most 0 at
every step, the wealth is a nonnegative supermartingale, so it ever reaches 1/alpha with probability alpha at
most, however often one looks (Ville's inequality; Waudby-Smith and Ramdas, https://arxiv.org/abs/2010.09686).
So is the mean wealth of several bettors, of whom one is nearly right.
scripts/deployment_error_rates.py measures the error rates: docs/evidence/deployment-decisions.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

BETS = (0.1, 0.25, 0.5)
"""Shares of the wealth that are staked. The growth is largest at effect / variance of an outcome: for a rate
of 80 % these are effects of 1.6, 4 and 8 points. v is at least -1, so half of the wealth is the most that is
lost at once."""
SEQUENCE_PRIOR = 4.25
"""1/rho^2 of the confidence sequence: narrowest at a variance of about 34, that of 500 conversations at a
share of 5 % and 1,000 at 25 % with a rate of 80 % (1/rho^2 = variance / (-2 log alpha + log(1 - 2 log
alpha)), alpha .05)."""
MIN_OUTCOMES = 50
"""Outcomes of each arm before there is an interval, which holds for large samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EProcess:
    """Evidence against "the mean of v is at most 0 at every step": the mean wealth of bettors who began with
    1.

    >>> EProcess(bets=(0.5,)).step(1.0).step(-0.5).wealth  # 1.5 x 0.75
    1.125
    """

    bets: tuple[float, ...] = BETS
    """Each bettor's stake, as a share of its wealth; a bet times the least v must stay above -1."""
    log_wealths: tuple[float, ...] | None = None
    """Logarithm of each bettor's wealth; None at the start. As logarithms they neither overflow nor come to
    0."""
    log_peak: float = 0.0
    """The largest log of the mean wealth so far, which decides."""

    @property
    def log_wealth(self) -> float:
        """Logarithm of the mean wealth."""
        if self.log_wealths is None:
            return 0.0
        largest = max(self.log_wealths)
        total = sum(math.exp(log_wealth - largest) for log_wealth in self.log_wealths)
        return largest + math.log(total / len(self.log_wealths))

    @property
    def wealth(self) -> float:
        """Infinite where a float does not hold it."""
        return math.exp(self.log_wealth) if self.log_wealth < 709 else math.inf

    @property
    def p_value(self) -> float:
        """Valid at any time: 1 / the largest wealth, which is at least the 1 at the start."""
        return math.exp(-self.log_peak)

    def step(self, value: float) -> EProcess:
        """After one more value."""
        before = self.log_wealths or (0.0,) * len(self.bets)
        after = tuple(log + math.log1p(bet * value) for bet, log in zip(self.bets, before, strict=True))
        moved = replace(self, log_wealths=after)
        return replace(moved, log_peak=max(self.log_peak, moved.log_wealth))

    def has_reached(self, alpha: float) -> bool:
        """Did the mean wealth ever reach 1 / alpha?"""
        return self.log_peak >= -math.log(alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceSequence:
    """An interval of the mean effect that holds at all times together, for the picture; decisions are by
    wealth.

    Each conversation gives the doubly robust (AIPW) estimate of its effect, weighted by w = p(1 - p), so that
    nothing is divided by a small share:

        x = w (m1 - m0) + (1 - p)(y - m1)  for the candidate,    w (m1 - m0) - p (y - m0)  for the baseline

    with m1 and m0 the arms' means before it. The interval is the normal-mixture one for large samples
    (Waudby-Smith et al., https://arxiv.org/abs/2103.06476, theorem 2.2).
    """

    weight: float = 0.0
    """Sum of w."""
    weighted: float = 0.0
    """Sum of x."""
    squares: float = 0.0
    """Sums of x^2, x w and w^2."""
    products: float = 0.0
    squared_weights: float = 0.0

    def step(self, value: float, weight: float) -> ConfidenceSequence:
        """After one more conversation, with its x and w."""
        return ConfidenceSequence(
            weight=self.weight + weight,
            weighted=self.weighted + value,
            squares=self.squares + value * value,
            products=self.products + value * weight,
            squared_weights=self.squared_weights + weight * weight,
        )

    @property
    def estimate(self) -> float | None:
        """The effect, weighted by w; None before there is any weight."""
        return self.weighted / self.weight if self.weight else None

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Both ends; None before there is any weight."""
        mean = self.estimate
        if mean is None:
            return None
        variance = max(self.squares - 2 * mean * self.products + mean * mean * self.squared_weights, 0.0)
        room = (variance + SEQUENCE_PRIOR) * math.log((variance / SEQUENCE_PRIOR + 1) / alpha**2)
        half = math.sqrt(room) / self.weight
        return mean - half, mean + half


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence of the outcomes so far, of conversations that could have gone to either arm (0 < p < 1)."""

    margin: float
    candidates: int = 0
    """Outcomes of the candidate's conversations."""
    baselines: int = 0
    candidate_sum: float = 0.0
    """Sum of their outcomes."""
    baseline_sum: float = 0.0
    promote: EProcess = field(default_factory=EProcess)
    roll_back: EProcess = field(default_factory=EProcess)
    effect: ConfidenceSequence = field(default_factory=ConfidenceSequence)

    @property
    def num_outcomes(self) -> int:
        return self.candidates + self.baselines

    def step(self, *, is_candidate: bool, probability: float, outcome: float) -> Evidence:
        """After one more outcome in [0, 1]; `probability`: of the candidate when the conversation was
        assigned.

        Raises ConfigurationError for a probability of 0 or 1, which no comparison can use, and for an outcome
        outside [0, 1].
        """
        expect_that(0 < probability < 1, "probability", "be between 0 and 1, both excluded", probability)
        expect_that(0 <= outcome <= 1, "an outcome", "be from 0 to 1", outcome)
        weight = probability * (1 - probability)
        mean = _mean(self.candidate_sum + self.baseline_sum, self.num_outcomes)
        candidate_mean = _mean(self.candidate_sum, self.candidates)
        baseline_mean = _mean(self.baseline_sum, self.baselines)
        difference = weight * (candidate_mean - baseline_mean)
        if is_candidate:
            gain = (outcome - mean) * (1 - probability)
            value = difference + (outcome - candidate_mean) * (1 - probability)
        else:
            gain = -(outcome - mean) * probability
            value = difference - (outcome - baseline_mean) * probability
        return replace(
            self,
            candidates=self.candidates + is_candidate,
            baselines=self.baselines + (not is_candidate),
            candidate_sum=self.candidate_sum + (outcome if is_candidate else 0.0),
            baseline_sum=self.baseline_sum + (0.0 if is_candidate else outcome),
            promote=self.promote.step(gain + self.margin * weight),
            roll_back=self.roll_back.step(-gain),
            effect=self.effect.step(value, weight),
        )

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Confidence interval of the effect; None before each arm has `MIN_OUTCOMES` outcomes."""
        return self.effect.interval(alpha) if min(self.candidates, self.baselines) >= MIN_OUTCOMES else None

    def snapshot(self, alpha: float) -> dict[str, float | int | None]:
        """Its numbers as plain values. Wealths are logarithms."""
        low, high = self.interval(alpha) or (None, None)
        return {
            "outcomes": self.num_outcomes,
            "candidates": self.candidates,
            "baselines": self.baselines,
            "effect": self.effect.estimate,
            "low": low,
            "high": high,
            "log_wealth_promote": self.promote.log_wealth,
            "log_wealth_roll_back": self.roll_back.log_wealth,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEvidence:
    """Evidence of pairs: both were tried on the same occasion, and the differences of their rewards are bet
    on.

    A difference beyond 1 counts as 1, so the mean that is tested is that of such differences: give rewards in
    a unit in which a difference of 1 is a large one.

    >>> PairedEvidence().step(0.5).mean, PairedEvidence().step(-7.0).mean
    (0.5, -1.0)
    """

    margin: float = 0.02
    """Largest deficit of the candidate's mean reward that is allowed."""
    alpha: float = 0.05
    """Probability of finding a candidate as good that is worse by the margin, and worse one that is as
    good."""
    count: int = 0
    total: float = 0.0
    """Sum of the differences, candidate less baseline."""
    as_good: EProcess = field(default_factory=EProcess)
    """Against "it is worse by the margin"."""
    worse: EProcess = field(default_factory=EProcess)
    """Against "it is at least as good"."""

    def __post_init__(self) -> None:
        expect_that(0 <= self.margin < 1, "margin", "be from 0 to below 1", self.margin)
        expect_that(0 < self.alpha < 1, "alpha", "be between 0 and 1", self.alpha)

    def step(self, difference: float) -> PairedEvidence:
        """After one more pair. Raises ConfigurationError for a difference that is no number."""
        if math.isnan(difference):
            raise ConfigurationError("a difference of rewards must be a number, got nan")
        difference = min(max(difference, -1.0), 1.0)
        return replace(
            self,
            count=self.count + 1,
            total=self.total + difference,
            as_good=self.as_good.step(difference + self.margin),
            worse=self.worse.step(-difference),
        )

    @property
    def mean(self) -> float | None:
        """Mean of the differences so far."""
        return self.total / self.count if self.count else None

    @property
    def is_worse(self) -> bool:
        """True if there was ever enough evidence that it is worse. No later pair takes that back."""
        return self.worse.has_reached(self.alpha)

    @property
    def is_as_good(self) -> bool:
        """True if the evidence says that it is worse by less than the margin, and none that it is worse."""
        return self.as_good.has_reached(self.alpha) and not self.is_worse


def _mean(total: float, count: int) -> float:
    """The mean of the outcomes so far and one of a half, so that the first conversation has one, too."""
    return (total + 0.5) / (count + 1)
