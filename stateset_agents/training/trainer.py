"""The trainer: scenarios -> episodes -> scored groups -> advantages -> batch -> loss -> step -> metrics.

`MultiTurnGRPOTrainer` conducts; its parts are made by `setup.py`. One step is `_step` and `_learn`.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment, expect_environment
from stateset_agents.core.reward import Reward, as_reward
from stateset_agents.evaluation.evaluator import Evaluation, PlayPart
from stateset_agents.runs.callbacks import expect_callback
from stateset_agents.runs.checkpoint_files import best_checkpoint, load_checkpoint
from stateset_agents.runs.early_stopping import crossed
from stateset_agents.runs.lifecycle import Lifecycle, Progress, State
from stateset_agents.runs.recorder import RunRecorder, ready
from stateset_agents.runs.session import end_training, one_line
from stateset_agents.runs.settings import CADENCE, changed_settings
from stateset_agents.runs.trackers import make_trackers
from stateset_agents.runtime.tasks import shielded
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.distributed.processes import PeerFailed, Processes
from stateset_agents.training.loop.curriculum.plan import StepPlan
from stateset_agents.training.loop.curriculum.success_table import SuccessTable
from stateset_agents.training.loop.metrics import merge_processes
from stateset_agents.training.loop.rollouts import Played, RolloutSource
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.step import (
    FinishedStep,
    StepWatch,
    Update,
    observe,
    update_policy,
    watch_step,
)
from stateset_agents.training.loop.temperature import next_temperature
from stateset_agents.training.setup import Job, Parts, is_deterministic, make_validation, set_up
from stateset_agents.training.update.factory import GRPOLearnerFactory, LearnerFactory
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, expect_scenarios
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup, by_scenario

_log = get_logger(__name__)

_MAY_CHANGE = CADENCE | {"num_episodes", "max_steps", "max_failed_steps", "log_rollouts"}


class MultiTurnGRPOTrainer:
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

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: Reward,
        config: TrainingConfig | None = None,
        *,
        run: RunFolder | None = None,
        description: Mapping[str, Any] | None = None,
        callbacks: Sequence[object] = (),
        learner_factory: LearnerFactory | None = None,
    ) -> None:
        """`run`: a folder to use instead of a new one; `description`: more for its config.yaml; `callbacks`:
        who hears of steps, evaluations and checkpoints: `Callback`s, or any objects with some of its
        methods; `learner_factory`: who makes what updates the policy, ours when absent."""
        expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        expect_environment(environment)
        if config is not None:
            expect("config", config, TrainingConfig, "write TrainingConfig(num_episodes=100, ...)")
        for callback in callbacks:
            expect_callback(callback)
        config = config or TrainingConfig()
        self._job = Job(
            agent=agent,
            environment=environment,
            reward_fn=as_reward(reward_fn),
            config=config,
            description=dict(description or {}),
        )
        self._factory = learner_factory or GRPOLearnerFactory()
        self._lifecycle = Lifecycle()
        self._worker = Worker()
        self._group = ProcessGroup(self._worker)
        self._recorder = RunRecorder([*make_trackers(config.report_to), *callbacks], run)
        self._parts: Parts | None = None
        self._state = RunState()
        self._is_stepping = False
        self._boundary = asyncio.Lock()
        """Held while the learner and the state change, so that a checkpoint has both of one step."""

    # ------------------------------------------------------------------------------ what it is made of

    @property
    def agent(self) -> MultiTurnAgent:
        """Who is trained."""
        return self._job.agent

    @property
    def environment(self) -> Environment:
        """Where it plays."""
        return self._job.environment

    @property
    def reward_fn(self) -> Any:
        """What scores its conversations."""
        return self._job.reward_fn

    @property
    def config(self) -> TrainingConfig:
        """The settings; once the trainer is ready, with what the model's card set."""
        return self._job.config if self._parts is None else self._parts.config

    @config.setter
    def config(self, config: TrainingConfig) -> None:
        """Another length or cadence from the next step on; before the trainer is ready, anything.

        Raises ConfigurationError for a setting that the trainer's parts were made with, and changes nothing.
        """
        changes = changed_settings(self.config, config, may_change=_MAY_CHANGE if self.is_ready else None)
        if self._parts is not None and changes:
            self._refuse_in_callback("another config")
            learner, checkpoints = self._parts.learner, self._parts.checkpoints
            settings = {**checkpoints.settings, "training": config.model_dump(mode="json")}
            learner.set_num_steps(config.num_steps())  # it may refuse
            try:
                self._recorder.settings_changed(settings, changes, step=self.step_number)
            except ConfigurationError:
                learner.set_num_steps(self.config.num_steps())
                raise
            self._parts = self._parts.with_config(config)
            self._state = checkpoints.change_settings(config, settings, self._state)
        self._job = replace(self._job, config=config)

    @property
    def recommended(self) -> dict[str, Any]:
        """What the model's card set, where the user set nothing."""
        return {} if self._parts is None else self._parts.recommended

    @property
    def is_ready(self) -> bool:
        """Has `initialize` been through?"""
        return self._parts is not None

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return self._recorder.run

    @property
    def tracker(self) -> JsonlTracker:
        """Writes the run folder's logs."""
        return self._recorder.tracker

    @property
    def callbacks(self) -> list[object]:
        """Who hears of steps, evaluations and checkpoints; trackers first."""
        return self._recorder.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[object]) -> None:
        self._recorder.callbacks = callbacks

    @property
    def console(self) -> Console | None:
        """Where the step lines of `config.progress` go; stderr when unset."""
        return self._recorder.console

    @console.setter
    def console(self, console: Console | None) -> None:
        self._recorder.console = console

    @property
    def learner(self) -> PolicyLearner:
        """Holds the master weights."""
        return ready(self._parts).learner

    @property
    def engine(self) -> ComputationalEngine:
        """Plays the conversations."""
        return ready(self._parts).engine

    @property
    def processes(self) -> Processes:
        """Who trains together."""
        return self._group.processes

    # ------------------------------------------------------------------------------ how it stands

    @property
    def step_number(self) -> int:
        """Steps finished."""
        return self._state.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_steps()

    @property
    def temperature(self) -> float:
        """Of the next rollout."""
        return self._state.temperature or self.config.temperature

    @property
    def deterministic(self) -> bool:
        """Does the run wait for every local reply, so that it can be repeated bit by bit?"""
        return is_deterministic(self.config, self.environment, self.agent.backend)

    @property
    def state(self) -> State:
        """What holds now."""
        return self._lifecycle.state

    @property
    def is_paused(self) -> bool:
        """Does the training hold between two steps?"""
        return self._lifecycle.is_paused

    @property
    def has_ended(self) -> bool:
        """Is there no training under way any more?"""
        return self._lifecycle.has_ended

    @property
    def progress(self) -> Progress:
        """The progress of the training now."""
        return Progress(
            state=self.state,
            step=self.step_number,
            num_steps=self.num_steps,
            seconds=round(self._state.train_seconds, 3),
            metrics=dict(self._recorder.metrics),
            best_step=self._state.best.step,
            best_value=self._state.best.value,
            why=self._lifecycle.why,
        )

    @property
    def successes(self) -> SuccessTable:
        """How often scenarios succeeded so far; empty unless `track_success`, or something that follows
        success, is set."""
        return self._state.curriculum.successes

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says about the training itself."""
        local = self.environment.local and self.reward_fn.local
        best, threads = self._state.best, torch.get_num_threads()
        system = f"{platform.system()} {platform.machine()}"
        return {
            "seed": self.config.seed,
            "steps": self.step_number,
            "num_steps": self.num_steps,
            "ended": self.state,
            "why": self._lifecycle.why,
            "best": None
            if best.step is None
            else {"step": best.step, "metric": best.metric, "value": best.value},
            "train_seconds": round(self._state.train_seconds, 3),
            "platform": f"{system}, {threads} thread{'s' * (threads > 1)}",
            "deterministic": self.deterministic and local and self._state.repeatable,
        }

    # ------------------------------------------------------------------------------ requests

    def pause(self) -> None:
        """Let the step under way end and hold there; `wait_for("paused")` waits for it. From any thread."""
        self._lifecycle.pause()

    def resume(self) -> None:
        """Go on after `pause`. From any thread."""
        self._lifecycle.resume()

    def request_stop(self) -> None:
        """Let the step under way end, keep a checkpoint, and have `train` return. From any thread.

        Before `train` was ever called it holds for the first call; after an end there is nothing to stop.
        """
        self._lifecycle.request_stop()

    async def wait_for(self, *states: State) -> State:
        """Wait until the training is in one of these states, or has ended; returns the state it is in.

        A `train` that was called as a task just before, after an earlier end, counts as begun.
        """
        return await self._lifecycle.wait_for(*states)

    # ------------------------------------------------------------------------------ begin and end

    async def initialize(self) -> None:
        """Load the model, make the trainable copy and the reference, open the run folder.

        Raises ConfigurationError for settings that cannot work together, a trainer that was stopped, an agent
        that another trainer is training, a run folder that another trainer is writing, and a launcher that
        started another number of processes than `num_processes`.
        """
        self._worker.refuse_stopped()
        if self.is_ready:
            return
        await self._group.join(self.config.num_processes)
        self._recorder.is_first = self._group.is_first
        try:
            self._parts = await set_up(
                self._job,
                self._factory,
                lifecycle=self._lifecycle,
                group=self._group,
                worker=self._worker,
                recorder=self._recorder,
                step_event=self._step_event,
                run_event=self._run_event,
                fault_event=self._fault_event,
            )
        except (Exception, asyncio.CancelledError) as error:
            await self._group.abort(error)
            raise
        date = self.agent.template.date
        self._state = replace(self._state, template_date=None if date is None else date.isoformat())

    async def stop(self) -> None:
        """End the update thread and close the logs; the agent goes on speaking.

        A `train` under way is asked to stop and waited for, so its last step is kept; a callback that is
        still at work after a minute is cancelled.
        """
        if self._lifecycle.is_this_task:
            raise ConfigurationError("stop() waits for train() to return: in a callback use request_stop()")
        self.request_stop()
        self._recorder.limit_callbacks()
        await self._lifecycle.wait_until_returned()
        await self._worker.stop()
        self._recorder.close()
        if self._parts is not None:
            self._parts.learner.close()
            if self._parts.teacher is not None:
                await self._parts.teacher.close()

    async def close(self) -> None:
        """Stop, and close the agent too."""
        await self.stop()
        await self.agent.close()

    async def __aenter__(self) -> Self:
        was_running = self.agent.is_running
        try:
            await self.initialize()
        except (Exception, asyncio.CancelledError):
            await self.stop()
            if not was_running:  # else it is in use elsewhere
                await self.agent.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent: the last step's, or with load_best_at_end the
        best evaluation's.

        However it ends, by a cancellation or an error too, it keeps a checkpoint of the last finished step,
        `summary.json` and `report.html`. After `request_stop` another call goes on; when all is done it says
        so. Raises TrainingStopped when `max_failed_steps` steps in a row (or the first) could not train.
        """
        if self._lifecycle.is_training:
            raise ConfigurationError("this trainer is training: await that call, or make another trainer")
        self._worker.refuse_stopped()
        self._lifecycle.begin()
        try:
            await self.initialize()
            parts = ready(self._parts)
            shown = self.config.progress
            screen = self._recorder.displayed(self, self.num_steps) if shown else contextlib.nullcontext()
            with parts.weights.exclusive(), screen:
                ending = await self._run_steps(parts)
        except asyncio.CancelledError as error:
            await self._group.abort(error)
            await self._end("stopped", self._cancelled())
            raise
        except PeerFailed as error:
            await self._end("stopped" if error.is_stop else "failed", one_line(error))
            raise
        except Exception as error:
            await self._group.abort(error)
            await self._end("failed", one_line(error))
            raise
        else:
            await self._end(*ending)
        finally:
            self._lifecycle.mark_returned()
        return self.agent

    async def _run_steps(self, parts: Parts) -> tuple[State, str]:
        """How it ended, and why."""
        if done := self._done():
            _log.warning(f"nothing is left to train: {': '.join(done)}")
        paths = self._factory.paths(parts.backend, parts.learner)
        self.tracker.log_event("paths", step=self.step_number, **paths)
        if parts.teacher is not None:
            self.tracker.log_event("teacher", step=self.step_number, **parts.teacher.identity)
        await self._notify("on_train_begin", self)
        await self._between_steps(parts)  # what a stop in their middle left undone
        source = parts.overlapped if self.config.max_staleness else parts.rollouts
        try:
            while not (done := self._done()):
                goes_on = self._lifecycle.wait_while_paused(source)
                if not all(await self._group.gather_results("the next step", goes_on)):
                    return "stopped", f"stopped as asked after step {self.step_number} of {self.num_steps}"
                await self._step(source)
                await self._between_steps(parts)
        finally:
            await source.close()
        if self.config.load_best_at_end:
            await shielded(self._publish_best(parts))
        else:
            parts.weights.name_origin(self.step_number)
        return "finished", done[0]

    def _done(self) -> tuple[str, str] | None:
        """Why no step is left, and what to do about it; None while there is one."""
        if self.step_number >= self.num_steps:
            steps = f"all {self.num_steps} steps are" if self.num_steps > 1 else "the one step is"
            return f"{steps} done", "raise max_steps or num_episodes to go on"
        if self._state.best.exhausts(self.config.early_stopping_patience):
            return self._state.best.why_stopped(), "raise early_stopping_patience to go on"
        return None

    async def _between_steps(self, parts: Parts) -> None:
        """Evaluate and save where it is due."""
        step, is_best = self.step_number, False
        if crossed(self.config.eval_steps, self._state.evaluated_step, step):
            await parts.weights.ensure_current(self._state)
            result = await self.evaluate()
            is_best = await shielded(self._note_evaluation(parts, result))
            await self._notify("on_evaluate", step, result)
        saved = parts.checkpoints.saved
        if is_best or crossed(self.config.save_steps, saved.step if saved else 0, step):
            await self._save_last(parts)

    async def _publish_best(self, parts: Parts) -> None:
        """Let the agent sample with the best step's weights; the trainer's own stay the last step's."""
        path = best_checkpoint(self.run.checkpoints)
        parts.weights.name_origin(self.step_number)
        if path is None:
            _log.warning("the run folder has no best checkpoint: the agent keeps the last step's weights")
        elif self._state.best.step is not None and self._state.best.step != self.step_number:
            checkpoint = await self._worker.run(load_checkpoint, path)
            await parts.weights.publish(checkpoint.weights, checkpoint.step)

    async def _end(self, state: State, why: str) -> None:
        """Save, write the summary and tell everyone; each is done whatever becomes of the others."""

        async def save(state: State, why: str) -> None:
            if self._parts is not None:
                await self._save_last(self._parts)

        async def notify(state: State, why: str) -> None:
            await self._notify("on_train_end", self)

        async def agree(state: State, why: str) -> None:
            """Wait for all, as a launcher ends the others when one is gone; fail where the first one did."""
            if self.is_ready:
                ended = (await shielded(self._group.barrier("the end", state == "failed" and why)))[0]
                if ended and state != "failed":
                    raise PeerFailed(f"process 0 failed: {ended}")

        async def write() -> None:
            if self.is_ready and self._group.is_first:
                await shielded(self._worker.run(self._recorder.finalize, self.summary()))

        await end_training(
            state,
            why,
            lifecycle=self._lifecycle,
            steps=(save, notify, agree),
            write=write,
            cancelled=self._cancelled,
        )

    def _cancelled(self) -> str:
        return f"cancelled after step {self.step_number} of {self.num_steps}"

    # ------------------------------------------------------------------------------ one step

    async def step(self) -> dict[str, float]:
        """One step: roll out, credit, update, hand the new weights to the agent; returns its metrics.

        Called by itself it plays first and learns then, whatever `max_staleness` is. Cancelled during the
        rollout it leaves nothing behind; from the update on it finishes first.
        """
        self._worker.refuse_stopped()
        return await self._step(ready(self._parts).rollouts)

    async def training_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """A step on groups that are there already, as `generate_trajectories` gives them."""
        self._worker.refuse_stopped()
        source = ready(self._parts).rollouts
        with self._stepping() as parts:
            played = Played.by_hand(groups, self._state.frontier, self.config)
            async with watch_step(self.agent.backend) as watch:
                learn = self._learn(parts, source, played, watch, time.perf_counter())
                finished = await shielded(learn)
            return await self._step_end(finished)

    async def _step(self, source: RolloutSource) -> dict[str, float]:
        with self._stepping() as parts:
            started = time.perf_counter()
            async with watch_step(self.agent.backend) as watch:
                played = await source.next(self._state)
                learn = self._learn(parts, source, played, watch, started)
                finished = await shielded(learn)
            return await self._step_end(finished)

    async def _learn(
        self, parts: Parts, source: RolloutSource, played: Played, watch: StepWatch, started: float
    ) -> FinishedStep:
        """Update the policy, push its weights, show the reward its scores, write it all down; nobody turns
        back from here on."""
        step, rolled_out = self.step_number + 1, time.perf_counter()
        began = self._state.curriculum
        plan = parts.curriculum.plan(self._state.frontier, began)
        async with self._boundary:
            repeatable = all(await self._group.barrier("the update", parts.engine.repeatable))
            with self.processes.updating():
                update = await update_policy(
                    parts.learner,
                    parts.backend,
                    played,
                    source,
                    self.config,
                    self._worker,
                    self._step_event,
                    teacher=parts.teacher,
                    step=step,
                    temperature=self.temperature,
                    versions=parts.weights.versions,
                )
                self._state = self._state.after_step(
                    episodes=len(played.groups),
                    replaced=len(played.batch.filtered),
                    new_policy=bool(update.credited.samples),
                    failed=update.failure is not None,
                    repeatable=repeatable,
                    temperature=next_temperature(
                        self.config, self.temperature, update.metrics.get("reward/mean")
                    ),
                    curriculum=parts.curriculum.after(began, step, played.all_groups, update.metrics),
                )
                self._write_group_ends(plan, played)
                if (stage := self._state.curriculum.stage) != began.stage:
                    self._run_event("stage begun", stage=stage + 1)
                if update.credited.samples:
                    await parts.weights.push(self._state)
                    self._run_event("weights handed over", version=self._state.version)
            source.release(played, self._state)
            observed = await observe(self.reward_fn, played.all_groups)
            now = time.perf_counter()
            self._state = replace(
                self._state,
                reward=self._state.reward if observed.state is None else observed.state,
                repeatable=self._state.repeatable and observed.failure is None,
                train_seconds=self._state.train_seconds + now - started,
            )
        if observed.failure is not None:
            self.tracker.log_event("reward failed", step=step, error=observed.failure)
        spent = {
            "time/rollout": rolled_out - started,
            "time/update": now - rolled_out,
            "time/step": now - started,
            **watch.metrics(),
            **parts.engine.fault_tolerance.metrics(),
        }
        metrics = update.metrics | plan.metrics(played.all_groups)
        metrics |= merge_processes(await self._group.barrier("the metrics", spent))
        sampled = metrics.get("tokens/agent", 0.0) + metrics.get("tokens/branches", 0.0)
        metrics["tokens/per_second"] = sampled / metrics["time/step"]
        metrics["policy/version"] = float(self._state.version)
        findings = self._recorder.step(step, metrics, self.config.model_dump(), watch.lag.place)
        await self._write_rollouts(played, update)
        if observed.mistake is not None:
            raise observed.mistake
        is_fatal = step == 1 or self._state.failed_steps >= self.config.max_failed_steps
        failure = f"step {step} {update.failure}" if update.failure and is_fatal else None
        return FinishedStep(metrics, findings, failure)

    async def _step_end(self, finished: FinishedStep) -> dict[str, float]:
        for finding in finished.findings:
            await self._notify("on_warning", self.step_number, finding)
        await self._notify("on_step_end", self.step_number, finished.metrics)
        if finished.failure is not None:
            raise TrainingStopped(finished.failure)
        return finished.metrics

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[Parts]:
        """One step at a time, and none after the last."""
        self._worker.refuse_stopped()
        self._refuse_in_callback("a step")
        parts = ready(self._parts)
        if done := self._done():
            raise ConfigurationError(": ".join(done))
        if self._is_stepping:
            raise ConfigurationError("a step of this trainer is under way: await it before the next")
        with parts.weights.exclusive():
            self._is_stepping = True
            try:
                yield parts
            finally:
                self._is_stepping = False

    # ------------------------------------------------------------------------------ parts of a step

    async def generate_trajectories(self, scenarios: Sequence[Scenario]) -> list[TrajectoryGroup]:
        """One scored group per scenario, sampled from the current policy."""
        expect_scenarios(scenarios)
        self._refuse_in_callback("generate_trajectories")
        return await ready(self._parts).rollouts.play(scenarios, self._state)

    async def compute_grpo_loss(self, groups: Sequence[TrajectoryGroup]) -> dict[str, Tensor]:
        """The policy's loss on these groups under the weights as they are, without a KL term; nothing steps.

        Scalars: total_loss carries the gradient; policy_loss, kl_penalty (0 here), entropy, approx_kl (to
        pi_old) and clip_fraction do not. `training_step` makes the same loss, with `beta` times the KL to the
        reference, and steps on it.

        Raises ConfigurationError where no group has `min_group_size` scored members.
        """
        return await self._loss(groups, 0.0)

    async def compute_enhanced_grpo_loss(
        self, trajectories: Sequence[Trajectory], beta: float = 0.1
    ) -> dict[str, Tensor]:
        """`compute_grpo_loss` plus `beta` times the KL to the reference, kl_penalty.

        Trajectories of one scenario are a group. Raises ConfigurationError, too, for a `beta` without a
        reference model.
        """
        return await self._loss(by_scenario(trajectories), beta)

    async def _loss(self, groups: Sequence[TrajectoryGroup], beta: float) -> dict[str, Tensor]:
        learner = self.learner

        def loss() -> dict[str, Tensor]:
            learner.set_temperature(self.temperature)
            return learner.losses(learner.credit(groups).credited.samples, beta=beta)

        if self.config.parallelism == "fsdp2":
            self._refuse_in_callback("the loss of shards")
        async with self._boundary:
            return await self._worker.run(loss)

    # ------------------------------------------------------------------------------ evaluation

    async def evaluate(
        self, split: str = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The current policy on held-out scenarios (at most `eval_episodes`, or `episodes` of them), with
        users of its own seed."""
        self._refuse_in_callback("evaluate")
        validation = (
            make_validation(self._job, self.config, self._group)
            if self._parts is None
            else self._parts.validation
        )
        return await validation.evaluate(split, episodes=episodes, temperature=temperature)

    async def _note_evaluation(self, parts: Parts, result: Evaluation) -> bool:
        """Log an evaluation; is it the best so far?"""
        state = parts.validation.judged(result, self._state)
        if self.config.log_rollouts:
            write = partial(self.tracker.log_rollouts, state.step, result.groups, stage="validation")
            await self._worker.run(write)
        self._recorder.measured(state.step, result.metrics())
        self._state = state
        return state.best.step == state.step

    async def divide(
        self, scenarios: Sequence[Scenario], play: PlayPart, place: str = "an evaluation"
    ) -> list[TrajectoryGroup]:
        """The groups of all scenarios, in order; each process plays its part of them."""
        return await self._group.divide(scenarios, play, place)

    # ------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        self._refuse_in_callback("save_checkpoint")
        path = await shielded(self._write_checkpoint(ready(self._parts)))
        await self._notify("on_checkpoint", self.step_number, path)
        return path

    async def _write_checkpoint(self, parts: Parts) -> Path:
        async with self._boundary:
            state = self._state
            path = await parts.checkpoints.save(state)
        self.tracker.log_event("checkpoint", step=state.step, path=path.name)
        return path

    async def _save_last(self, parts: Parts) -> None:
        if parts.checkpoints.is_due(self._state):
            await self.save_checkpoint()

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given (warns where
        that has none yet).

        Log lines and checkpoints of later steps are dropped. Raises CheckpointError when it is damaged, was
        taken away, or is of another base model or other settings, ConfigurationError during a step. Another
        machine, thread count or length of the schedule is allowed and said: not bit-equal. Cancelled midway
        it finishes first.
        """
        self._refuse_in_callback("load_checkpoint")
        await self.initialize()
        if self._is_stepping:
            raise ConfigurationError(
                "a step of this trainer is under way: await it, then load the checkpoint"
            )
        parts = ready(self._parts)
        with parts.weights.exclusive():
            try:
                await shielded(self._restore(parts, path))
            except (Exception, asyncio.CancelledError) as error:
                await self._group.abort(error)
                raise

    async def _restore(self, parts: Parts, path: str | Path | None) -> None:
        async with self._boundary:
            restored = await parts.checkpoints.restore(path)
            if restored is not None:
                date = restored.state.template_date or self._state.template_date  # older states have none
                self._state = replace(restored.state, template_date=date)
                await parts.weights.push(self._state)
                self.reward_fn.restore(self._state.reward)
            await parts.checkpoints.truncate_after(self._state)
        if restored is None:
            _log.warning(
                f"{self.run.path} has no checkpoint yet: starting at step {self.step_number}; to go on with "
                "another run, give its folder"
            )
        else:
            self.tracker.log_event("resumed", step=self.step_number, path=restored.path.name)

    def describe(self, summary: Mapping[str, Any]) -> None:
        """Put what was measured of the agent into the model card of its checkpoint. Blocking.

        `summary`: as `summary.json` is to have it. Raises CheckpointError when the disk cannot take it.
        """
        ready(self._parts).checkpoints.describe(self.agent.origin, summary)

    # ------------------------------------------------------------------------------ what is written

    def _step_event(self, name: str, **fields: Any) -> None:
        """Of the step under way."""
        self._recorder.event(name, step=self.step_number + 1, **fields)

    def _run_event(self, name: str, **fields: Any) -> None:
        """With the last finished step: it may come before that step's checkpoint, which a resume goes on
        from, and what is of later steps is cut off then with all that follows."""
        self._recorder.event(name, step=self.step_number, **fields)

    def _fault_event(self, name: str, **fields: Any) -> None:
        self.tracker.log_event(name, step=self.step_number, **fields)

    def _write_group_ends(self, plan: StepPlan, played: Played) -> None:
        """One record of each group, over all restarts."""
        for place, end in played.batch.ends.items():
            scenario = played.groups[place].trajectories[0].scenario.id
            epoch = plan.order.epoch_of(place)
            self._run_event("group consumed", group=place, epoch=epoch, scenario=scenario, end=end.value)

    async def _write_rollouts(self, played: Played, update: Update) -> None:
        if not self.config.log_rollouts:
            return
        credited, places = update.credited, played.batch.selected
        none = {place: [None] * len(group.trajectories) for place, group in played.groups.items()}
        advantages = none | dict(zip(places, credited.advantages, strict=True))
        logprobs = none | dict(zip(places, credited.by_member(update.logprobs), strict=True))
        write = partial(
            self.tracker.log_rollouts,
            self.step_number,
            played.all_groups,
            list(advantages.values()),
            list(logprobs.values()),
            stage="train",
        )
        await self._worker.run(write)

    async def _notify(self, moment: str, *arguments: Any) -> None:
        await self._recorder.notify(moment, *arguments, step=self.step_number)

    def _refuse_in_callback(self, what: str) -> None:
        """Raises ConfigurationError for what all processes do together, where the first is alone."""
        if self._recorder.is_notifying and not self._group.is_alone:
            raise ConfigurationError(
                f"{what} needs all {self.processes.count} processes, and callbacks are called in the first "
                "one: call it between steps of your own, in every process, or set save_steps or eval_steps"
            )


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
