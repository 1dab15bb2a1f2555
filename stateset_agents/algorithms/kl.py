"""Distance to the reference policy: estimators, where they go, and controllers of the coefficient.

With d = log pi(token) - log pi_ref(token) of a sampled token (Schulman 2020,
http://joschu.net/blog/kl-approx.html):

    k1 = d                    unbiased, noisy, may be negative
    k2 = d^2 / 2              biased, low variance
    k3 = exp(-d) - 1 + d      unbiased, never negative

An estimator of the *value* need not have the gradient of KL(pi || pi_ref) when used as a loss
(Tang & Munos, https://arxiv.org/abs/2506.09477). With rho = pi / mu, mu the policy that sampled:

    as a loss term            expected gradient, on-policy      off-policy
    k1                        zero                              wrong
    k2                        reverse KL                        wrong
    k3                        forward KL                        wrong
    rho * k1, rho * k3        reverse KL                        reverse KL     rho with gradient: "live"
    stop_gradient(rho) * k2   reverse KL                        reverse KL     "detached"

That is each token's own distribution. A loss per token still misses what an early token does to later
divergence; -beta * k1 in the reward, with return-to-go, does not. The default is rho * k3 in the loss.
DeepSeekMath's GRPO uses bare k3 (`weighting="none"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, Protocol, Self, get_args

import torch
from torch import Tensor

from stateset_agents.algorithms.aggregation import (
    Averaging,
    Denominators,
    LossOutput,
    Metrics,
    aggregate,
)
from stateset_agents.types.errors import ConfigurationError, TrainingStopped

__all__ = [
    "AdaptiveKLController",
    "Estimator",
    "FixedKLController",
    "KLController",
    "KLControllerKind",
    "Weighting",
    "ZieglerKLController",
    "create_kl_controller",
    "default_weighting",
    "estimate",
    "kl_loss",
    "kl_rewards",
    "kl_tokens",
    "log_ratio",
    "token_returns_to_go",
    "trajectory_sums",
]

Estimator = Literal["k1", "k2", "k3"]
Weighting = Literal["live", "detached", "none"]
"""What multiplies the estimator in the loss: rho with its gradient, rho without, or 1."""

_WEIGHTINGS: Mapping[Estimator, tuple[Weighting, ...]] = {
    "k1": ("live",),
    "k2": ("detached", "none"),
    "k3": ("live", "detached", "none"),
}
"""The first is the default and has the exact reverse-KL gradient. What is missing is useless: k1 without
a live rho has gradient zero, and a live rho spoils k2."""

_MAX_LOG_RATIO = 20.0
"""Beyond it a value stays what it is there, and its slope, too: exp(20) = 4.9e8, so that a gradient norm,
which squares the product of two such ratios, is finite in fp32. No token loses its gradient: one that went
astray must find back."""


class _Sloped(torch.autograd.Function):
    """A value with the derivative that is given, where autograd's own would be lost or overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        """[N] each: `value`, whose derivative by `x` is `slope`."""
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradients[0] * slope, None, None


