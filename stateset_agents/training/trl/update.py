"""TRL's GRPOTrainer on whole conversations and our advantages. Importing this file imports TRL.

Three private methods of TRL are overridden, so its version is pinned: `_generate_and_score_completions`, to
put one advantage on each token, and `_compute_loss` and `_get_per_token_logps_and_entropies`, to count
conversations as we do, whatever their rows. Everything else (forward, loss, reference, optimiser,
distribution) is TRL's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]  # it has no stubs
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from stateset_agents.backends.linears import MatmulPrecision, fast_linears, head_weight
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.rows import TrlRow, columns, shares_of_conversations
from stateset_agents.training.update.policy import clear_dropout_rates
from stateset_agents.types.seeds import derive

# transformers' own doing: it warns of a name that TRL's settings still have.
warnings.filterwarnings(
    "ignore", message=r"`(is_)?gradient_checkpointing` is deprecated", category=FutureWarning
)

_NAMES: Mapping[str, str] = {
    "loss": "loss/total",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "entropy": "policy/entropy",
    "clip_ratio/low_mean": "policy/clip_fraction_low",
    "clip_ratio/high_mean": "policy/clip_fraction_high",
    "cispo_clip_ratio": "policy/clip_fraction_high",
}
"""TRL's metrics of an optimiser step -> our names."""


