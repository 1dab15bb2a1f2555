"""`stateset-agents deploy CANDIDATE --baseline MODEL`: begin what `serve --deployment` carries out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stateset_agents.cli.serving.deployments import add_file, last_record, user_name
from stateset_agents.types.errors import ConfigurationError


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "deploy",
        help="let a new agent in; also: status, promote, rollback",
        description="Begin to let a candidate take over from a baseline, as far as its outcomes allow: in "
        "shadow, then with a growing share of the conversations that `serve --deployment FILE` answers. "
        "`status` says where it stands; `promote` and `rollback` move it by hand.",
    )
    parser.add_argument("candidate", metavar="CANDIDATE", help="the new model or run, as for `serve`")
    parser.add_argument("--baseline", required=True, metavar="MODEL", help="the present one")
    parser.add_argument(
        "--plan", metavar="FILE", help="YAML file of stages, guards, margin, ... (docs/deployment.md)"
    )
    add_file(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0."""
    from stateset_agents.deployment.controller import DeploymentController, start_deployment
    from stateset_agents.deployment.journal import Journal
    from stateset_agents.deployment.plan import read_plan

    plan = None if args.plan is None else read_plan(Path(args.plan))
    candidate, baseline = _resolved(args.candidate), _resolved(args.baseline)
    with Journal(args.deployments) as journal:
        if journal.records():
            state = DeploymentController(journal, (last := last_record(journal)).id).state
            if state.mode in ("shadow", "gradual"):
                raise ConfigurationError(
                    f"deployment {last.id} of {last.candidate} is {state.mode}: promote it to 1, roll it "
                    "back, or give another --deployments FILE"
                )
        record = start_deployment(journal, candidate=candidate, baseline=baseline, plan=plan, who=user_name())
    print(f"deployment {record.id} of {record.candidate} in place of {record.baseline} begins in shadow")
    print(f"next: stateset-agents serve --deployment {args.deployments}")
    return 0


def _resolved(model: str) -> str:
    """A folder or file by its own path: `runs/latest` will be another run one day."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model
