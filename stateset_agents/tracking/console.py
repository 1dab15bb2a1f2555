"""The display of a run that goes on: a live line on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("success", "success/rate", "{:.0%}"),
    ("KL", "kl/reference", "{:.4f}"),
    ("tokens/s", "tokens/per_second", "{:,.0f}"),
)
"""Caption, metric, format; a metric that a step does not have shows a dash."""
_SFT_COLUMNS = (("loss", "sft/loss", "{:.4f}"), ("tokens/s", "tokens/per_second", "{:,.0f}"))
"""The columns of a step of fine-tuning."""
_CONTROL_COLUMNS = (
    ("return", "reward/mean", "{:.3f}"),
    ("length", "episode/length", "{:.0f}"),
    ("steps/s", "rollout/steps_per_second", "{:,.0f}"),
)
"""The columns of an update of a numeric policy."""
_RESULTS = (("success", "{:.1%}"), ("reward", "{:.3f}"), ("loss", "{:.4f}"))
"""The results of an evaluation that are shown, with their formats."""

_MIN_CUT_SHARE = 0.05
"""Share of replies that their limit of tokens cut, from which on the line says it."""
_PLAIN_LINES = 20
"""About how many lines a whole run prints where there is no terminal."""
_PLAY_SECONDS = 10.0
"""Seconds between two lines there while held-out scenarios are played."""


class _Measured(Protocol):
    """An evaluation of any kind of training."""

    def metrics(self) -> dict[str, float]: ...


class ConsoleDisplay:
    """Shows step, reward, success, KL, tokens/s and time left; a context manager.

    `every` is how many steps go by between two plain lines; about twenty lines a run by default.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        every: int | None = None,
        console: Console | None = None,
        trainer: Any = None,
    ) -> None:
        """`trainer` knows which evaluation is the best."""
        self.total_steps = total_steps
        self._console = console or Console()
        self._every = every or max(1, total_steps // _PLAIN_LINES)
        self._first_step = self._last_step = first_step
        self._trainer = trainer
        self._started = time.monotonic()
        bar = [BarColumn(bar_width=16)] if self._console.width >= 100 else []
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *bar,
            TextColumn("{task.fields[line]}"),
            console=self._console,
            redirect_stdout=sys.stdout.isatty(),  # what the program prints into a file stays there
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step, line="")

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of `step`, the count of steps done so far."""
        line = progress_line(metrics, self._seconds_left(step))
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, line=line)
        elif step // self._every > self._last_step // self._every or step >= self.total_steps:
            self._console.print(f"step {step}/{self.total_steps}  {line}", highlight=False, soft_wrap=True)
        self._last_step = step

    def on_evaluate(self, step: int, evaluation: _Measured) -> None:
        """A line on what the validation split showed, above the live one on a terminal."""
        metrics = evaluation.metrics()
        results = [(name, style, metrics.get(f"eval/{name}")) for name, style in _RESULTS]
        texts = [f"{name} {style.format(value)}" for name, style, value in results if value is not None]
        best = " (best)" if self._trainer and self._trainer.progress.best_step == step else ""
        line = f"eval step {step}: {', '.join(texts) or 'no verdict and no score'}{best}"
        self._console.print(line, highlight=False, soft_wrap=True)

    def _seconds_left(self, step: int) -> float:
        num_done = step - self._first_step
        if num_done <= 0:
            return math.nan
        return (time.monotonic() - self._started) / num_done * max(0, self.total_steps - step)


class PlayDisplay:
    """Shows how many held-out scenarios have been played, on stderr; a context manager.

    A live line on a terminal, gone when all are played; else a line at most every ten seconds.
    """

    def __init__(self, name: str, *, console: Console | None = None) -> None:
        """`name` says what they are played for, such as "before"."""
        self._name = name
        self._console = console or Console(stderr=True)
        self._started = self._printed = time.monotonic()
        redirect = sys.stdout.isatty()
        self._live = Live(console=self._console, transient=True, redirect_stdout=redirect)

    def __enter__(self) -> Self:
        self._started = self._printed = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_progress(self, done: int, number: int) -> None:
        """`done` of `number` have been played."""
        now = time.monotonic()
        left = (now - self._started) / done * (number - done)
        line = f"{self._name}: {done}/{number} conversations played  left {_minutes(left)}"
        if self._console.is_terminal:
            self._live.update(Text(line))
        elif now - self._printed >= _PLAY_SECONDS:
            self._printed = now
            self._console.print(line, highlight=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    """`1:05`."""
    minutes, rest_seconds = divmod(round(seconds), 60)
    return f"{minutes}:{rest_seconds:02d}"


def progress_line(metrics: Mapping[str, float], seconds_left: float) -> str:
    """`reward 0.412  success 38%  KL 0.0012  tokens/s 5,120  cut 12%  left 1:05`."""
    parts = []
    columns = (
        _SFT_COLUMNS
        if "sft/loss" in metrics
        else _CONTROL_COLUMNS
        if "rollout/steps_per_second" in metrics
        else _COLUMNS
    )
    for caption, name, style in columns:
        value = metrics.get(name, math.nan)
        parts.append(f"{caption} {style.format(value) if math.isfinite(value) else '-'}")
    cut = metrics.get("rollout/cut_replies", 0.0)
    if cut >= _MIN_CUT_SHARE:
        parts.append(f"cut {cut:.0%}")
    if math.isfinite(seconds_left):
        parts.append(f"left {_minutes(seconds_left)}")
    return "  ".join(parts)
