"""One HTML page per run, made from its folder alone. `stateset-agents report` and the trainer call it.

The page opens from disk and loads nothing from any network. All data of the run is in it, compressed; its
script shows it as text, never as markup. plotly.js is either inside the page,
compressed to two fifths of its size, so that the page can be moved or mailed alone, or in a file beside the
run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.reporting.conversations import Conversations, Distributions, Timeline
from stateset_agents.reporting.curves import (
    activity_curves,
    learning_curves,
    numeric_curves,
    other_curves,
    reward_terms,
    step_activity,
)
from stateset_agents.reporting.episodes import numeric_page
from stateset_agents.reporting.html import CHART_SCRIPTS, html_page, shared_plotly
from stateset_agents.tracking.diagnostics import NUMERIC, diagnose, units_of
from stateset_agents.tracking.jsonl import damage_named, read_json
from stateset_agents.tracking.run_folder import RunFolder, replace_file
from stateset_agents.tracking.run_log import RunLog, flat_settings
from stateset_agents.types.errors import ConfigurationError

# ------------------------------------------------------------------------------ evaluations

_Side = Mapping[str, Any]
"""`before` or `after` of a summary; empty if it was not evaluated."""


def success_rows(before: _Side, after: _Side) -> list[dict[str, Any]]:
    """Success with its interval: all scenarios, then each family; a side is None if it was not evaluated."""
    if not before and not after:
        return []
    rows = [{"name": "All scenarios", "before": _success(before), "after": _success(after)}]
    families = [side.get("families") or {} for side in (before, after)]
    for name in sorted({name for side in families for name in side}):
        tries = [side.get("tries", 1) for side in (before, after)]
        old, new = (
            _success({"tries": n, **side.get(name, {})}) for n, side in zip(tries, families, strict=True)
        )
        rows.append({"name": name, "before": old, "after": new})
    return rows


def other_tables(before: _Side, after: _Side) -> list[dict[str, Any]]:
    """Tables of the other results, if there are any: several tries, matched pairs, broken rules.

    `main` names the most important row of each table.
    """
    tables = [
        ("Several tries", "", [*_try_rows(before, after)], -1),
        ("Parts", "families that are counted together", [*_part_rows(before, after)], 0),
        ("Floors", _FLOORS_NOTE, [*_floor_rows(before, after)], 0),
        ("Twins", _PAIRS_NOTE, [*_rows("both of a pair right", before, after, "twins")], 0),
        ("Rules broken", _RULES_NOTE, [*_rule_rows(before, after)], 0),
    ]
    return [
        {"title": title, "note": note, "rows": rows, "main": rows[main]["name"]}
        for title, note, rows, main in tables
        if rows
    ]


_FLOORS_NOTE = "agents that know nothing, on the same scenarios: what success is worth no more than"
_PAIRS_NOTE = "scenarios that differ in the one fact which decides: how often both succeed"
_RULES_NOTE = "share of conversations; lower is better"


def _try_rows(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    for label, kind in (("pass@", "pass_at"), ("pass^", "pass_hat")):
        for k in sorted({k for side in (before, after) for k in side.get(kind) or {}}, key=int):
            yield from _rows(f"{label}{k}", before, after, kind, k)


def _part_rows(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    for name in sorted({name for side in (before, after) for name in side.get("parts") or {}}):
        sides = [_success((side.get("parts") or {}).get(name, {})) for side in (before, after)]
        yield {"name": name, "before": sides[0], "after": sides[1]}


def _floor_rows(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    """Each agent on all scenarios, then on each part and family."""
    floors = [side.get("floors") or {} for side in (before, after)]
    for agent in sorted({agent for side in floors for agent in side}):
        shares = [
            {
                agent: side[agent],
                **{
                    f"{agent}, {name}": share
                    for kind in ("parts", "families")
                    for name, share in side[agent][kind].items()
                },
            }
            if agent in side
            else {}
            for side in floors
        ]
        for name in dict.fromkeys(name for side in shares for name in side):
            old, new = (_success(side.get(name, {})) for side in shares)
            yield {"name": name, "before": old, "after": new}


def _rule_rows(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    rules = {rule for side in (before, after) for rule in side.get("violations") or {}}
    for rule in sorted(rules, key=lambda rule: (rule != "any", rule)):
        yield from _rows(rule, before, after, "violations", rule)


def _rows(name: str, before: _Side, after: _Side, *path: str) -> Iterator[dict[str, Any]]:
    """Yield one row if either side has this estimate."""
    old, new = _estimate(before, *path), _estimate(after, *path)
    if old or new:
        yield {"name": name, "before": old, "after": new}


def _estimate(side: _Side, *path: str) -> dict[str, float] | None:
    estimate: Any = side
    for name in path:
        estimate = (estimate or {}).get(name)
    if not estimate:
        return None
    low, high = estimate["interval"]
    return {"value": float(estimate["value"]), "low": low, "high": high, "n": estimate["n"], "tries": 1}


def _success(side: _Side) -> dict[str, float] | None:
    if side.get("success") is None:
        return None
    success, n = float(side["success"]), int(side["n"])
    low, high = side.get("interval") or wilson(round(success * n), n)
    return {"value": success, "low": low, "high": high, "n": n, "tries": int(side.get("tries", 1))}


# ------------------------------------------------------------------------------ `audit` and `rescore`
#
# stateset-agents audit runs/latest --out runs/latest/audit.json
# stateset-agents rescore runs/latest --reward REWARD --out runs/latest/rescore.json

_MAX_FLIPS = 20
_CHANGES = ("n", "old_mean", "new_mean", "rank_correlation", "within_groups", "flipped")


def verdict_tables(folder: RunFolder) -> dict[str, Any]:
    """`audit` and `rescore` as the page shows them; None of what was not written.

    Raises ConfigurationError for a file of that name that the command did not write.
    """
    return {
        "audit": _read(folder.audit, "audit", _audited),
        "rescore": _read(folder.rescore, "rescore", _rescored),
    }


def _read(file: Path, command: str, shape: Any) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        data: dict[str, Any] = shape(read_json(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} is not what `{command} --out` writes: remove it, or write it again"
        ) from error
    return data


def _audited(result: Mapping[str, Any]) -> dict[str, Any]:
    policies = {**result["policies"], **({"honest": result["honest"]} if result["honest"] else {})}
    fields = {"success": "success", "interval": "interval", "reward": "mean_reward", "n": "n"}
    return {
        "agents": [
            {"name": name, **{ours: side[theirs] for ours, theirs in fields.items()}}
            for name, side in policies.items()
        ],
        "over": [*result.get("over", ()), *result.get("lost", ())],
    }


def _rescored(result: Mapping[str, Any]) -> dict[str, Any]:
    rows = [("all", result["all"]), *result["families"].items()]
    return {
        "rows": [{"name": name, **{field: row[field] for field in _CHANGES}} for name, row in rows],
        "num_groups": result["num_groups"],
        "flips": result["flips"][:_MAX_FLIPS],
        "num_flips": len(result["flips"]),
    }


# ------------------------------------------------------------------------------ the page's other data


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
    units, environment = units_of(config), config.get("environment")
    numeric = units is NUMERIC
    name = None  # of a conversation's environment it says little
    if numeric and isinstance(environment, Mapping):
        name = str(environment.get("gymnasium", environment.get("name"))).rpartition("/")[2]
    estimator = training.get("advantage_estimator") if isinstance(training, Mapping) else None
    ended_early = steps <= summary.get("steps", -1) < summary.get("num_steps", 0)
    facts = [
        ("model", agent.get("model_name") if isinstance(agent, Mapping) else None),
        ("environment", name),
        (f"{units.along}s", _steps(summary, training, steps)),
        ("episodes", summary.get("episodes")),
        ("ended", summary.get("why") if ended_early else None),
        ("credit", estimator if estimator != "group" or numeric else None),
        ("seed", summary.get("seed")),
        ("training", _duration(summary.get("train_seconds"))),
        ("platform", summary.get("platform")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


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


# ------------------------------------------------------------------------------ the whole page

MAX_BYTES = 8_000_000
"""The most bytes of a page with plotly.js in it, unless the number of conversations is given."""

_SCRIPTS = (
    *CHART_SCRIPTS,
    *(f"page/page.{part}.js" for part in ("measured", "distributions", "numeric", "timeline", "verdicts")),
    *(
        f"page/conversations/page.{part}.js"
        for part in ("search", "conversations", "rows", "parting", "tokens")
    ),
    "page/page.start.js",
)
_HINT = "copy the run to a folder you may write"


def write_report(
    run_path: str | Path, *, shared_assets: bool = False, conversations: int | None = None
) -> Path:
    """Write `report.html` into a run folder and return its path.

    `shared_assets` keeps plotly.js once in the folder around the run instead of in the page. The page has at
    most `conversations`; with None all that keep it within `MAX_BYTES`. Of a running training it has the
    parts that exist so far. Raises ConfigurationError if the folder is no run, or cannot be read or written.
    """
    log = RunLog.open(run_path)
    plotly = f"../{shared_plotly(log.folder.path.parent, _HINT)}" if shared_assets else None
    with damage_named(log.folder.path):
        recorded, data = Recorded(log, conversations), page_data(log)
        recorded.read()
        size = len(render({**data, **recorded.without_conversations()}, plotly=plotly).encode())
        left = MAX_BYTES - size
        while True:
            browser_data = recorded.select(left)
            page = render({**data, **browser_data}, plotly=plotly)
            excess = len(page.encode()) - MAX_BYTES  # compressed in another order, they may take 1 % more
            if conversations is not None or excess <= 0 or not browser_data["conversations"]:
                break
            left -= 2 * excess
    replace_file(log.folder.report, page, _HINT)
    return log.folder.report


class Recorded:
    """The data of the page's conversations, distributions and timeline, of the lines that were read."""

    def __init__(self, log: RunLog, conversations: int | None = None) -> None:
        """`conversations`: at most so many in the page; None: as many bytes as `select` says."""
        self._log = log
        self._conversations = Conversations(log.folder, conversations)
        self._distributions = Distributions(log.folder)
        self._timeline = Timeline(log.folder)

    def read(self) -> None:
        """Read the lines that were added. Raises ConfigurationError on another schema version."""
        for part in (self._conversations, self._distributions, self._timeline):
            part.read()

    def select(self, page_bytes: float | None = None) -> dict[str, Any]:
        """The data as the page takes it. `page_bytes`: see `Conversations.select`."""
        token_texts = self._log.tokens()
        selected = self._conversations.select(token_texts, page_bytes=page_bytes)
        return self.without_conversations() | _with_texts(selected, token_texts)

    def of_steps(self, stage: str, steps: tuple[float, float]) -> dict[str, Any]:
        """The conversations of these steps or of another stage than training, with what their tokens say."""
        token_texts = self._log.tokens()
        return _with_texts(self._conversations.of_steps(stage, steps, token_texts), token_texts)

    def without_conversations(self) -> dict[str, Any]:
        """The data beside the conversations, and the texts of the tokens of all of them."""
        return {
            "total": self._conversations.total,
            "counts": self._conversations.counts,
            "moved": asdict(self._conversations.transitions()),
            "tokens": self._log.tokens(),
            "conversations": [],
            "distributions": self._distributions.select(),
            "timeline": self._timeline.select(),
        }


def _with_texts(conversations: list[dict[str, Any]], token_texts: Mapping[int, str]) -> dict[str, Any]:
    used_ids = {id for conversation in conversations for id in conversation["token_ids"]}
    return {
        "conversations": conversations,
        "tokens": {id: text for id, text in token_texts.items() if id in used_ids},
    }


def render(data: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """The page as HTML. `plotly`: path of plotly.js for the browser; None: inside the page."""
    return html_page(
        "page/page.html",
        ["page/shared/page.css"],
        _SCRIPTS,
        data,
        plotly=plotly,
        live=live,
        numeric="numeric" in data,
    )
