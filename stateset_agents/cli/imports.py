"""`stateset-agents import`: conversations of others as scenarios, logs and examples."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.cli.output import check_new
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import shown_line
from stateset_agents.types.settings import expect_that

_OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".gz", ".eval")
"""Of files that would be read as something else than JSON lines."""


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the file is described, and written where `--output` says so."""
    if args.form == "served" and None not in (args.deployments, args.output):
        return _import_served(args)
    if args.form == "served" or args.deployments is not None:
        raise ConfigurationError("--as served, --deployments FILE and --output FOLDER go together: give all")
    from stateset_agents.core.sources.imports import FORMS

    if args.output is not None and args.form == "auto":
        raise ConfigurationError(f"say what {args.output} is to hold: --as {' or '.join(FORMS)}")
    suffix = Path(args.output or "").suffix.lower()
    expect_that(suffix not in _OTHER_SUFFIXES, "--output", "name JSON lines, ROWS.jsonl", args.output)
    check_new(args.output)
    forms = converted(args.file, list(FORMS) if args.form == "auto" else [args.form], redacts=args.redact)
    if args.output is not None:
        write_rows(Path(args.output), forms[args.form])
        print(f"written: {args.output}")
    return 0


def converted(file: str, names: Sequence[str], *, redacts: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The rows of a file in each of these forms. Prints what was found, and what each form leaves out.

    Raises ConfigurationError where none of them has a row.
    """
    from stateset_agents.core.sources.imports import convert, read_import
    from stateset_agents.core.sources.trace_rows import reason_lines

    imported = read_import(file, redacts=redacts)
    forms, reasons = dict[str, list[dict[str, Any]]](), dict[str, list[str]]()
    for name in names:
        forms[name], left_out = convert(imported.rows, name)
        for line in reason_lines(imported.left_out + left_out):
            reasons.setdefault(line, []).append(name)
    lines = imported.summary()
    for line, of in reasons.items():
        lines.append(f"left out{'' if len(of) == len(forms) else ' of ' + ', '.join(of)}: {line}")
    if redacts:
        lines.append(f"personal text taken out: {_counted(imported.removed) or 'none'}")
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in forms.items())
    print("\n".join(map(shown_line, [*lines, f"rows that it gives: {counts}"])))
    if not any(forms.values()):
        raise ConfigurationError(f"{file} gives no row: the lines above say why")
    return forms


def run_served(args: argparse.Namespace) -> int:
    """`import --as served` under its first name."""
    print("stateset-agents: served is `import FILE --as served` now", file=sys.stderr)
    return _import_served(args)


def _import_served(args: argparse.Namespace) -> int:
    """Exit code 0 once both files are written."""
    from stateset_agents.core.sources.served_conversations import scenarios_from, warm_start
    from stateset_agents.deployment.journal import Journal
    from stateset_agents.deployment.views.history import served_outcomes
    from stateset_agents.serving.saved_conversations import load_served

    with Journal(args.deployments, create=False) as journal:
        outcomes = served_outcomes(journal)
    served = load_served(args.file).values()
    harvest = scenarios_from(((talk.id, talk.messages, talk.tools) for talk in served), outcomes)
    left_out = _counted(harvest.left_out)
    if not harvest.scenarios:
        raise ConfigurationError(
            f"{args.file} gives no scenario: {left_out}; give its server's journal, gradual or full"
        )
    rows = warm_start(harvest.scenarios)
    folder = Path(args.output)
    write_rows(folder / "scenarios.jsonl", harvest.scenarios)
    write_rows(folder / "warm_start.jsonl", rows)
    ends = Counter(scenario.get("success") for scenario in harvest.scenarios)
    kinds = f"{ends[True]} succeeded, {ends[False]} failed, {ends[None]} unknown"
    print(f"{len(harvest.scenarios)} scenarios in {folder / 'scenarios.jsonl'}: {kinds}")
    print(f"{len(rows)} examples in {folder / 'warm_start.jsonl'}")
    print(f"personal text taken out: {_counted(harvest.removed) or 'none'}")
    if left_out:
        print(f"left out: {left_out}")
    return 0


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def write_rows(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines, and the folder where there is none; raises ConfigurationError where that fails."""
    from stateset_agents.core.chat.escaping import encodable

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    replace_file(path, "".join(f"{encodable(json.dumps(line, ensure_ascii=False))}\n" for line in lines))
