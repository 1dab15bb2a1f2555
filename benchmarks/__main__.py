"""`python -m benchmarks`: time ours and each peer in turn, print the ratios, keep them in results.json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environments, models, page
from benchmarks.comparisons import Comparison, comparisons
from benchmarks.processors import this_processor
from benchmarks.profiling import table
from benchmarks.results import RESULTS, current, expected, read, row, to_lines, wanted, write_row
from benchmarks.running import Others, measure, profiled
from benchmarks.sides import SideError
from scripts import bootstrap


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Time ours and each peer in turn, print the ratios, keep them in results.json and write "
        "docs/evidence/step-times.md. Rows that were measured at this commit on this processor are kept, so "
        "that a run that was interrupted goes on where it ended.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these rows, or those whose names begin so; measured again in any case",
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="of each side, after one warm-up (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, help="where rows are kept, others stay; no page is written")
    parser.add_argument(
        "--list", action="store_true", help="name the rows, with the time that each took, and stop"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        metavar=("ROW", "SIDE"),
        help="where the time and memory of a row's sides go (step-32k ours; all by default), and stop",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny rows instead, which take seconds")
    parser.add_argument("--page", action="store_true", help="write the pages anew and stop")
    chosen = parser.parse_args(arguments)
    if chosen.smoke and not (chosen.results or chosen.list or chosen.profile):
        parser.error("--smoke needs --results FILE: tiny rows don't belong beside the others")
    path = chosen.results or RESULTS
    if chosen.page:
        page.write(read(path))
        return 0
    known_rows = comparisons(smoke=chosen.smoke)
    if chosen.profile:
        name, *sides = chosen.profile
        if name not in known_rows:
            parser.error(f"there is no row {name}: there are {', '.join(known_rows)}")
        if unknown := set(sides) - set(known_rows[name].sides):
            parser.error(
                f"{name} has no side {', '.join(unknown)}: it has {', '.join(known_rows[name].sides)}"
            )
        return _profile(known_rows[name], sides or list(known_rows[name].sides))
    prefixes = tuple(comparison for comparison in chosen.only or () if comparison not in known_rows)
    names = [
        name for name in known_rows if not chosen.only or name in chosen.only or name.startswith(prefixes)
    ]
    if not names:
        parser.error(f"no row begins with {' or '.join(chosen.only)}: there are {', '.join(known_rows)}")
    stored = read(path).get(this_processor().key, {})
    if chosen.list:
        seconds = {name: f" {stored[name]['seconds']} s" for name in names if name in stored}
        print("\n".join(f"{name}{seconds.get(name, '')}" for name in names))
        return 0
    if not chosen.only:
        names = [
            name for name in names if not current(stored.get(name), known_rows[name], chosen.repetitions)
        ]
    return _run_all([known_rows[name] for name in names], chosen.repetitions, path, stored)


def _run_all(
    rows_to_run: Sequence[Comparison], repetitions: int, path: Path, stored: Mapping[str, Mapping[str, Any]]
) -> int:
    """Measure rows one after the other; the exit status."""
    if not rows_to_run:
        print("every row is measured at this commit; --only NAME measures one again")
        return 0
    times = {
        comparison.name: expected(stored.get(comparison.name), comparison, repetitions)
        for comparison in rows_to_run
    }
    total = sum(seconds for seconds in times.values() if seconds) / 60
    unknown = sum(seconds is None for seconds in times.values())
    more = f", without {unknown} that were never timed" if unknown else ""
    print(f"{len(rows_to_run)} rows, by their last time about {total:.1f} minutes{more}", flush=True)
    failed = []
    for number, comparison in enumerate(rows_to_run, start=1):
        seconds = times[comparison.name]
        about = f", about {seconds:.0f} s" if seconds else ""
        print(f"[{number}/{len(rows_to_run)}] {comparison.name}{about}", flush=True)
        if not _run(comparison, repetitions, path):
            failed.append(comparison.name)
    if failed:
        print(f"not measured: {', '.join(failed)}; the lines above say why", file=sys.stderr)
    return 1 if failed else 0


def _ready(comparison: Comparison) -> None:
    """The model's files and the environments of all sides."""
    if comparison.model is not None:
        models.ensure(**asdict(comparison.model))
    for side in comparison.sides.values():
        environments.ensure(side.environment)


def _run(comparison: Comparison, repetitions: int, path: Path) -> bool:
    """Measure one row, keep it and say it; False where a side could not be had."""
    try:
        _ready(comparison)
        started = time.perf_counter()
        with Others() as background:
            measured = measure(comparison, repetitions=wanted(comparison, repetitions))
        result = row(comparison, measured)
        result |= {"seconds": round(time.perf_counter() - started), "others": background.cores}
    except (bootstrap.SetupError, SideError) as error:
        print(f"{comparison.name}: {error}", file=sys.stderr)
        return False
    write_row(path, result)
    if path == RESULTS:
        page.write(read(path))
    print("\n".join(to_lines(result)), flush=True)
    return True


def _profile(comparison: Comparison, sides: Sequence[str]) -> int:
    try:
        _ready(comparison)
        for name in sides:
            print(f"\n{comparison.name}, {name}\n{table(profiled(comparison, name))}", flush=True)
    except (bootstrap.SetupError, SideError) as error:
        print(f"{comparison.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
