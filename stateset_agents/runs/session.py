"""The life of a training, whatever it trains: steps, pauses, evaluations, checkpoints, an end written down.

Every trainer is a `Session`; it adds what a step, an evaluation and a checkpoint are.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from rich.console import Console

from stateset_agents.runs.callbacks import expect_callback
from stateset_agents.runs.early_stopping import Best, crossed
from stateset_agents.runs.lifecycle import Lifecycle, NothingBeside, Pausable, Progress, State
from stateset_agents.runs.recorder import RunRecorder, ready
from stateset_agents.runs.settings import CADENCE, RunSettings, changed_settings
from stateset_agents.runs.trackers import make_trackers
from stateset_agents.runtime.tasks import Worker, shielded
from stateset_agents.tracking.monitors import Finding
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_Config = TypeVar("_Config", bound=RunSettings)


class SessionState(Protocol):
    """The progress of a training, whatever it trains."""

    @property
    def step(self) -> int: ...
    @property
    def train_seconds(self) -> float: ...
    @property
    def evaluated_step(self) -> int: ...  # after which the policy was last evaluated
    @property
    def best(self) -> Best: ...


class Session(ABC, Generic[_Config]):
    """Base of the trainers: handles pause and stop, calls callbacks, evaluates and saves when it is due, and
    writes down how the training ended.

    A trainer sets `_parts` in `initialize` and replaces `_state` after each step.
    """

    _MAY_CHANGE: ClassVar[frozenset[str]]
    """Settings that may change between two steps, beside `CADENCE`."""
    _LENGTH: ClassVar[str]
    """The settings that a user raises for a longer run."""
    _SECTION: ClassVar[str] = "training"
    """Name of the settings in config.yaml."""

    _parts: Any
    """Collaborators that `initialize` makes, `checkpoints` among them; None before."""
    _state: Any
    """A `SessionState`."""

    def __init__(self, config: _Config, run: RunFolder | None, callbacks: Sequence[object]) -> None:
        """`run`: a folder to use instead of a new one."""
        for callback in callbacks:
            expect_callback(callback)
        self._config = config
        self._lifecycle = Lifecycle()
        self._worker = Worker()
        self.callbacks: list[object] = [*make_trackers(config.report_to), *callbacks]
        """Objects whose methods are called at steps, evaluations and checkpoints; trackers first."""
        self.console: Console | None = None
        """Console for the step lines of `config.progress`; stderr when unset."""
        self._recorder = RunRecorder(run)
        self._parts = None
        self._boundary = asyncio.Lock()
        """Held while the weights and the state change, so that a checkpoint has both of one step."""

    # ------------------------------------------------------------------------------ what a trainer adds

    @abstractmethod
    async def initialize(self) -> None:
        """Make `_parts` where there are none yet."""

    @property
    @abstractmethod
    def _planned_steps(self) -> int | None:
        """Steps of the whole run; None where that is not known before `initialize`."""

    @abstractmethod
    async def _next_step(self) -> None:
        """Make the next step, record it, and call the callbacks."""

    @abstractmethod
    async def _validate(self) -> bool:
        """Evaluate the policy, record the result, and call the callbacks; True for the best so far."""

    @abstractmethod
    def _adopt_settings(self, config: _Config, settings: Mapping[str, Any]) -> None:
        """Hand another length or cadence to the parts; `settings` are those of config.yaml."""

    @abstractmethod
    async def train(self) -> Any:
        """Run the steps that are left, and return what was trained."""

    @abstractmethod
    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`."""

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Held during the steps, so that no other trainer trains the same model."""
        return contextlib.nullcontext()

    @property
    def _beside(self) -> Pausable:
        """Work that goes on beside the steps, such as rollouts of later ones."""
        return NothingBeside()

    async def _begin(self) -> None:
        """Write what a reader of the logs should know before the first step."""

    async def _may_continue(self) -> bool:
        """Wait while paused; False when a stop was requested."""
        return await self._lifecycle.wait_while_paused(self._beside)

    async def _finish(self, *, is_done: bool) -> None:
        """Choose the weights that stay; called after the last step, or with `is_done` False at a stop."""

    async def _broken_off(self, error: BaseException) -> tuple[State, str]:
        """The state in which `error` ended the training, and the reason."""
        if isinstance(error, asyncio.CancelledError):
            return "stopped", self._cancelled()
        return "failed", one_line(error)

    async def _agree_on_end(self, state: State, why: str) -> None:
        """Wait for the other processes, where there are any."""

    # ------------------------------------------------------------------------------ how it stands

    @property
    def config(self) -> _Config:
        """The settings."""
        return self._config

    @config.setter
    def config(self, config: _Config) -> None:
        """Another length or cadence from the next step on; before the trainer is ready, anything.

        Raises ConfigurationError for a setting that the trainer's parts were made with, and changes nothing.
        """
        may_change = CADENCE | self._MAY_CHANGE if self.is_ready else None
        changes = changed_settings(self._config, config, may_change=may_change)
        if self.is_ready and changes:
            self._change_settings(config, changes)
        self._config = config

    def _change_settings(self, config: _Config, changes: Mapping[str, Any]) -> None:
        settings = {**self._parts.checkpoints.settings, self._SECTION: config.model_dump(mode="json")}
        self._recorder.settings_changed(settings, changes, step=self.step_number)
        self._parts.checkpoints.limit = config.save_total_limit
        self._adopt_settings(config, settings)

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return self._recorder.run

    @property
    def tracker(self) -> JsonlTracker:
        """Writes the run folder's logs."""
        return self._recorder.tracker

    @property
    def is_first(self) -> bool:
        """True in the process that records the run, of those that train together."""
        return self._recorder.is_first

    @property
    def is_ready(self) -> bool:
        """True once `initialize` has finished."""
        return self._parts is not None

    @property
    def step_number(self) -> int:
        """Steps finished."""
        step: int = self._state.step
        return step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return ready(self._planned_steps)

    @property
    def state(self) -> State:
        """The state of the training now."""
        return self._lifecycle.state

    @property
    def is_paused(self) -> bool:
        """True while the training is held between two steps."""
        return self._lifecycle.is_paused

    @property
    def progress(self) -> Progress:
        """The progress of the training now."""
        state: SessionState = self._state
        return Progress(
            state=self.state,
            step=state.step,
            num_steps=self._planned_steps or 0,
            seconds=round(state.train_seconds, 3),
            metrics=dict(self._recorder.metrics),
            best_step=state.best.step,
            best_value=state.best.value,
            why=self._lifecycle.why,
        )

    def _outcome(self, **counts: int) -> dict[str, Any]:
        """The entries that every `summary.json` has; `counts` are the trainer's own."""
        state: SessionState = self._state
        best = state.best
        return {
            "seed": self.config.seed,
            "steps": state.step,
            "num_steps": self.num_steps,
            **counts,
            "ended": self.state,
            "why": self._lifecycle.why,
            "best": None
            if best.step is None
            else {"step": best.step, "metric": best.metric, "value": best.value},
            "train_seconds": round(state.train_seconds, 3),
        }

    # ------------------------------------------------------------------------------ requests

    def pause(self) -> None:
        """Let the running step end and hold there; `wait_for("paused")` waits for it. From any thread."""
        self._lifecycle.pause()

    def resume(self) -> None:
        """Go on after `pause`. From any thread."""
        self._lifecycle.resume()

    def request_stop(self) -> None:
        """Let the running step end, save a checkpoint, and have `train` return. From any thread.

        Before `train` was ever called it holds for the first call; after an end there is nothing to stop.
        """
        self._lifecycle.request_stop()

    async def wait_for(self, *states: State) -> State:
        """Wait until the training is in one of these states, or has ended; returns the state it is in.

        A `train` that was called as a task just before, after an earlier end, counts as begun.
        """
        return await self._lifecycle.wait_for(*states)

    async def stop(self) -> None:
        """End the trainer's thread and close the logs.

        A `train` under way is asked to stop and waited for, so its last step is kept; a callback that is
        still running after a minute is cancelled.
        """
        if self._lifecycle.is_this_task:
            raise ConfigurationError("stop() waits for train() to return: in a callback use request_stop()")
        self.request_stop()
        self._recorder.limit_callbacks()
        await self._lifecycle.wait_until_returned()
        await self._worker.stop()
        self._recorder.close()

    async def close(self) -> None:
        """Stop, and close what the trainer opened."""
        await self.stop()

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

    async def _train(self) -> None:
        """Prepare, make the steps that are left, and end; an error and a cancellation are raised when all is
        written.

        Raises ConfigurationError while it trains already, and after `stop`.
        """
        if self._lifecycle.is_training:
            raise ConfigurationError("this trainer is training: await that call, or make another trainer")
        self._worker.refuse_stopped()
        self._lifecycle.begin()
        try:
            await self.initialize()
            screen = self._recorder.displayed(self, self.num_steps, self.console)
            with self._exclusive(), screen if self.config.progress else contextlib.nullcontext():
                ending = await self._run_steps()
        except (Exception, asyncio.CancelledError) as error:
            await self._end(*await self._broken_off(error))
            raise
        else:
            await self._end(*ending)
        finally:
            self._lifecycle.mark_returned()

    async def _run_steps(self) -> tuple[State, str]:
        """Make the steps that are left; returns how the training ended, and why."""
        if done := self._done():
            _log.warning(f"nothing is left to train: {': '.join(done)}")
        await self._begin()
        await self._notify("on_train_begin", self)
        await self._between_steps()  # a stop in the middle of it left some undone
        beside = self._beside
        try:
            while not (done := self._done()) and await self._may_continue():
                await self._next_step()
                await self._between_steps()
        finally:
            await beside.close()
        await self._finish(is_done=done is not None)
        if done is None:
            return "stopped", f"stopped as asked after step {self.step_number} of {self.num_steps}"
        return "finished", done[0]

    def _done(self) -> tuple[str, str] | None:
        """The reason why no step is left, and how to go on; None while there is one."""
        if self.step_number >= self.num_steps:
            steps = f"all {self.num_steps} steps are" if self.num_steps > 1 else "the one step is"
            return f"{steps} done", f"raise {self._LENGTH} to go on"
        best: Best = self._state.best
        if best.exhausts(self.config.early_stopping_patience):
            return best.why_stopped(), "raise early_stopping_patience to go on"
        return None

    def _is_evaluation_due(self) -> bool:
        """True after the steps at which the policy is evaluated."""
        return crossed(self.config.eval_steps, self._state.evaluated_step, self.step_number)

    async def _between_steps(self) -> None:
        """Evaluate and save where it is due."""
        is_best = self._is_evaluation_due() and await self._validate()
        saved = self._parts.checkpoints.saved
        if is_best or crossed(self.config.save_steps, saved.step if saved else 0, self.step_number):
            await self._save_last()

    async def _end(self, state: State, why: str) -> None:
        """Save, call the callbacks and wait for the other processes, whatever becomes of each; after each,
        where it is news, write down how the training ended.

        The first error on the way is raised, and is how the training ended; a cancellation does not undo a
        failure.
        """
        failures: list[BaseException] = []

        async def attempt(work: Any) -> None:
            nonlocal state, why
            try:
                await work
            except asyncio.CancelledError as error:
                failures.append(error)
                if state != "failed":
                    state, why = "stopped", self._cancelled()
            except Exception as error:
                if not failures:
                    state, why = "failed", one_line(error)
                failures.append(error)

        async def tell() -> None:
            if (state, why) != (self._lifecycle.state, self._lifecycle.why):
                self._lifecycle.end(state, why)
                await attempt(self._write_summary())

        await attempt(self._save_last())
        await tell()
        await attempt(self._notify("on_train_end", self))
        await tell()
        await attempt(self._agree_on_end(state, why))
        await tell()
        if failures:
            raise failures[0]

    def _cancelled(self) -> str:
        planned = f" of {self._planned_steps}" if self._planned_steps else ""
        return f"cancelled after step {self.step_number}{planned}"

    async def _write_summary(self) -> None:
        if self.is_ready:
            await shielded(self._worker.run(self._recorder.finalize, self.summary()))

    async def _notify(self, moment: str, *arguments: Any) -> None:
        await self._recorder.notify(self.callbacks, moment, *arguments, step=self.step_number)

    async def _announce_step(
        self,
        metrics: Mapping[str, float],
        findings: Sequence[Finding] = (),
        failure: str | None = None,
    ) -> None:
        """Call the callbacks for a recorded step; raises TrainingStopped with a `failure`."""
        for finding in findings:
            await self._notify("on_warning", self.step_number, finding)
        await self._notify("on_step_end", self.step_number, metrics)
        if failure is not None:
            raise TrainingStopped(failure)

    # ------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        path = await shielded(self._write_checkpoint())
        await self._notify("on_checkpoint", self.step_number, path)
        return path

    async def _write_checkpoint(self) -> Path:
        checkpoints = ready(self._parts).checkpoints
        async with self._boundary:
            state: SessionState = self._state
            path: Path = await checkpoints.save(state)
        self.tracker.log_event("checkpoint", step=state.step, path=path.name)
        return path

    async def _save_last(self) -> None:
        """Keep a checkpoint of the last finished step, unless there is one or it cannot be saved any more."""
        if self._parts is not None and self._parts.checkpoints.is_due(self._state):
            await self.save_checkpoint()


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def platform_line() -> str:
    """The operating system, the processor and torch's threads, for `summary.json`."""
    threads = torch.get_num_threads()
    return f"{platform.system()} {platform.machine()}, {threads} thread{'s' * (threads > 1)}"
