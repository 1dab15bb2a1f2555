"""Writes a training's metrics, events and summary into its run folder, and calls its callbacks."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from stateset_agents.algorithms.advantages import is_over_batch
from stateset_agents.runs.callbacks import CallbackTimeout, Training, notify
from stateset_agents.tracking.console import ConsoleDisplay
from stateset_agents.tracking.diagnostics import History, live_findings
from stateset_agents.tracking.monitors import MAX_LOOP_LAG, MAX_TIED_STEPS, OTHER_CODE_HINT, Finding
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import MetricLine, RunLog
from stateset_agents.tracking.tracker import JsonlTracker, SilentTracker
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

# Warnings while a run goes on; the recorder hands each step's metrics to a `StepWarnings`.

_EARLY_CHECKS = ("vocabulary", "numbers", "cut replies", "sampler")
"""Checks that the first steps can show already; the other checks need several steps."""
_FIRST, _LAST = 5, 20
"""Steps that are remembered: how the run began, and how it stands."""


class StepWarnings:
    """Checks the metrics of one step after another."""

    def __init__(self) -> None:
        self._first: list[MetricLine] = []
        self._last: deque[MetricLine] = deque(maxlen=_LAST)
        self._num_tied = 0
        """Steps in a row in which no group had two different rewards."""
        self._reported: set[tuple[str, str]] = set()

    def check(
        self,
        step: int,
        metrics: Mapping[str, float],
        training: Mapping[str, Any],
        lag_place: str | None = None,
    ) -> list[Finding]:
        """Log and return the warnings that are new in this step. `training`: the settings; `lag_place`: where
        the user's code held the event loop."""
        line = MetricLine(step, 0.0, dict(metrics))
        if len(self._first) < _FIRST:
            self._first.append(line)
        else:
            self._last.append(line)
        lines = [*self._first, *self._last]
        checked = live_findings(History(lines, training, {}))
        if len(lines) < _FIRST:
            checked = [finding for finding in checked if finding.check in _EARLY_CHECKS]
        at_once = self._at_once(metrics, training, lag_place)
        new = [
            finding
            for finding in (*at_once, *checked)
            if (finding.check, finding.verdict) not in self._reported
        ]
        for finding in new:
            self._reported.add((finding.check, finding.verdict))
            name = "" if finding in at_once else f"{finding.check}: "
            _log.warning(f"{name}{finding.seen}: {finding.cure}")
        return new

    def _at_once(
        self, metrics: Mapping[str, float], training: Mapping[str, Any], lag_place: str | None
    ) -> list[Finding]:
        """Findings of one step by itself, or with a count of the steps before."""
        findings = []
        tied = "reward/mean" in metrics and metrics.get("group/zero_variance") == 1.0
        if is_over_batch(training.get("baseline_type")):  # then a group is compared with the others
            tied = tied and not metrics.get("reward/std")
        self._num_tied = self._num_tied + 1 if tied else 0
        if self._num_tied == MAX_TIED_STEPS:
            symptom = (
                f"no group had two different rewards in {MAX_TIED_STEPS} steps (mean "
                f"{metrics['reward/mean']:.3g}), so nothing is learned"
            )
            cure = (
                "is the reward the same whatever the agent says, are all scenarios too easy or too hard, or "
                "the replies all alike (temperature)?"
            )
            if "episode/length" in metrics:
                cure = "is the task solved, or is the reward the same whatever a member does?"
            findings.append(Finding("tied groups", "fail", symptom, cure))
        if metrics.get("time/loop_lag", 0.0) >= MAX_LOOP_LAG:
            symptom = f"the event loop stood still for {metrics['time/loop_lag']:.1f} s"
            cure = OTHER_CODE_HINT
            if metrics.get("time/loop_lag_user", 0.0) >= MAX_LOOP_LAG:
                symptom += f" in your code ({lag_place})" if lag_place else " in your code"
                cure = "it blocks there; make that function a plain def, which runs in a thread"
            findings.append(Finding("event loop", "warn", symptom, cure))
        return findings


_log = get_logger(__name__)
_T = TypeVar("_T")


class RunRecorder:
    """Writes a training into its run folder and tells callbacks and the screen of it.

    Of several processes that train together the first one records; the others `follow`.
    """

    def __init__(self, run: RunFolder | None = None) -> None:
        """`run`: the folder to use, where it is known already."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step and the last evaluation."""
        self.folder = run
        self.is_first = True
        """True in the process that records, of those that train together."""
        self._tracker: JsonlTracker | None = None
        self._displays: tuple[ConsoleDisplay, ...] = ()
        self._warnings = StepWarnings()
        self._callback_timeout = CallbackTimeout()
        self.is_notifying = False
        """True while a callback runs."""

    # ------------------------------------------------------------------------------ the folder

    @property
    def is_open(self) -> bool:
        """True when metrics and events can be written."""
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
        from stateset_agents.reporting.report import write_report  # only a run's end loads the page's parts

        try:
            self.run.write_summary({**RunLog(self.run).summary(), **summary})
            write_report(self.run.path)
        except ConfigurationError as error:
            if summary.get("ended") != "failed":  # else what it failed with says enough, and follows
                _log.error(f"the run is kept, but not its summary and report: {error}")

    # ------------------------------------------------------------------------------ callbacks

    async def notify(self, callbacks: Sequence[object], moment: str, *arguments: Any, step: int) -> None:
        """Call callbacks and the console for a moment after `step`; a callback that fails is an event."""
        if not self.is_first:
            return
        self.is_notifying = True
        try:
            listeners = [*callbacks, *self._displays]
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
    def displayed(self, training: Training, num_steps: int, console: Console | None) -> Iterator[None]:
        """Print the run folder and the steps meanwhile; of several processes the first does.

        Where a `console` is given, its owner says where the run is; else all goes to stderr.
        """
        if not self.is_first:
            yield
            return
        if console is None:
            console = Console(stderr=True)
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
