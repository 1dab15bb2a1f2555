"""`stateset-agents deploy`, `status`, `promote` and `rollback`: the deployments that `serve` carries out."""

from __future__ import annotations

import argparse
import getpass
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import shown, shown_line, table

if TYPE_CHECKING:
    from stateset_agents.deployment.controller import DeploymentController
    from stateset_agents.deployment.journal import DeploymentRecord, Journal


ROLLED_BACK = 3
"""Exit code where a deployment was rolled back, for scripts."""


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
    """The name of the user who runs this, for the journal."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def run_deploy(args: argparse.Namespace) -> int:
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


# ------------------------------------------------------------------------------ promote and rollback


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


# ------------------------------------------------------------------------------ status

_WATCH_SECONDS = 1.0
_DECIDED = ("full", "rolled_back")


def run_status(args: argparse.Namespace) -> int:
    """Exit code 0, or 3 if the deployment was rolled back."""
    with opened(args) as controller:
        status = controller.status()
        if not args.watch:
            print(json.dumps(status, indent=2) if args.json else shown("\n".join(_page(status))))
        last: Any = None
        while args.watch:
            if (now := {**status, "seconds": None}) != last:
                print(json.dumps(status) if args.json else shown_line(_line(status)), flush=True)
                last = now
            if status["mode"] in _DECIDED:
                break
            time.sleep(_WATCH_SECONDS)
            status = controller.status()
    return ROLLED_BACK if status["mode"] == "rolled_back" else 0


def _page(status: Mapping[str, Any]) -> list[str]:
    evidence = status["evidence"]
    since = datetime.fromtimestamp(status["since"]).astimezone().isoformat(" ", "seconds")
    head = ["", "conversations", "outcomes", "success", "answers", "unsafe", "seconds", "cost"]
    rows = [head, *(_row(arm, status["arms"][arm]) for arm in ("candidate", "baseline"))]
    lines = [
        f"deployment {status['id']}: {status['candidate']} in place of {status['baseline']}",
        f"{status['mode']}, share {status['share']:g}, since {since}: {status['why']}",
        *table(rows),
        f"effect on success: {_effect(evidence)}; it may be {_points(-evidence['margin'])}",
        f"evidence: {_wealths(evidence)}; {evidence['waiting']} conversations wait for their outcome, "
        f"{evidence['timeouts']} never had one",
    ]
    if (compared := status["agreement"])["answers"]:
        calls, replies = (compared[name] / compared["answers"] for name in ("same_calls", "same_reply"))
        lines.append(
            f"in shadow the candidate did what the baseline did in {calls:.0%} of {compared['answers']} "
            f"answers, and said the same in {replies:.0%}"
        )
    if status["violations"]:
        violations = ", ".join(f"{name} {count}" for name, count in sorted(status["violations"].items()))
        lines.append(f"unsafe answers of the candidate: {violations}")
    return lines


def _line(status: Mapping[str, Any]) -> str:
    evidence = status["evidence"]
    clock = time.strftime("%H:%M:%S")
    unsafe = status["arms"]["candidate"]["unsafe_answers"]
    return (
        f"{clock} {status['mode']} {status['share']:g}, {evidence['outcomes']} outcomes, "
        f"{_wealths(evidence)}, effect {_effect(evidence)}, {unsafe} unsafe: {status['why']}"
    )


def _row(name: str, arm: Mapping[str, Any]) -> list[str]:
    success = "-" if arm["success"] is None else f"{arm['success']:.1%}"
    means = ["-" if arm[key] is None else f"{arm[key]:.3g}" for key in ("mean_seconds", "mean_cost")]
    counts = [str(arm[key]) for key in ("conversations", "outcomes", "answers", "unsafe_answers")]
    return [name, counts[0], counts[1], success, counts[2], counts[3], *means]


def _effect(evidence: Mapping[str, Any]) -> str:
    if evidence["effect"] is None:
        return "not known yet"
    low, high = map(_points, evidence["interval"])
    return f"{_points(evidence['effect'])} [{low}, {high}]"


def _points(share: float) -> str:
    """`-2.0 points` of a hundred."""
    return f"{100 * share:+.1f} points"


def _wealths(evidence: Mapping[str, Any]) -> str:
    parts = [
        f"to {name} {math.exp(min(evidence[key]['log_wealth'], 700)):.3g} of {evidence[key]['needed']:.3g}"
        for name, key in (("promote", "promote"), ("roll back", "roll_back"))
    ]
    return ", ".join(parts)
