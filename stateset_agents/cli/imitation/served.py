"""`stateset-agents served`: served conversations become scenarios and examples, without personal text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import ConfigurationError


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(  # without help: `sft` names it in the list of verbs
        "served",
        description="Make scenarios for `train --from-served`, and examples for `sft`, of conversations "
        "that a deployment shared out. Personal text is taken out.",
    )
    parser.add_argument(
        "conversations", metavar="FILE", help="what a server saved, with the conversations' ids"
    )
    parser.add_argument(
        "--deployments", required=True, metavar="FILE", help="the journal that knows how they ended"
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="for scenarios.jsonl, warm_start.jsonl"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once both files are written."""
    from stateset_agents.core.sources.served_conversations import scenarios_from, warm_start
    from stateset_agents.deployment.journal import Journal
    from stateset_agents.deployment.views.served_outcomes import served_outcomes
    from stateset_agents.serving.saved_conversations import load_served

    with Journal(args.deployments, create=False) as journal:
        outcomes = served_outcomes(journal)
    served = load_served(args.conversations).values()
    harvest = scenarios_from(((one.id, one.messages, one.tools) for one in served), outcomes)
    left_out = _counted(harvest.left_out)
    if not harvest.scenarios:
        raise ConfigurationError(
            f"{args.conversations} gives no scenario: {left_out}; give the journal of the same server, with "
            "conversations of gradual or full"
        )
    rows = warm_start(harvest.scenarios)
    folder = Path(args.out)
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
    from stateset_agents.tracking.run_folder import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    replace_file(path, "".join(f"{encodable(json.dumps(line, ensure_ascii=False))}\n" for line in lines))
