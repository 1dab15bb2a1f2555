"""What was measured before and after training, as rows of the report: each a share with its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stateset_agents.algorithms.intervals import wilson

__all__ = ["also_measured", "measured"]

_Side = Mapping[str, Any]
"""`before` or `after` of a summary; empty where that was not measured."""


def measured(before: _Side, after: _Side) -> list[dict[str, Any]]:
    """Success with its interval, all scenarios first, then each family; a side is None where not measured."""
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


def also_measured(before: _Side, after: _Side) -> list[dict[str, Any]]:
    """Tables of what an evaluation found beside success: tries, twins, broken rules; those that it found.

    `main` is the row of each that says most.
    """
    tables = [
        ("Several tries", "", [*_tries(before, after)], -1),
        ("Twins", _TWINS, [*_rows("both of a pair right", before, after, "twins")], 0),
        ("Rules broken", _RULES, [*_rules(before, after)], 0),
    ]
    return [
        {"title": title, "note": note, "rows": rows, "main": rows[main]["name"]}
        for title, note, rows, main in tables
        if rows
    ]


_TWINS = "scenarios that differ in the one fact which decides: how often both succeed"
_RULES = "share of conversations; lower is better"


def _tries(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    for called, kind in (("pass@", "pass_at"), ("pass^", "pass_hat")):
        for k in sorted({k for side in (before, after) for k in side.get(kind) or {}}, key=int):
            yield from _rows(f"{called}{k}", before, after, kind, k)


def _rules(before: _Side, after: _Side) -> Iterator[dict[str, Any]]:
    rules = {rule for side in (before, after) for rule in side.get("violations") or {}}
    for rule in sorted(rules, key=lambda rule: (rule != "any", rule)):
        yield from _rows(rule, before, after, "violations", rule)


def _rows(name: str, before: _Side, after: _Side, *path: str) -> Iterator[dict[str, Any]]:
    """One row, where either side has that estimate."""
    old, new = _estimate(before, *path), _estimate(after, *path)
    if old or new:
        yield {"name": name, "before": old, "after": new}


def _estimate(side: _Side, *path: str) -> dict[str, float] | None:
    found: Any = side
    for name in path:
        found = (found or {}).get(name)
    if not found:
        return None
    low, high = found["interval"]
    return {"value": float(found["value"]), "low": low, "high": high, "n": found["n"], "tries": 1}


def _success(side: _Side) -> dict[str, float] | None:
    if side.get("success") is None:
        return None
    success, n = float(side["success"]), int(side["n"])
    low, high = side.get("interval") or wilson(round(success * n), n)
    return {"value": success, "low": low, "high": high, "n": n, "tries": int(side.get("tries", 1))}
