"""`stateset-agents promote` and `rollback`: move a deployment by hand, also while it is served."""

from __future__ import annotations

import argparse
from typing import Any

from stateset_agents.cli.serving.deployments import add_deployment, opened, user_name


def add_parser(subparsers: Any) -> None:
    """Register both verbs."""
    for name, description, run in (
        ("promote", "Give the candidate the next stage's share of new conversations, or --to.", promote),
        ("rollback", "Give all conversations back to the baseline: the end of the deployment.", roll_back),
    ):
        parser = subparsers.add_parser(name, description=description)  # no help: `deploy` names them
        add_deployment(parser)
        parser.add_argument("--why", required=True, metavar="TEXT", help="for the journal")
        if name == "promote":
            parser.add_argument(
                "--to", type=float, metavar="SHARE", help="above the present one, up to 1 (full)"
            )
            parser.add_argument(
                "--force", action="store_true", help="also against the evidence; the journal says so"
            )
        parser.set_defaults(run=run)


def promote(args: argparse.Namespace) -> int:
    """Exit code 0; ConfigurationError, and so 1, against the evidence without --force."""
    with opened(args) as controller:
        state = controller.promote(who=user_name(), why=args.why, to=args.to, force=args.force)
    print(f"deployment {state.id} is {state.mode}, share {state.share:g}: {state.why}")
    return 0


def roll_back(args: argparse.Namespace) -> int:
    """Exit code 0."""
    with opened(args) as controller:
        state = controller.roll_back(who=user_name(), why=args.why)
    print(f"deployment {state.id} is {state.mode}: {state.why}")
    return 0
