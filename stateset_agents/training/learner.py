"""Samples in, better weights out: log-probs, loss, gradient, step. Runs in the trainer's worker thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stateset_agents.algorithms.aggregation import Denominators, LossOutput, Metrics
from stateset_agents.algorithms.kl import create_kl_controller, kl_rewards, token_returns_to_go
from stateset_agents.algorithms.losses import LOSSES, entropy_loss, policy_loss
from stateset_agents.errors import CheckpointError
from stateset_agents.streams import derive
from stateset_agents.training.batch import MicroBatch, Sample, make_micro_batches
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.optimization import Optimization, StepResult, autocast_dtype
from stateset_agents.training.policy import Policy, TokenScores

__all__ = ["Learner"]


class Learner:
    """Owns the policy's master weights, the frozen reference, the optimiser and the KL coefficient."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, *, num_steps: int, exact_logprobs: bool
    ) -> None:
        """`exact_logprobs`: rollouts ran in fp32, so what they stored is pi_old; else it is recomputed."""
        self.config = config
        device = next(model.parameters()).device
        autocast = autocast_dtype(config.precision, device)
        if config.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.policy = Policy(model, temperature=config.temperature, autocast=autocast)
        self.reference = self.policy.reference() if config.uses_reference else None
        self.kl = create_kl_controller(
            config.kl_controller,
            beta=config.beta if config.uses_reference else 0.0,
            target=config.kl_target,
            horizon=config.kl_horizon,
        )
        self.optimization = Optimization(
            model, config, num_updates=num_steps * config.num_iterations, scale=autocast is torch.float16
        )
        self._recompute_old = not exact_logprobs or autocast is not None

    def weights(self) -> dict[str, Tensor]:
        """A copy of the master weights by name."""
        return {name: tensor.detach().clone() for name, tensor in self.policy.model.state_dict().items()}

    def write_model_files(self, path: Path) -> None:
        """What plain transformers needs beside the weights."""
        self.policy.model.config.save_pretrained(path)
        self.policy.model.generation_config.save_pretrained(path)

    def update(self, samples: Sequence[Sample], *, step: int) -> dict[str, float]:
        """`num_iterations` optimiser steps on one step's samples; returns metrics.

        Denominators are counted over all samples, so the cut into micro-batches changes nothing. Samples
        without any advantage are left out where that is exact (no KL term, no entropy bonus); when
        nothing is left, the weights stay as they are (AdamW would move them on a zero gradient).
        """
        denominators = Denominators.of(
            [sample.trajectory.num_agent_tokens for sample in samples], max_length=self.config.loss_length
        )
        batches = [
            batch.to(self.policy.device)
            for batch in make_micro_batches(
                samples,
                max_rows=self.config.per_device_train_batch_size * self.config.num_generations,
                max_tokens=self.config.micro_batch_tokens,
            )
        ]
        if self.kl.beta == 0 and self.config.entropy_coef == 0:
            batches = [batch for batch in batches if bool(batch.advantages.any())]
        if not batches:
            return {"optimizer/skipped": 1.0}
        with _own_randomness(derive(self.config.seed, "update", step), self.policy.device):
            return self._passes(batches, denominators)

    def _passes(self, batches: Sequence[MicroBatch], denominators: Denominators) -> dict[str, float]:
        self.policy.model.eval()
        prepared = [self._prepare(batch) for batch in batches]
        self.policy.model.train()
        first: Metrics | None = None
        for _ in range(self.config.num_iterations):
            metrics = Metrics()
            for batch, reference in prepared:
                output = self._loss(self.policy.score(batch, entropy=True), batch, reference, denominators)
                self.optimization.backward(output.loss)
                metrics = metrics + output.metrics
            result = self.optimization.step()
            first = first or metrics
        numbers = metrics.to_dict()
        if self.reference is not None:
            conversations = int((denominators.tokens_per_trajectory > 0).sum())
            self.kl = self.kl.updated(numbers["kl/reference"], num_episodes=conversations)
        assert first is not None  # num_iterations is at least 1
        return {
            **numbers,
            **self._report(result),
            "policy/first_ratio_max": first.to_dict()["policy/ratio_max"],
        }

    def _report(self, result: StepResult) -> dict[str, float]:
        return {
            "optimizer/grad_norm": result.grad_norm,
            "optimizer/learning_rate": result.learning_rate,
            "optimizer/skipped": 0.0 if result.stepped else 1.0,
            "kl/coefficient": self.kl.beta,
        }

    @torch.no_grad()
    def _prepare(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor | None]:
        """What stays the same over the inner passes: pi_old, the reference, a KL in the reward."""
        if self._recompute_old:
            batch = replace(batch, old_logprobs=self.policy.score(batch).logprobs)
        if self.reference is None:
            return batch, None
        reference = self.reference.score(batch).logprobs
        if self.config.kl_placement == "reward":
            cost = kl_rewards(batch.old_logprobs, reference, self.kl.beta)
            batch = replace(
                batch, advantages=batch.advantages + token_returns_to_go(cost, batch.trajectory_ids)
            )
        return batch, reference

    def _loss(
        self, scores: TokenScores, batch: MicroBatch, reference: Tensor | None, denominators: Denominators
    ) -> LossOutput:
        config = self.config
        output = policy_loss(
            config.loss_type,
            scores.logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.trajectory_ids,
            denominators,
            clip_ratio=config.clip_ratio,
            clip_ratio_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            ref_logprobs=reference,
            beta=self.kl.beta if config.kl_placement == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
        )
        assert scores.entropy is not None  # asked for in _passes
        spread = entropy_loss(
            scores.entropy, batch.trajectory_ids, denominators, averaging=LOSSES[config.loss_type].averaging
        )
        loss = output.loss + config.entropy_coef * spread.loss if config.entropy_coef else output.loss
        return LossOutput(loss=loss, metrics=output.metrics + spread.metrics)

    def state(self) -> dict[str, Any]:
        """Optimiser and KL coefficient, for a checkpoint."""
        return {**self.optimization.state(), "kl": self.kl.state_dict()}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; a tied tensor stands there under one of its names only."""
        missing, unexpected = self.policy.model.load_state_dict(dict(weights), strict=False)
        own = self.policy.model.state_dict()
        tied = {own[name].data_ptr() for name in weights if name in own}
        lost = [name for name in missing if own[name].data_ptr() not in tied]
        if lost or unexpected:
            raise CheckpointError(
                f"the checkpoint's weights are of another model: {[*lost, *unexpected][0]} differs"
            )
        self.optimization.load(dict(state))
        self.kl = self.kl.restored(state["kl"])


@contextlib.contextmanager
def _own_randomness(key: int, device: torch.device) -> Iterator[None]:
    """Dropout drawn from this step's own stream; the process's generators are left as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