def _sloped(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    result: Tensor = _Sloped.apply(x, value, slope)  # type: ignore[no-untyped-call]  # torch's own
    return result


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[N] logprobs - other, held within ±20, in fp32 or wider.

    Its gradient to `logprobs` is 1 everywhere; `other_logprobs` gets none.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - other_logprobs.detach().to(dtype)
    held = difference.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return _sloped(difference, held, torch.ones_like(held))


# ------------------------------------------------------------------------------------- in the loss


def estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """[N] the bare estimator of KL(pi || pi_ref) at tokens sampled from pi, with gradient.

    At d = .5: k1 .5, k2 .125, k3 .1065.
    """
    d = log_ratio(logprobs, ref_logprobs)
    return _sloped(d, *_value_and_slope(d.detach(), estimator))


def _value_and_slope(d: Tensor, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """[N] of d -> the estimator and its derivative."""
    match estimator:
        case "k1":
            return d, torch.ones_like(d)
        case "k2":
            return d.square() / 2, d
        case "k3":
            less = torch.expm1(-d)
            return less + d, -less
    raise ConfigurationError(
        f"kl estimator must be one of {', '.join(get_args(Estimator))}, got {estimator!r}"
    )


def default_weighting(estimator: Estimator) -> Weighting:
    """The weighting under which `estimator` has the exact reverse-KL gradient per token."""
    return _allowed_weightings(estimator)[0]


def kl_tokens(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: Estimator = "k3",
    weighting: Weighting | None = None,
) -> Tensor:
    """[N] the loss term of each token before averaging: the estimator times its weighting.

    `behaviour_logprobs` are of the policy that sampled the tokens; on-policy, under `live`, the weight is
    exactly 1 in value and still carries gradient. Raises ConfigurationError on a pair whose gradient is
    useless (see the table above).
    """
    allowed = _allowed_weightings(estimator)
    chosen = allowed[0] if weighting is None else weighting
    if chosen not in allowed:
        raise ConfigurationError(
            f"kl weighting for {estimator} in the loss must be one of {', '.join(allowed)}, got {chosen!r}"
        )
    if chosen == "none":
        return estimate(logprobs, ref_logprobs, estimator)
    d = log_ratio(logprobs, ref_logprobs)
    held = d.detach()
    value, slope = _value_and_slope(held, estimator)
    rho = log_ratio(logprobs.detach(), behaviour_logprobs).exp()
    if chosen == "live":  # rho' = rho; of k3, value and slope cancel but for d, which rounding would drown
        slope = held if estimator == "k3" else value + slope
    return _sloped(d, rho * value, rho * slope)


def kl_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    ref_logprobs: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    *,
    averaging: Averaging,
    estimator: Estimator = "k3",
    weighting: Weighting | None = None,
    keep: Tensor | None = None,
) -> LossOutput:
    """This piece's share of the KL term, not yet times beta. All tensors are [N].

    Average as the policy loss does (`LOSSES[name].averaging`), since its formula holds both terms.
    Metrics: kl/reference, the token mean of bare k3 whatever the loss uses, so that runs compare.
    """
    tokens = kl_tokens(logprobs, behaviour_logprobs, ref_logprobs, estimator=estimator, weighting=weighting)
    with torch.no_grad():
        k3 = estimate(logprobs, ref_logprobs, "k3")
        report = Metrics(shares={"kl/reference": aggregate(k3, trajectory_ids, denominators, "token")})
    return LossOutput(
        loss=aggregate(tokens, trajectory_ids, denominators, averaging, keep=keep), metrics=report
    )


def _allowed_weightings(estimator: Estimator) -> tuple[Weighting, ...]:
    if estimator not in _WEIGHTINGS:
        raise ConfigurationError(f"kl estimator must be one of {', '.join(_WEIGHTINGS)}, got {estimator!r}")
    return _WEIGHTINGS[estimator]


# ----------------------------------------------------------------------------------- in the reward


def kl_rewards(behaviour_logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """[N] -beta * k1 per token, without gradient: what the divergence costs as a reward.

    Where it goes depends on the credit:
    - GAE: add to the tokens' rewards;
    - per turn: add each turn's sum to the turn's reward;
    - whole trajectory: add `trajectory_sums(...)` to the trajectory's reward before its group is compared
      (std scaling then scales beta too), or add `token_returns_to_go(...)` to the finished advantages:
      the exact gradient with beta as given.
    """
    return -beta * log_ratio(behaviour_logprobs, ref_logprobs).detach()


def trajectory_sums(values: Tensor, trajectory_ids: Tensor, num_trajectories: int) -> Tensor:
    """[N] -> [B]: the sum of each trajectory's tokens."""
    return values.new_zeros(num_trajectories).index_add(0, trajectory_ids, values)


def token_returns_to_go(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """[N] -> [N]: each token's value plus those of the later tokens of its trajectory (undiscounted).

    Tokens of one trajectory stand in the order in which they were sampled.
    """
    returns = torch.zeros_like(values)
    for trajectory in set(trajectory_ids.tolist()):
        own = trajectory_ids == trajectory
        returns[own] = values[own].flip(0).cumsum(0).flip(0)
    return returns


# ------------------------------------------------------------------------------- the coefficient


class KLController(Protocol):
    """Holds beta; a new value after each step."""

    @property
    def beta(self) -> float:
        """The coefficient of the KL term."""
        ...

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        """The controller after a step that measured `observed_kl` (nats per token)."""
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        ...

    def restored(self, state: Mapping[str, float]) -> Self:
        """This controller as `state_dict` left it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKLController:
    """beta never changes; 0 switches the term off."""

    beta: float

    def __post_init__(self) -> None:
        if not (isfinite(self.beta) and self.beta >= 0):
            raise ConfigurationError(f"beta must be a number of at least 0, got {self.beta!r}")

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        return self

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def restored(self, state: Mapping[str, float]) -> Self:
        return replace(self, beta=state["beta"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKLController:
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
        if not 0 < self.minimum <= self.maximum:
            raise ConfigurationError(
                f"kl minimum must lie between 0 and maximum {self.maximum}, got {self.minimum!r}"
            )

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        error = _relative_error(observed_kl, self.target)
        beta = self.beta
        if error > self.tolerance:
            beta *= self.factor
        elif error < -self.tolerance:
            beta /= self.factor
        return replace(self, beta=min(max(beta, self.minimum), self.maximum))

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def restored(self, state: Mapping[str, float]) -> Self:
        return replace(self, beta=state["beta"])


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
        if self.horizon < 1:
            raise ConfigurationError(f"kl horizon must be at least 1 episode, got {self.horizon!r}")

    def updated(self, observed_kl: float, *, num_episodes: int = 1) -> Self:
        error = min(max(_relative_error(observed_kl, self.target), -0.2), 0.2)
        # A step of more episodes than the horizon counts as one horizon, so that beta stays positive.
        return replace(self, beta=self.beta * (1 + error * min(num_episodes / self.horizon, 1.0)))

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def restored(self, state: Mapping[str, float]) -> Self:
        return replace(self, beta=state["beta"])


KLControllerKind = Literal["fixed", "adaptive", "ziegler"]


def create_kl_controller(
    kind: KLControllerKind, *, beta: float, target: float = 0.01, horizon: int = 10_000
) -> KLController:
    """The controller that a configuration names. Only `fixed` takes beta = 0."""
    match kind:
        case "fixed":
            return FixedKLController(beta=beta)
        case "adaptive":
            return AdaptiveKLController(beta=beta, target=target)
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
    if not target > 0:
        raise ConfigurationError(f"target kl must be positive, got {target!r}")
