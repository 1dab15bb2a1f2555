"""The data of a run's page without its conversations: facts, measurements, charts, findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stateset_agents.reporting.curves import (
    activity_curves,
    learning_curves,
    numeric_curves,
    other_curves,
    reward_terms,
)
from stateset_agents.reporting.episodes import numeric_page
from stateset_agents.reporting.measurements import other_tables, success_rows
from stateset_agents.reporting.step_activity import step_activity
from stateset_agents.reporting.verdicts import verdict_tables
from stateset_agents.tracking.diagnostics import diagnose
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.run_settings import flat_settings
from stateset_agents.tracking.units import NUMERIC, units_of


def page_data(log: RunLog) -> dict[str, Any]:
    """The parts that the run has so far; parts that were not measured or logged are empty or None."""
    summary, config, lines = log.summary(), log.config(), list(log.metrics())
    before, after = summary.get("before") or {}, summary.get("after") or {}
    units = units_of(config)
    numeric = units is NUMERIC
    curves = (
        numeric_curves(lines)
        if numeric
        else [*learning_curves(lines), *activity_curves(step_activity(log.events()))]
    )
    return {
        **({"numeric": numeric_page(log, lines, summary)} if numeric else {}),
        "name": log.folder.path.name,
        "ended": summary.get("ended"),
        "update": units.update,
        "facts": _facts(summary, config, steps=max((line.step for line in lines), default=0)),
        "greedy": {"before": before.get("greedy"), "after": after.get("greedy")},
        "measured": [] if numeric else success_rows(before, after),
        "also": [] if numeric else other_tables(before, after),
        "curves": [asdict(chart) for chart in curves],
        "terms": [] if numeric else [asdict(chart) for chart in reward_terms(lines)],
        "others": [
            {"stage": stage, "charts": [asdict(chart) for chart in charts]}
            for stage, charts in other_curves(lines, units)
        ],
        "findings": [{**asdict(finding), "sign": finding.sign} for finding in diagnose(log)],
        "verdicts": verdict_tables(log.folder),
        "settings": list(flat_settings(config)),
    }


def _facts(summary: Mapping[str, Any], config: Mapping[str, Any], *, steps: int) -> list[tuple[str, str]]:
    """The facts under the title, as far as the run has them."""
    agent, training = config.get("agent"), config.get("training")
    units = units_of(config)
    numeric = units is NUMERIC
    estimator = training.get("advantage_estimator") if isinstance(training, Mapping) else None
    ended_early = steps <= summary.get("steps", -1) < summary.get("num_steps", 0)
    facts = [
        ("model", agent.get("model_name") if isinstance(agent, Mapping) else None),
        ("environment", _numeric_environment(config)),
        (f"{units.along}s", _steps(summary, training, steps)),
        ("episodes", summary.get("episodes")),
        ("ended", summary.get("why") if ended_early else None),
        ("credit", estimator if estimator != "group" or numeric else None),
        ("seed", summary.get("seed")),
        ("training", _duration(summary.get("train_seconds"))),
        ("platform", summary.get("platform")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _numeric_environment(config: Mapping[str, Any]) -> str | None:
    """Of a numeric run; a conversation's says little by its name."""
    environment = config.get("environment")
    if units_of(config) is not NUMERIC or not isinstance(environment, Mapping):
        return None
    return str(environment.get("gymnasium", environment.get("name"))).rpartition("/")[2]


def _steps(summary: Mapping[str, Any], training: Any, done: int) -> str:
    """`110`, or `unfinished: step 40 of 110` unless the summary says that the training finished."""
    if summary.get("ended", "finished") == "finished" and summary.get("steps", -1) >= done:
        return f"{summary['steps']:,}"
    if isinstance(training, Mapping) and "total_steps" in training:
        return f"unfinished: step {done:,} of {training['total_steps']:,}"
    if not isinstance(training, Mapping) or "num_episodes" not in training:
        return f"{done:,}"
    episodes = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    planned = training["max_steps"] or math.ceil(training["num_episodes"] / episodes)
    return f"unfinished: step {done:,} of {planned:,}"


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, rest_seconds = divmod(round(seconds), 60)
    return f"{minutes} min {rest_seconds} s" if minutes else f"{rest_seconds} s"
