"""Supervised fine-tuning: conversations -> rows -> mean -log p of the agent's tokens -> step."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stateset_agents.backends.base import (
    RunningBackend,
    TrainableBackend,
    exclusive,
    picture_reader,
)
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.sources.datasets import Chats
from stateset_agents.runs.checkpoint_files import best_checkpoint, latest_checkpoint, load_checkpoint
from stateset_agents.runs.checkpoints import checkpoint_at
from stateset_agents.runs.compatibility import Identity
from stateset_agents.runs.early_stopping import Best, crossed
from stateset_agents.runs.recorder import ready
from stateset_agents.runs.trackers import check_installed
from stateset_agents.runtime.tasks import in_thread, shielded
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.agent_session import AgentSession
from stateset_agents.training.loop.checkpointer import Checkpointer
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.weight_sync import WeightSync, initial_tokens
from stateset_agents.training.sft.demonstrations import (
    Demonstrations,
    DemonstrationSource,
    OwnSuccesses,
    load_demonstrations,
)
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.factory import LearnerFactory, is_quantized_training, trainable_copy
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The collaborators of a trainer, once its model is loaded and its conversations are encoded."""

    demonstrations: Demonstrations
    backend: RunningBackend
    learner: Learner
    weights: WeightSync
    checkpoints: Checkpointer


_TAKEN = (
    *("optimizer/grad_norm", "optimizer/learning_rate", "optimizer/skipped"),
    *("tokens/forwarded", "tokens/padding", "batch/micro_batches"),
)
"""Metrics of an update that mean the same here."""


