"""`stateset-agents dashboard`: runs and deployments on one page, live or as a file."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(  # without help: `report` names it in the list of verbs
        "dashboard", description="Show runs and deployments on one page while they go on."
    )
    parser.add_argument("runs", metavar="RUNS", help="a folder of runs, e.g. runs; it may still be empty")
    parser.add_argument(
        "--deployments", metavar="FILE", help="a journal of deployments, e.g. deployments.sqlite"
    )
    parser.add_argument(
        "--conversations", metavar="FILE", help="saved conversations, to show without personal text"
    )
    parser.add_argument("--out", metavar="FILE", help="write the page into an HTML file instead")
    parser.add_argument("--port", type=int, help="to serve the page at (8750); 0 takes a free one")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write it and print its path; exit code 0."""
    from stateset_agents.deployment.views.dashboard_data import Deployments
    from stateset_agents.deployment.views.dashboard_page import write_dashboard

    _check(args)
    deployments = None
    if args.deployments is not None:
        deployments = Deployments(args.deployments, conversations=args.conversations)
    try:
        if args.out is None:
            return _serve(args, deployments)
        path = write_dashboard(args.runs, deployments, args.out)
    finally:
        if deployments is not None:
            deployments.close()
    print(path)
    if args.open:
        webbrowser.open(path.as_uri())
    return 0


def _check(args: argparse.Namespace) -> None:
    if not Path(args.runs).is_dir():
        raise ConfigurationError(f"{args.runs!r} is no folder: give one of runs, such as runs")
    if (Path(args.runs) / "metrics.jsonl").is_file():
        raise ConfigurationError(
            f"{args.runs!r} is a single run: give the folder around it, or stateset-agents report {args.runs}"
        )
    if args.conversations is not None and args.deployments is None:
        raise ConfigurationError("--conversations is for deployments: name their journal with --deployments")
    if args.out is not None and args.port is not None:
        raise ConfigurationError("--port is for the live page: leave it out with --out")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise ConfigurationError(f"--port must be from 0 to 65535, got {args.port}")


def _serve(args: argparse.Namespace, deployments: Any) -> int:
    from stateset_agents.deployment.views.dashboard_live import serve_dashboard
    from stateset_agents.reporting.live import DEFAULT_PORT

    def on_ready(url: str) -> None:
        print(f"{Path(args.runs).resolve().name} live at {url} (Ctrl-C ends)", flush=True)
        if args.open:
            webbrowser.open(url)

    port = DEFAULT_PORT if args.port is None else args.port
    try:
        event_loop.run(serve_dashboard(args.runs, deployments, port=port, on_ready=on_ready))
    except KeyboardInterrupt:  # the way to end it
        print()
    return 0
