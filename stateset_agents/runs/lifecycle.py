"""Pause, stop and progress of a training; any part of the application may ask."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

State = Literal["idle", "running", "pausing", "paused", "stopping", "stopped", "finished", "failed"]
"""idle: `train` was not called yet. pausing and stopping: asked for, the step under way ends first.
stopped: before the last step, as asked or by a cancellation; `train` goes on from there."""
_ENDED = ("stopped", "finished", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a training at one moment."""

    state: State = "idle"
    step: int = 0
    """Steps finished."""
    num_steps: int = 0
    """Steps of the whole run."""
    seconds: float = 0.0
    """Seconds spent in steps, over all parts of a resumed run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step and of the last evaluation."""
    best_step: int | None = None
    """Step of the best evaluation so far."""
    best_value: float | None = None
    why: str | None = None
    """The reason for the end, in one line; None while the training goes on."""

    def to_json(self) -> dict[str, Any]:
        """The values for JSON: numbers that are not finite are null."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": numbers}


class Pausable(Protocol):
    """Work that goes on beside the steps, such as rollouts of later ones."""

    @property
    def is_idle(self) -> bool:
        """True when no work is running."""

    def pause(self) -> None:
        """Start no new work; let running work finish."""

    def resume(self) -> None:
        """Begin work again."""

    async def close(self) -> object:
        """End the work; it will not be resumed."""


class NothingBeside:
    """Nothing goes on beside the steps."""

    is_idle = True

    def pause(self) -> None:
        """Nothing to hold."""

    def resume(self) -> None:
        """Nothing to begin."""

    async def close(self) -> object:
        """Nothing to end."""


class Lifecycle:
    """Keeps whether a training runs, holds, stops or has ended; requests may come from any thread."""

    def __init__(self) -> None:
        self.why: str | None = None
        """The reason for the end, in one line; None while the training goes on."""
        self._phase: State = "idle"
        self._pauses = self._stops = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._returned = asyncio.Event()
        self._returned.set()
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        """The state of the training now."""
        if self._phase == "running":
            return "stopping" if self._stops else "pausing" if self._pauses else "running"
        return self._phase

    @property
    def is_paused(self) -> bool:
        """True while the training is held between two steps."""
        return self._phase == "paused"

    @property
    def has_ended(self) -> bool:
        """True once the training has ended, until another begins."""
        return self._phase in _ENDED

    @property
    def is_training(self) -> bool:
        """True from the call of `train` until it returns."""
        return not self._returned.is_set()

    @property
    def is_this_task(self) -> bool:
        """True in the task that runs the training."""
        return self._task is not None and asyncio.current_task() is self._task

    # ------------------------------------------------------------------------------ requests

    def pause(self) -> None:
        """Let the step under way end and hold there; `wait_for("paused")` waits for it."""
        self._pauses = True
        self._wake()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._pauses = False
        self._wake()

    def request_stop(self) -> None:
        """Let the step under way end, keep a checkpoint, and have `train` return.

        Before `train` was ever called it holds for the first call; after an end there is nothing to stop.
        """
        if self.has_ended:
            return
        self._stops = True
        self._wake()

    async def wait_for(self, *states: State) -> State:
        """Wait until the training is in one of these states, or has ended; returns the state it is in.

        A `train` that was called as a task just before, after an earlier end, counts as begun.
        """
        names = get_args(State)
        for state in states:
            if state not in names:
                raise ConfigurationError(
                    f"no training is ever {state!r}{nearest(str(state), names)}: there are {', '.join(names)}"
                )
        if self.has_ended:
            await asyncio.sleep(0)  # such a task has its first turn
        while self.state not in (*states, *_ENDED):
            await self._changed.wait()
        return self.state

    async def wait_until_returned(self) -> None:
        """Wait until no `train` is under way."""
        await self._returned.wait()

    # ------------------------------------------------------------------------------ the training's side

    def begin(self) -> None:
        """Training begins, in this event loop and task."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._returned.clear()
        self.why = None
        self._enter("running")

    def end(self, state: State, why: str) -> None:
        """Training has ended in this state; a request to stop is forgotten."""
        self._stops = False
        self.why = why
        self._enter(state)

    def mark_returned(self) -> None:
        """`train` returns: whoever waits in `wait_until_returned` goes on."""
        self._task = None
        self._returned.set()

    async def wait_while_paused(self, work: Pausable) -> bool:
        """Between two steps: pause `work` and wait while paused; False when a stop was requested."""
        while self._pausing:
            work.pause()
            while self._pausing and not work.is_idle:
                await self._changed.wait()
            while self._pausing:
                if self._phase != "paused":
                    self._enter("paused")
                await self._changed.wait()
            if not self._stops:  # else what it begins would be dropped at once
                work.resume()
        if self._phase == "paused":
            self._enter("running")
        return not self._stops

    def notify(self) -> None:
        """Wake whoever waits for a state; called in the event loop's thread."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def _pausing(self) -> bool:
        return self._pauses and not self._stops

    def _enter(self, state: State) -> None:
        self._phase = state
        self.notify()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify)
