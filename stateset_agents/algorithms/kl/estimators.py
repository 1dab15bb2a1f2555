"""Estimators of the KL to the reference at one token, by name, and what multiplies them in the loss.

`kl` says which of them has which gradient. The settings read the names, and importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor


KLEstimator = Literal["k1", "k2", "k3"]
Weighting = Literal["live", "detached", "none"]
"""What multiplies the estimator in the loss: rho with its gradient, rho without, or 1."""

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
    """Those with which `estimator` has a useful gradient; under the first it is the exact reverse KL's."""
    if estimator not in _WEIGHTINGS:
        raise ConfigurationError(f"kl estimator must be one of {', '.join(_WEIGHTINGS)}, got {estimator!r}")
    return _WEIGHTINGS[estimator]
