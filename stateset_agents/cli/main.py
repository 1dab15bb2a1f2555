"""The entry point: one verb per file, one line and a non-zero exit for what goes wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stateset_agents.cli import build_embedded, evaluate, report, train
from stateset_agents.errors import StatesetError
from stateset_agents.tracking.logging import configure_logging

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stateset-agents", description="Train multi-turn conversational agents by GRPO, on this machine."
    )
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (train, evaluate, build_embedded, report):
        verb.add_parser(subparsers)
    args = parser.parse_args(argv)
    configure_logging()
    try:
        code: int = args.run(args)
    except StatesetError as error:
        print(f"stateset-agents: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
