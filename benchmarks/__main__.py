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
from benchmarks.processors import here
from benchmarks.profiling import table
from benchmarks.results import RESULTS, current, expected, keep, read, row, spoken, wanted
from benchmarks.running import Others, measure, profiled
from benchmarks.sides import SideError
from scripts import bootstrap


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Time ours and each peer in turn, print the ratios, keep them in results.json and write "
        "docs/performance.md. Rows that were measured at this commit on this processor are kept, so that a "
        "run that was interrupted goes on where it ended.",
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
    parser.add_argument("--page", action="store_true", help="write docs/performance.md anew and stop")
    chosen = parser.parse_args(arguments)
    if chosen.smoke and not (chosen.results or chosen.list or chosen.profile):
        parser.error("--smoke needs --results FILE: tiny rows don't belong beside the others")
    path = chosen.results or RESULTS
    if chosen.page:
        page.write(read(path))
        return 0
    rows = comparisons(smoke=chosen.smoke)
    if chosen.profile:
        name, *sides = chosen.profile
        if name not in rows:
            parser.error(f"there is no row {name}: there are {', '.join(rows)}")
        if unknown := set(sides) - set(rows[name].sides):
            parser.error(f"{name} has no side {', '.join(unknown)}: it has {', '.join(rows[name].sides)}")
        return _profile(rows[name], sides or list(rows[name].sides))
    begins = tuple(one for one in chosen.only or () if one not in rows)
    names = [name for name in rows if not chosen.only or name in chosen.only or name.startswith(begins)]
    if not names:
        parser.error(f"no row begins with {' or '.join(chosen.only)}: there are {', '.join(rows)}")
    kept = read(path).get(here().key, {})
    if chosen.list:
        took = {name: f" {kept[name]['seconds']} s" for name in names if name in kept}
        print("\n".join(f"{name}{took.get(name, '')}" for name in names))
        return 0
    if not chosen.only:
        names = [name for name in names if not current(kept.get(name), rows[name], chosen.repetitions)]
    return _run_all([rows[name] for name in names], chosen.repetitions, path, kept)


def _run_all(
    todo: Sequence[Comparison], repetitions: int, path: Path, kept: Mapping[str, Mapping[str, Any]]
) -> int:
    """Measure rows one after the other; the exit status."""
    if not todo:
        print("every row is measured at this commit; --only NAME measures one again")
        return 0
    times = {one.name: expected(kept.get(one.name), one, repetitions) for one in todo}
    total = sum(seconds for seconds in times.values() if seconds) / 60
    unknown = sum(seconds is None for seconds in times.values())
    more = f", without {unknown} that were never timed" if unknown else ""
    print(f"{len(todo)} rows, by their last time about {total:.1f} minutes{more}", flush=True)
    failed = []
    for number, one in enumerate(todo, start=1):
        seconds = times[one.name]
        about = f", about {seconds:.0f} s" if seconds else ""
        print(f"[{number}/{len(todo)}] {one.name}{about}", flush=True)
        if not _run(one, repetitions, path):
            failed.append(one.name)
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
        with Others() as others:
            measured = measure(comparison, repetitions=wanted(comparison, repetitions))
        made = row(comparison, measured)
        made |= {"seconds": round(time.perf_counter() - started), "others": others.cores}
    except (bootstrap.SetupError, SideError) as error:
        print(f"{comparison.name}: {error}", file=sys.stderr)
        return False
    keep(path, made)
    if path == RESULTS:
        page.write(read(path))
    print("\n".join(spoken(made)), flush=True)
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
