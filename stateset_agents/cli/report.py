"""`stateset-agents report`: the page of a run, from its folder alone."""

from __future__ import annotations

import argparse
import webbrowser
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("report", help="write a run's report.html from its folder")
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, e.g. runs/latest")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; exit code 0."""
    from stateset_agents.reporting.report import write_report

    path = write_report(args.run_folder)
    print(path)
    if args.open:
        webbrowser.open(path.as_uri())
    return 0
