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
from benchmarks.processors import this_processor
from benchmarks.running import WARM_UPS, Measured, success

RESULTS = ROOT / "benchmarks" / "results.json"
_SCHEMA = 2


def wanted(comparison: Comparison, repetitions: int) -> int:
    """How often each side of a row is timed."""
    return min(repetitions, comparison.most_repetitions or repetitions) * comparison.times


def current(stored: Mapping[str, Any] | None, comparison: Comparison, repetitions: int) -> bool:
    """Was this processor's row measured at this very commit, and often enough?"""
    if stored is None or stored["repetitions"] < wanted(comparison, repetitions):
        return False
    now = commit()
    return not now.endswith("+") and stored["commit"] == now


def expected(stored: Mapping[str, Any] | None, comparison: Comparison, repetitions: int) -> float | None:
    """Seconds that a row will take if it goes as it went last time; None where it was never timed."""
    if stored is None:
        return None
    rounds = (wanted(comparison, repetitions) + WARM_UPS) / (stored["repetitions"] + WARM_UPS)
    return float(stored["seconds"] * rounds)


def ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times ours the peer's median is."""
    return median(peer) / median(ours)


def spread(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """The quartiles of the repetitions' own ratios."""
    ratios = [peer_seconds / our_seconds for our_seconds, peer_seconds in zip(ours, peer, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return low, high


def row(comparison: Comparison, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """What is kept of one comparison."""
    sides = {name: _side(measured_side) for name, measured_side in measured.items()}
    ours = measured[comparison.base]
    lines = []
    for line in comparison.lines:
        mine, peer_seconds = ours.values(line.quantity), measured[line.peer].values(line.quantity)
        lines.append(
            {
                "title": line.title,
                "quantity": line.quantity,
                "peer": line.peer,
                "ratio": ratio(mine, peer_seconds),
                "spread": spread(mine, peer_seconds),
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


def _side(measured_side: Measured) -> dict[str, Any]:
    """Medians of what a side reported; of successes, how many of how many in all."""
    names = measured_side.repetitions[0].keys() - {"successes", "conversations", "peak"}
    result: dict[str, Any] = {
        name: median(measured_side.values(name)) for name in sorted({*names, *measured_side.memory})
    }
    if "successes" in measured_side.repetitions[0]:
        result["success"] = success(measured_side)
    return result | {"versions": measured_side.prepared["versions"]}


def write_row(path: Path, result: Mapping[str, Any], processor: str | None = None) -> None:
    """Put one row of a processor (this one) into the file; the others stay, so that a run may be done in
    pieces, and on several machines."""
    results = read(path)
    results.setdefault(processor or this_processor().key, {})[result["name"]] = dict(result)
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


def to_lines(result: Mapping[str, Any]) -> list[str]:
    """A row for the terminal."""
    lines = [f"{result['name']}, {result['repetitions']} repetitions, {result['seconds']} s"]
    for line in result["lines"]:
        low, high = line["spread"]
        wanted = "" if line["at_least"] is None else f", at least {line['at_least']:g}"
        lines.append(
            f"  {line['title']}: {line['ratio']:.2f} against {line['peer']} by {line['quantity']} "
            f"({low:.2f} to {high:.2f}){wanted}"
        )
    for name, side in result["sides"].items():
        parts = [f"{part} {side[part] / side['wall']:.0%}" for part in ("rollout", "update") if part in side]
        if "peak" in side:
            peak, extra = side["peak"] / 2**20, side["extra"] / 2**20
            parts.append(f"peak memory {peak:,.0f} MiB, {extra:,.0f} more than at rest")
        if parts:
            lines.append(f"  {name}: {', '.join(parts)}")
    return lines
