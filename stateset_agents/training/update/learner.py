"""Samples in, better weights out: log-probs, loss, gradient, step. Runs in the trainer's worker thread."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stateset_agents.algorithms.kl_settings import create_kl_controller
from stateset_agents.algorithms.losses import Denominators, Metrics
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.backends.adapters import Adapter
from stateset_agents.backends.grammars import Grammars
from stateset_agents.backends.linears import MatmulPrecision
from stateset_agents.backends.pretrained.pictures import PictureReader
from stateset_agents.runs.optimizer import Optimization, StepResult, autocast_dtype
from stateset_agents.runtime.machine import trim_memory
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes, max_or_nan
from stateset_agents.training.rows.layout import Layout, num_distinct_tokens, units_of_conversations
from stateset_agents.training.rows.parallel_passes import ParallelPasses, default_pass_tokens
from stateset_agents.training.update.batch import (
    ConversationRow,
    MicroBatch,
    Sample,
    lengths,
    micro_batch,
    rows_of,
)
from stateset_agents.training.update.critic import ActorCritic, make_critic
from stateset_agents.training.update.lora import (
    add_adapter,
    freeze_vision,
    plain_weights,
    size_for_auto,
    write_model_files,
)
from stateset_agents.training.update.objective import MeasuredLoss, Objective
from stateset_agents.training.update.policy import Policy, seeded_rng, set_mode
from stateset_agents.training.update.protocol import Learned, Weights, not_finite
from stateset_agents.training.update.weight_store import weights_and_reference
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.seeds import derive

_log = get_logger(__name__)

_LOSS = "loss"
"""The loss's name beside a step's metrics, whose names have a stage."""
_TOGETHER, _MOST_TOGETHER = 8, 16384
"""A pass may be so many times as long to keep the rows of one conversation together: what they share is worth
more than caches. But at most so many tokens."""


class Learner(ActorCritic):
    """Owns the policy's master weights, the frozen reference, the optimiser and the KL coefficient.

    With `config.lora` an adapter is trained on them; they themselves, without it, are the reference.
    `protocol.PolicyLearner` documents what a trainer calls.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        num_steps: int,
        exact_logprobs: bool,
        processes: Processes | None = None,
        matmul_precision: MatmulPrecision = "highest",
        reference_model: nn.Module | None = None,
        pictures: PictureReader | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Trains `model` itself, in fp32 (or float64 where it is that).

        `exact_logprobs`: rollouts ran in that precision, so the log-probs that they stored are pi_old's; else
        these are recomputed, and the difference reported as policy/rollout_mismatch. `processes`: all of
        those that train together credit and update on the same groups, and each takes its share of the rows.
        `matmul_precision`: of fp32 products, as the rollouts' backend has it. `reference_model`: what the
        policy is to stay near, where that is not a copy of `model` as it is now; it is frozen and widened in
        its place. `pictures`: the rollouts' reader, where their prompts may have pictures. `grammars`: of the
        model's tokenizer, where replies may be constrained.

        Raises ConfigurationError for a reference model that no setting uses, or beside an adapter.
        """
        self.config = config
        self._processes = processes or Processes()
        self._grammars = grammars
        self.base: Any = model
        self.policy = _trainable_policy(model, config, matmul_precision, pictures)
        self.device = self.policy.device
        self.layout = {"rows": "packed" if self.policy.packs else "padded", "why_rows": self.policy.why}
        log = _log.debug if self.policy.packs else _log.info
        log("rows of the update", layout=self.layout["rows"], why=self.layout["why_rows"])
        self.fingerprint, self._store, self.reference = weights_and_reference(
            self.policy, config, self._processes, reference_model
        )
        self._pass_tokens = default_pass_tokens(self.base, self.policy.device, fused=self.policy.fuses)
        self._max_tokens = config.micro_batch_tokens or self._pass_tokens
        self._parallel = ParallelPasses(self._max_tokens)
        self._objective = Objective(
            self.policy, self.reference, config, exact_logprobs=exact_logprobs, passes=self._parallel
        )
        self.kl = create_kl_controller(
            config.kl_controller,
            beta=config.beta if config.uses_reference else 0.0,
            target=config.kl_target,
            horizon=config.kl_horizon,
        )
        self.optimization = Optimization(
            self.policy.model,
            config,
            num_updates=num_steps * config.num_iterations,
            scale=self.policy.autocast is torch.float16,
        )
        self.scales_gradients = self.optimization.scaler.is_enabled()
        self.critic = make_critic(
            self.policy.model,
            config,
            layouts=self._layouts,
            hidden=self._hidden,
            autocast=self.policy.autocast,
        )

    @property
    def num_updates(self) -> int:
        return self.optimization.num_updates

    def _layouts(self, rows: Sequence[ConversationRow]) -> list[Layout]:
        """The layouts of these rows: packed by conversations, padded by lengths."""
        config = self.config
        ids = [row.token_ids for _, row in rows]
        conversations = [conversation for conversation, _ in rows]
        units = None
        if self._objective.needs_whole_conversations:
            units = units_of_conversations(ids, conversations)
        elif self.policy.packs:
            most = config.micro_batch_tokens or min(_MOST_TOGETHER, _TOGETHER * self._pass_tokens)
            units = units_of_conversations(ids, conversations, max_tokens=most)
        layouts = self.policy.layouts(
            ids,
            max_rows=config.per_device_train_batch_size * config.num_generations,
            max_tokens=self._max_tokens,
            units=units,
            at_once=self.policy.passes_at_once,
        )
        plain_rows = [row for _, row in rows]
        return [self.policy.with_pixels(layout, plain_rows) for layout in layouts]

    def _hidden(self, layout: Layout) -> Tensor:
        """[R * T, H] hidden states for the critic, without dropout."""
        self.policy.model.eval()
        return self.policy.hidden(layout)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        layouts = self._layouts(rows_of(sample.rows for sample in samples))
        return [micro_batch(samples, layout, self._grammars).to(self.policy.device) for layout in layouts]

    def close(self) -> None:
        """End the threads of passes."""
        self._parallel.close()

    def set_num_steps(self, num_steps: int) -> None:
        """Give the learning rate's schedule this length, from the next update on."""
        self.optimization.length = num_steps * self.config.num_iterations

    def set_temperature(self, temperature: float) -> None:
        """Let policy and reference score at the temperature of the rollouts that the next update learns
        from."""
        self.policy.temperature = temperature
        if self.reference is not None:
            self.reference.temperature = temperature

    def weights(self) -> Mapping[str, Tensor]:
        return self._store.weights()

    def adapter(self, state: Mapping[str, Any] | None = None) -> Adapter | None:
        optimizer = None if state is None else state["optimizer"]
        return self._store.adapter(optimizer, self.optimization.trained_parameters)

    def base_weights(self) -> Mapping[str, Tensor]:
        return plain_weights(self.policy.model, {})

    def write_model_files(self, path: Path) -> None:
        write_model_files(self.policy.model, path, dtype=self.policy.dtype)

    def update(self, samples: Sequence[Sample], *, step: int) -> dict[str, float]:
        """The metrics of `learn_from`."""
        return self.learn_from(samples, step=step).metrics

    def learn_from(self, samples: Sequence[Sample], *, step: int) -> Learned:
        """`num_iterations` optimiser steps of the policy alone, on one step's samples.

        Denominators are counted over all samples, so the cut into micro-batches changes nothing. Samples
        without an advantage are left out where their gradient is exactly 0: without a reference and an
        entropy bonus, and where `advantage_skip` passes over them. When that leaves none, the weights stay as
        they are (AdamW would move them on a zero gradient). Means in the metrics are over the samples that
        were forwarded.
        """
        places = [place for place, sample in enumerate(samples) if self._has_gradient(sample)]
        trained = [samples[place] for place in places]
        metrics = {"batch/left_out": float(len(samples) - len(trained))}
        if not trained:
            return Learned(metrics | {"batch/micro_batches": 0.0, "optimizer/skipped": 1.0})
        self._objective.begin(float(lengths(trained).float().mean()))
        ids = [[row.token_ids for row in sample.rows] for sample in trained]
        # Tokens that go through the model for each sample, were it laid out alone.
        sizes = [num_distinct_tokens(rows) if self.policy.packs else sum(map(len, rows)) for rows in ids]
        share = self._processes.balanced_slice(sizes)
        local, local_places = trained[share], places[share]
        batches = self._micro_batches(local)
        figures = {
            "batch/micro_batches": len(batches),
            "tokens/forwarded": sum(batch.layout.num_tokens for batch in batches),
            "tokens/padding": sum(batch.layout.num_padding for batch in batches),
        }
        metrics |= self._processes.reduce("the update", figures, sum)
        if self.policy.is_sharded:
            missing = max(self._processes.gather("the update", len(batches))) - len(batches)
            batches += [self.policy.empty_batch()] * missing
        # Every process divides by the counts of the whole step, so that gradients are summed, not averaged;
        # lengths are read only of the trajectories that are here.
        length = self.config.loss_length
        everything = Denominators.of(lengths(samples), max_length=length)
        denominators = Denominators.of(lengths(trained), max_length=length)
        denominators = replace(denominators, tokens_per_trajectory=lengths(local))
        # The loss divides by what is forwarded. What was left out counts in the mean, too, with a loss of 0.
        if LOSSES[self.config.loss_type].averaging == "token":
            fraction = denominators.num_tokens / everything.num_tokens
        else:
            fraction = denominators.num_trajectories / everything.num_trajectories
        self.optimization.zero_grad()  # of `losses` that were called before
        rank = self._processes.rank
        stream = derive(self.config.seed, "update", step, *([rank] if rank else []))
        try:
            with seeded_rng(stream, self.policy.device):
                prepared = self._objective.prepare(batches, self.kl.beta)
                passes, last_logprobs, failure = self._passes(prepared, denominators, fraction)
            metrics |= passes
            if not self.config.log_learner_logprobs:
                return Learned(metrics, failure=failure)
            counts = [sample.trajectory.num_agent_tokens for sample in local]
            logprobs = self._objective.token_logprobs(prepared, last_logprobs, counts)
            local_logprobs = {local_places[number]: tokens for number, tokens in logprobs.items()}
            merged = ChainMap(*self._processes.gather("the log-probs", local_logprobs))
            return Learned(metrics, [merged.get(place) for place in range(len(samples))], failure)
        finally:
            self.optimization.zero_grad()

    def _has_gradient(self, sample: Sample) -> bool:
        """True where the sample's gradient may be other than exactly 0."""
        config = self.config
        highest = sample.weight * max(map(abs, sample.advantages), default=0.0)
        if config.advantage_skip and not (self.kl.beta > 0 and config.kl_placement == "reward"):
            return highest >= config.advantage_skip
        return highest > 0 or self.kl.beta > 0 or config.entropy_coef > 0

    def losses(self, samples: Sequence[Sample], *, beta: float | None = None) -> dict[str, Tensor]:
        """The loss of these samples under the weights as they are; nothing steps.

        `beta` replaces the coefficient of the KL to the reference. total_loss carries the gradient;
        beside it, without: policy_loss, kl_penalty (beta times the KL, 0 without a reference), entropy,
        approx_kl (k3, to pi_old: the policy as the update began) and clip_fraction. Dropout is off.

        Raises ConfigurationError where there is no sample, or a `beta` and no reference.
        """
        if not samples:
            raise ConfigurationError("no sample has an advantage: score a group of at least min_group_size")
        coefficient = self.kl.beta if beta is None else beta
        if coefficient and self.reference is None:
            raise ConfigurationError(
                f"beta {coefficient} needs a reference: train with beta > 0 and use_reference_model true"
            )
        denominators = Denominators.of(lengths(samples), max_length=self.config.loss_length)
        self._objective.begin(float(lengths(samples).float().mean()))
        prepared = self._objective.prepare(self._micro_batches(samples), coefficient)
        set_mode(self.policy.model, dropout=False)
        outputs = [self._objective.loss(batch, denominators, coefficient) for batch in prepared]
        parts = sum((output.metrics for output in outputs), Metrics()).shares
        total = torch.stack([output.loss for output in outputs]).sum()
        clipped = parts["policy/clip_fraction_low"] + parts["policy/clip_fraction_high"]
        return {
            "total_loss": total,
            "policy_loss": parts["loss/policy"],
            "kl_penalty": parts.get("loss/kl", torch.zeros_like(total)).detach(),
            "entropy": parts["policy/entropy"],
            "approx_kl": parts["kl/old"],
            "clip_fraction": clipped,
        }

    def negative_log_likelihood(self, samples: Sequence[Sample]) -> float:
        """The mean of -log p, in nats, over the samples' tokens, weighted by their advantages."""
        set_mode(self.policy.model, dropout=False)

        def weighted(batch: MicroBatch) -> tuple[float, float]:
            advantages = batch.advantages.double()
            logprobs = self.policy.score(batch).logprobs.double()
            return float((advantages * logprobs).sum()), float(advantages.sum())

        batches = self._micro_batches(samples)
        tokens = [batch.layout.num_tokens for batch in batches]
        parts = self._parallel.run(weighted, batches, tokens, at_once=self.policy.passes_at_once)
        total, weights = map(sum, zip(*parts, strict=True))
        return -total / weights

    def _passes(
        self, batches: Sequence[MicroBatch], denominators: Denominators, fraction: float
    ) -> tuple[dict[str, float], list[Tensor], str | None]:
        """Metrics, the log-probs [N] of each micro-batch's tokens in the last pass, and what was not finite
        in the first pass that had such a number.

        `fraction` turns the loss's mean over the forwarded samples into its mean over all.
        """
        results: list[StepResult] = []
        ratios: list[float] = []
        failure: str | None = None
        for _ in range(self.config.num_iterations):
            loss, numbers, logprobs = self._gradient(batches, denominators, fraction)
            if not self.policy.is_sharded:
                self._processes.sum_gradients(self.optimization.trained_parameters)
            numbers["loss/policy"] *= fraction
            kl, usable = self.kl, math.isfinite(loss)  # its gradient may be finite where the loss is not
            if self.reference is not None and usable:  # before the step: it may raise
                kl = kl.updated(numbers["kl/reference"], num_episodes=denominators.num_trajectories)
            self.midway = True
            results.append(self.optimization.step(usable=usable))
            norm, scaled = results[-1].grad_norm, self.scales_gradients
            failure = failure or not_finite(loss, norm, scaled=scaled, metrics=numbers)
            ratios.append(numbers["policy/ratio_max"])
        self.kl = kl
        self.midway = False
        metrics = {
            **self._objective.measure(numbers),
            "policy/first_ratio_max": ratios[0],
            "optimizer/grad_norm": results[-1].grad_norm,
            "optimizer/learning_rate": results[-1].learning_rate,
            "optimizer/skipped": float(sum(not result.stepped for result in results)),
            "kl/coefficient": self.kl.beta,
        }
        return metrics, logprobs, failure

    def _gradient(
        self, batches: Sequence[MicroBatch], denominators: Denominators, fraction: float
    ) -> tuple[float, dict[str, float], list[Tensor]]:
        """Add `fraction` of this process's part of the step's gradient, micro-batch by micro-batch; returns
        that fraction of the loss and the metrics, of all processes, and [N] log-probs of each micro-batch."""
        set_mode(self.policy.model, dropout=self.config.dropout)

        def add(batch: MicroBatch) -> MeasuredLoss:
            output = self._objective.loss(batch, denominators, self.kl.beta, weight=fraction)
            self.optimization.backward(output.loss)
            batch.layout.forget_masks()
            if self.config.rollout_sleep:  # the next one's tensors leave its holes empty
                trim_memory()
            return replace(output, loss=output.loss.detach())  # its graph is no longer needed

        parts = self._parallel.run(
            add,
            batches,
            [batch.layout.num_tokens for batch in batches],
            at_once=self.policy.passes_at_once,
            parameters=self.optimization.trained_parameters,
        )
        metrics = sum((part.metrics for part in parts), Metrics())
        loss = sum(float(part.loss) for part in parts)
        shares = self._processes.reduce("the gradient", {**metrics.shares, _LOSS: loss}, sum)
        maxima = self._processes.reduce("the gradient", metrics.maxima, max_or_nan)
        return shares.pop(_LOSS), shares | maxima, [part.logprobs for part in parts]

    def state(self) -> dict[str, Any]:
        state = self.optimization.state()
        optimizer = self._store.optimizer_state(state["optimizer"], self.optimization.trained_parameters)
        importance = {"mismatch_rms": self._objective.mismatch_rms}
        return {**state, "optimizer": optimizer, "kl": {"beta": self.kl.beta}, "importance": importance}

    def contribute_shards(self) -> None:
        self._store.contribute_shards(self.optimization.state()["optimizer"])

    def restore(self, weights: Weights, state: Mapping[str, Any], critic: Weights | None = None) -> None:
        optimizer = self._store.restore(weights, state["optimizer"], self.optimization.trained_parameters)
        self.restore_critic(critic)
        self.optimization.load({**state, "optimizer": optimizer})
        self.kl = replace(self.kl, beta=state["kl"]["beta"])
        self._objective.mismatch_rms = state.get("importance", {}).get("mismatch_rms")


def _trainable_policy(
    base: Any, config: TrainingConfig, precision: MatmulPrecision, pictures: PictureReader | None
) -> Policy:
    """The policy on `base`, under a new adapter where `config` has one, with its frozen parts frozen."""
    device, model = next(base.parameters()).device, base
    if config.lora is not None:
        with seeded_rng(derive(config.seed, "adapter"), device):
            model = add_adapter(base, config.lora)
    if config.freeze_vision:
        freeze_vision(model)
    policy = Policy(
        model,
        temperature=config.temperature,
        autocast=autocast_dtype(config.precision, device, size_for_auto(base, config, precision)),
        row_layout=config.row_layout,
        fast=config.fast_linears,
        precision=precision,
        place_id=None if pictures is None else pictures.place_id,
    )
    if config.gradient_checkpointing is True:
        policy.recompute_activations()
    return policy
