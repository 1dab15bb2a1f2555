"""The policy loss of a micro-batch, value loss, entropy; an update's objective calls them per micro-batch.

Everything is flat: [N] tokens that the agent sampled, with the trajectory each belongs to. `policy_losses`
has the losses by name, and the notation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from stateset_agents.algorithms.kl_settings import KLEstimator, Weighting, allowed_weightings, value_and_slope
from stateset_agents.algorithms.policy_losses import LOSSES, Averaging, Clip, PolicyLoss
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

# KL to the reference policy: its estimators, in the loss or in the reward; `kl_settings` adapts beta.
#
# With d = log pi(token) - log pi_ref(token) of a sampled token (Schulman 2020,
# http://joschu.net/blog/kl-approx.html):
#
#     k1 = d                    unbiased, noisy, may be negative
#     k2 = d^2 / 2              biased, low variance
#     k3 = exp(-d) - 1 + d      unbiased, never negative
#
# An estimator of the *value* need not have the gradient of KL(pi || pi_ref) when used as a loss
# (Tang & Munos, https://arxiv.org/abs/2506.09477). With rho = pi / mu, mu the policy that sampled:
#
#     as a loss term            expected gradient, on-policy      off-policy
#     k1                        zero                              wrong
#     k2                        reverse KL                        wrong
#     k3                        forward KL                        wrong
#     rho * k1, rho * k3        reverse KL                        reverse KL     rho with gradient: "live"
#     stop_gradient(rho) * k2   reverse KL                        reverse KL     "detached"
#
# That is each token's own distribution. A loss per token still misses what an early token does to later
# divergence; -beta * k1 in the reward, with return-to-go, does not. The default is rho * k3 in the loss.
# DeepSeekMath's GRPO uses bare k3 (`weighting="none"`).

# Averages the loss over tokens, with the same result for any division of the batch into micro-batches.
#
# Tensors are flat: [N] holds only the tokens that the agent sampled, so prompt, user, tool and padding
# positions have no loss term. `trajectory_ids` [N] is each token's trajectory, as an index into
# `Denominators.tokens_per_trajectory` [B].
#
# Every mean divides by a count of the whole global batch, fixed before the first micro-batch. A piece
# returns its *share*, so micro-batches and accumulation steps are simply added, in any split:
#
#     loss(tokens 0..N) == loss(tokens 0..k) + loss(tokens k..N)
#
# Under data-parallel training the gradients must be *summed* over processes, not averaged.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denominators:
    """The counts of one whole optimiser step, over all micro-batches and processes.

    `|y_i|` and B count trajectories, however many rows a trajectory is laid out in. They are counted
    before any token is rejected (see `keep` in `policy_loss`): rejection must not raise the rest's weight.
    """

    tokens_per_trajectory: Tensor
    """[B] trained tokens of each trajectory; a process needs only those it holds."""
    num_trajectories: int
    """B over all processes: trajectories with at least one trained token."""
    num_tokens: int
    """Trained tokens over all processes."""
    max_length: int | None = None
    """L_max of Dr. GRPO; None where no loss of the step averages by a constant."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_trajectories < 1:
            raise ValueError("a batch without a trained token has no loss; skip its optimiser step")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigurationError(f"max_length must be at least 1, got {self.max_length!r}")

    @classmethod
    def of(
        cls, tokens_per_trajectory: Sequence[int] | Tensor, *, max_length: int | None = None
    ) -> Denominators:
        """Count a batch that one process holds. With several, `dataclasses.replace` the two totals by
        their sums over processes."""
        counts = torch.as_tensor(tokens_per_trajectory)
        return cls(
            tokens_per_trajectory=counts,
            num_trajectories=int((counts > 0).sum()),
            num_tokens=int(counts.sum()),
            max_length=max_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metrics:
    """Metrics of a loss; `+` merges micro-batches, inner losses and processes."""

    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> 0-d tensor: this piece's share of a mean over the global batch. Shares add."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> 0-d tensor: the largest value in this piece. Of maxima the larger stays."""

    def __add__(self, other: Metrics) -> Metrics:
        shares, maxima = dict(self.shares), dict(self.maxima)
        for name, share in other.shares.items():
            shares[name] = shares[name] + share if name in shares else share
        for name, top in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], top) if name in maxima else top
        return Metrics(shares=shares, maxima=maxima)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, once the pieces of the batch have been added."""
        return {name: float(value) for name, value in {**self.shares, **self.maxima}.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """One piece's share of a loss."""

    loss: Tensor
    """0-d, with gradient; sums over the pieces of a batch. A step whose sum is not finite moves no weight."""
    metrics: Metrics
    """Figures for the logs: none of them decides whether a step is taken."""


