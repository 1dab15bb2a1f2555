"""The objective of an update: pi_old and the reference of each micro-batch, then its share of the loss.

Called by the learner, in the trainer's worker thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stateset_agents.algorithms.losses import (
    Denominators,
    LossInputs,
    Metrics,
    WeightLevel,
    entropy_loss,
    kl_rewards,
    log_ratio,
    policy_loss,
    token_returns_to_go,
)
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.chunked_head import TokenScores
from stateset_agents.training.rows.parallel_passes import ParallelPasses
from stateset_agents.training.update.batch import MicroBatch
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import TokenLogprobs

WEIGHT_CAPS: Mapping[WeightLevel, float] = {"token": 2.0, "sequence": 5.0}
"""The largest importance weight, where the settings name none."""
_QUIET = 0.3
"""The largest deviation of a conversation's log weight at which its weight is taken: its noise is 1.05 times
that without weights."""


def weight_level(
    importance: Literal["auto", "none", "token", "sequence"],
    mismatch_rms: float | None,
    tokens_per_conversation: float,
) -> WeightLevel | None:
    """The level of a step's importance weights under this setting; None for no weights.

    `mismatch_rms`: root mean square, in nats, of the last step's gaps; None before the first step.

    >>> weight_level("auto", 0.02, 100.0), weight_level("auto", 0.02, 400.0)
    ('sequence', 'token')
    """
    if importance == "auto":
        rms = math.inf if mismatch_rms is None else mismatch_rms
        return "sequence" if rms * math.sqrt(tokens_per_conversation) <= _QUIET else "token"
    return None if importance == "none" else importance


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLoss:
    """A micro-batch's share of the step's loss, and what was measured on the way."""

    loss: Tensor
    metrics: Metrics
    logprobs: Tensor
    """[N] log-probs of the trained tokens in this forward, without gradient."""


class Objective:
    """The policy's loss on a step's micro-batches."""

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        config: TrainingConfig,
        *,
        exact_logprobs: bool,
        passes: ParallelPasses,
    ) -> None:
        """`exact_logprobs` as of `Learner`. Raises ConfigurationError for importance weights without use."""
        self._passes = passes
        self.config = config
        self.policy = policy
        self.reference = reference
        self._recompute_old = not exact_logprobs or policy.autocast is not None or config.max_staleness > 0
        self.mismatch_rms: float | None = None
        """The root mean square of the last step's gaps, pi_old's log-probs minus the sampler's."""
        self.weight_level: WeightLevel | None = None
        """The level of importance weights in this step; None without any."""
        for name, value in (("importance", config.importance), ("importance_cap", config.importance_cap)):
            if value not in ("auto", "none", None) and not self._recompute_old:
                text = value if isinstance(value, str) else f"{value:g}"
                raise ConfigurationError(
                    f"{name} {text} would correct twice for who sampled: without staleness and with fp32 "
                    f"rollouts the clipped ratio is to that policy already; leave {name} out"
                )
        single_pass = config.num_iterations == 1 and not config.dropout and config.kl_placement == "loss"
        self.old_is_current = self._recompute_old and single_pass
        """True where pi_old is the policy of the only pass, whose log-probs, without gradient, then are
        pi_old's."""
        self._measures_mismatch = self._recompute_old and not config.max_staleness
        """True where pi_old differs from what the rollouts stored by the sampler's doing alone: not with
        staleness."""

    def begin(self, tokens_per_conversation: float) -> None:
        """Choose the importance weights of a step whose conversations have so many trained tokens in the
        mean."""
        self.weight_level = None
        if self._recompute_old:
            self.weight_level = weight_level(
                self.config.importance, self.mismatch_rms, tokens_per_conversation
            )

    @property
    def needs_whole_conversations(self) -> bool:
        """True where all tokens of a conversation must be in one micro-batch."""
        return LOSSES[self.config.loss_type].level == "sequence" or self.weight_level == "sequence"

    def measure(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics with those of its weights; the next step's `auto` reads them."""
        result = dict(metrics)
        if "policy/mismatch_square" in result:
            self.mismatch_rms = math.sqrt(result.pop("policy/mismatch_square"))
            result["policy/mismatch_rms"] = self.mismatch_rms
        if "policy/weight_square" in result:
            square = result.pop("policy/weight_square")
            result["policy/importance_level"] = float(self.weight_level == "sequence") + 1.0
            result["policy/importance_ess"] = result["policy/weight"] ** 2 / square if square else 0.0
        return result

    @torch.no_grad()
    def prepare(self, batches: Sequence[MicroBatch], beta: float) -> list[MicroBatch]:
        """The micro-batches with pi_old, the reference, and a KL in the reward.

        Where tokens may be of earlier policies, pi_old is the current policy, the proximal one of
        the decoupled objective (https://arxiv.org/abs/2505.24298, equation 5): the clip keeps near it, and
        the weight, pi_old over the policy that sampled, is truncated at `importance_cap`
        (https://fengyao.notion.site/off-policy-rl).
        """
        self.policy.model.eval()
        at_once = self.policy.passes_at_once
        if self.reference is not None:
            at_once = min(at_once, self.reference.passes_at_once)
        tokens = [batch.layout.num_tokens for batch in batches]
        prepared = self._passes.run(self._scored, batches, tokens, at_once=at_once)
        if prepared and self.reference is not None and self.config.kl_placement == "reward":
            prepared = _with_kl_rewards(prepared, beta)
        return prepared

    def _scored(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with pi_old's log-probs and the reference's."""
        behaviour = batch.old_logprobs if self._recompute_old else None
        if self._recompute_old and not self.old_is_current:
            batch = replace(batch, old_logprobs=self.policy.score(batch).logprobs)
        reference = None if self.reference is None else self.reference.score(batch).logprobs
        return replace(batch, ref_logprobs=reference, behaviour_logprobs=behaviour)

    def loss(
        self, batch: MicroBatch, denominators: Denominators, beta: float, *, weight: float = 1.0
    ) -> MeasuredLoss:
        """A prepared micro-batch's share of the step's loss, with `beta` times its KL to the reference.

        `weight` scales the loss and not its metrics. A product with the loss that is returned would be one
        with the head's whole gradient, which is formed already.
        """
        config, loss, level = self.config, LOSSES[self.config.loss_type], self.weight_level
        keep = batch.advantages.abs() >= config.advantage_skip if config.advantage_skip else None

        def loss_of(scores: TokenScores, part: slice) -> tuple[Tensor, tuple[Metrics, Tensor]]:
            logprobs = scores.logprobs.detach()
            if not len(batch.targets):  # rows of a process that waits for others' micro-batches
                return scores.logprobs.sum(), (Metrics(), logprobs)
            sampled = _part(batch.behaviour_logprobs, part)
            inputs = LossInputs(
                scores.logprobs,
                logprobs if self.old_is_current else batch.old_logprobs[part],
                batch.advantages[part],
                batch.trajectory_ids[part],
                denominators,
                behaviour_logprobs=None if level is None else sampled,
                ref_logprobs=_part(batch.ref_logprobs, part),
                keep=_part(keep, part),
            )
            policy = policy_loss(
                config.loss_type,
                inputs,
                clip_ratio=config.clip_ratio,
                clip_ratio_high=config.clip_ratio_high,
                dual_clip=config.dual_clip,
                weight_cap=None if level is None else config.importance_cap or WEIGHT_CAPS[level],
                weight_level=level or "token",
                beta=beta if config.kl_placement == "loss" else 0.0,
                kl_estimator=config.kl_estimator,
            )
            entropy = entropy_loss(
                scores.entropy,
                inputs.trajectory_ids,
                denominators,
                averaging=loss.averaging,
                keep=inputs.keep,
            )
            metrics = policy.metrics + entropy.metrics
            if sampled is not None:
                metrics = metrics + self._mismatch(inputs, sampled)
            total = policy.loss + config.entropy_coef * entropy.loss if config.entropy_coef else policy.loss
            return weight * total, (metrics, logprobs)

        total, parts = self.policy.loss(
            batch,
            loss_of,
            additive=not self.needs_whole_conversations,
            entropy_gradient=config.entropy_coef > 0,
        )
        metrics = sum((metrics for metrics, _ in parts), Metrics())
        return MeasuredLoss(total, metrics, torch.cat([logprobs for _, logprobs in parts]))

    def _mismatch(self, inputs: LossInputs, sampled: Tensor) -> Metrics:
        """How far pi_old's log-probs are from those that the rollouts stored, `sampled` [N]."""
        gap = log_ratio(inputs.old_logprobs, sampled)
        return Metrics(
            shares={"policy/mismatch_square": inputs.mean(gap.square(), "token")},
            maxima={"policy/rollout_mismatch": gap.abs().max()} if self._measures_mismatch else {},
        )

    def token_logprobs(
        self, batches: Sequence[MicroBatch], logprobs: Sequence[Tensor], counts: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """Log-probs by trajectory, of prepared micro-batches that hold all trained tokens of each.

        `logprobs`: [N] of each micro-batch, as `loss` measured them; `counts`: agent tokens of each
        trajectory, of which forced ones have the log-prob 0.
        """
        tokens_of: dict[int, dict[int, tuple[float, float]]] = {}
        for batch, current in zip(batches, logprobs, strict=True):
            old = current if self.old_is_current else batch.old_logprobs
            columns = (column.tolist() for column in (batch.trajectory_ids, batch.places, old, current))
            for trajectory, place, *pair in zip(*columns, strict=True):
                tokens_of.setdefault(trajectory, {})[place] = pair[0], pair[1]
        pairs = {
            trajectory: [tokens.get(place, (0.0, 0.0)) for place in range(counts[trajectory])]
            for trajectory, tokens in tokens_of.items()
        }
        return {
            trajectory: TokenLogprobs(
                old=tuple(old for old, _ in of_trajectory),
                learner=tuple(current for _, current in of_trajectory),
            )
            for trajectory, of_trajectory in pairs.items()
        }


def _with_kl_rewards(batches: Sequence[MicroBatch], beta: float) -> list[MicroBatch]:
    """Each token's advantage plus the KL rewards of it and of all later tokens of its conversation, in
    whatever rows and micro-batches these are."""
    costs: list[Tensor] = []
    for batch in batches:
        assert batch.ref_logprobs is not None  # the KL is to it
        costs.append(kl_rewards(batch.old_logprobs, batch.ref_logprobs, beta))
    rewards = torch.cat(costs)
    ids = torch.cat([batch.trajectory_ids for batch in batches])
    # A conversation's tokens may lie in several micro-batches: by place, then stably by conversation, they
    # stand in the order in which they were sampled.
    order = torch.cat([batch.places for batch in batches]).argsort(stable=True)
    order = order[ids[order].argsort(stable=True)]
    to_go = torch.empty_like(rewards)
    to_go[order] = token_returns_to_go(rewards[order], ids[order])
    parts = torch.split(to_go, [len(batch.targets) for batch in batches])
    return [
        replace(batch, advantages=batch.advantages + part) for batch, part in zip(batches, parts, strict=True)
    ]


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]
