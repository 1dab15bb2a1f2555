"""`stateset-agents report`: the page of a run, or of all runs in a folder; as a file, or live."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("report", help="make a page of one run or many; also: learn, dashboard")
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run folder, e.g. runs/latest, or a folder of runs, e.g. runs"
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument(
        "--shared-assets",
        action="store_true",
        help="keep plotly.js (5 MB) once beside all runs, instead of compressed in the page (2 MB)",
    )
    parser.add_argument(
        "--conversations",
        type=int,
        default=None,
        metavar="N",
        help="most conversations in the page (those of 8 MB)",
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page on this machine while the run goes on"
    )
    parser.add_argument("--port", type=int, default=None, help="of --live (8750); 0 takes a free one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or serve it until Ctrl-C; exit code 0."""
    is_many = _holds_runs(Path(args.run_folder))
    if is_many and args.conversations is not None:
        raise ConfigurationError(
            "--conversations is for the page of one run; leave it out for a folder of runs"
        )
    if args.conversations is not None and args.conversations < 1:
        raise ConfigurationError(f"--conversations must be at least 1, got {args.conversations}")
    if args.live:
        if args.shared_assets:
            raise ConfigurationError("--shared-assets is for the file; leave it out with --live")
        return _serve(args, is_many)
    if args.port is not None:
        raise ConfigurationError("--port is for --live: add it, or leave --port out")
    if is_many:
        from stateset_agents.reporting.overview.overview_report import write_overview

        path = write_overview(args.run_folder, shared_assets=args.shared_assets)
    else:
        from stateset_agents.reporting.report import write_report

        path = write_report(
            args.run_folder, shared_assets=args.shared_assets, conversations=args.conversations
        )
    print(path)
    if args.open:
        webbrowser.open(path.as_uri())
    return 0


def _holds_runs(path: Path) -> bool:
    """Is it no run itself, but a folder with runs in it?"""
    return not (path / "metrics.jsonl").is_file() and any(path.glob("*/metrics.jsonl"))


def _serve(args: argparse.Namespace, is_many: bool) -> int:
    from stateset_agents.reporting.live import DEFAULT_PORT, serve
    from stateset_agents.reporting.overview.overview_live import serve_overview
    from stateset_agents.tracking.run_log import RunLog

    name = Path(args.run_folder).resolve().name
    log = None if is_many else RunLog.open(args.run_folder)
    port = DEFAULT_PORT if args.port is None else args.port
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"--port must be from 0 to 65535, got {port}")

    def on_ready(url: str) -> None:
        print(f"{name} live at {url} (Ctrl-C ends)", flush=True)
        if args.open:
            webbrowser.open(url)

    try:
        if log is None:
            event_loop.run(serve_overview(args.run_folder, port=port, on_ready=on_ready))
        else:
            event_loop.run(serve(log, port=port, conversations=args.conversations, on_ready=on_ready))
    except KeyboardInterrupt:  # the way to end it
        print()
    return 0
