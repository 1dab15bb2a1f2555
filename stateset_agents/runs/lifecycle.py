"""Pause, stop and progress of a training, from anywhere in the application that runs it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

__all__ = ["Controlled", "Progress", "State"]

State = Literal["idle", "running", "pausing", "paused", "stopping", "stopped", "finished", "failed"]
"""idle: `train` was not called yet. pausing and stopping: asked for, the step under way ends first.
stopped: before the last step, as asked or by a cancellation; `train` goes on from there."""
_ENDED = ("stopped", "finished", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a training stands at one moment."""

    state: State = "idle"
    step: int = 0
    """Steps finished."""
    num_steps: int = 0
    """Of the whole run, were it to go to its end."""
    seconds: float = 0.0
    """Spent in steps, over all parts of a resumed run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step, and of the last evaluation."""
    best_step: int | None = None
    """Of the best evaluation so far."""
    best_value: float | None = None
    why: str | None = None
    """How the training ended, in one line; None while it has not."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: numbers that are not finite are null."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": numbers}


class Controlled:
    """A training that can be held, ended and waited for; the requests may come from any thread."""

    def __init__(self) -> None:
        self._phase: State = "idle"
        self._pauses = self._stops = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        """What holds now."""
        if self._phase == "running":
            return "stopping" if self._stops else "pausing" if self._pauses else "running"
        return self._phase

    @property
    def is_paused(self) -> bool:
        """Does the training hold between two steps?"""
        return self._phase == "paused"

    @property
    def has_ended(self) -> bool:
        """Is there no training under way any more?"""
        return self._phase in _ENDED

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
        known = get_args(State)
        for state in states:
            if state not in known:
                raise ConfigurationError(
                    f"no training is ever {state!r}{nearest(str(state), known)}: there are {', '.join(known)}"
                )
        if self.has_ended:
            await asyncio.sleep(0)  # such a task has its first turn
        while self.state not in (*states, *_ENDED):
            await self._changed.wait()
        return self.state

    def _begin(self) -> None:
        """Training begins, in this event loop."""
        self._loop = asyncio.get_running_loop()
        self._enter("running")

    def _settle(self, state: State) -> None:
        """Training ended; a stop that was asked for is done with."""
        self._stops = False
        self._enter(state)

    async def _goes_on(self) -> bool:
        """Between two steps: wait while paused; False when a stop was asked for."""
        while self._pauses and not self._stops:
            await self._quieten()
            while self._pauses and not self._stops:
                if self._phase != "paused":
                    self._enter("paused")
                await self._changed.wait()
            if not self._stops:  # else what it begins would be dropped at once
                self._liven()
        if self._phase == "paused":
            self._enter("running")
        return not self._stops

    async def _quieten(self) -> None:
        """A pause begins: wait for what must end before it, or for the pause to be taken back."""

    def _liven(self) -> None:
        """A pause is over."""

    def _enter(self, state: State) -> None:
        self._phase = state
        self._look_again()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        """Let whoever waits look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
