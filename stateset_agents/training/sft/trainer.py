"""Supervised fine-tuning: conversations -> rows -> mean -log p of the agent's tokens -> step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.sources.chat_logs import Chats
from stateset_agents.runs.callbacks import expect_callback
from stateset_agents.runs.checkpoint_files import best_checkpoint, latest_checkpoint, load_checkpoint
from stateset_agents.runs.early_stopping import Best, crossed
from stateset_agents.runs.lifecycle import NothingBeside, Progress, State
from stateset_agents.runs.recorder import ready
from stateset_agents.runs.resuming import checkpoint_at
from stateset_agents.runs.session import Session, Work
from stateset_agents.runs.settings import CADENCE, changed_settings
from stateset_agents.runs.trackers import make_trackers
from stateset_agents.runtime.tasks import shielded
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.sft.demonstrations import DemonstrationSource
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.setup import Parts, date_of, set_up
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.factory import engine_paths
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.logs import get_logger
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect

_log = get_logger(__name__)

_MAY_CHANGE = CADENCE | {"num_train_epochs", "max_steps"}

_TAKEN = (
    *("optimizer/grad_norm", "optimizer/learning_rate", "optimizer/skipped"),
    *("tokens/forwarded", "tokens/padding", "batch/micro_batches"),
)
"""What of an update's metrics means the same here."""


