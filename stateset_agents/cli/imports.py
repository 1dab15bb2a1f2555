"""`stateset-agents import`: conversations of others as scenarios, logs, examples and rows for other libraries."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.cli.output import check_writable
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import shown_line

_USES = {
    "scenarios": "environment: {{name: conversation, scenarios: {file}}}",
    "replay": "environment: {{name: chats, logs: {file}}}",
    "sft": "stateset-agents sft {file}",
    "evaluation": "environment: {{name: conversation, scenarios: {file}}}, measured on its split test",
    "openai": "upload it with the purpose fine-tune",
    "trl": 'load_dataset("json", data_files="{file}")',
}


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the file is described, and written where `--output` says so."""
    if args.form == "served":
        for option in ("deployments", "output"):
            if getattr(args, option) is None:
                raise ConfigurationError(f"--as served needs --{option}: see docs/served-conversations.md")
        return _import_served(args)
    if args.deployments is not None:
        raise ConfigurationError("--deployments goes with --as served: leave it out, or add that")
    from stateset_agents.core.sources.imports import FORMS, convert, read_import

    form = args.form if args.to is None else args.to
    if args.to is not None and args.form != "auto":
        raise ConfigurationError(
            f"--as {args.form} is a form of ours, --to {args.to} one of others: give one"
        )
    if args.output is not None:
        if form == "auto":
            raise ConfigurationError(
                f"say what {args.output} is to hold: --as scenarios, replay, sft or evaluation"
            )
        if Path(args.output).resolve() == Path(args.file).resolve():
            raise ConfigurationError(f"--output {args.output} is the file itself: give another")
        check_writable(args.output)
    imported = read_import(args.file, redacts=args.redact)
    lines = imported.summary() + imported.left_out.lines()
    if args.redact:
        lines.append(f"personal text taken out: {_counted(imported.removed) or 'none'}")
    if form == "auto":
        made = {name: len(convert(imported.rows, name)[0]) for name in FORMS}
        lines.append(f"could become: {', '.join(f'{name} ({count})' for name, count in made.items())}")
    else:
        rows, left_out = convert(imported.rows, form)
        lines += left_out.lines()
        if rows and args.output is not None:
            _write(Path(args.output), rows)
            lines.append(f"{len(rows)} rows in {args.output}: {_USES[form].format(file=args.output)}")
        else:
            lines.append(f"{len(rows)} rows of {form}" + "; --output FILE writes them" * bool(rows))
    print("\n".join(map(shown_line, lines)))
    if not (any(made.values()) if form == "auto" else rows):
        raise ConfigurationError(f"{args.file} gives no row: what was left out, and why, stands above")
    return 0


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
    _write(folder / "scenarios.jsonl", harvest.scenarios)
    _write(folder / "warm_start.jsonl", rows)
    print(f"{len(harvest.scenarios)} scenarios in {folder / 'scenarios.jsonl'}: {_kinds(harvest.scenarios)}")
    print(f"{len(rows)} examples in {folder / 'warm_start.jsonl'}")
    print(f"personal text taken out: {_counted(harvest.removed) or 'none'}")
    if left_out:
        print(f"left out: {left_out}")
    return 0


def _kinds(scenarios: Sequence[Mapping[str, Any]]) -> str:
    succeeded = sum(scenario.get("success") is True for scenario in scenarios)
    failed = sum(scenario.get("success") is False for scenario in scenarios)
    return f"{succeeded} succeeded, {failed} failed, {len(scenarios) - succeeded - failed} unknown"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    from stateset_agents.core.chat.escaping import encodable

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    replace_file(path, "".join(f"{encodable(json.dumps(line, ensure_ascii=False))}\n" for line in lines))
