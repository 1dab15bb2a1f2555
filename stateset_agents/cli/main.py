"""The entry point: one verb per file, one line and a non-zero exit for what goes wrong."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from stateset_agents.cli import build_embedded, chat, compare, diagnose, doctor, evaluate, report, train
from stateset_agents.errors import StatesetError
from stateset_agents.tracking.logging import configure_logging

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 1 for an error, 2 for a wrong command, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="stateset-agents", description="Train multi-turn conversational agents by GRPO, on this machine."
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (train, evaluate, compare, chat, report, diagnose, doctor, build_embedded):
        verb.add_parser(subparsers)
    args = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ?
    configure_logging()
    if not sys.stderr.isatty():  # progress bars are for people
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if os.getcwd() not in sys.path:  # environments and rewards of the user's own, as package.module:Class
        sys.path.insert(0, os.getcwd())
    try:
        code: int = args.run(args)
    except StatesetError as error:
        print(f"stateset-agents: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stateset-agents: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
