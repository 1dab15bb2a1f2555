"""Measured sides become rows of results.json: medians, their ratio, how it spreads, and what was measured.

The file keeps the rows of each processor apart: {"processors": {processor: {row: ...}}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.environments import ROOT, commit
from benchmarks.processors import here
from benchmarks.running import WARM_UPS, Measured, success

RESULTS = ROOT / "benchmarks" / "results.json"
_SCHEMA = 2


def wanted(comparison: Comparison, repetitions: int) -> int:
    """How often each side of a row is timed."""
    return min(repetitions, comparison.most_repetitions or repetitions) * comparison.times


def current(kept: Mapping[str, Any] | None, comparison: Comparison, repetitions: int) -> bool:
    """Was this processor's row measured at this very commit, and often enough?"""
    if kept is None or kept["repetitions"] < wanted(comparison, repetitions):
        return False
    now = commit()
    return not now.endswith("+") and kept["commit"] == now


def expected(kept: Mapping[str, Any] | None, comparison: Comparison, repetitions: int) -> float | None:
    """Seconds that a row will take if it goes as it went last time; None where it was never timed."""
    if kept is None:
        return None
    rounds = (wanted(comparison, repetitions) + WARM_UPS) / (kept["repetitions"] + WARM_UPS)
    return float(kept["seconds"] * rounds)


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times ours the peer's median is."""
    return median(peer) / median(ours)


def spread(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """The quartiles of the repetitions' own ratios."""
    each = [theirs / own for own, theirs in zip(ours, peer, strict=True)]
    if len(each) < 2:
        return each[0], each[0]
    low, _, high = quantiles(each, n=4, method="inclusive")
    return low, high


def row(comparison: Comparison, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """What is kept of one comparison."""
    sides = {name: _side(one) for name, one in measured.items()}
    ours = measured[comparison.base]
    lines = []
    for line in comparison.lines:
        mine, theirs = ours.values(line.quantity), measured[line.peer].values(line.quantity)
        lines.append(
            {
                "title": line.title,
                "quantity": line.quantity,
                "peer": line.peer,
                "ratio": ratio(mine, theirs),
                "spread": spread(mine, theirs),
                "at_least": line.at_least,
                "aim": line.aim,
            }
        )
    return {
        "name": comparison.name,
        "sides": sides,
        "lines": lines,
        "repetitions": len(ours.repetitions),
        "commit": commit(),
    }


def _side(one: Measured) -> dict[str, Any]:
    """Medians of what a side reported; of successes, how many of how many in all."""
    told = one.repetitions[0].keys() - {"successes", "conversations", "peak"}
    made: dict[str, Any] = {name: median(one.values(name)) for name in sorted({*told, *one.memory})}
    if "successes" in one.repetitions[0]:
        made["success"] = success(one)
    return made | {"versions": one.prepared["versions"]}


def keep(path: Path, made: Mapping[str, Any], processor: str | None = None) -> None:
    """Put one row of a processor (this one) into the file; the others stay, so that a run may be done in
    pieces, and on several machines."""
    results = read(path)
    results.setdefault(processor or here().key, {})[made["name"]] = dict(made)
    ordered = {name: dict(sorted(rows.items())) for name, rows in sorted(results.items())}
    text = json.dumps({"schema_version": _SCHEMA, "processors": ordered}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by processor and name; none where there is no file."""
    if not path.is_file():
        return {}
    results: dict[str, dict[str, Any]] = json.loads(path.read_text())["processors"]
    return results


def spoken(made: Mapping[str, Any]) -> list[str]:
    """A row for the terminal."""
    said = [f"{made['name']}, {made['repetitions']} repetitions, {made['seconds']} s"]
    for line in made["lines"]:
        low, high = line["spread"]
        wanted = "" if line["at_least"] is None else f", at least {line['at_least']:g}"
        said.append(
            f"  {line['title']}: {line['ratio']:.2f} against {line['peer']} by {line['quantity']} "
            f"({low:.2f} to {high:.2f}){wanted}"
        )
    for name, side in made["sides"].items():
        parts = [f"{part} {side[part] / side['wall']:.0%}" for part in ("rollout", "update") if part in side]
        if "peak" in side:
            peak, extra = side["peak"] / 2**20, side["extra"] / 2**20
            parts.append(f"peak memory {peak:,.0f} MiB, {extra:,.0f} more than at rest")
        if parts:
            said.append(f"  {name}: {', '.join(parts)}")
    return said
