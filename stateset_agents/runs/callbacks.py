"""Callbacks: an application is called at seven moments of its training, each a method to override.

The trainer awaits each call before it goes on, so callbacks see the moments in order. An `async` method
runs in the event loop; a plain one in a thread of its own, so it may block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stateset_agents.runtime.tasks import Deadline
from stateset_agents.runtime.user_code import call_user_code, format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import closest, nearest

if TYPE_CHECKING:
    from stateset_agents.runs.lifecycle import Progress
    from stateset_agents.tracking.monitors import Finding
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.types.trajectory import TrajectoryGroup


_log = get_logger(__name__)

CLOSING_TIMEOUT = 60.0
"""Seconds that each call of a callback has left once the application stops or closes the trainer."""


class Training(Protocol):
    """The part of any trainer that callbacks, trackers and the console use."""

    @property
    def run(self) -> RunFolder: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def step_number(self) -> int: ...  # steps finished
    def pause(self) -> None: ...  # let the running step end, and wait there
    def resume(self) -> None: ...
    def request_stop(self) -> None: ...  # let the running step end, save a checkpoint, have `train` return


class Callback:
    """Base of callbacks; override the moments you need, as plain or as `async` methods.

    A method that raises is logged in one line and in events.jsonl, and training goes on; programming
    errors (TypeError, NameError and their like) and the package's own errors end the training instead, as
    `raise TrainingStopped("...")` does on purpose. The last finished step is kept either way. A method may
    take as long as it likes, but a minute once the trainer is stopped or closed: then it is cancelled, and
    has failed.

    >>> class Watch(Callback):
    ...     async def on_step_end(self, step, metrics):
    ...         await websocket.send_json({"step": step, "reward": metrics.get("reward/mean")})
    >>> trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config, callbacks=[Watch()])
    """

    def on_train_begin(self, trainer: Any) -> Any:
        """`train` begins. Keep `trainer`, a `Training`, to call its `request_stop` or `pause` later."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Any:
        """A step (from 1) is finished and in the logs."""

    def on_rollout(self, step: int, groups: Sequence[TrajectoryGroup]) -> Any:
        """The conversations that a step learned from, scored; before that step's `on_step_end`. Numeric
        policies have none."""

    def on_warning(self, step: int, finding: Finding) -> Any:
        """A step showed a problem for the first time: `finding` has the check, the observation and what to
        do.

        It is in the logs as well. Called before that step's `on_step_end`.
        """

    def on_evaluate(self, step: int, evaluation: Any) -> Any:
        """The policy was evaluated after this step; `evaluation.metrics()` has the figures."""

    def on_checkpoint(self, step: int, path: Path) -> Any:
        """A checkpoint is on disk."""

    def on_train_end(self, trainer: Any) -> Any:
        """`train` ends, however it does; `trainer.progress` says how."""


_MOMENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def expect_callback(callback: object) -> None:
    """Raises ConfigurationError for a class, and for a method that is never called because of its name.

    Another object than a `Callback` may have methods `on_...` of its own, unless they are nearly a moment's.
    """
    moments = f"there are {', '.join(_MOMENTS)}"
    if isinstance(callback, type):
        raise ConfigurationError(f"a callback must be an object, got the class: write {callback.__name__}()")
    if not any(hasattr(callback, name) for name in _MOMENTS):
        raise ConfigurationError(f"a callback without a moment to hear of, got {callback!r:.60}: {moments}")
    for name in dir(callback):
        if not name.startswith("on_") or name in _MOMENTS:
            continue
        if isinstance(callback, Callback) or closest(name, _MOMENTS, likeness=0.8):
            raise ConfigurationError(
                f"{type(callback).__name__}.{name} would never be called{nearest(name, _MOMENTS)}: {moments}"
            )


class CallbackTimeout:
    """The time limit of a callback's call: none, until `start` is called."""

    def __init__(self) -> None:
        self._has_started = False
        self._running: set[Deadline] = set()

    def start(self) -> None:
        """Give each call `CLOSING_TIMEOUT` seconds from now on, also those that are running."""
        self._has_started = True
        for deadline in self._running:
            deadline.set(CLOSING_TIMEOUT)

    @contextlib.asynccontextmanager
    async def applied(self) -> AsyncIterator[None]:
        """Cancel the body when its time is over, and raise TimeoutError."""
        deadline = Deadline(CLOSING_TIMEOUT if self._has_started else None)
        late = TimeoutError(f"still at work {CLOSING_TIMEOUT:g} s after the trainer was to stop")
        self._running.add(deadline)
        try:
            async with deadline.bound(late):
                yield
        finally:
            self._running.discard(deadline)


async def notify(
    callbacks: Sequence[object], moment: str, *arguments: Any, limit: CallbackTimeout
) -> list[str]:
    """Call `moment` of each callback that has it, in order; returns a line per one that failed."""
    failures = []
    for callback in callbacks:
        expect_callback(callback)  # it may have joined the list since the trainer was made
        method = getattr(callback, moment, None)
        if method is None or getattr(type(callback), moment, None) is getattr(Callback, moment):
            continue
        try:
            async with limit.applied():
                await call_user_code(method, *arguments)
        except (*PROGRAMMING_ERRORS, StatesetError):
            raise
        except (Exception, asyncio.CancelledError) as error:
            # The boundary to user code: training outlives a webhook that is down, and a task that the
            # callback itself started and that was cancelled.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            failures.append(f"{type(callback).__name__}.{moment} failed: {format_error(error)}")
            _log.error(f"callback {failures[-1]}; training goes on")
    return failures
