"""The trainer: scenarios -> episodes -> scored groups -> advantages -> batch -> loss -> step -> metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.evaluation.evaluator import (
    Evaluation,
    evaluate,
    held_out,
    spread,
)
from stateset_agents.runs.checkpoint_files import (
    best_checkpoint,
    load_checkpoint,
)
from stateset_agents.runs.early_stopping import crossed
from stateset_agents.runs.lifecycle import State
from stateset_agents.runtime.tasks import in_thread, uninterrupted
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.distributed.processes import ProcessLeft
from stateset_agents.training.loop.ending import leave
from stateset_agents.training.loop.step import TrainSteps
from stateset_agents.training.loop.training_lock import at_work, new_edition
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.seeds import derive

__all__ = ["MultiTurnGRPOTrainer", "train"]

_log = get_logger(__name__)


class MultiTurnGRPOTrainer(TrainSteps):
    """Trains an agent by group-relative policy optimisation, inside the caller's event loop.

    Generation runs in the backend's worker thread and the update in the trainer's own, so the loop goes
    on answering. With `scheduling: deterministic` a run is a function of settings, seed, versions, CPU
    type and thread count.

    Trainers of one agent take turns: while one is in `train` or a step, the others refuse to begin. Each
    goes on from its own weights, which the agent takes again when that trainer's next rollout begins; none
    needs to be closed for the next.

    >>> trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config)
    >>> await trainer.initialize()
    >>> agent = await trainer.train()
    """

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent: the last step's, or with load_best_at_end the
        best evaluation's.

        However it ends, by a cancellation or an error too, it keeps a checkpoint of the last finished step,
        `summary.json` and `report.html`. After `request_stop` another call goes on; when all is done it says
        so. Raises TrainingStopped when `max_failed_steps` steps in a row (or the first) could not train.
        """
        if not self._ended.is_set():
            raise ConfigurationError("this trainer is training: await that call, or make another trainer")
        self._worker.refuse_stopped()
        self._ended.clear()
        self._begin()
        self._task, self._why = asyncio.current_task(), None
        try:
            await self.initialize()
            with at_work(self.agent.backend, self), self._displayed():
                ending = await self._run_steps()
        except asyncio.CancelledError as error:
            await self._part(error)
            await self._end("stopped", self._cancelled())
            raise
        except ProcessLeft as error:
            await self._end("stopped" if error.is_stop else "failed", _one_line(error))
            raise
        except Exception as error:
            await self._part(error)
            await self._end("failed", _one_line(error))
            raise
        else:
            await self._end(*ending)
        finally:
            self._task = None
            self._ended.set()
        return self.agent

    async def _run_steps(self) -> tuple[State, str]:
        """How it ended, and why."""
        if done := self._done():
            _log.warning(f"nothing is left to train: {': '.join(done)}")
        self.tracker.log_event("paths", step=self.step_number, **self._paths(self.agent.backend))
        await self._notify("on_train_begin", self)
        await self._between_steps()  # what a stop in their middle left undone
        try:
            while not (done := self._done()):
                if not all(await self._together("the next step", self._goes_on())):
                    return "stopped", f"stopped as asked after step {self.step_number} of {self.num_steps}"
                await (self._overlapping_step() if self.config.max_staleness else self.step())
                await self._between_steps()
        finally:
            await self._stop_flow()
        if self.config.load_best_at_end:
            await uninterrupted(self._speak_as_best())
        else:
            self._say_origin(self.step_number)
        return "finished", done[0]

    async def _end(self, state: State, why: str) -> None:
        """Keep what there is, write it down and tell everyone; each is done whatever becomes of the others.

        What breaks first on the way is raised, and is how the training ended; a cancellation does not undo a
        failure.
        """
        failures: list[BaseException] = []

        async def attempt(work: Awaitable[None]) -> None:
            nonlocal state, why
            try:
                await work
            except asyncio.CancelledError as error:
                failures.append(error)
                if state != "failed":
                    state, why = "stopped", self._cancelled()
            except Exception as error:
                if not failures:
                    state, why = "failed", _one_line(error)
                failures.append(error)

        async def settle() -> None:
            if (state, why) != (self.state, self._why):
                await attempt(self._settle_as(state, why))

        if self.is_ready:
            await attempt(self._save_last())
        await settle()
        await attempt(self._notify("on_train_end", self))
        await settle()
        await attempt(self._agree(state, why))
        await settle()
        if failures:
            raise failures[0]

    async def _agree(self, state: State, why: str) -> None:
        """Wait for all, as a launcher ends the others when one is gone; fail where the first one did."""
        if self.is_ready:
            ended = (await uninterrupted(self._all("the end", state == "failed" and why)))[0]
            if ended and state != "failed":
                raise ProcessLeft(f"process 0 failed: {ended}")

    async def _settle_as(self, state: State, why: str) -> None:
        self._why = why
        self._settle(state)
        if self.is_ready and self.processes.is_first:
            await uninterrupted(self._worker.run(leave, self.run, self.summary()))

    def _cancelled(self) -> str:
        return f"cancelled after step {self.step_number} of {self.num_steps}"

    async def _speak_as_best(self) -> None:
        """Hand the best step's weights to the agent; the trainer's own stay the last step's."""
        path = best_checkpoint(self.run.checkpoints)
        self._say_origin(self.step_number)
        if path is None:
            _log.warning("the run folder has no best checkpoint: the agent keeps the last step's weights")
        elif self._state.best.step is not None and self._state.best.step != self.step_number:
            checkpoint = await self._worker.run(load_checkpoint, path)
            await self._give(checkpoint.weights, checkpoint.step)
            new_edition(self.agent.backend)
            self._say_origin(checkpoint.step)

    async def _between_steps(self) -> None:
        """Evaluate and save where it is due."""
        step, is_best = self.step_number, False
        if crossed(self.config.eval_steps, self._state.evaluated_step, step):
            await self._speak_as_itself()
            result = await self.evaluate()
            is_best = await uninterrupted(self._note(result))
            await self._notify("on_evaluate", step, result)
        if is_best or crossed(self.config.save_steps, self._saved.step if self._saved else 0, step):
            await self._save_last()

    async def _note(self, result: Evaluation) -> bool:
        """Log an evaluation; is it the best so far?"""
        step, metrics, best = self.step_number, result.metrics(), self._state.best
        best = best.chosen(self.config.metric_for_best, metrics)
        value = metrics.get(best.metric or "")
        best = best.after(step, value, threshold=self.config.early_stopping_threshold)
        if self.config.log_rollouts:
            write = partial(self.tracker.log_rollouts, step, result.groups, stage="validation")
            await self._worker.run(write)
        self.tracker.log_metrics(step, metrics)
        self._metrics |= metrics
        self._state = replace(self._state, evaluated_step=step, best=best)
        return best.step == step

    async def evaluate(
        self, split: str = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The current policy on held-out scenarios (at most `eval_episodes`, or `episodes` of them), with
        users of its own seed."""
        self._refuse_in_callback("evaluate")
        scenarios = await in_thread(held_out, self.environment, split, episodes)
        if episodes is None:
            scenarios = spread(scenarios, self.config.eval_episodes)
        return await evaluate(
            self.agent,
            self.environment,
            self.reward_fn,
            scenarios,
            temperature=temperature,
            seed=derive(self.config.seed, "evaluate", split),
            max_concurrent=self.config.max_concurrent,
            deterministic=self.deterministic,
            turn_timeout=self.config.turn_timeout,
            reward_timeout=self.config.reward_timeout,
            faults=self.config.faults,
            episode_timeout=self.config.episode_timeout,
            divide=self.divide,
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def train(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward,
    config: TrainingConfig | None = None,
    *,
    profile: TrainingProfile | str | None = None,
    callbacks: Sequence[object] = (),
    **overrides: Any,
) -> MultiTurnAgent:
    """Train in one call: `await train(agent, environment, reward_fn, profile="balanced", num_episodes=9)`.

    Settings are a `config`, or a profile ("balanced" if absent) and what differs from it; not both.
    `callbacks` hear of steps, evaluations and checkpoints, see `Callback`. Each step prints a line on stderr;
    `progress=False` turns that off.
    """
    if config is None:
        config = TrainingConfig.from_profile(profile or TrainingProfile.BALANCED, **overrides)
    elif profile is not None or overrides:
        raise ConfigurationError("give train a config, or a profile and overrides, not both")
    trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config, callbacks=callbacks)
    try:
        return await trainer.train()
    finally:
        await trainer.stop()
