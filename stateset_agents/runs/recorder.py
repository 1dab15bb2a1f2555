"""Writes a training's metrics, events and summary into its run folder, and calls its callbacks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from stateset_agents.reporting.report import write_report
from stateset_agents.runs.callbacks import CallbackTimeout, Training, notify
from stateset_agents.runs.warnings import StepWarnings
from stateset_agents.tracking.console import ConsoleDisplay
from stateset_agents.tracking.monitors import Finding
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker, SilentTracker
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)
_T = TypeVar("_T")


class RunRecorder:
    """Writes a training into its run folder and tells callbacks and the screen of it.

    Of several processes that train together the first one records; the others `follow`.
    """

    def __init__(self, callbacks: Sequence[object], run: RunFolder | None = None) -> None:
        """`run`: the folder to use, where it is known already."""
        self.callbacks = list(callbacks)
        self.console: Console | None = None
        """Where step lines go; stderr when unset."""
        self.metrics: dict[str, float] = {}
        """Of the last step and the last evaluation."""
        self.folder = run
        self.is_first = True
        """Does this process record, of those that train together?"""
        self._tracker: JsonlTracker | None = None
        self._displays: tuple[ConsoleDisplay, ...] = ()
        self._warnings = StepWarnings()
        self._callback_timeout = CallbackTimeout()
        self.is_notifying = False
        """Does a callback run now?"""

    # ------------------------------------------------------------------------------ the folder

    @property
    def is_open(self) -> bool:
        """Can metrics and events be written?"""
        return self._tracker is not None

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return ready(self.folder)

    @property
    def tracker(self) -> JsonlTracker:
        """Writes the run folder's logs."""
        return ready(self._tracker)

    def open(
        self,
        make: Callable[[], RunFolder],
        settings: Mapping[str, Any],
        piece: Callable[[int], str] | None = None,
    ) -> None:
        """Open the logs of the folder, made where there is none yet. Blocking.

        The settings of a run that is there stay, until its checkpoint agrees. `piece`: what a token id
        says, where there are tokens.
        """
        if self.is_open:  # by a call that was cancelled while it waited
            return
        folder = self.folder or make()
        if not folder.config.exists():
            folder.write_config(settings)
        self._tracker = JsonlTracker(folder, piece)
        self.folder = folder

    def follow(self, path: Path) -> None:
        """Another process records, in this folder."""
        self.is_first = False
        self.folder = RunFolder(path)
        self._tracker = SilentTracker(self.folder)

    def close(self) -> None:
        """Close the logs."""
        if self._tracker is not None:
            self._tracker.close()

    # ------------------------------------------------------------------------------ what is written

    def event(self, name: str, *, step: int, **fields: Any) -> None:
        """Write an event of a step, for a timeline of the run."""
        self.tracker.log_event(
            name, step=step, run=self.run.path.name, monotonic=round(time.monotonic(), 6), **fields
        )

    def step(
        self,
        number: int,
        metrics: Mapping[str, float],
        settings: Mapping[str, Any],
        lag_place: str | None = None,
    ) -> list[Finding]:
        """Write a step's metrics; what they warn of for the first time is logged and given. `lag_place`: the
        user's code that held the event loop."""
        self.metrics |= metrics
        findings = self._warnings.check(number, metrics, settings, lag_place)
        for finding in findings:
            self.tracker.log_event("warning", step=number, **asdict(finding))
        self.tracker.log_metrics(number, metrics)
        return findings

    def measured(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write metrics of a step that warn of nothing, or of an evaluation after it."""
        self.tracker.log_metrics(number, metrics)
        self.metrics |= metrics

    def settings_changed(self, settings: Mapping[str, Any], changes: Mapping[str, Any], *, step: int) -> None:
        """Write config.yaml anew, and an event of what changed after `step`; before they are used, since the
        disk may refuse. Raises ConfigurationError then."""
        if self.is_first:
            self.run.write_config(settings)
        self.tracker.log_event("settings changed", step=step, changes=dict(changes))

    def finalize(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, where other entries (an earlier measurement) are kept, and
        `report.html`. Blocking.

        A disk that cannot take them is said in one line: the checkpoint stands, and `stateset-agents report`
        makes the page later.
        """
        if not self.is_first:
            return
        try:
            self.run.write_summary({**RunLog(self.run).summary(), **summary})
            write_report(self.run.path)
        except ConfigurationError as error:
            if summary.get("ended") != "failed":  # else what it failed with says enough, and follows
                _log.error(f"the run is kept, but not its summary and report: {error}")

    # ------------------------------------------------------------------------------ callbacks

    async def notify(self, moment: str, *arguments: Any, step: int) -> None:
        """Call callbacks and the console for a moment after `step`; a callback that fails is an event."""
        if not self.is_first:
            return
        self.is_notifying = True
        try:
            listeners = [*self.callbacks, *self._displays]
            failures = await notify(listeners, moment, *arguments, limit=self._callback_timeout)
        finally:
            self.is_notifying = False
        for failure in failures:
            if self._tracker is not None:
                self._tracker.log_event("callback failed", step=step, error=failure)

    def limit_callbacks(self) -> None:
        """Give callbacks a minute each from now on, also those that are running."""
        self._callback_timeout.start()

    @contextlib.contextmanager
    def displayed(self, training: Training, num_steps: int) -> Iterator[None]:
        """Print the run folder and the steps meanwhile; of several processes the first does.

        Where `console` is set, its owner says where the run is.
        """
        if not self.is_first:
            yield
            return
        console = self.console or Console(stderr=True)
        if self.console is None:
            console.print(f"run folder: {self.run.path}", highlight=False, soft_wrap=True)
        first_step = training.step_number
        with ConsoleDisplay(num_steps, first_step=first_step, console=console, trainer=training) as display:
            self._displays = (display,)
            try:
                yield
            finally:
                self._displays = ()


def ready(part: _T | None) -> _T:
    """A part of a trainer that `initialize` makes; raises ConfigurationError before that."""
    if part is None:
        raise ConfigurationError("the trainer is not ready: await trainer.initialize() first")
    return part
