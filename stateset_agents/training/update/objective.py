"""The objective of an update: pi_old and the reference of each micro-batch, then its share of the loss.

Called by the learner, in the trainer's worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stateset_agents.algorithms.aggregation import Denominators, LossOutput, Metrics
from stateset_agents.algorithms.kl.penalty import kl_rewards, token_returns_to_go
from stateset_agents.algorithms.losses import entropy_loss, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.chunked_head import TokenScores
from stateset_agents.training.rows.parallel_passes import ParallelPasses
from stateset_agents.training.update.batch import MicroBatch
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import TokenLogprobs

_MISMATCH = "policy/rollout_mismatch"
"""The largest difference between the log-probs that rollouts stored and pi_old's."""
_IMPORTANCE_CAP = 2.0
"""Of stale tokens' weights, by default."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A micro-batch with what stays the same over the inner passes."""

    batch: MicroBatch
    reference: Tensor | None
    """[N] the reference's log-probs."""
    behaviour: Tensor | None
    """[N] log-probs of the policy that sampled, where pi_old is another and a weight corrects for it."""


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
        """`exact_logprobs` as of `Learner`. Raises ConfigurationError for an importance_cap without use."""
        self._passes = passes
        self.config = config
        self.policy = policy
        self.reference = reference
        self._recompute_old = not exact_logprobs or policy.autocast is not None or config.max_staleness > 0
        self._importance_cap = config.importance_cap
        if config.max_staleness and config.importance_cap is None:
            self._importance_cap = _IMPORTANCE_CAP
        if self._importance_cap is not None and not self._recompute_old:
            raise ConfigurationError(
                f"importance_cap {self._importance_cap:g} would correct twice for who sampled: without "
                "staleness and with fp32 rollouts the clipped ratio is to that policy already; leave "
                "importance_cap out"
            )
        single_pass = config.num_iterations == 1 and not config.dropout and config.kl_placement == "loss"
        self.old_is_current = self._recompute_old and single_pass
        """Is pi_old the policy of the only pass? Then its log-probs, without gradient, are pi_old's."""
        self._measures_mismatch = self._recompute_old and not config.max_staleness
        """Does pi_old differ from what the rollouts stored by rounding alone? With staleness it does not."""

    @torch.no_grad()
    def prepare(self, batches: Sequence[MicroBatch], beta: float) -> tuple[list[Prepared], dict[str, float]]:
        """pi_old and the reference of each micro-batch, a KL in the reward; and metrics of the mismatch.

        Where tokens may be of earlier policies, pi_old is the current policy, the proximal one of
        the decoupled objective (https://arxiv.org/abs/2505.24298, equation 5): the clip keeps near it, and
        the weight of each token, pi_old over the policy that sampled it, is truncated at `importance_cap`
        (https://fengyao.notion.site/off-policy-rl).
        """
        self.policy.model.eval()
        scorers = [one for one in (self.policy, self.reference) if one is not None]
        at_once = min(one.passes_at_once for one in scorers)
        tokens = [batch.layout.num_tokens for batch in batches]
        scored = self._passes.run(self._scored, batches, tokens, at_once=at_once)
        prepared = [one for one, _ in scored]
        if prepared and self.reference is not None and self.config.kl_placement == "reward":
            prepared = _with_kl_rewards(prepared, beta)
        mismatch = max((mismatch for _, mismatch in scored), default=0.0)
        return prepared, {_MISMATCH: mismatch} if self._measures_mismatch else {}

    def _scored(self, batch: MicroBatch) -> tuple[Prepared, float]:
        """A micro-batch with its scores, and the mismatch where they were computed again."""
        behaviour = batch.old_logprobs if self._importance_cap is not None else None
        mismatch = 0.0
        if self._recompute_old and not self.old_is_current:
            old = self.policy.score(batch).logprobs
            mismatch = float(_mismatch(old, batch.old_logprobs))
            batch = replace(batch, old_logprobs=old)
        reference = None if self.reference is None else self.reference.score(batch).logprobs
        return Prepared(batch, reference, behaviour), mismatch

    def loss(
        self,
        prepared: Prepared,
        denominators: Denominators,
        beta: float,
        *,
        weight: float = 1.0,
        seen: Tensor | None = None,
    ) -> LossOutput:
        """A micro-batch's share of the step's loss, with `beta` times its KL to the reference.

        `weight`: times the loss, but not its metrics; a product with the loss itself would be one with the
        head's whole gradient. `seen` [N]: takes the tokens' log-probs as this forward has them.
        """
        config, batch, loss = self.config, prepared.batch, LOSSES[self.config.loss_type]
        behaviour, reference = prepared.behaviour, prepared.reference
        metrics: list[Metrics] = []
        if not len(batch.targets):
            zero = self.policy.loss(batch, lambda scores, part: scores.logprobs.sum())
            return LossOutput(loss=zero, metrics=Metrics())

        keep = batch.advantages.abs() >= config.advantage_skip if config.advantage_skip else None

        def loss_of(scores: TokenScores, part: slice) -> Tensor:
            ids = batch.trajectory_ids[part]
            if seen is not None:
                seen[part] = scores.logprobs.detach().to(seen.dtype)
            output = policy_loss(
                config.loss_type,
                scores.logprobs,
                scores.logprobs.detach() if self.old_is_current else batch.old_logprobs[part],
                batch.advantages[part],
                ids,
                denominators,
                clip_ratio=config.clip_ratio,
                clip_ratio_high=config.clip_ratio_high,
                dual_clip=config.dual_clip,
                behaviour_logprobs=None if behaviour is None else behaviour[part],
                weight_cap=self._importance_cap,
                keep=None if keep is None else keep[part],
                ref_logprobs=None if reference is None else reference[part],
                beta=beta if config.kl_placement == "loss" else 0.0,
                kl_estimator=config.kl_estimator,
            )
            entropy = entropy_loss(
                scores.entropy,
                ids,
                denominators,
                averaging=loss.averaging,
                keep=None if keep is None else keep[part],
            )
            metrics.append(output.metrics + entropy.metrics)
            if self.old_is_current and self._measures_mismatch:
                mismatch = _mismatch(scores.logprobs.detach(), batch.old_logprobs[part])
                metrics.append(Metrics(maxima={_MISMATCH: mismatch}))
            total = output.loss + config.entropy_coef * entropy.loss if config.entropy_coef else output.loss
            return weight * total

        total = self.policy.loss(
            batch,
            loss_of,
            additive=loss.level == "token",  # a ratio of whole trajectories needs all their tokens
            entropy_gradient=config.entropy_coef > 0,
        )
        return LossOutput(loss=total, metrics=sum(metrics, Metrics()))


