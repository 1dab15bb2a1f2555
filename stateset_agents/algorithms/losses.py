"""The policy loss of a micro-batch, value loss, entropy; called by the trainer once per micro-batch.

Everything is flat: [N] tokens that the agent sampled, with the trajectory each belongs to. `policy_losses`
has the losses by name, and the notation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stateset_agents.algorithms.aggregation import (
    Averaging,
    Denominators,
    LossOutput,
    Metrics,
    aggregate,
    mean_per_trajectory,
)
from stateset_agents.algorithms.kl.estimators import KLEstimator, Weighting
from stateset_agents.algorithms.kl.penalty import kl_loss, log_ratio
from stateset_agents.algorithms.policy_losses import LOSSES, Clip, PolicyLoss
from stateset_agents.types.errors import ConfigurationError


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    *,
    clip_ratio: float | None = None,
    clip_ratio_high: float | None = None,
    dual_clip: float | None = None,
    behaviour_logprobs: Tensor | None = None,
    weight_cap: float | None = None,
    keep: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_weighting: Weighting | None = None,
    measure: bool = True,
) -> LossOutput:
    """This micro-batch's share of the batch's loss: policy term plus beta times the KL term.

    Tensors are [N] over sampled tokens, in fp32 or wider (half precision is widened); only `logprobs`
    carries gradient. `trajectory_ids` are int64 indices into `denominators.tokens_per_trajectory`. Shares
    of different micro-batches add up to the same loss and gradient however the tokens are split; gspo
    alone needs each trajectory whole in one micro-batch, and checks it.

    - clip_ratio, clip_ratio_high: the range is 1 - clip_ratio to 1 + clip_ratio_high; the upper one is
      the lower one's equal where only that is given; with neither, the loss's own (`LOSSES[name].clip`).
    - dual_clip: see `Clip.dual`; only for the clipped surrogates.
    - behaviour_logprobs: the decoupled form (https://arxiv.org/abs/2110.00641, for language models
      https://arxiv.org/abs/2505.24298) for tokens sampled by a staler policy mu. `old_logprobs` then are
      of the proximal policy, recomputed at the start of the step: the clip keeps near it, and a weight
      exp(old - behaviour), without gradient, corrects for who sampled. Under gspo the weight, as its
      ratio, is the geometric mean over the trajectory.
    - weight_cap: truncates that weight. Without behaviour_logprobs `old` is the policy that sampled, its
      ratio already is the importance correction, and a cap is refused.
    - keep: [N] bool; False rejects a token. Denominators do not change.
    - ref_logprobs, beta, kl_estimator, kl_weighting: the KL term, see `kl.kl_loss`; rho is taken to the
      policy that sampled, pi_old's part of it truncated at weight_cap. With a reference and beta 0 the KL is
      reported only.
    - measure: False leaves the metrics out (but for the KL's), which is quicker for a small network.

    Metrics are shares (sums over micro-batches, `ratio_max` a maximum): loss/policy, loss/kl (times beta),
    policy/ratio, policy/ratio_max, policy/clip_fraction_low (A < 0, ratio below the range),
    policy/clip_fraction_high (A > 0, above it), policy/clip_fraction_dual, in the decoupled form
    policy/weight and policy/weight_truncated (the share at the cap), kl/old (k3 against old, KL(old || pi)),
    kl/reference. Under gspo ratios, weights and clip fractions count trajectories, elsewhere tokens. Add
    `policy_loss(...).metrics` over micro-batches with `+`.

    Raises ConfigurationError on options that contradict each other, ValueError on unequal shapes.
    """
    if name not in LOSSES:
        raise ConfigurationError(f"loss_type must be one of {', '.join(LOSSES)}, got {name!r}")
    loss = LOSSES[name]
    clip = _clip(name, clip_ratio, clip_ratio_high, dual_clip)
    _check_shapes(
        logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        trajectory_ids=trajectory_ids,
        behaviour_logprobs=behaviour_logprobs,
        keep=keep,
        ref_logprobs=ref_logprobs,
    )
    if beta and ref_logprobs is None:
        raise ConfigurationError(f"beta {beta} needs ref_logprobs; load a reference policy or set beta to 0")

    live = log_ratio(logprobs, old_logprobs)
    logprobs = logprobs.to(live.dtype)
    advantages = advantages.detach().to(live.dtype)
    per = _Level(loss.level, trajectory_ids, denominators)
    ratio = per.ratio(live)
    tokens = loss.token_loss(logprobs, ratio, advantages, clip)
    weight = _weight(old_logprobs, behaviour_logprobs, weight_cap, per)
    if weight is not None:
        tokens = weight * tokens
    total = aggregate(tokens, trajectory_ids, denominators, loss.averaging, keep=keep)
    metrics = Metrics()
    if measure:
        with torch.no_grad():
            shares = {
                "loss/policy": total.detach(),
                "policy/ratio": per.share(ratio),
                "kl/old": aggregate(torch.expm1(live) - live, trajectory_ids, denominators, "token"),
                **{
                    f"policy/clip_fraction_{side}": per.share(hit.to(live.dtype))
                    for side, hit in _clipped(loss, ratio, advantages, clip).items()
                },
            }
            if weight is not None:
                at_cap = torch.zeros_like(weight)
                if weight_cap is not None:
                    at_cap = (weight >= weight_cap).to(live.dtype)
                shares |= {"policy/weight": per.share(weight), "policy/weight_truncated": per.share(at_cap)}
            highest = torch.cat([ratio.detach(), ratio.new_zeros(1)]).max()  # an empty piece gives 0
        metrics = Metrics(shares=shares, maxima={"policy/ratio_max": highest})
    if ref_logprobs is None:
        return LossOutput(loss=total, metrics=metrics)

    sampler = old_logprobs if behaviour_logprobs is None else behaviour_logprobs
    if weight_cap is not None:  # the KL's weight is truncated as the other one
        sampler = torch.maximum(sampler, old_logprobs.detach() - math.log(weight_cap))
    kl = kl_loss(
        logprobs,
        sampler,
        ref_logprobs,
        trajectory_ids,
        denominators,
        averaging=loss.averaging,
        estimator=kl_estimator,
        weighting=kl_weighting,
        keep=keep,
    )
    metrics = metrics + kl.metrics + Metrics(shares={"loss/kl": beta * kl.loss.detach()})
    return LossOutput(loss=total + beta * kl.loss if beta else total, metrics=metrics)


@dataclass(frozen=True, slots=True)
class _Level:
    """Is a ratio that of a token or of a trajectory, and how are its metrics averaged?"""

    level: Literal["token", "sequence"]
    trajectory_ids: Tensor
    denominators: Denominators

    def ratio(self, live: Tensor) -> Tensor:
        """[N] exp(log ratio) with gradient.

        For sequences GSPO's token form (GSPO-token): s_i = exp(mean log ratio) in value, and each token
        carries the gradient of its own log-prob; with one advantage per trajectory this is the gradient
        of the sequence form.
        """
        if self.level == "token":
            return live.exp()
        return self.correction(live) * (live - live.detach()).exp()

    def correction(self, log_weights: Tensor) -> Tensor:
        """[N] exp(log weight), or its geometric mean over the trajectory, without gradient."""
        if self.level == "token":
            return log_weights.detach().exp()
        return mean_per_trajectory(log_weights, self.trajectory_ids, self.denominators).exp()

    def share(self, values: Tensor) -> Tensor:
        averaging: Averaging = "token" if self.level == "token" else "trajectory"
        return aggregate(values, self.trajectory_ids, self.denominators, averaging)


def _clip(name: str, low: float | None, high: float | None, dual: float | None) -> Clip:
    loss = LOSSES[name]
    if dual is not None and loss.clips != "both":
        raise ConfigurationError(f"dual_clip {dual} has no effect on {name}; leave it out")
    if low is None:
        return Clip(low=loss.clip.low, high=loss.clip.high if high is None else high, dual=dual)
    return Clip(low=low, high=low if high is None else high, dual=dual)


def _weight(
    old_logprobs: Tensor, behaviour_logprobs: Tensor | None, cap: float | None, per: _Level
) -> Tensor | None:
    """[N] exp(old - behaviour), truncated, without gradient; None in the ordinary form."""
    if cap is not None and not cap > 0:
        raise ConfigurationError(f"weight_cap must be positive (None for no cap), got {cap!r}")
    same = behaviour_logprobs is not None and _same_values_in_memory(behaviour_logprobs, old_logprobs)
    if cap is not None and (behaviour_logprobs is None or same):
        raise ConfigurationError(
            f"weight_cap {cap} needs behaviour_logprobs apart from old_logprobs: where old is the policy that"
            " sampled, the clipped ratio already is the importance correction; leave weight_cap out"
        )
    if behaviour_logprobs is None:
        return None
    weight = per.correction(log_ratio(old_logprobs, behaviour_logprobs))
    return weight if cap is None else weight.clamp(max=cap)


def _same_values_in_memory(a: Tensor, b: Tensor) -> bool:
    """Are both the same tensor, or the same slice of one?"""
    return a is b or (a.numel() > 0 and a.data_ptr() == b.data_ptr())


def _clipped(loss: PolicyLoss, ratio: Tensor, advantages: Tensor, clip: Clip) -> dict[str, Tensor]:
    """By side: [N] bool, the tokens whose loss was changed by the clip."""
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
    if value_clip is not None and not value_clip > 0:
        raise ConfigurationError(f"value_clip must be positive (None for none), got {value_clip!r}")
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
