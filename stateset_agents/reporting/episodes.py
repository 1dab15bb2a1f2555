"""The parts of a numeric run's page in place of conversations: returns, lengths, rewards, actions, windows.

Charts are plain data, drawn by `page.charts.js`; tables and windows by `page.numeric.js`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from stateset_agents.algorithms.paired import paired_rewards
from stateset_agents.reporting.curves import Chart, Range, Series, axis, bin_value, binned, common_axis
from stateset_agents.tracking.diagnostics import NUMERIC
from stateset_agents.tracking.run_log import MetricLine, RunLog, held_out_gains
from stateset_agents.tracking.windows import Window

_MAX_POINTS = 500
"""The most points of a chart of episodes; more steps are taken together."""
_MOST_ACTIONS = 24
"""Rows of the table of actions."""
_ENDS = {"terminated": "ended by itself", "truncated": "cut by a limit", "failed": "failed"}
_SHARES = (0.1, 0.5, 0.9)
"""The quantiles of a chart's band and its line."""

_Episode = Mapping[str, Any]


def numeric_page(log: RunLog, lines: Sequence[MetricLine], summary: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page has of a numeric run beside learning curves."""
    episodes = list(log.episodes())
    counts = [(event["step"], event["counts"]) for event in log.events() if event["event"] == "actions"]
    return {
        "players": player_table(summary, held_out_gains(log)),
        "episodes": [asdict(chart) for chart in episode_charts(episodes, lines)],
        "actions": action_table(counts),
        "windows": [
            {"name": window.name, "note": _note(window), "charts": [asdict(c) for c in window_charts(window)]}
            for window in log.windows()
        ],
    }


# ------------------------------------------------------------------------------ episodes by step


def episode_charts(episodes: Iterable[_Episode], lines: Sequence[MetricLine]) -> list[Chart]:
    """The training's episodes step by step: the spread of returns and lengths, how they ended, and the parts
    of the reward. An empty list where no episodes were written."""
    trained = [episode for episode in episodes if episode["stage"] == "train"]
    steps = [(step, list(group)) for step, group in groupby(trained, key=itemgetter("step"))]
    parts, size = binned(steps, _MAX_POINTS)
    bins = [(part[-1][0], [episode for _, group in part for episode in group]) for part in parts]
    together = f"; each point {size} updates" if size > 1 else ""
    charts = []
    if bins:
        charts = [
            _spread(
                "Returns", "return", f"median of an update's episodes; band: the middle 80 %{together}", bins
            ),
            _spread("Lengths", "length", f"{NUMERIC.along}s, median; band: the middle 80 %{together}", bins),
            _endings(bins, f"share of an update's episodes{together}"),
        ]
    components = _components(lines)
    return [*charts, *([components] if components else [])]


def _spread(title: str, name: str, note: str, bins: Sequence[tuple[int, list[_Episode]]]) -> Chart:
    columns = [[e[name] for e in part if e[name] is not None] for _, part in bins]
    spreads = [
        [float(f"{value:.7g}") for value in np.quantile(column, _SHARES)] if column else [None] * 3
        for column in columns
    ]
    low, middle, high = map(list, zip(*spreads, strict=True))
    return Chart(
        title=title,
        note=note,
        range=common_axis((low, high)),
        series=[Series(name=title, steps=[step for step, _ in bins], values=middle, low=low, high=high)],
        along=NUMERIC.along,
    )


def _endings(bins: Sequence[tuple[int, list[_Episode]]], note: str) -> Chart:
    met = {episode["ended"] for _, part in bins for episode in part}
    return Chart(
        title="How episodes end",
        note=note,
        percent=True,
        stacked=True,
        range=(0.0, 1.0),
        series=[
            Series(
                name=words,
                steps=[step for step, _ in bins],
                values=[sum(e["ended"] == end for e in part) / len(part) for _, part in bins],
            )
            for end, words in _ENDS.items()
            if end in met or end != "failed"
        ],
        along=NUMERIC.along,
    )


def _components(lines: Sequence[MetricLine]) -> Chart | None:
    """The parts of the mean return, above and below zero; None for a reward of one part."""
    logged = {name for line in lines for name in line.values if name.startswith("reward/")}
    names = sorted(logged - {"reward/mean", "reward/std"})
    component_lines = [line for line in lines if any(name in line.values for name in names)]
    if len(names) < 2:
        return None
    parts, _ = binned(component_lines, _MAX_POINTS)
    series = [
        Series(
            name=name.removeprefix("reward/"),
            steps=[part[-1].step for part in parts],
            values=[bin_value("", (line.values.get(name, math.nan) for line in part)) for part in parts],
        )
        for name in names
    ]
    return Chart(
        title="Parts of the reward",
        note="of the mean return; parts below zero hang from it",
        stacked=True,
        signed=True,
        range=_both_ways(series),
        series=series,
        along=NUMERIC.along,
    )


def _both_ways(series: Sequence[Series]) -> Range | None:
    """Room for the sums of what is above zero, and of what is below."""
    columns = list(zip(*(line.values for line in series), strict=True))
    up = max((sum(max(v or 0.0, 0.0) for v in column) for column in columns), default=0.0)
    down = min((sum(min(v or 0.0, 0.0) for v in column) for column in columns), default=0.0)
    return (1.05 * down, 1.05 * up) if down < up else None


# ------------------------------------------------------------------------------ actions and players


def action_table(counts: Sequence[tuple[int, Mapping[str, int]]]) -> dict[str, Any] | None:
    """Shares of the actions in the first and the last tenth of the updates, in their order; where there are
    many, the most frequent and the rest together. None of fewer than two updates."""
    if len(counts) < 2:
        return None
    tenth = max(1, len(counts) // 10)
    sides = []
    for part in (counts[:tenth], counts[-tenth:]):
        total: Counter[str] = Counter()
        for _, each in part:
            total.update(each)
        number = sum(total.values())
        sides.append({name: count / number for name, count in total.items()} if number else {})
    first, last = sides
    names = list(dict.fromkeys(name for _, each in counts for name in each))
    names.sort(key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0))
    row_names = names
    if len(names) > _MOST_ACTIONS:
        by_use = sorted(names, key=lambda name: -max(first.get(name, 0.0), last.get(name, 0.0)))
        top_names = set(by_use[: _MOST_ACTIONS - 1])
        row_names = [name for name in names if name in top_names]
    rows = [{"name": name, "first": first.get(name, 0.0), "last": last.get(name, 0.0)} for name in row_names]
    if len(row_names) < len(names):
        rest = f"{len(names) - len(row_names)} others"
        others = [sum(side.get(name, 0.0) for name in names if name not in row_names) for side in sides]
        rows.append({"name": rest, "first": others[0], "last": others[1]})
    return {"rows": rows, "updates": tenth}


def player_table(summary: Mapping[str, Any], gains: Sequence[float]) -> list[dict[str, Any]]:
    """Mean returns from the held-out starts: the policy before and after training, and rules.

    `gains`: see `held_out_gains`; `difference`: of the trained policy to each, paired start by start.
    """
    sides = [
        (name, summary[name]) for name in ("before", "after") if "mean_reward" in (summary.get(name) or {})
    ]
    rows = []
    for name, side in sides:
        row = {"name": f"policy {name}", **_row(side)}
        if name == "before" and len(sides) == 2 and gains:
            row |= {
                "difference": sum(gains) / len(gains),
                "difference_interval": paired_rewards(gains).interval,
            }
        rows.append(row)
    for name, rule in (summary.get("rules") or {}).items():
        gain = {key: rule[key] for key in ("difference", "difference_interval")}
        rows.append({"name": name, **_row(rule), **gain})
    return rows


def _row(side: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "mean": side["mean_reward"],
        "interval": side["reward_interval"],
        "n": side["n"] - side["num_failed"],
        "length": side["mean_length"],
        "difference": None,
        "difference_interval": None,
    }


# ------------------------------------------------------------------------------ windows


def _note(window: Window) -> str:
    """`policy -1.2, hpa -1.4`"""
    return ", ".join(f"{player} {value:.4g}" for player, value in window.returns.items())


def window_charts(window: Window) -> list[Chart]:
    """A chart for each panel, all players on one axis; what is the same for all is drawn once."""
    titles = list(dict.fromkeys(p.title for trace in window.traces.values() for p in trace.panels))
    seconds = next(iter(window.traces.values())).seconds_per_step
    scale = 1.0 if seconds is None else seconds / 60
    return [_panel(window, title, scale, NUMERIC.along if seconds is None else "minute") for title in titles]


def _panel(window: Window, title: str, scale: float, along: str) -> Chart:
    panels = {
        player: panel
        for player, trace in window.traces.items()
        for panel in trace.panels
        if panel.title == title
    }
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel.series))
    series = []
    for name in names:
        by_player = {player: list(p.series[name]) for player, p in panels.items() if name in p.series}
        first = next(iter(by_player.values()))
        if len(by_player) == len(panels) and all(values == first for values in by_player.values()):
            by_player = {"": first}
        series += [
            Series(
                name=f"{player}: {name}" if player else name,
                steps=[round(scale * (step + 1), 4) for step in range(len(values))],
                values=values,
            )
            for player, values in by_player.items()
        ]
    units = [panel.unit for panel in panels.values() if panel.unit]
    numbers = [value for line in series for value in line.values if value is not None]
    return Chart(
        title=title,
        note=units[0] if units else "",
        range=axis(numbers),
        series=series,
        along=along,
        smoothed=False,
    )
