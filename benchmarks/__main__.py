"""`python -m benchmarks`: time ours and each peer in turn, print the ratios, keep them in results.json."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import environments, models, page
from benchmarks.comparisons import Comparison, comparisons
from benchmarks.results import RESULTS, keep, read, row, spoken
from benchmarks.running import measure
from benchmarks.sides import SideError
from scripts import bootstrap


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names begin so; all by default")
    parser.add_argument("--repetitions", type=int, default=7, help="of each side, after one warm-up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where rows are kept, others stay")
    parser.add_argument(
        "--list", action="store_true", help="name the rows, with the time that each took, and stop"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny rows instead, which take seconds")
    parser.add_argument("--page", action="store_true", help="write docs/performance.md anew and stop")
    chosen = parser.parse_args(arguments)
    if chosen.page:
        for path, text in page.files(read(chosen.results), page.PAGE.read_text(encoding="utf-8")).items():
            path.write_text(text, encoding="utf-8")
        return 0
    rows = comparisons(smoke=chosen.smoke)
    names = [name for name in rows if not chosen.only or name.startswith(tuple(chosen.only))]
    if not names:
        parser.error(f"no row begins with {' or '.join(chosen.only)}: there are {', '.join(rows)}")
    if chosen.list:
        kept = read(chosen.results)
        print(
            "\n".join(
                f"{name} {kept[name]['seconds']:.0f} s" if "seconds" in kept.get(name, {}) else name
                for name in names
            )
        )
        return 0
    failed = [name for name in names if not _run(rows[name], chosen.repetitions, chosen.results)]
    if failed:
        print(f"not measured: {', '.join(failed)}; the lines above say why", file=sys.stderr)
    return 1 if failed else 0


def _run(comparison: Comparison, repetitions: int, path: Path) -> bool:
    """Measure one row, keep it and say it; False where a side could not be had."""
    try:
        if comparison.model is not None:
            models.ensure(**asdict(comparison.model))
        for side in comparison.sides.values():
            environments.ensure(side.environment)
        most = min(repetitions, comparison.most_repetitions or repetitions)
        started = time.perf_counter()
        made = row(comparison, measure(comparison, repetitions=most))
        made["seconds"] = round(time.perf_counter() - started)
    except (bootstrap.SetupError, SideError) as error:
        print(f"{comparison.name}: {error}", file=sys.stderr)
        return False
    keep(path, made)
    print("\n".join(spoken(made)), flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
