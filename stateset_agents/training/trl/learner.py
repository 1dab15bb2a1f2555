"""TRL as the trainer's learner: samples in, better weights out, by `trl.update.ConversationTrainer`.

TRL runs its own loop, so it has a thread of its own. Where it would generate it waits for the rows of our
next step; after its optimiser steps on them it waits again, and the weights do not change.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.backends.adapters import Adapter
from stateset_agents.backends.base import AdapterBackend, RunningBackend, TrainableBackend, picture_reader
from stateset_agents.backends.linears import MatmulPrecision
from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.template import ChatTemplate
from stateset_agents.core.value_function import trunk_of
from stateset_agents.runs.checkpoint_files import fingerprint
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.rows.layout import Layout, padded_layouts
from stateset_agents.training.trl.backend import Sampled, TrlBackend
from stateset_agents.training.trl.rows import TrlRow, padding_row, trl_rows
from stateset_agents.training.trl.settings import TrlSettings, check_mappable, grpo_arguments
from stateset_agents.training.update.batch import ConversationRow, Sample
from stateset_agents.training.update.critic import ActorCritic, Critic, make_critic
from stateset_agents.training.update.factory import (
    LearnerFactory,
    is_quantized_training,
    refuse_truncated_sampling,
    trainable_copy,
)
from stateset_agents.training.update.lora import (
    base_of,
    lora_config,
    plain_weights,
    size_for_auto,
    write_model_files,
)
from stateset_agents.training.update.protocol import Learned, Weights, not_finite
from stateset_agents.training.update.weight_store import AdapterWeights, FullWeights
from stateset_agents.types.errors import CheckpointError, ConfigurationError
from stateset_agents.types.settings import expect

_MOST_TOKENS = 16384
"""Tokens of one forward for the critic, padding included."""


class _TrainingEnded(Exception):
    """Raised where TRL waits for rows: there will be none."""


@dataclass(frozen=True, slots=True)
class _SampleRequest:
    """Prompts that TRL samples before it gets rows."""

    prompts: list[list[int]]
    replies: Future[list[Sampled]] = field(default_factory=Future)


class TrlLearner(ActorCritic):
    """A `PolicyLearner`, which documents what a trainer calls, with TRL's model, loss and optimiser."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: TrainingConfig,
        settings: TrlSettings,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        matmul_precision: MatmulPrecision = "highest",
    ) -> None:
        """Trains `model` itself, or with `config.lora` an adapter on it. `max_new_tokens` and `stop_ids`
        bound a turn where TRL samples; `matmul_precision` is of fp32 products."""
        from trl.trainer.grpo_config import GRPOConfig

        from stateset_agents.training.trl.update import ConversationTrainer, no_dropout

        self.config = config
        self._tokenizer = copy.deepcopy(tokenizer)  # TRL gives it a padding token
        self._folder = tempfile.TemporaryDirectory(prefix="trl-")
        self._rows: queue.SimpleQueue[Sequence[TrlRow] | _SampleRequest | None] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[Mapping[str, float] | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_updates = 0
        no_dropout(model)
        name_or_path = getattr(model.config, "_name_or_path", "")
        arguments = grpo_arguments(
            config,
            settings,
            device=model.device,
            max_new_tokens=max_new_tokens,
            folder=self._folder.name,
            num_parameters=size_for_auto(model, config, matmul_precision),
        )
        with loading(), torch.random.fork_rng(), tempfile.TemporaryDirectory(prefix="start-") as folder:
            if config.uses_reference and config.lora is None:  # TRL loads it from where the model came from
                model.save_pretrained(folder)
                model.config._name_or_path = folder
            try:
                self.trainer: Any = ConversationTrainer(
                    model,
                    self._tokenizer,
                    GRPOConfig(**arguments),
                    config,
                    next_rows=self._next_rows,
                    stepped=self._steps.put,
                    stop_ids=stop_ids,
                    precision=matmul_precision,
                    peft_config=None if config.lora is None else lora_config(config.lora, model),
                )
            finally:
                model.config._name_or_path = name_or_path
        self.model: nn.Module = self.trainer.accelerator.unwrap_model(self.trainer.model)
        """TRL's, wrapped by peft where there is an adapter."""
        self.base = base_of(self.model)
        self.device: torch.device = self.base.device
        self.layout = {"rows": "padded", "why_rows": "TRL pads"}
        self.scales_gradients = bool(self.trainer.args.fp16)
        self._store = (FullWeights if config.lora is None else AdapterWeights)(self.model)
        self._cuts_after_first_token = _left_padding_matters(self.base)
        """True where a prompt is cut to one token, so that TRL pads nothing on the left."""
        self.critic = _critic(self.base, config)
        self.fingerprint = fingerprint(self.base_weights() if config.lora else self.weights())

    # ------------------------------------------------------------------------------ learning

    def set_num_steps(self, num_steps: int) -> None:
        """Raises ConfigurationError for another length: TRL counts its steps when its trainer is made."""
        if num_steps == self.config.num_steps():
            return
        raise ConfigurationError(
            f"TRL was made for {self.config.num_steps()} steps and cannot go on to {num_steps}: make a new "
            "trainer of that max_steps and load this one's checkpoint"
        )

    def set_temperature(self, temperature: float) -> None:
        """TRL's was set at the start; `check_mappable` refuses a temperature that changes."""

    def losses(self, samples: Sequence[Sample], *, beta: float | None = None) -> dict[str, Tensor]:
        """Raises ConfigurationError: TRL computes its loss in its own step."""
        raise ConfigurationError("TRL computes its loss in its own step: ask a MultiTurnGRPOTrainer for one")

    def learn_from(self, samples: Sequence[Sample], *, step: int) -> Learned:
        """`num_iterations` optimiser steps of TRL's; none where the gradient is exactly 0 (AdamW would still
        move the weights)."""
        config = self.config
        if not (config.uses_reference or any(any(sample.advantages) for sample in samples)):
            return Learned({"optimizer/skipped": 1.0})
        self.midway = True
        self._start()
        self._rows.put(self._batch(samples))
        metrics: Mapping[str, float] = {}
        for _ in range(config.num_iterations):
            result = self._steps.get()
            if isinstance(result, BaseException):
                raise result
            metrics = result
        self.num_updates += config.num_iterations
        self.midway = False
        loss, norm = metrics.get("loss/total", 0.0), metrics.get("optimizer/grad_norm", 0.0)
        failure = not_finite(loss, norm, scaled=self.scales_gradients)
        beta = config.beta if config.uses_reference else 0.0
        return Learned({**metrics, "kl/coefficient": beta, "optimizer/skipped": 0.0}, failure=failure)

    def _batch(self, samples: Sequence[Sample]) -> list[TrlRow]:
        size = self.config.episodes_per_step() * self.config.num_generations
        if len(samples) > size:
            raise ConfigurationError(
                f"{len(samples)} conversations do not fit a step of {size}: TRL's batches are all of one size"
            )
        cut = 1 if self._cuts_after_first_token else None
        rows = [
            row
            for number, sample in enumerate(samples)
            for row in trl_rows(
                sample.trajectory,
                sample.advantages,
                weight=sample.weight,
                prompt_tokens=cut,
                conversation=number,
            )
        ]
        if len(rows) > len(samples) and LOSSES[self.config.loss_type].level == "sequence":
            raise ConfigurationError(
                f"loss_type {self.config.loss_type!r} in TRL takes one ratio of each row, and {len(samples)} "
                f"conversations have {len(rows)} rows: take a loss_type with a ratio of each token, or train "
                "with MultiTurnGRPOTrainer"
            )
        padding = padding_row(self._tokenizer.pad_token_id, reward=fmean(row.reward for row in rows))
        return [*rows, *[padding] * (-len(rows) % size)]

    async def sample(self, prompts: list[list[int]]) -> list[Sampled]:
        """Replies by TRL's own generation, which runs in TRL's thread, between two steps."""
        self._start()
        request = _SampleRequest(prompts)
        self._rows.put(request)
        return await asyncio.wrap_future(request.replies)

    # ------------------------------------------------------------------------------ TRL's thread

    def _start(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            raise ConfigurationError(
                "TRL's last update broke off: make a new trainer, of the checkpoint's model/"
            )
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._train, args=(threads,), name="trl", daemon=True)
            self._thread.start()

    def _train(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # torch keeps one number per thread
        try:
            self.trainer.train()
        except _TrainingEnded:
            return
        except BaseException as error:  # `learn_from` raises it, whatever it is
            self._steps.put(error)

    def _next_rows(self) -> Sequence[TrlRow]:
        while isinstance(rows := self._rows.get(), _SampleRequest):
            try:
                rows.replies.set_result(self.trainer.sample(rows.prompts))
            except Exception as error:  # `sample` raises it
                rows.replies.set_exception(error)
        if rows is None:
            raise _TrainingEnded
        return rows

    def close(self) -> None:
        """End TRL's thread; the weights stay."""
        if self._thread is not None:
            self._rows.put(None)
            self._thread.join()
            self._thread = None
        self._folder.cleanup()

    # ------------------------------------------------------------------------------ weights and checkpoints

    def weights(self) -> Mapping[str, Tensor]:
        return self._store.weights()

    def adapter(self, state: Mapping[str, Any] | None = None) -> Adapter | None:
        return self._store.adapter(None if state is None else state["optimizer"], self._trained())

    def base_weights(self) -> Mapping[str, Tensor]:
        return plain_weights(self.model, {})

    def write_model_files(self, path: Path) -> None:
        write_model_files(self.model, path, dtype=self.base.config.dtype)

    def state(self) -> dict[str, Any]:
        state = self._optimizer().state_dict()
        return {
            "optimizer": self._store.optimizer_state(state, self._trained()),
            "num_updates": self.num_updates,
        }

    def contribute_shards(self) -> None:
        """One process trains, and it writes the checkpoints."""

    def _optimizer(self) -> Any:
        if self.trainer.optimizer is None:
            self.trainer.create_optimizer()
        return self.trainer.optimizer

    def _trained(self) -> list[Tensor]:
        """The trained parameters in the optimiser's order."""
        return [parameter for group in self._optimizer().param_groups for parameter in group["params"]]

    def restore(self, weights: Weights, state: Mapping[str, Any], critic: Weights | None = None) -> None:
        """Load a checkpoint before the first step. Raises CheckpointError, too, once TRL has begun."""
        if self._thread is not None:
            raise CheckpointError(
                "TRL has begun to train: load the checkpoint in a new trainer, before its steps"
            )
        optimizer = self._optimizer()
        optimizer.load_state_dict(self._store.restore(weights, dict(state["optimizer"]), self._trained()))
        for group in optimizer.param_groups:  # the schedule begins with them
            group["lr"] = self.config.learning_rate
            group.pop("initial_lr", None)
        self.restore_critic(critic)
        self.num_updates = self.trainer.updates_done = int(state["num_updates"])


def _critic(model: Any, config: TrainingConfig) -> Critic | None:
    """TRL has none: a value head on the hidden states of its model."""

    def layouts(rows: Sequence[ConversationRow]) -> list[Layout]:
        ids = [row.token_ids for _, row in rows]
        return padded_layouts(ids, max_rows=len(ids), max_tokens=_MOST_TOKENS)

    def hidden(layout: Layout) -> Tensor:
        training = model.training
        model.eval()  # in training mode its forward differs by some bits
        output = trunk_of(model)(**layout.forward_arguments(model.device)).last_hidden_state
        model.train(training)
        states: Tensor = output.flatten(0, 1).float()
        return states

    return make_critic(model, config, layouts=layouts, hidden=hidden)


def _computes_in_its_dtype(model: Any) -> bool:
    """True where TRL trains an adapter on weights of this dtype: on a CPU it computes in fp32."""
    return model.device.type != "cpu" or model.dtype is torch.float32


@torch.no_grad()
def _left_padding_matters(model: Any) -> bool:
    """True where padding before a text changes the model's logits; TRL pads prompts there.

    Rotary positions are relative and do not change; learned ones do.
    """
    ids = torch.arange(1, 7, device=model.device)[None]
    padded = torch.cat([torch.zeros_like(ids), ids], dim=1)
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], dim=1)
    logits = model(input_ids=ids, use_cache=False).logits
    shifted = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, ids.shape[1] :]
    return not torch.allclose(logits, shifted, atol=1e-2, rtol=1e-2)


