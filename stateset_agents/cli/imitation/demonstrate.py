"""`stateset-agents demonstrate`: the conversations of a scripted agent, as a file for `sft`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.named_environment import named_environment
from stateset_agents.cli.output import check_writable
from stateset_agents.runtime import event_loop
from stateset_agents.tracking.jsonl import dump

if TYPE_CHECKING:
    from stateset_agents.evaluation.demonstrations import Demonstrated


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("demonstrate", help="write a scripted agent's conversations, for sft")
    parser.add_argument(
        "environment",
        metavar="ENV",
        help="a name (retail_desk, module:Class, '{name: ..., argument: ...}'), a YAML file or a run folder",
    )
    parser.add_argument(
        "--agent", default="honest", help="the environment's honest one (default), or one that audit plays"
    )
    parser.add_argument("--split", default="train", help="train (default), validation or test")
    parser.add_argument("--episodes", type=int, help="conversations; one of each scenario when unset")
    parser.add_argument("--seed", type=int, default=0, help="of the users (default 0)")
    parser.add_argument("--keep-failures", action="store_true", help="also conversations judged failures")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL, a conversation a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the file is written."""
    check_writable(args.out)
    shown = event_loop.run(_demonstrated(args))
    lines = list(map(dump, shown.chats))
    Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    left_out = f"; {shown.num_failed} that did not succeed are left out" if shown.num_failed else ""
    print(f"{len(lines)} conversations in {args.out}{left_out}")
    return 0


async def _demonstrated(args: argparse.Namespace) -> Demonstrated:
    from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.training.components import make_environment

    named = named_environment(args.environment)
    environment = make_environment(named.environment)
    return await demonstrate(
        environment,
        held_out(environment, args.split, args.episodes),
        scripted_agent_of(environment, args.agent),
        seed=args.seed,
        keep_failures=args.keep_failures,
        limits=named.training.rollout_limits(),
    )
