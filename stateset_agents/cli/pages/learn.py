"""`stateset-agents learn`: pages to learn from, of papers, of a run or of a study."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(  # without help: `report` names it in the list of verbs
        "learn", description="Write pages to play with: of a run, of a study, or of papers."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="a run, e.g. runs/latest, or a study; without it the pages of papers",
    )
    parser.add_argument(
        "--out", default=None, metavar="DIR", help="where the pages go (learn/, in FOLDER where there is one)"
    )
    parser.add_argument("--open", action="store_true", help="show the first page in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the pages and print their paths; exit code 0."""
    paths = write_pages(args.folder, args.out)
    for path in paths:
        print(path)
    if args.open:
        webbrowser.open(paths[0].resolve().as_uri())
    return 0


def write_pages(folder: str | Path | None = None, out: str | Path | None = None) -> list[Path]:
    """The pages of a run, a study, or with `folder` None of papers; their paths, the first to begin with.

    `out`: where they go; else into `learn/`, in the folder where there is one. Raises ConfigurationError
    where the folder is neither, has nothing to show, or the pages cannot be written.
    """
    from stateset_agents.cli.pages.study_data import is_study, study_data
    from stateset_agents.reporting.learn.learn_pages import write_learn_pages, write_study_pages

    if folder is not None and is_study(folder):
        return write_study_pages(study_data(folder), Path(folder) / "learn" if out is None else out)
    return write_learn_pages(folder, out)
