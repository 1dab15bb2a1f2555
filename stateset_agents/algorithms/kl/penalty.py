"""KL to the reference policy: its estimators, in the loss or in the reward; `controllers` adapts beta.

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

from typing import Any

import torch
from torch import Tensor

from stateset_agents.algorithms.aggregation import Averaging, Denominators, LossOutput, Metrics, aggregate
from stateset_agents.algorithms.kl.estimators import (
    KLEstimator,
    Weighting,
    allowed_weightings,
    value_and_slope,
)
from stateset_agents.types.errors import ConfigurationError

_MAX_LOG_RATIO = 20.0
"""Beyond it values and slopes stay constant: with exp(20) = 4.9e8 a gradient norm, which squares the product
of two such ratios, is finite in fp32. No token loses its gradient, so that a diverged one can recover."""


class _Sloped(torch.autograd.Function):
    """A value with a given derivative, for cases in which autograd's own would be 0 or overflow."""

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
    """[N] logprobs - other, clamped to ±20, in fp32 or wider.

    Its gradient to `logprobs` is 1 everywhere; `other_logprobs` gets none.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - other_logprobs.detach().to(dtype)
    bounded = difference.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return _sloped(difference, bounded, torch.ones_like(bounded))


# ------------------------------------------------------------------------------------- in the loss


def estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """[N] the bare estimator of KL(pi || pi_ref) at tokens sampled from pi, with gradient.

    At d = .5: k1 .5, k2 .125, k3 .1065.
    """
    d = log_ratio(logprobs, ref_logprobs)
    return _sloped(d, *value_and_slope(d.detach(), estimator))


def kl_tokens(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: KLEstimator = "k3",
    weighting: Weighting | None = None,
) -> Tensor:
    """[N] the loss term of each token before averaging: the estimator times its weighting.

    `behaviour_logprobs` are of the policy that sampled the tokens; on-policy, under `live`, the weight is
    exactly 1 in value and still carries gradient. Raises ConfigurationError on a pair whose gradient is
    useless (see the table above).
    """
    allowed = allowed_weightings(estimator)
    chosen = allowed[0] if weighting is None else weighting
    if chosen not in allowed:
        raise ConfigurationError(
            f"kl weighting for {estimator} in the loss must be one of {', '.join(allowed)}, got {chosen!r}"
        )
    if chosen == "none":
        return estimate(logprobs, ref_logprobs, estimator)
    d = log_ratio(logprobs, ref_logprobs)
    bounded = d.detach()
    value, slope = value_and_slope(bounded, estimator)
    rho = log_ratio(logprobs.detach(), behaviour_logprobs).exp()
    if chosen == "live":  # rho' = rho; of k3, value and slope cancel but for d, which rounding would drown
        slope = bounded if estimator == "k3" else value + slope
    return _sloped(d, rho * value, rho * slope)


def kl_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    ref_logprobs: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    *,
    averaging: Averaging,
    estimator: KLEstimator = "k3",
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


# ----------------------------------------------------------------------------------- in the reward


def kl_rewards(behaviour_logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """[N] -beta * k1 per token, without gradient: the divergence as a negative reward.

    Where to add it depends on the estimator of advantages:
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
        is_of_trajectory = trajectory_ids == trajectory
        returns[is_of_trajectory] = values[is_of_trajectory].flip(0).cumsum(0).flip(0)
    return returns