class SFTTrainer:
    """Imitates conversations, inside the caller's event loop.

    The loss of a step is the mean of -log p over the tokens that the agent says in its conversations, in
    nats. Prompts and replies are those of the agent's own template and history, rows are packed, and the
    optimiser is that of `MultiTurnGRPOTrainer`, which may go on from the result.

    >>> trainer = SFTTrainer(agent, "conversations.jsonl", SFTConfig(learning_rate=1e-4))
    >>> agent = await trainer.train()
    """

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
        for callback in callbacks:
            expect_callback(callback)
        self.agent = agent
        self._config = config or SFTConfig()
        self._conversations = conversations
        self._tools = tools
        self._session = Session([*make_trackers(self.config.report_to), *callbacks], run)
        self._lifecycle, self._worker = self._session.lifecycle, self._session.worker
        self._recorder = self._session.recorder
        self._group = ProcessGroup(self._worker)
        self._parts: Parts | None = None
        self._state = RunState(best=Best(metric="eval/loss"))

    # ------------------------------------------------------------------------------ how it stands

    @property
    def config(self) -> SFTConfig:
        """The settings."""
        return self._config

    @config.setter
    def config(self, config: SFTConfig) -> None:
        """Another length or cadence from the next step on; before the trainer is ready, anything.

        Raises ConfigurationError for a setting that the trainer's parts were made with, and changes nothing.
        """
        changes = changed_settings(self._config, config, may_change=_MAY_CHANGE if self.is_ready else None)
        if self._parts is not None and changes:
            checkpoints = self._parts.checkpoints
            settings = {**checkpoints.settings, "sft": config.model_dump(mode="json")}
            self._recorder.settings_changed(settings, changes, step=self.step_number)
            training = config.as_training(len(self._parts.demonstrations.train))
            self._parts.learner.set_num_steps(training.num_steps())
            self._parts = replace(self._parts, num_steps=training.num_steps())
            checkpoints.limit = config.save_total_limit
            self._state = checkpoints.change_settings(training, settings, self._state)
        self._config = config

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return self._recorder.run

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

    @property
    def is_ready(self) -> bool:
        """Has `initialize` been through?"""
        return self._parts is not None

    @property
    def step_number(self) -> int:
        """Steps finished."""
        return self._state.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; known once the conversations are encoded."""
        return ready(self._parts).num_steps

    @property
    def progress(self) -> Progress:
        """The progress of the training now."""
        state, num_steps = self._state, self.num_steps if self.is_ready else 0
        return self._session.progress(
            step=state.step, num_steps=num_steps, seconds=state.train_seconds, best=state.best
        )

    @property
    def console(self) -> Console | None:
        """Where the step lines of `config.progress` go; stderr when unset."""
        return self._recorder.console

    @console.setter
    def console(self, console: Console | None) -> None:
        self._recorder.console = console

    def pause(self) -> None:
        """Let the step under way end and hold there. From any thread."""
        self._lifecycle.pause()

    def resume(self) -> None:
        """Go on after `pause`. From any thread."""
        self._lifecycle.resume()

    def request_stop(self) -> None:
        """Let the step under way end, keep a checkpoint, and have `train` return. From any thread."""
        self._lifecycle.request_stop()

    async def wait_for(self, *states: State) -> State:
        """Wait until the training is in one of these states, or has ended; returns the state it is in."""
        return await self._lifecycle.wait_for(*states)

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
        self._parts = await set_up(
            self.agent,
            self._conversations,
            self._tools,
            self.config,
            lifecycle=self._lifecycle,
            group=self._group,
            worker=self._worker,
            recorder=self._recorder,
            date=None if checkpoint is None else date_of(checkpoint),
        )
        date = self.agent.template.date
        self._state = replace(self._state, template_date=None if date is None else date.isoformat())

    async def stop(self) -> None:
        """End the update thread and close the logs; the agent goes on speaking."""
        await self._session.stop()
        if self._parts is not None:
            self._parts.learner.close()

    async def close(self) -> None:
        """Stop, and close the agent too."""
        await self.stop()
        await self.agent.close()

    async def __aenter__(self) -> Self:
        try:
            await self.initialize()
        except (Exception, asyncio.CancelledError):
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent with the weights of the lowest held-out loss, or
        of the last step where nothing is held out.

        However it ends, it keeps a checkpoint of the last finished step, `summary.json` and `report.html`.
        Raises TrainingStopped where a loss or gradient is not finite.
        """
        work = Work(
            prepare=self.initialize,
            run=self._run_steps,
            save=self._save_last,
            summary=self.summary,
            is_ready=lambda: self.is_ready,
            num_steps=lambda: self.num_steps,
        )
        await self._session.train(self, work, is_shown=self.config.progress)
        return self.agent

    async def _run_steps(self) -> tuple[State, str]:
        """How it ended, and why."""
        parts = ready(self._parts)
        with parts.weights.exclusive():
            return await self._steps_left(parts)

    async def _steps_left(self, parts: Parts) -> tuple[State, str]:
        paths = {**engine_paths(parts.backend), **parts.learner.layout}
        self._recorder.tracker.log_event("paths", step=self.step_number, **paths)
        await self._notify("on_train_begin", self)
        if self.step_number == 0 and parts.demonstrations.validation:
            await self._evaluate(parts)
        while not (done := self._done()):
            if not await self._lifecycle.wait_while_paused(NothingBeside()):
                break
            await self._step(parts)
            await self._between_steps(parts)
        await self._publish(parts)
        if done is None:
            return "stopped", f"stopped as asked after step {self.step_number} of {self.num_steps}"
        return "finished", done

    def _done(self) -> str | None:
        """Why no step is left; None while there is one."""
        if self.step_number >= self.num_steps:
            return f"all {self.num_steps} steps are done"
        if self._state.best.exhausts(self.config.early_stopping_patience):
            return self._state.best.why_stopped()
        return None

    async def _step(self, parts: Parts) -> None:
        started, step = time.perf_counter(), self.step_number + 1
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
        taken = {name: metrics[name] for name in _TAKEN if name in metrics}
        num_tokens = float(sum(sample.trajectory.num_agent_tokens for sample in samples))
        shown = {
            "sft/loss": metrics["loss/policy"],
            "sft/entropy": metrics["policy/entropy"],
            "sft/epoch": step / self.config.steps_per_epoch(len(parts.demonstrations.train)),
            **taken,
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
        self._recorder.measured(step, shown)
        await self._notify("on_step_end", step, shown)

    async def _between_steps(self, parts: Parts) -> None:
        """Measure the held-out loss and save where it is due."""
        step, is_best = self.step_number, False
        every = self.config.eval_steps or self.config.steps_per_epoch(len(parts.demonstrations.train))
        is_due = crossed(every, self._state.evaluated_step, step) or step == self.num_steps
        if parts.demonstrations.validation and is_due:
            is_best = await self._evaluate(parts)
        saved = parts.checkpoints.saved
        if is_best or crossed(self.config.save_steps, saved.step if saved else 0, step):
            await self._save(parts)

    async def _evaluate(self, parts: Parts) -> bool:
        """Measure the held-out loss; is it the lowest so far?"""
        held_out = parts.demonstrations.validation[: self.config.eval_episodes]
        loss = await self._worker.run(parts.learner.negative_log_likelihood, held_out)
        step = self.step_number
        best = self._state.best.after(step, loss, threshold=self.config.early_stopping_threshold)
        self._state = replace(self._state, evaluated_step=step, best=best)
        self._recorder.measured(step, {"eval/loss": loss, "eval/conversations": float(len(held_out))})
        await self._notify("on_evaluate", step, HeldOutLoss(loss=loss, conversations=len(held_out)))
        return best.step == step

    async def _publish(self, parts: Parts) -> None:
        """Let the agent speak with the best weights; the trainer's own stay the last step's."""
        await parts.weights.push(self._state)
        best = self._state.best.step
        if not self.config.load_best_at_end or best in (None, self.step_number):
            return
        path = best_checkpoint(self.run.checkpoints)
        if path is not None:
            checkpoint = await self._worker.run(load_checkpoint, path)
            await parts.weights.publish(checkpoint.weights, checkpoint.step)

    # ------------------------------------------------------------------------------ checkpoints, the end

    async def _save_last(self) -> None:
        if self._parts is not None:
            await self._save(self._parts)

    async def _save(self, parts: Parts) -> None:
        if not parts.checkpoints.is_due(self._state):
            return
        path = await shielded(parts.checkpoints.save(self._state))
        self._recorder.tracker.log_event("checkpoint", step=self.step_number, path=path.name)
        await self._notify("on_checkpoint", self.step_number, path)

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
                self._state = restored.state
                await parts.weights.push(self._state)
            await parts.checkpoints.truncate_after(self._state)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says."""
        parts = ready(self._parts)
        return {
            "seed": self.config.seed,
            "steps": self.step_number,
            "num_steps": parts.num_steps,
            "conversations": len(parts.demonstrations.train),
            "held_out": len(parts.demonstrations.validation),
            **self._session.ending(self._state.best),
            "train_seconds": round(self._state.train_seconds, 3),
            "threads": torch.get_num_threads(),
        }

    async def _notify(self, moment: str, *arguments: Any) -> None:
        await self._recorder.notify(moment, *arguments, step=self.step_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutLoss:
    """What `on_evaluate` gets of a fine-tuning."""

    loss: float
    """Mean of -log p over the agent's tokens in the held-out conversations, in nats."""
    conversations: int

    def metrics(self) -> dict[str, float]:
        """For logs and trackers."""
        return {"eval/loss": self.loss}


def step_samples(samples: Sequence[Sample], step: int, *, size: int, seed: int) -> list[Sample]:
    """Those of a step, from 1: every epoch shows all, in an order of its own that the seed decides.

    They are weighted so that the step's loss is the mean over the tokens that count.
    """
    per_epoch = -(-len(samples) // size)
    epoch, place = divmod(step - 1, per_epoch)
    generator = torch.Generator().manual_seed(derive(seed, "demonstrations", epoch))
    order = torch.randperm(len(samples), generator=generator).tolist()
    chosen = [samples[index] for index in order[place * size : (place + 1) * size]]
    total = sum(len(sample.advantages) for sample in chosen)
    weight = total / sum(sum(sample.advantages) for sample in chosen)
    return [replace(sample, weight=weight) for sample in chosen]


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
    try:
        return await trainer.train()
    finally:
        await trainer.stop()
