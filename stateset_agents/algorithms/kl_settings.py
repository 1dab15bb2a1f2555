"""Controllers of beta, the coefficient of the KL to the reference: they change it after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Literal, Self, get_args

from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.settings import expect_that

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKLController:
    """beta never changes; 0 switches the term off."""

    beta: float

    def __post_init__(self) -> None:
        expect_that(isfinite(self.beta) and self.beta >= 0, "beta", "be a number of at least 0", self.beta)

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedKLController:
    """beta in steps: KL more than half above its target, beta times 1.5; more than half below, beta / 1.5.

    The rule of PPO's adaptive penalty (https://arxiv.org/abs/1707.06347, section 4) with 1.5 both for
    threshold and factor, where the paper has 1.5 and 2, and with bounds.
    """

    beta: float = 0.04
    target: float = 0.01
    tolerance: float = 0.5
    factor: float = 1.5
    minimum: float = 0.001
    maximum: float = 1.0

    def __post_init__(self) -> None:
        _check_adaptive(self.beta, self.target)
        is_below = 0 < self.minimum <= self.maximum
        expect_that(is_below, "kl minimum", f"lie between 0 and maximum {self.maximum}", self.minimum)

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        error = _relative_error(observed_kl, self.target)
        beta = self.beta
        if error > self.tolerance:
            beta *= self.factor
        elif error < -self.tolerance:
            beta /= self.factor
        return replace(self, beta=min(max(beta, self.minimum), self.maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZieglerKLController:
    """beta * (1 + clip(error, ±.2) * num_episodes / horizon): a slow, proportional pull to the target.

    From Ziegler et al., https://arxiv.org/abs/1909.08593. At most 20 % per `horizon` episodes.
    """

    beta: float = 0.04
    target: float = 0.01
    horizon: int = 10_000

    def __post_init__(self) -> None:
        _check_adaptive(self.beta, self.target)
        expect_that(self.horizon >= 1, "kl horizon", "be at least 1 episode", self.horizon)

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        error = min(max(_relative_error(observed_kl, self.target), -0.2), 0.2)
        # A step of more episodes than the horizon counts as one horizon, so that beta stays positive.
        return replace(self, beta=self.beta * (1 + error * min(num_episodes / self.horizon, 1.0)))


KLController = FixedKLController | SteppedKLController | ZieglerKLController
"""A controller holds beta; `updated` returns it with the beta after a step that measured `observed_kl` (nats
per token)."""
KLControllerKind = Literal["fixed", "adaptive", "ziegler"]


def create_kl_controller(
    kind: KLControllerKind, *, beta: float, target: float = 0.01, horizon: int = 10_000
) -> KLController:
    """The controller that a configuration names. Only `fixed` takes beta = 0."""
    match kind:
        case "fixed":
            return FixedKLController(beta=beta)
        case "adaptive":
            return SteppedKLController(beta=beta, target=target)
        case "ziegler":
            return ZieglerKLController(beta=beta, target=target, horizon=horizon)
    raise ConfigurationError(
        f"kl controller must be one of {', '.join(get_args(KLControllerKind))}, got {kind!r}"
    )


def _relative_error(observed_kl: float, target: float) -> float:
    if not isfinite(observed_kl):
        raise TrainingStopped(f"kl/reference is {observed_kl!r}; lower the learning rate or raise beta")
    return observed_kl / target - 1


def _check_adaptive(beta: float, target: float) -> None:
    if not (isfinite(beta) and beta > 0):
        raise ConfigurationError(
            f"beta must be positive for an adaptive controller, got {beta!r}; use the fixed one for 0"
        )
    expect_that(target > 0, "target kl", "be positive", target)


# Estimators of the KL to the reference at one token, by name, and what multiplies them in the loss.
#
# `kl` says which of them has which gradient. The settings read the names, and importing this loads no torch.

KLEstimator = Literal["k1", "k2", "k3"]
Weighting = Literal["live", "detached", "none"]
"""The factor of the estimator in the loss: rho with its gradient, rho without, or 1."""

_WEIGHTINGS: Mapping[KLEstimator, tuple[Weighting, ...]] = {
    "k1": ("live",),
    "k2": ("detached", "none"),
    "k3": ("live", "detached", "none"),
}
"""The first is the default and has the exact reverse-KL gradient. What is missing is useless: k1 without
a live rho has gradient zero, and a live rho spoils k2."""


def value_and_slope(d: Tensor, estimator: KLEstimator) -> tuple[Tensor, Tensor]:
    """[N] of d = log pi - log pi_ref -> the estimator and its derivative."""
    match estimator:
        case "k1":
            return d, d.new_ones(d.shape)
        case "k2":
            return d.square() / 2, d
        case "k3":
            less = (-d).expm1()
            return less + d, -less
    raise ConfigurationError(
        f"kl estimator must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}"
    )


def allowed_weightings(estimator: KLEstimator) -> tuple[Weighting, ...]:
    """The weightings with which `estimator` has a useful gradient; the first's is the exact reverse KL's."""
    expect_that(estimator in _WEIGHTINGS, "kl estimator", f"be one of {', '.join(_WEIGHTINGS)}", estimator)
    return _WEIGHTINGS[estimator]
