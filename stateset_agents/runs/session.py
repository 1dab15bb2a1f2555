"""One training from its beginning to its end, whatever it trains: it may hold, it is written down, it ends.

At the end everything is attempted, and what breaks first is how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.runs.callbacks import Training
from stateset_agents.runs.early_stopping import Best
from stateset_agents.runs.lifecycle import Lifecycle, Progress, State
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runtime.tasks import shielded
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a trainer does within its session."""

    prepare: Callable[[], Awaitable[None]]
    """`initialize`; done before the rest."""
    run: Callable[[], Awaitable[tuple[State, str]]]
    """The steps that are left; says how the training ended, and why."""
    save: Callable[[], Awaitable[None]]
    """Keep a checkpoint of the last finished step, where there is one to keep."""
    summary: Callable[[], Mapping[str, Any]]
    """What `summary.json` says."""
    is_ready: Callable[[], bool]
    """Has `prepare` been through?"""
    num_steps: Callable[[], int]
    """Of the whole run, once it has."""


class Session:
    """Conducts a trainer: who asks for a pause or a stop is heard, callbacks are told, the end is written.

    >>> session = Session(callbacks, run=None)
    >>> await session.train(trainer, work, is_shown=True)
    """

    def __init__(self, callbacks: Sequence[object], run: RunFolder | None) -> None:
        """`run`: a folder to use instead of a new one."""
        self.lifecycle = Lifecycle()
        self.worker = Worker()
        self.recorder = RunRecorder(callbacks, run)

    def progress(self, *, step: int, num_steps: int, seconds: float, best: Best) -> Progress:
        """The progress of the training now."""
        return Progress(
            state=self.lifecycle.state,
            step=step,
            num_steps=num_steps,
            seconds=round(seconds, 3),
            metrics=dict(self.recorder.metrics),
            best_step=best.step,
            best_value=best.value,
            why=self.lifecycle.why,
        )

    def ending(self, best: Best) -> dict[str, Any]:
        """What every summary says of the end."""
        found = {"step": best.step, "metric": best.metric, "value": best.value}
        return {
            "ended": self.lifecycle.state,
            "why": self.lifecycle.why,
            "best": None if best.step is None else found,
        }

    async def train(self, trainer: Training, work: Work, *, is_shown: bool) -> None:
        """Prepare, run and end; what breaks, and a cancellation, travel on when all is written.

        Raises ConfigurationError while it trains already, and after `stop`.
        """
        if self.lifecycle.is_training:
            raise ConfigurationError("this trainer is training: await that call, or make another trainer")
        self.worker.refuse_stopped()
        self.lifecycle.begin()
        try:
            await work.prepare()
            shown = self.recorder.displayed(trainer, work.num_steps())
            with shown if is_shown else contextlib.nullcontext():
                ending = await work.run()
        except asyncio.CancelledError:
            await self._end(trainer, work, "stopped", _cancelled(trainer, work))
            raise
        except Exception as error:
            await self._end(trainer, work, "failed", one_line(error))
            raise
        else:
            await self._end(trainer, work, *ending)
        finally:
            self.lifecycle.mark_returned()

    async def stop(self) -> None:
        """End the thread and close the logs. A `train` under way is asked to stop and waited for."""
        if self.lifecycle.is_this_task:
            raise ConfigurationError("stop() waits for train() to return: in a callback use request_stop()")
        self.lifecycle.request_stop()
        self.recorder.limit_callbacks()
        await self.lifecycle.wait_until_returned()
        await self.worker.stop()
        self.recorder.close()

    async def _end(self, trainer: Training, work: Work, state: State, why: str) -> None:
        async def save(state: State, why: str) -> None:
            await work.save()

        async def notify(state: State, why: str) -> None:
            await self.recorder.notify("on_train_end", trainer, step=trainer.step_number)

        async def write() -> None:
            if work.is_ready():
                await shielded(self.worker.run(self.recorder.finalize, work.summary()))

        await end_training(
            state,
            why,
            lifecycle=self.lifecycle,
            steps=(save, notify),
            write=write,
            cancelled=lambda: _cancelled(trainer, work),
        )


def _cancelled(trainer: Training, work: Work) -> str:
    of = f" of {work.num_steps()}" if work.is_ready() else ""
    return f"cancelled after step {trainer.step_number}{of}"


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


async def end_training(
    state: State,
    why: str,
    *,
    lifecycle: Lifecycle,
    steps: tuple[Callable[[State, str], Awaitable[None]], ...],
    write: Callable[[], Awaitable[None]],
    cancelled: Callable[[], str],
) -> None:
    """Attempt each of `steps(state, why)`, whatever becomes of the others; after each, where it is news,
    `lifecycle` hears how the training ended and `write` writes it down.

    What breaks first on the way is raised, and is how the training ended; a cancellation does not undo a
    failure. `cancelled`: how the training ended where that was by a cancellation.
    """
    failures: list[BaseException] = []

    async def attempt(work: Awaitable[None]) -> None:
        nonlocal state, why
        try:
            await work
        except asyncio.CancelledError as error:
            failures.append(error)
            if state != "failed":
                state, why = "stopped", cancelled()
        except Exception as error:
            if not failures:
                state, why = "failed", one_line(error)
            failures.append(error)

    for step in steps:
        await attempt(step(state, why))
        if (state, why) != (lifecycle.state, lifecycle.why):
            lifecycle.end(state, why)
            await attempt(write())
    if failures:
        raise failures[0]