class TrlLearnerFactory(LearnerFactory):
    """A `LearnerFactory` whose learners update by TRL, and sample by it where that is asked for."""

    def __init__(self, settings: TrlSettings | None = None) -> None:
        if settings is not None:
            expect("trl", settings, TrlSettings, "write TrlSettings(options={...})")
        self.settings = settings or TrlSettings()

    def check(self, agent: MultiTurnAgent, config: TrainingConfig) -> None:
        """Raises ConfigurationError for settings that TRL cannot follow."""
        refuse_truncated_sampling("TRL", agent)
        check_mappable(config, self.settings)

    def make(
        self, agent: MultiTurnAgent, backend: TrainableBackend, config: TrainingConfig, processes: Processes
    ) -> Any:
        """A learner on a copy of the backend's model. Blocking."""
        check_mappable(config, self.settings)  # the model's card may have set some
        if picture_reader(backend) is not None:
            raise ConfigurationError("TRL as the learner gets no pictures: leave --trl out")
        if is_quantized_training(config) or config.lora is None:
            model = trainable_copy(backend, config)[0]
        else:
            model = None
            if isinstance(backend, AdapterBackend):
                model = backend.share_model(_computes_in_its_dtype)
            if model is None and _computes_in_its_dtype(own := backend.model_to_quantize()):
                model = copy.deepcopy(own)
            model = backend.master_model() if model is None else model
        tokenizer: Any = backend.tokenizer
        return TrlLearner(
            model,
            tokenizer.hf,
            config,
            self.settings,
            max_new_tokens=agent.config.max_new_tokens,
            stop_ids=sorted({*agent.template.stop_ids, *tokenizer.eos_ids}),
            matmul_precision=backend.matmul_precision,
        )

    async def player(self, agent: MultiTurnAgent, learner: Any) -> MultiTurnAgent:
        """The agent itself, or one that samples by TRL."""
        if not self.settings.generates:
            return agent
        backend: Any = TrlBackend(
            agent.backend,
            learner.sample,
            temperature=learner.config.temperature,
            max_new_tokens=agent.config.max_new_tokens,
        )
        player = _Player(agent, backend)
        await player.initialize()
        return player

    def paths(self, backend: RunningBackend, learner: Any) -> dict[str, Any]:
        """The engine that plays, and TRL's row layout."""
        if self.settings.generates:
            engine = "vLLM" if self.settings.options.get("use_vllm") else "transformers"
            return {"engine": f"TRL, {engine}", "why": "asked for", **learner.layout}
        return super().paths(backend, learner)


class _Player(MultiTurnAgent):
    """An agent that samples elsewhere, and speaks by the template that the trainer pinned to its day."""

    def __init__(self, agent: MultiTurnAgent, backend: Any) -> None:
        super().__init__(agent.config, backend=backend)
        self._agent = agent

    @property
    def template(self) -> ChatTemplate:
        return self._agent.template
