"""Evaluations before and after training as rows of the report: shares with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stateset_agents.algorithms.intervals import wilson

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
    """One row, if either side has this estimate."""
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