class ConversationTrainer(GRPOTrainer):
    """GRPOTrainer that asks for rows where it would generate, each with one advantage per token."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        arguments: GRPOConfig,
        config: TrainingConfig,
        *,
        next_rows: Callable[[], Sequence[TrlRow]],
        stepped: Callable[[Mapping[str, float]], None],
        peft_config: Any = None,
        stop_ids: Sequence[int] = (),
        precision: MatmulPrecision = "highest",
    ) -> None:
        """`next_rows` returns each batch, in a multiple of the rows that TRL asks for, and may wait;
        `stepped` is called with the metrics of each optimiser step. `stop_ids` end a turn where TRL samples;
        `precision` is of fp32 products, logits excepted."""
        self._config = config
        self._linears = partial(fast_linears, config.fast_linears, precision, wide=head_weight(model))
        self.updates_done = 0
        """Optimiser steps of the run before it was resumed: where the learning rate's schedule goes on."""
        self._next_rows = next_rows
        self._stepped = stepped
        self._rows: Sequence[TrlRow] = ()
        self._gradient_shares: Tensor | None = None
        """[B] what the gradient of each row that is forwarded is multiplied by; None: 1."""
        self._logprobs: Tensor | None = None
        """[B, T] of the rows that were forwarded with shares."""
        self._rng_state: Tensor | None = None
        settings: Any = arguments
        num_prompts = settings.max_steps * settings.generation_batch_size // settings.num_generations
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental.*")
            super().__init__(
                model=model,
                reward_funcs=[_reward],  # type: ignore[list-item]  # it has keywords of its own
                args=arguments,
                # What is played is chosen elsewhere: these only make TRL count as many batches as there are.
                train_dataset=Dataset.from_dict({"prompt": ["conversation"] * num_prompts}),
                processing_class=tokenizer,
                peft_config=peft_config,
                rollout_func=self._played_rows,
            )
        trained: Any = self.model
        for parameter in trained.parameters():  # TRL rounds an adapter on few bits to bf16, in which
            if parameter.requires_grad:  # AdamW's small steps are lost
                parameter.data = parameter.data.float()
        self.remove_callback(PrinterCallback)
        if stop_ids and not self.use_vllm:
            self.generation_config.eos_token_id = list(stop_ids)
            self.generation_kwargs["eos_token_id"] = list(stop_ids)
        self.eos_token_ids = [*stop_ids] or self.eos_token_ids
        # dr_grpo's constant; what bounds a turn was read when the trainer was made
        self.max_completion_length = config.loss_length

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Our schedule of the learning rate, over all optimiser steps of the run."""
        length = self._config.num_steps() * self._config.num_iterations
        done = self.updates_done
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,  # type: ignore[arg-type]  # TRL made it by now
                lambda step: self._config.lr_factor(step + done, length),
            )
        return self.lr_scheduler

    def _played_rows(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: conversations that were played already."""
        rows = self._rows
        if len(rows) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need a row each, got {len(rows)}")
        return columns(rows, [row.reward for row in rows], with_logprobs=self.use_vllm)

    def sample(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """One reply to each prompt by TRL's own generation, with log-probs of the policy as it is."""
        with self._linears():
            sampled: Any = self._generate_single_turn(prompts, None, {}, 1)  # type: ignore[no-untyped-call]  # TRL
            replies, logprobs = sampled
            if logprobs is None:  # vLLM alone returns them
                logprobs = self._scored(prompts, replies)
        return list(zip(replies, logprobs, strict=True))

    @torch.no_grad()
    def _scored(self, prompts: list[list[int]], replies: list[list[int]]) -> list[list[float]]:
        rows = [[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.accelerator.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=ids.device)
        shortest = min(map(len, prompts))
        scores, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, width - shortest)
        starts = [len(prompt) - shortest for prompt in prompts]
        return [
            logprobs[start : start + len(reply)].tolist()
            for logprobs, start, reply in zip(scores, starts, replies, strict=True)
        ]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's; afterwards the process's generator has the state that it had before."""
        inputs = super()._prepare_inputs(generation_batch)
        if self._rng_state is not None:
            torch.set_rng_state(self._rng_state)
            self._rng_state = None
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, its advantages [B] replaced by ours, [B, T]. It has as many rows as there are."""
        rows = self._rows = self._next_rows()
        parts, rest = divmod(len(rows), len(inputs))
        if rest or not parts:
            raise ValueError(f"{len(inputs)} prompts need a multiple of as many rows, got {len(rows)}")
        with self._linears():
            batch: dict[str, Any] = super()._generate_and_score_completions(
                [dict(prompt) for _ in range(parts) for prompt in inputs]  # TRL writes into them
            )
        advantages = torch.zeros(batch["completion_ids"].shape, dtype=torch.float32)
        for index, row in enumerate(rows):
            advantages[index, : len(row.advantages)] = torch.tensor(row.advantages)
        batch["advantages"] = advantages.to(batch["completion_ids"].device)
        training = {row.conversation for row in rows if row.num_trained}
        # TRL shuffles the rows next, in an order of the run's seed and the update's number. The seed is not
        # set sooner: until the rows are there other threads draw, too.
        self._rng_state = torch.get_rng_state()
        torch.manual_seed(derive(self._config.seed, "trl", self.updates_done + self.state.global_step))
        batch["parts"] = torch.tensor(parts)
        batch["row_share"] = torch.tensor(len(inputs) / max(1, len(training)))
        batch["gradient_share"] = torch.tensor(shares_of_conversations(rows))
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss. Where it averages over rows, conversations count, and a row's mean over its tokens
        counts by their share of its conversation's.

        A batch with more rows than TRL asked for goes through the model in parts of the size it asked for.
        """
        *earlier, last = split_tensor_dict(inputs, int(inputs["parts"]))
        before = torch.zeros(())
        for part in earlier:
            loss = self._part_loss(model, part)
            self.accelerator.backward(loss)
            before = before.to(loss.device) + loss.detach()
        loss = self._part_loss(model, last)
        return loss + before if earlier else loss

    def _part_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        shares = inputs["gradient_share"].to(inputs["completion_ids"].device)
        trains = shares > 0
        if self.loss_type == "grpo" and not bool((shares[trains] == 1).all()):
            self._gradient_shares = shares
        try:
            with self._linears():
                loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]  # TRL
            if self._logprobs is not None:
                loss = loss + self._correction(inputs, self._logprobs, shares)
        finally:
            self._gradient_shares = self._logprobs = None
        return loss * inputs["row_share"].item() if self.loss_type in ("grpo", "dr_grpo") else loss

    @torch.no_grad()
    def _correction(self, inputs: Mapping[str, Any], logprobs: Tensor, shares: Tensor) -> Tensor:
        """The amount by which TRL's `grpo` loss differs from one whose rows count by their shares.

        Only gradients can be given shares inside it, so its value is computed again: the loss with
        `importance_sampling_level="token"` as `GRPOTrainer._compute_loss` of TRL 1.16 has it, without the
        entropy bonus, which counts tokens.
        """
        settings: Any = self.args
        mask, advantages = inputs["completion_mask"] * inputs["tool_mask"], inputs["advantages"]
        ratio = torch.exp(logprobs - inputs.get("old_per_token_logps", logprobs))
        clipped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
        capped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
        losses = -torch.min(capped * advantages, clipped * advantages)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            losses = losses * inputs["importance_sampling_ratio"]
        if self.beta != 0.0:
            distance = inputs["ref_per_token_logps"] - logprobs
            kl = torch.exp(distance) - distance - 1
            losses = losses + self.beta * (kl * ratio if settings.use_bias_correction_kl else kl)
        rows: Tensor = (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        return ((shares - 1) * rows).mean() / self.current_gradient_accumulation_steps

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        """TRL's; each row's gradient goes into the model by its share."""
        scores = super()._get_per_token_logps_and_entropies(*args, **options)
        shares = self._gradient_shares
        if shares is not None and scores[0].requires_grad:
            self._logprobs = scores[0].detach()
            scores[0].register_hook(lambda gradient: gradient * shares[:, None].to(gradient.dtype))
        return scores

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log; the metrics of an optimiser step go to `stepped` by our names."""
        super().log(logs, start_time)
        if "grad_norm" not in logs:  # it is the last line, about the whole run
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, int | float)}
        metrics = {ours: numbers[name] for name, ours in _NAMES.items() if name in numbers}
        if "kl" in numbers:  # TRL's is multiplied by the ratio, which is 1 in a first pass alone
            metrics["kl/reference" if self.num_iterations == 1 else "kl/times_ratio"] = numbers["kl"]
        sampling = {name: value for name, value in numbers.items() if name.startswith("sampling/")}
        self._stepped(metrics | sampling)


def _reward(conversation_reward: Sequence[float], **_: Any) -> list[float]:
    """The conversations' rewards, for TRL's own log."""
    return list(conversation_reward)


_reward.__name__ = "reward"


def no_dropout(model: torch.nn.Module) -> None:
    """Set every dropout rate of a model to 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        clear_dropout_rates(module)
