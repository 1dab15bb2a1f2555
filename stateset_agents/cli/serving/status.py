"""`stateset-agents status`: where a deployment stands, once or until it is decided."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stateset_agents.cli.output import table
from stateset_agents.cli.serving.deployments import ROLLED_BACK, add_deployment, opened
from stateset_agents.types.shown_text import shown, shown_line

_WATCH_SECONDS = 1.0
_DECIDED = ("full", "rolled_back")


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(  # no help: `deploy` names it
        "status",
        description="Say where a deployment stands. The exit code is 3 if it was rolled back, else 0.",
    )
    add_deployment(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one a line")
    parser.add_argument(
        "--watch", action="store_true", help="a line for each change, until it is full or rolled back"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 3 if the deployment was rolled back."""
    with opened(args) as controller:
        status = controller.status()
        if not args.watch:
            print(json.dumps(status, indent=2) if args.json else shown("\n".join(_page(status))))
        seen: Any = None
        while args.watch:
            if (now := {**status, "seconds": None}) != seen:
                print(json.dumps(status) if args.json else shown_line(_line(status)), flush=True)
                seen = now
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
        found = ", ".join(f"{name} {count}" for name, count in sorted(status["violations"].items()))
        lines.append(f"unsafe answers of the candidate: {found}")
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