class SFTTrainer(AgentSession[SFTConfig]):
    """Imitates conversations, inside the caller's event loop.

    The loss of a step is the mean of -log p over the tokens that the agent says in its conversations, in
    nats. Prompts and replies are those of the agent's own template and history, rows are packed, and the
    optimiser is that of `MultiTurnGRPOTrainer`, which may go on from the result.

    >>> trainer = SFTTrainer(agent, "conversations.jsonl", SFTConfig(learning_rate=1e-4))
    >>> agent = await trainer.train()
    """

    _MAY_CHANGE = frozenset({"num_train_epochs", "max_steps"})
    _LENGTH = "max_steps or num_train_epochs"
    _SECTION = "sft"
    _parts: Parts | None

    def __init__(
        self,
        agent: MultiTurnAgent,
        conversations: Chats | DemonstrationSource,
        config: SFTConfig | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        run: RunFolder | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        """`conversations`: as `load_demonstrations` reads them, or a source such as a run's `OwnSuccesses`;
        `tools`: schemas that the agent is shown where a conversation names none; `run`: a folder to use
        instead of a new one; `callbacks`: who hears of steps, evaluations and checkpoints, see `Callback`."""
        expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        if config is not None:
            expect("config", config, SFTConfig, "write SFTConfig(learning_rate=1e-4, ...)")
        super().__init__(agent, config or SFTConfig(), run, callbacks)
        self._conversations = conversations
        self._tools = tools
        self._state = RunState(best=Best(metric="eval/loss"))

    # ------------------------------------------------------------------------------ how it stands

    def _adopt_settings(self, config: SFTConfig, settings: Mapping[str, Any]) -> None:
        parts = ready(self._parts)
        training = config.as_training(len(parts.demonstrations.train))
        parts.learner.set_num_steps(training.num_steps())
        self._state = parts.checkpoints.change_settings(training, settings, self._state)

    @property
    def _planned_steps(self) -> int | None:
        """Known once the conversations are encoded."""
        return None if self._parts is None else self.config.num_steps(len(self._parts.demonstrations.train))

    @property
    def model_folder(self) -> Path:
        """The weights that the agent ends with, as plain transformers loads them."""
        best = best_checkpoint(self.run.checkpoints) if self.config.load_best_at_end else None
        step = f"step-{self.step_number:06d}" if best is None else "best"
        return self.run.checkpoints / step / "model"

    @property
    def learner(self) -> Learner:
        """Holds the master weights."""
        return ready(self._parts).learner

    # ------------------------------------------------------------------------------ begin and end

    async def initialize(self) -> None:
        """Load the model, encode the conversations, make the trainable copy, open the run folder.

        Raises ConfigurationError for conversations that cannot be read or train nothing, and an agent that
        another trainer is training.
        """
        folder = self._recorder.folder
        await self._initialize(None if folder is None else latest_checkpoint(folder.checkpoints))

    async def _initialize(self, checkpoint: Path | None) -> None:
        """`checkpoint`: one that will be gone on from; its run's day is told."""
        self._worker.refuse_stopped()
        if self.is_ready:
            return
        await self._group.join(1)
        self._parts = await self._set_up(None if checkpoint is None else date_of(checkpoint))
        self._note_date()

    async def _set_up(self, date: datetime.date | None) -> Parts:
        """Load the model, encode the conversations, make the learner, open the run folder.

        A template that tells the date tells `date`, of the run that is gone on with.
        """
        agent, config, worker = self.agent, self.config, self._worker
        await in_thread(check_installed, self.callbacks)
        await agent.initialize()
        if (day := date or agent.template.date) is not None:
            agent.pin_date(day)
        backend = agent.backend
        if not isinstance(backend, RunningBackend) or not isinstance(backend, TrainableBackend):
            raise ConfigurationError(
                f"a {type(backend).__name__} has no weights to train: use an in-process model"
            )
        demonstrations = await worker.run(self._encoded)
        if backend.trained_tokens is not None:
            backend.trained_tokens |= demonstrations.token_ids
        training = config.as_training(len(demonstrations.train))

        def make_learner() -> Learner:
            model, _ = trainable_copy(backend, training)
            return Learner(
                model,
                training,
                num_steps=training.num_steps(),
                exact_logprobs=True,
                matmul_precision=backend.matmul_precision,
                pictures=picture_reader(backend),
            )

        with exclusive(backend, self._lifecycle):
            tokens = initial_tokens(backend, is_quantized=is_quantized_training(training))
            learner = await worker.run(make_learner)
        agent_settings = agent.config.model_dump(mode="json")
        identity = Identity(
            base=learner.fingerprint,
            scenarios=await worker.run(_fingerprint, demonstrations),
            settings={"agent": agent_settings, "training": training.model_dump(mode="json")},
        )
        settings = {
            "made_by": "sft",
            "agent": agent_settings,
            "conversations": _source(self._conversations),
            "sft": config.model_dump(mode="json"),
        }
        weights, checkpoints = await self._open_run(learner, training, identity, settings, tokens=tokens)
        return Parts(
            demonstrations=demonstrations,
            backend=backend,
            learner=learner,
            weights=weights,
            checkpoints=checkpoints,
        )

    def _encoded(self) -> Demonstrations:
        conversations, share = self._conversations, self.config.validation_share
        if isinstance(conversations, DemonstrationSource):
            return conversations.load(self.agent, validation_share=share)
        return load_demonstrations(self.agent, conversations, tools=self._tools, validation_share=share)

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent with the weights of the lowest held-out loss, or
        of the last step where nothing is held out.

        However it ends, it keeps a checkpoint of the last finished step, `summary.json` and `report.html`.
        Raises TrainingStopped where a loss or gradient is not finite.
        """
        return await super().train()

    async def _begin(self) -> None:
        parts = ready(self._parts)
        paths = LearnerFactory().paths(parts.backend, parts.learner)
        self.tracker.log_event("paths", step=self.step_number, **paths)

    async def _next_step(self) -> None:
        parts, step = ready(self._parts), self.step_number + 1
        started = time.perf_counter()
        samples = step_samples(
            parts.demonstrations.train,
            step,
            size=self.config.per_device_train_batch_size,
            seed=self.config.seed,
        )
        learned = await shielded(self._worker.run(lambda: parts.learner.learn_from(samples, step=step)))
        if learned.failure is not None:
            raise TrainingStopped(f"step {step} {learned.failure}; earlier steps are kept")
        metrics = learned.metrics
        seconds = time.perf_counter() - started
        update_metrics = {name: metrics[name] for name in _TAKEN if name in metrics}
        num_tokens = float(sum(sample.trajectory.num_agent_tokens for sample in samples))
        step_metrics = {
            "sft/loss": metrics["loss/policy"],
            "sft/entropy": metrics["policy/entropy"],
            "sft/epoch": step / self.config.steps_per_epoch(len(parts.demonstrations.train)),
            **update_metrics,
            "tokens/agent": num_tokens,
            "tokens/per_second": metrics["tokens/forwarded"] / seconds,
            "time/step": seconds,
        }
        self._state = replace(
            self._state,
            step=step,
            version=step,
            frontier=self._state.frontier + len(samples),
            train_seconds=self._state.train_seconds + seconds,
        )
        self._recorder.measured(step, step_metrics)
        await self._notify("on_step_end", step, step_metrics)

    def _is_evaluation_due(self) -> bool:
        """True before the first step, after an epoch or `eval_steps`, and after the last step."""
        demonstrations, step = ready(self._parts).demonstrations, self.step_number
        every, evaluated_step = self.config.eval_steps, self._state.evaluated_step
        is_last = evaluated_step < step == self.num_steps
        every = every or self.config.steps_per_epoch(len(demonstrations.train))
        is_due = step == 0 or is_last or crossed(every, evaluated_step, step)
        return is_due and bool(demonstrations.validation)

    async def _validate(self) -> bool:
        """Measure the held-out loss; True where a step's is the lowest so far."""
        parts = ready(self._parts)
        held_out = parts.demonstrations.validation[: self.config.eval_episodes]
        loss = await self._worker.run(parts.learner.negative_log_likelihood, held_out)
        step = self.step_number
        best = self._state.best.after(step, loss, threshold=self.config.early_stopping_threshold)
        self._state = replace(self._state, evaluated_step=step, best=best)
        self._recorder.measured(step, {"eval/loss": loss, "eval/conversations": float(len(held_out))})
        await self._notify("on_evaluate", step, HeldOutLoss(loss=loss, conversations=len(held_out)))
        return best.step == step > 0  # the weights at the start are no checkpoint

    async def _finish(self, *, is_done: bool) -> None:
        """Let the agent speak with the best weights; the trainer's own stay the last step's."""
        parts = ready(self._parts)
        await parts.weights.push(self._state)
        best = self._state.best.step
        if not self.config.load_best_at_end or best in (None, self.step_number):
            return
        path = best_checkpoint(self.run.checkpoints)
        if path is not None:
            checkpoint = await self._worker.run(load_checkpoint, path)
            await parts.weights.publish(checkpoint)

    # ------------------------------------------------------------------------------ checkpoints, the end

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given.

        Raises CheckpointError when it is damaged, or is of another base model, other conversations or other
        settings. The length of the run may differ.
        """
        await (self.initialize() if path is None else self._initialize(checkpoint_at(Path(path))))
        parts = ready(self._parts)
        with parts.weights.exclusive():
            restored = await parts.checkpoints.restore(path)
            if restored is not None:
                self._state = restored[1]
                await parts.weights.push(self._state)
            await parts.checkpoints.truncate_after(self._state)

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        demonstrations = ready(self._parts).demonstrations
        counts = {"conversations": len(demonstrations.train), "held_out": len(demonstrations.validation)}
        return {**self._outcome(**counts), "threads": torch.get_num_threads()}


def date_of(checkpoint: Path) -> datetime.date | None:
    """The day that the run of a checkpoint tells; None where it tells none, or the checkpoint is damaged, as
    `load_checkpoint` will say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        return datetime.date.fromisoformat(state["progress"]["template_date"])
    return None


def _source(conversations: Chats | DemonstrationSource) -> str | dict[str, Any] | None:
    """The name of the conversations in config.yaml; None where only the program has them."""
    if isinstance(conversations, OwnSuccesses):
        return {"best_of": str(conversations.run.absolute())}
    if isinstance(conversations, Mapping) and isinstance(name := conversations["dataset"], str | Path):
        return {**conversations, "dataset": str(Path(name).absolute() if Path(name).exists() else name)}
    return str(Path(conversations).absolute()) if isinstance(conversations, str | Path) else None


def _fingerprint(demonstrations: Demonstrations) -> str:
    """SHA-256 of everything that is imitated or held out, token by token."""
    digest = hashlib.sha256()
    for sample in (*demonstrations.train, *demonstrations.validation):
        for row in sample.rows:
            digest.update(repr((row.token_ids, row.action_mask)).encode())
            digest.update("".join(item.digest for item in row.pixels).encode())
        digest.update(repr(sample.advantages).encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """The evaluation of a fine-tuning, as `on_evaluate` gets it."""

    loss: float
    """Mean of -log p over the agent's tokens in the held-out conversations, in nats."""
    conversations: int

    def metrics(self) -> dict[str, float]:
        """The metrics for logs and trackers."""
        return {"eval/loss": self.loss}


def step_samples(samples: Sequence[Sample], step: int, *, size: int, seed: int) -> list[Sample]:
    """The samples of a step, from 1: every epoch shows all, in an order of its own that the seed decides.

    They are weighted so that the step's loss is the mean over the tokens that count.
    """
    per_epoch = -(-len(samples) // size)
    epoch, place = divmod(step - 1, per_epoch)
    generator = torch.Generator().manual_seed(derive(seed, "demonstrations", epoch))
    order = torch.randperm(len(samples), generator=generator).tolist()
    batch = [samples[index] for index in order[place * size : (place + 1) * size]]
    total = sum(len(sample.advantages) for sample in batch)
    weight = total / sum(sum(sample.advantages) for sample in batch)
    return [replace(sample, weight=weight) for sample in batch]


async def sft(
    agent: MultiTurnAgent,
    conversations: Chats | DemonstrationSource,
    config: SFTConfig | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    callbacks: Sequence[object] = (),
    **settings: Any,
) -> MultiTurnAgent:
    """Fine-tune in one call: `await sft(agent, "conversations.jsonl", learning_rate=1e-4)`.

    `settings` are `SFTConfig`'s where no `config` is given. The agent speaks with the new weights.
    """
    if config is not None and settings:
        raise ConfigurationError("give sft a config or settings, not both")
    trainer = SFTTrainer(
        agent, conversations, config or SFTConfig(**settings), tools=tools, callbacks=callbacks
    )
    return await trainer.train_and_stop()