def _with_kl_rewards(prepared: Sequence[Prepared], beta: float) -> list[Prepared]:
    """Each token's advantage plus the KL rewards of it and of all later tokens of its conversation, in
    whatever rows and micro-batches these are."""
    batches = [one.batch for one in prepared]
    costs: list[Tensor] = []
    for one in prepared:
        assert one.reference is not None  # the KL is to it
        costs.append(kl_rewards(one.batch.old_logprobs, one.reference, beta))
    rewards = torch.cat(costs)
    ids = torch.cat([batch.trajectory_ids for batch in batches])
    order = torch.cat([batch.places for batch in batches]).argsort(stable=True)
    order = order[ids[order].argsort(stable=True)]
    to_go = torch.empty_like(rewards)
    to_go[order] = token_returns_to_go(rewards[order], ids[order])
    parts = torch.split(to_go, [len(batch.targets) for batch in batches])
    return [
        replace(one, batch=replace(one.batch, advantages=one.batch.advantages + part))
        for one, part in zip(prepared, parts, strict=True)
    ]


def token_logprobs(
    prepared: Sequence[Prepared], seen: Sequence[Tensor], *, old_is_current: bool
) -> dict[int, TokenLogprobs]:
    """By trajectory, of micro-batches that hold all trained tokens of each.

    `seen`: of each micro-batch, as `Objective.loss` filled it.
    `old_is_current`: pi_old is the policy that was seen.
    """
    found: dict[int, list[tuple[int, float, float]]] = {}
    for one, current in zip(prepared, seen, strict=True):
        batch = one.batch
        old = current if old_is_current else batch.old_logprobs
        rows = (part.tolist() for part in (batch.trajectory_ids, batch.places, old, current))
        for trajectory, *token in zip(*rows, strict=True):
            found.setdefault(trajectory, []).append((token[0], token[1], token[2]))
    return {
        trajectory: TokenLogprobs(
            old=tuple(old for _, old, _ in sorted(tokens)),
            learner=tuple(learner for _, _, learner in sorted(tokens)),
        )
        for trajectory, tokens in found.items()
    }


def _mismatch(old: Tensor, stored: Tensor) -> Tensor:
    """The largest difference, 0 for a process's empty batch."""
    return (old - stored).abs().max() if len(old) else old.new_zeros(())
