"""`stateset-agents diagnose`: check the health of a run, finished or running."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from stateset_agents.types.shown_text import shown


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("diagnose", help="say what a run's metrics warn of, and what to do")
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, e.g. runs/latest; a live one too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for a warning or no step, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 if a check fails; with `--strict` also for a warning and before the first step."""
    from stateset_agents.tracking.diagnostics import all_passed, diagnose
    from stateset_agents.tracking.run_log import RunLog

    findings = diagnose(RunLog.open(args.run_folder))
    if args.json:
        result = {"all_passed": all_passed(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(result, indent=2))
    else:
        print(
            "\n".join(shown(str(finding)) for finding in findings)
            or "no step has finished yet: nothing to diagnose"
        )
    passed = (
        bool(findings) and all_passed(findings)
        if args.strict
        else all(finding.verdict != "fail" for finding in findings)
    )
    return int(not passed)
