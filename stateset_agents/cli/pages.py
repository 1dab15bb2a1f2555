"""`stateset-agents report`, `dashboard` and `learn`: pages of runs and deployments, as files or live."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from stateset_agents.cli.study import is_study, study_data
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that


def run_report(args: argparse.Namespace) -> int:
    """Write the page and print its path, or serve it until Ctrl-C; exit code 0."""
    path = Path(args.run_folder)
    is_many = not (path / "metrics.jsonl").is_file() and any(path.glob("*/metrics.jsonl"))
    if is_many and args.conversations is not None:
        raise ConfigurationError(
            "--conversations is for the page of one run; leave it out for a folder of runs"
        )
    if args.conversations is not None and args.conversations < 1:
        raise ConfigurationError(f"--conversations must be at least 1, got {args.conversations}")
    if args.live:
        if args.shared_assets:
            raise ConfigurationError("--shared-assets is for the file; leave it out with --live")
        return _serve_report(args, is_many)
    if args.port is not None:
        raise ConfigurationError("--port is for --live: add it, or leave --port out")
    if is_many:
        from stateset_agents.reporting.overview import write_overview

        path = write_overview(args.run_folder, shared_assets=args.shared_assets)
    else:
        from stateset_agents.reporting.report import write_report

        path = write_report(
            args.run_folder, shared_assets=args.shared_assets, conversations=args.conversations
        )
    return _show([path], args)


def _serve_report(args: argparse.Namespace, is_many: bool) -> int:
    from stateset_agents.reporting.live import serve, serve_overview
    from stateset_agents.tracking.run_log import RunLog

    if is_many:
        return _serve(args, args.run_folder, partial(serve_overview, args.run_folder))
    log = RunLog.open(args.run_folder)
    return _serve(args, args.run_folder, partial(serve, log, conversations=args.conversations))


def _serve(args: argparse.Namespace, folder: str, serve: Callable[..., Coroutine[Any, Any, None]]) -> int:
    """Serve a folder's page until Ctrl-C. Raises ConfigurationError for an impossible --port."""
    from stateset_agents.reporting.live import DEFAULT_PORT

    port = DEFAULT_PORT if args.port is None else args.port
    expect_that(0 <= port <= 65535, "--port", "be from 0 to 65535", port)

    def on_ready(url: str) -> None:
        print(f"{Path(folder).resolve().name} live at {url} (Ctrl-C ends)", flush=True)
        if args.open:
            webbrowser.open(url)

    try:
        event_loop.run(serve(port=port, on_ready=on_ready))
    except KeyboardInterrupt:  # the way to end it
        print()
    return 0


def _show(paths: list[Path], args: argparse.Namespace) -> int:
    """Print the paths of pages that were written and, with --open, open the first; exit code 0."""
    print(*paths, sep="\n")
    if args.open:
        webbrowser.open(paths[0].resolve().as_uri())
    return 0


# ------------------------------------------------------------------------------ dashboard


def run_dashboard(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write it and print its path; exit code 0."""
    from stateset_agents.deployment.views.dashboard_data import Deployments
    from stateset_agents.deployment.views.dashboard_live import serve_dashboard
    from stateset_agents.deployment.views.dashboard_page import write_dashboard

    _check(args)
    deployments = None
    if args.deployments is not None:
        deployments = Deployments(args.deployments, conversations=args.conversations)
    try:
        if args.out is None:
            return _serve(args, args.runs, partial(serve_dashboard, args.runs, deployments))
        path = write_dashboard(args.runs, deployments, args.out)
    finally:
        if deployments is not None:
            deployments.close()
    return _show([path], args)


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


# ------------------------------------------------------------------------------ learn


def run_learn(args: argparse.Namespace) -> int:
    """Write the pages and print their paths; exit code 0."""
    return _show(write_pages(args.folder, args.out), args)


def write_pages(folder: str | Path | None = None, out: str | Path | None = None) -> list[Path]:
    """The pages of a run, a study, or with `folder` None of papers; their paths, the first to begin with.

    `out`: where they go; else into `learn/`, in the folder where there is one. Raises ConfigurationError
    where the folder is neither, has nothing to show, or the pages cannot be written.
    """
    from stateset_agents.reporting.learn_pages import write_learn_pages, write_study_pages

    if folder is not None and is_study(folder):
        return write_study_pages(study_data(folder), Path(folder) / "learn" if out is None else out)
    return write_learn_pages(folder, out)
