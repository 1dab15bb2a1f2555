"""One self-contained HTML page per run, made from its folder alone. `stateset-agents report` calls it.

The page opens from disk: its style is inline, its charts are SVG, it has no script and loads nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.errors import ConfigurationError
from stateset_agents.reporting.conversations import choose, pairs, spoken, transitions
from stateset_agents.reporting.curves import learning_curves, other_curves, reward_terms
from stateset_agents.tracking.diagnostics import diagnose
from stateset_agents.tracking.run_log import RunLog

__all__ = ["write_report"]


@dataclass(frozen=True, slots=True)
class _Measure:
    """A share of successes with its interval, ready to draw."""

    success: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the before/after chart; a side is None where it was not measured."""

    name: str
    before: _Measure | None
    after: _Measure | None


def write_report(run_path: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    A run that is still going on, or was not measured before and after, gets the parts it has. Raises
    ConfigurationError when the folder is no run, or cannot be read or written.
    """
    log = RunLog.open(run_path)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stateset_agents.reporting", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{share:.1%}"
    environment.globals["spoken"] = spoken
    page = environment.get_template("page.html").render(_content(log))
    beside = log.folder.report.with_name(f".report.{os.getpid()}.html")
    try:
        beside.write_text(page, encoding="utf-8")
        beside.replace(log.folder.report)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigurationError(
            f"cannot write {log.folder.report}: {error.strerror}; copy the run to a folder you may write"
        ) from error
    return log.folder.report


def _content(log: RunLog) -> dict[str, Any]:
    summary, config, lines = log.summary(), log.config(), list(log.metrics())
    before, after = summary.get("before"), summary.get("after")
    measured = bool(before or after)
    all_pairs = pairs(log.rollouts("before", "after"))
    return {
        "name": log.folder.path.name,
        "facts": _facts(summary, config, steps=max((line.step for line in lines), default=0)),
        "before": before,
        "after": after,
        "rows": _rows(before or {}, after or {}) if measured else [],
        "findings": diagnose(log),
        "curves": learning_curves(lines),
        "terms": reward_terms(lines),
        "others": other_curves(lines),
        "pairs": choose(all_pairs),
        "moved": transitions(all_pairs),
        "settings": list(_flat(config)),
    }


def _facts(summary: Mapping[str, Any], config: Mapping[str, Any], *, steps: int) -> list[tuple[str, str]]:
    """What stands under the title, as far as the run says it."""
    agent, training = config.get("agent"), config.get("training")
    estimator = training.get("advantage_estimator") if isinstance(training, Mapping) else None
    ended_early = steps <= summary.get("steps", -1) < summary.get("num_steps", 0)
    facts = [
        ("model", agent.get("model_name") if isinstance(agent, Mapping) else None),
        ("steps", _steps(summary, training, steps)),
        ("ended", summary.get("why") if ended_early else None),
        ("credit", estimator if estimator != "group" else None),
        ("seed", summary.get("seed")),
        ("training", _duration(summary.get("train_seconds"))),
        ("platform", summary.get("platform")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _steps(summary: Mapping[str, Any], training: Any, done: int) -> str:
    """`110`, or `unfinished: step 40 of 110` unless the summary says that the training came to its end."""
    if summary.get("ended", "finished") == "finished" and summary.get("steps", -1) >= done:
        return str(summary["steps"])
    if not isinstance(training, Mapping) or "num_episodes" not in training:
        return str(done)
    episodes = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    planned = training["max_steps"] or math.ceil(training["num_episodes"] / episodes)
    return f"unfinished: step {done} of {planned}"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_Row]:
    """All scenarios first, then each family."""
    families = [before.get("families") or {}, after.get("families") or {}]
    names = sorted({name for side in families for name in side})
    rows = [_Row("All scenarios", _measure(before), _measure(after))]
    return rows + [_Row(name, *(_measure(side.get(name, {})) for side in families)) for name in names]


def _measure(side: Mapping[str, Any]) -> _Measure | None:
    if side.get("success") is None:
        return None
    success, n = float(side["success"]), int(side["n"])
    low, high = side.get("interval") or wilson(round(success * n), n)
    return _Measure(success, low, high, n)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """`training.seed`, `0` and so on, in the file's order."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows.extend(_flat(value, f"{prefix}{name}."))
        else:
            rows.append((f"{prefix}{name}", str(value)))
    return rows