def aggregate(
    values: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    averaging: Averaging,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """This piece's share of the batch mean of `values` [N]; a 0-d tensor.

    Tokens where `keep` [N] is False add nothing, while the denominator stays what it was.
    """
    if keep is not None:
        values = torch.where(keep, values, torch.zeros_like(values))
    match averaging:
        case "trajectory":
            lengths = denominators.tokens_per_trajectory.to(values.device)[trajectory_ids]
            return (values / lengths.to(values.dtype)).sum() / denominators.num_trajectories
        case "token":
            return values.sum() / denominators.num_tokens
        case "constant":
            if denominators.max_length is None:
                raise ConfigurationError("averaging by a constant needs Denominators.max_length, got None")
            return values.sum() / (denominators.num_trajectories * denominators.max_length)
    raise ConfigurationError(f"averaging must be one of {', '.join(get_args(Averaging))}, got {averaging!r}")


def mean_per_trajectory(values: Tensor, trajectory_ids: Tensor, denominators: Denominators) -> Tensor:
    """[N] -> [N]: every token gets the mean over its whole trajectory, without gradient.

    Raises ValueError unless all tokens of each trajectory are here: a mean of some of them would depend on
    the division of the batch.
    """
    lengths = denominators.tokens_per_trajectory.to(values.device)
    num_present = torch.bincount(trajectory_ids, minlength=len(lengths))
    is_incomplete = (num_present > 0) & (num_present != lengths)
    if bool(is_incomplete.any()):
        index = int(is_incomplete.nonzero()[0])
        raise ValueError(
            f"trajectory {index} has {int(lengths[index])} tokens but {int(num_present[index])} are in this"
            " micro-batch: a sequence-level loss needs each trajectory whole in one micro-batch"
        )
    sums = values.new_zeros(len(lengths)).index_add(0, trajectory_ids, values.detach())
    return (sums / lengths.clamp(min=1).to(values.dtype)).index_select(0, trajectory_ids)


_MAX_LOG_RATIO = 20.0
"""Largest size of a log ratio: beyond it values and slopes stay constant. With exp(20) = 4.9e8 a gradient
norm, which squares the product of two such ratios, is finite in fp32. No token loses its gradient, so that a
diverged one can recover."""


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
    choice = allowed[0] if weighting is None else weighting
    name = f"kl weighting for {estimator} in the loss"
    expect_that(choice in allowed, name, f"be one of {', '.join(allowed)}", choice)
    if choice == "none":
        return estimate(logprobs, ref_logprobs, estimator)
    d = log_ratio(logprobs, ref_logprobs)
    bounded = d.detach()
    value, slope = value_and_slope(bounded, estimator)
    rho = log_ratio(logprobs.detach(), behaviour_logprobs).exp()
    if choice == "live":  # rho' = rho; of k3, value and slope cancel but for d, which rounding would drown
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
    - whole trajectory: add the sum of its tokens to the trajectory's reward before its group is compared
      (std scaling then scales beta too), or add `token_returns_to_go(...)` to the finished advantages:
      the exact gradient with beta as given.
    """
    return -beta * log_ratio(behaviour_logprobs, ref_logprobs).detach()


def token_returns_to_go(values: Tensor, trajectory_ids: Tensor) -> Tensor:
    """[N] -> [N]: each token's value plus those of the later tokens of its trajectory (undiscounted).

    Tokens of one trajectory stand in the order in which they were sampled.
    """
    returns = torch.zeros_like(values)
    for trajectory in set(trajectory_ids.tolist()):
        is_of_trajectory = trajectory_ids == trajectory
        returns[is_of_trajectory] = values[is_of_trajectory].flip(0).cumsum(0).flip(0)
    return returns


WeightLevel: TypeAlias = Literal["token", "sequence"]
"""What one importance weight is of."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Sampled tokens of one micro-batch, and the batch that they are part of.

    Tensors are [N] over sampled tokens, in fp32 or wider (half precision is widened); only `logprobs` carries
    gradient. Raises ValueError on unequal shapes.
    """

    logprobs: Tensor
    """Log-probs under the policy that is trained."""
    old_logprobs: Tensor
    """Log-probs under the policy that the ratio is taken to."""
    advantages: Tensor
    trajectory_ids: Tensor
    """int64 indices into `denominators.tokens_per_trajectory`."""
    denominators: Denominators
    behaviour_logprobs: Tensor | None = None
    """The decoupled form (https://arxiv.org/abs/2110.00641, for language models
    https://arxiv.org/abs/2505.24298) for tokens sampled by a staler policy mu. `old_logprobs` then are of the
    proximal policy, recomputed at the start of the step: the clip keeps near it, and a weight
    exp(old - behaviour), without gradient, corrects for who sampled."""
    ref_logprobs: Tensor | None = None
    """Log-probs under the reference policy. With a reference and beta 0 the KL is reported only."""
    keep: Tensor | None = None
    """bool; False rejects a token. Denominators do not change."""

    def __post_init__(self) -> None:
        _check_shapes(
            self.logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            trajectory_ids=self.trajectory_ids,
            behaviour_logprobs=self.behaviour_logprobs,
            keep=self.keep,
            ref_logprobs=self.ref_logprobs,
        )

    def mean(self, values: Tensor, averaging: Averaging, *, keep: Tensor | None = None) -> Tensor:
        """The share of the batch mean of `values` [N] that these tokens have."""
        return aggregate(values, self.trajectory_ids, self.denominators, averaging, keep=keep)


def policy_loss(
    name: str,
    inputs: LossInputs,
    *,
    clip_ratio: float | None = None,
    clip_ratio_high: float | None = None,
    dual_clip: float | None = None,
    weight_cap: float | None = None,
    weight_level: WeightLevel = "token",
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_weighting: Weighting | None = None,
    measure: bool = True,
) -> LossOutput:
    """This micro-batch's share of the batch's loss: policy term plus beta times the KL term.

    Shares of different micro-batches add up to the same loss and gradient however the tokens are split; gspo
    and weights of whole trajectories need each trajectory whole in one micro-batch, and check it.

    - clip_ratio, clip_ratio_high: the range is 1 - clip_ratio to 1 + clip_ratio_high; the upper one is
      the lower one's equal where only that is given; with neither, the loss's own (`LOSSES[name].clip`).
    - dual_clip: see `Clip.dual`; only for the clipped surrogates.
    - weight_level: the weight of the decoupled form is each token's, or its whole trajectory's product: this
      alone is unbiased, and its noise grows with the length. It needs each trajectory whole.
    - weight_cap: truncates that weight. Without behaviour_logprobs `old` is the policy that sampled, its
      ratio already is the importance correction, and a cap is refused.
    - beta, kl_estimator, kl_weighting: the KL term, see `kl_loss`; rho is taken to the policy that sampled,
      pi_old's part of it truncated at weight_cap.
    - measure: False leaves the metrics out (but for the KL's), which is quicker for a small network.

    Metrics are shares (sums over micro-batches, `ratio_max` a maximum): loss/policy, loss/kl (times beta),
    policy/ratio, policy/ratio_max, policy/clip_fraction_low (A < 0, ratio below the range),
    policy/clip_fraction_high (A > 0, above it), policy/clip_fraction_dual, in the decoupled form
    policy/weight, policy/weight_square and policy/weight_truncated (the share at the cap),
    policy/importance_gain (mean over trajectories of advantages times old - behaviour: by about how much the
    trainer is better than the sampler), kl/old (k3 against old, KL(old || pi)), kl/reference. Under gspo
    ratios and clip fractions count trajectories, elsewhere tokens. Add `policy_loss(...).metrics` over
    micro-batches with `+`.

    Raises ConfigurationError on options that contradict each other.
    """
    expect_that(name in LOSSES, "loss_type", f"be one of {', '.join(LOSSES)}", name)
    loss = LOSSES[name]
    if dual_clip is not None and loss.clips != "both":
        raise ConfigurationError(f"dual_clip {dual_clip} has no effect on {name}; leave it out")
    usual = loss.clip if clip_ratio is None else replace(loss.clip, low=clip_ratio, high=clip_ratio)
    clip = replace(usual, high=usual.high if clip_ratio_high is None else clip_ratio_high, dual=dual_clip)
    if beta and inputs.ref_logprobs is None:
        raise ConfigurationError(f"beta {beta} needs ref_logprobs; load a reference policy or set beta to 0")

    # log-probs -> ratios; half precision is widened
    live = log_ratio(inputs.logprobs, inputs.old_logprobs)
    logprobs, advantages = inputs.logprobs.to(live.dtype), inputs.advantages.detach().to(live.dtype)
    # For sequences GSPO's token form (GSPO-token): s_i = exp(mean log ratio) in value, and each token carries
    # the gradient of its own log-prob; with one advantage per trajectory this is the gradient of the sequence
    # form.
    by_token = loss.level == "token"
    ratio = live.exp() if by_token else _correction(live, inputs, loss) * (live - live.detach()).exp()
    weight = _weight(inputs, weight_cap, weight_level)

    # ratios -> losses of tokens -> this piece's share of the batch's loss
    tokens = loss.token_loss(logprobs, ratio, advantages, clip)
    total = inputs.mean(tokens if weight is None else weight * tokens, loss.averaging, keep=inputs.keep)
    metrics = Metrics()
    if measure:
        clipped = _clipped(loss, ratio, advantages, clip)
        metrics = _ratio_metrics(inputs, loss, total, live, ratio, clipped, weight, weight_cap, weight_level)
    if inputs.ref_logprobs is None:
        return LossOutput(loss=total, metrics=metrics)

    # plus beta times the KL
    sampler = inputs.old_logprobs if inputs.behaviour_logprobs is None else inputs.behaviour_logprobs
    if weight is not None and weight_level == "sequence":  # the KL's weight is the other one, truncated
        sampler = inputs.old_logprobs.detach() - weight.log()
    elif weight_cap is not None:
        sampler = torch.maximum(sampler, inputs.old_logprobs.detach() - math.log(weight_cap))
    kl = kl_loss(
        logprobs,
        sampler,
        inputs.ref_logprobs,
        inputs.trajectory_ids,
        inputs.denominators,
        averaging=loss.averaging,
        estimator=kl_estimator,
        weighting=kl_weighting,
        keep=inputs.keep,
    )
    metrics = metrics + kl.metrics + Metrics(shares={"loss/kl": beta * kl.loss.detach()})
    return LossOutput(loss=total + beta * kl.loss if beta else total, metrics=metrics)


@torch.no_grad()
def _ratio_metrics(
    inputs: LossInputs,
    loss: PolicyLoss,
    total: Tensor,
    live: Tensor,
    ratio: Tensor,
    clipped: Mapping[str, Tensor],
    weight: Tensor | None,
    weight_cap: float | None,
    weight_level: WeightLevel,
) -> Metrics:
    """Metrics of the policy's term `total`. `live`: [N] log ratios of tokens."""
    # A ratio, a weight and their metrics are of tokens, or of trajectories.
    unit: Averaging = "token" if loss.level == "token" else "trajectory"
    shares = {
        "loss/policy": total.detach(),
        "policy/ratio": inputs.mean(ratio, unit),
        "kl/old": inputs.mean(torch.expm1(live) - live, "token"),
    }
    for side, hit in clipped.items():
        shares[f"policy/clip_fraction_{side}"] = inputs.mean(hit.to(live.dtype), unit)
    if weight is not None and inputs.behaviour_logprobs is not None:
        unit = "token" if weight_level == "token" else "trajectory"
        at_cap = weight >= (math.inf if weight_cap is None else weight_cap)
        shares["policy/weight"] = inputs.mean(weight, unit)
        shares["policy/weight_truncated"] = inputs.mean(at_cap.to(live.dtype), unit)
        shares["policy/weight_square"] = inputs.mean(weight.square(), unit)
        gap = log_ratio(inputs.old_logprobs, inputs.behaviour_logprobs)
        gain = (inputs.advantages.to(live.dtype) * gap).sum() / inputs.denominators.num_trajectories
        shares["policy/importance_gain"] = gain
    highest = torch.cat([ratio, ratio.new_zeros(1)]).max()  # an empty piece gives 0
    return Metrics(shares=shares, maxima={"policy/ratio_max": highest})


def _correction(log_weights: Tensor, inputs: LossInputs, loss: PolicyLoss) -> Tensor:
    """[N] exp(log ratio), for sequences its geometric mean over the trajectory, without gradient."""
    if loss.level == "sequence":
        log_weights = mean_per_trajectory(log_weights, inputs.trajectory_ids, inputs.denominators)
    return log_weights.detach().exp()


def _weight(inputs: LossInputs, cap: float | None, level: WeightLevel) -> Tensor | None:
    """[N] exp(old - behaviour) of each token or of its whole trajectory, truncated, without gradient; None in
    the ordinary form."""
    expect_that(cap is None or cap > 0, "weight_cap", "be positive (None for no cap)", cap)
    old, behaviour = inputs.old_logprobs, inputs.behaviour_logprobs
    # Are both the same tensor, or the same slice of one?
    is_same = behaviour is not None and behaviour.numel() > 0 and behaviour.data_ptr() == old.data_ptr()
    if cap is not None and (behaviour is None or behaviour is old or is_same):
        raise ConfigurationError(
            f"weight_cap {cap} needs behaviour_logprobs apart from old_logprobs: where old is the policy that"
            " sampled, the clipped ratio already is the importance correction; leave weight_cap out"
        )
    if behaviour is None:
        return None
    log_weight = log_ratio(old, behaviour).detach()
    if level == "sequence":
        means = mean_per_trajectory(log_weight, inputs.trajectory_ids, inputs.denominators)
        lengths = inputs.denominators.tokens_per_trajectory.to(means.device)[inputs.trajectory_ids]
        log_weight = (means * lengths).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_weight.exp() if cap is None else log_weight.exp().clamp(max=cap)


def _clipped(loss: PolicyLoss, ratio: Tensor, advantages: Tensor, clip: Clip) -> dict[str, Tensor]:
    """The tokens whose loss was changed by the clip, [N] bool by side."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    match loss.clips:
        case "none":
            return {"low": never, "high": never}
        case "above":
            return {"low": never, "high": (advantages != 0) & (ratio > 1 + clip.high)}
        case "both":
            low = (advantages < 0) & (ratio < 1 - clip.low)
            high = (advantages > 0) & (ratio > 1 + clip.high)
            if clip.dual is None:
                return {"low": low, "high": high}
            return {"low": low, "high": high, "dual": (advantages < 0) & (ratio > clip.dual)}


def _check_shapes(logprobs: Tensor, **tensors: Tensor | None) -> None:
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs must be flat, [N] sampled tokens, got shape {list(logprobs.shape)}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs, {list(logprobs.shape)}, got {list(tensor.shape)}"
            )


# ------------------------------------------------------------------------------- value and entropy


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    *,
    value_clip: float | None = None,
    averaging: Averaging = "token",
    keep: Tensor | None = None,
) -> LossOutput:
    """Half the squared error of the value function, [N] predictions against `returns` (A + V).

    With `value_clip` the larger of the error and that of V held within old V ± value_clip counts, as in
    PPO's reference code (https://github.com/openai/baselines, ppo2). The multiplier is the caller's.
    N counts tokens, or turns where there is one value per turn: then denominators count turns too.
    Metrics: loss/value, value/clip_fraction.
    """
    expect_that(value_clip is None or value_clip > 0, "value_clip", "be positive (None for none)", value_clip)
    _check_shapes(values, old_values=old_values, returns=returns, trajectory_ids=trajectory_ids, keep=keep)
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    error = (values - returns).square()
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if value_clip is not None:
        clamped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clamped_error = (clamped - returns).square()
        clipped = clamped_error > error
        error = torch.maximum(error, clamped_error)
    total = aggregate(error / 2, trajectory_ids, denominators, averaging, keep=keep)
    fraction = aggregate(clipped.to(dtype), trajectory_ids, denominators, averaging)
    return LossOutput(
        loss=total, metrics=Metrics(shares={"loss/value": total.detach(), "value/clip_fraction": fraction})
    )


def entropy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] exact entropy -sum p log p in nats, in fp32 or wider, with gradient.

    Rows are independent, so large vocabularies can go through in chunks. Logits of -inf (forbidden
    tokens) add nothing.
    """
    return entropy_of(torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1))


def entropy_of(logprobs: Tensor, *, any_forbidden: bool = True) -> Tensor:
    """[..., V] log-probs that are normalised -> [...] their exact entropy, with gradient.

    `any_forbidden`: False where none is -inf, which is quicker.
    """
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0) if any_forbidden else logprobs
    return -(logprobs.exp() * finite).sum(dim=-1)


def entropy_loss(
    entropies: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    *,
    averaging: Averaging,
    keep: Tensor | None = None,
) -> LossOutput:
    """Minus the mean entropy of [N] token distributions, not yet times entropy_coef: added to the loss,
    it keeps the policy exploring. Metrics: policy/entropy, the token mean in nats."""
    _check_shapes(entropies, trajectory_ids=trajectory_ids, keep=keep)
    report = aggregate(entropies.detach(), trajectory_ids, denominators, "token")
    return LossOutput(
        loss=-aggregate(entropies, trajectory_ids, denominators, averaging, keep=keep),
        metrics=Metrics(shares={"policy/entropy": report}),
    )
