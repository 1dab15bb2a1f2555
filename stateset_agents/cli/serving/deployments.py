"""What the verbs of deployments have in common: the file, the deployment in it, and who asks."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.deployment.controller import DeploymentController
    from stateset_agents.deployment.journal import DeploymentRecord, Journal


ROLLED_BACK = 3
"""Exit code where a deployment was rolled back, for scripts."""


def add_file(parser: argparse.ArgumentParser) -> None:
    """The option --deployments."""
    parser.add_argument(
        "--deployments",
        metavar="FILE",
        default="deployments.sqlite",
        help="the journal (deployments.sqlite)",
    )


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """A deployment that is there: its id, and the file."""
    parser.add_argument("id", nargs="?", metavar="ID", help="of the deployment, such as 0001 (the last one)")
    add_file(parser)


def last_record(journal: Journal) -> DeploymentRecord:
    """Raises ConfigurationError if there is none."""
    records = journal.records()
    if not records:
        raise ConfigurationError(
            f"{str(journal.path)!r} has no deployment yet: `stateset-agents deploy` begins one"
        )
    return records[-1]


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[DeploymentController]:
    """The deployment that a command names. Raises JournalError where there is no such file."""
    from stateset_agents.deployment.controller import DeploymentController
    from stateset_agents.deployment.journal import Journal

    with Journal(args.deployments, create=False) as journal:
        yield DeploymentController(journal, args.id or last_record(journal).id)


def user_name() -> str:
    """Of whoever runs this, for the journal."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
