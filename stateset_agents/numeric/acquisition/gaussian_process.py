"""A Gaussian process over the values of an exploration set, with a mean and a deviation from observed data.

The causal prior of Aglietti and others (https://arxiv.org/abs/2005.11741, equations 2 to 4): before the first
experiment the effect of do(X = x) is believed to be m(x), give or take s(x), both by observational data, and

    k(x, x') = variance exp(-|x - x'|^2 / (2 length^2)) + s(x) s(x')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stateset_agents.numeric.acquisition.linear_models import Array
from stateset_agents.types.errors import ConfigurationError

CausalPrior = Callable[[Array], tuple[Array, Array]]
"""[n, k] values of the k variables -> [n] prior means and [n] prior deviations of the effect."""


def flat_prior(points: Array) -> tuple[Array, Array]:
    """Mean 0 and no causal deviation: plain Bayesian optimisation."""
    return np.zeros(len(points)), np.zeros(len(points))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """Effects at points [n, k], measured with noise. Raises ConfigurationError for a singular covariance."""

    points: Array  # [n, k]
    outcomes: Array  # [n]
    lengths: Array  # [k]
    """In the units of the variables."""
    variance: float = 1.0
    noise: float = 1e-4
    """Variance of an outcome around its effect."""
    prior: CausalPrior = flat_prior

    def __post_init__(self) -> None:
        for name, value in (
            ("variance", self.variance),
            *((f"lengths[{i}]", x) for i, x in enumerate(self.lengths)),
        ):
            if not value > 0:
                raise ConfigurationError(f"{name} must be above 0, got {value}")
        if not (np.isfinite(self.points).all() and np.isfinite(self.outcomes).all()):
            raise ConfigurationError(
                f"points and outcomes must be finite, got {self.outcomes.tolist()}: leave the failed ones out"
            )
        if self.noise < 0:
            raise ConfigurationError(f"noise must be at least 0, got {self.noise}")

    def with_outcome(self, point: Sequence[float], outcome: float) -> GaussianProcess:
        """With one experiment more."""
        return replace(
            self,
            points=np.concatenate([self.points, np.array([point], dtype=np.float64)]),
            outcomes=np.append(self.outcomes, outcome),
        )

    def posterior(self, points: Array) -> tuple[Array, Array]:
        """[m] means and [m] deviations of the effect itself at [m, k] points."""
        mean, deviation = self.prior(points)
        own = self.variance + deviation**2
        if not len(self.points):
            return mean, np.sqrt(own)
        root, missed = self._whitened()
        beside = np.linalg.solve(root, self._kernel(self.points, points))  # [n, m]
        left = own - (beside**2).sum(axis=0)
        return mean + beside.T @ missed, np.sqrt(np.maximum(left, 0.0))

    def log_likelihood(self) -> float:
        """Of the outcomes, the effects integrated out."""
        root, missed = self._whitened()
        half_determinant = float(np.log(np.diag(root)).sum())
        return -0.5 * float(missed @ missed) - half_determinant - 0.5 * len(missed) * math.log(2 * math.pi)

    def fitted(self, limits: Sequence[tuple[float, float]]) -> GaussianProcess:
        """With the lengths and the variance of the highest likelihood of a grid: lengths from a fiftieth to a
        half of each range, the present variance or a quarter or four times of it."""
        if len(self.points) < 2:
            return self
        spread = np.array([high - low for low, high in limits])
        tries = [
            replace(self, lengths=share * spread, variance=times * self.variance)
            for share in (0.02, 0.04, 0.08, 0.15, 0.3, 0.5)
            for times in (0.25, 1.0, 4.0)
        ]
        return max(tries, key=GaussianProcess.log_likelihood)

    def _kernel(self, ones: Array, others: Array) -> Array:
        """[n, m]"""
        apart = (ones[:, None, :] - others[None, :, :]) / self.lengths
        near: Array = self.variance * np.exp(-0.5 * (apart**2).sum(axis=-1))
        return near + self.prior(ones)[1][:, None] * self.prior(others)[1][None, :]

    def _whitened(self) -> tuple[Array, Array]:
        """The covariance's Cholesky root, and outcomes minus the prior mean divided by it."""
        covariance = self._kernel(self.points, self.points) + self.noise * np.eye(len(self.points))
        try:
            root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        except np.linalg.LinAlgError:
            raise ConfigurationError(
                f"the posterior is singular: {len(self.points)} outcomes at equal or nearly equal points "
                f"with noise {self.noise:g}; raise noise"
            ) from None
        missed = np.linalg.solve(root, self.outcomes - self.prior(self.points)[0])
        return root, np.asarray(missed, dtype=np.float64)
