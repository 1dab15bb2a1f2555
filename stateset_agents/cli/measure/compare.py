"""`stateset-agents compare`: two models on the same held-out scenarios, pair by pair."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli import control
from stateset_agents.cli.measure.endpoint import (
    add_endpoint_options,
    endpoint_lines,
    endpoint_of,
    how_to_go_on,
)
from stateset_agents.cli.measure.evaluate import add_options, experiment, play, temperature
from stateset_agents.cli.output import bounds, check_writable, exclusions, floors, print_result, rate
from stateset_agents.cli.run_settings import is_control
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.comparison import Comparison, Paired
    from stateset_agents.evaluation.evaluator import Evaluation

__all__ = ["add_parser", "run"]

_SIDES = ("-a", "-b")


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("compare", help="compare two models on the same held-out scenarios")
    parser.add_argument(
        "config", help="YAML file or run folder: environment, reward, evaluation; a run's may be left out"
    )
    parser.add_argument("a", metavar="A", help="a model: a name, a folder, a checkpoint, or a run folder")
    parser.add_argument("b", metavar="B", nargs="?", help="the model that is compared with it")
    add_options(parser)
    add_endpoint_options(parser, *_SIDES)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when both could be measured."""
    from stateset_agents.evaluation.comparison import compare

    if is_control(args.config):
        return control.compare(args)
    if args.b is None:  # two runs, on the scenarios of the first
        if not Path(args.config).is_dir():
            raise ConfigurationError(
                f"compare needs a file and two models, or two run folders, got {args.config} {args.a}: write "
                f"compare {args.config} A {args.a}"
            )
        args.a, args.b = args.config, args.a
    check_writable(args.out)
    try:
        (a, measured_a), (b, measured_b) = asyncio.run(_evaluate_both(args))
    except KeyboardInterrupt:
        if args.endpoint_a is None and args.endpoint_b is None:
            raise
        print(f"stateset-agents: {how_to_go_on(args.argv)}", file=sys.stderr)
        return 130
    result = compare(a, b)
    a_side, b_side = {**measured_a, "model": args.a}, {**measured_b, "model": args.b}
    lines = []
    for name, side in (("A", a_side), ("B", b_side)):
        lines.append("; ".join([f"{name}  {side['model']}: {rate(side)}", *floors(side), *exclusions(side)]))
        lines += [f"   {line}" for line in endpoint_lines(side)]
    summary = {"a": a_side, "b": b_side, "comparison": result.summary()}
    print_result(summary, args, "\n".join([*lines, *_lines(result)]))
    return 0


async def _evaluate_both(args: argparse.Namespace) -> list[tuple[Evaluation, dict[str, Any]]]:
    sides = []
    for model, side in zip((args.a, args.b), _SIDES, strict=True):  # both are read before one is played
        endpoint = endpoint_of(args, model, side)
        sides.append((experiment(args, None if endpoint else model), endpoint))
    return [await play(config, temperature(args), endpoint) for config, endpoint in sides]


def _lines(result: Comparison) -> list[str]:
    lines = []
    if result.success is not None:
        success = result.success
        p = "p < 0.0001" if success.p_value < 1e-4 else f"p = {success.p_value:.4f}"
        lines.append(f"B - A: success {_change(success)}, exact McNemar {p}")
        lines.append(
            f"B wins {success.wins}, loses {success.losses}, ties {success.ties} of {success.n} scenarios"
        )
    if result.reward is not None:
        lines.append(f"B - A: mean reward {result.reward:+.3f}{bounds(result.reward_interval, '+.3f')}")
    is_clear = result.verdict != "unclear"
    lines.append(f"B is {result.verdict}" if is_clear else f"which is better is unclear: {result.reason}")
    if result.num_left_out:
        lines.append(f"left out: {result.num_left_out} scenarios that one of them could not play")
    lines += [
        f"  {name:16} {paired.a:6.1%} -> {paired.b:6.1%}  {_change(paired)}  (n = {paired.n})"
        for name, paired in result.families.items()
    ]
    return lines


def _change(paired: Paired) -> str:
    low, high = paired.interval
    return f"{100 * paired.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
