"""`stateset-agents compare`: two models on the same held-out scenarios, pair by pair.

Two run folders are compared by what they recorded, and nothing is played.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli import numeric
from stateset_agents.cli.measure.endpoint import (
    add_endpoint_options,
    endpoint_lines,
    endpoint_of,
    how_to_go_on,
)
from stateset_agents.cli.measure.evaluate import add_options, experiment, play, temperature
from stateset_agents.cli.output import (
    bounds,
    check_writable,
    exclusions,
    floors,
    print_result,
    rate,
    verdict_line,
)
from stateset_agents.cli.run_settings import is_control
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.comparison import Comparison, Paired
    from stateset_agents.evaluation.evaluator import Evaluation


_SIDES = ("-a", "-b")
_ENDS = ("_a", "_b")
"""Of the endpoints' options."""
_ONE_SEED = "one seed each: another seed may differ"


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("compare", help="compare two models or runs on the same scenarios")
    parser.add_argument(
        "config",
        help="YAML file or run folder: environment, reward, evaluation; left out, two run folders are "
        "compared by their recorded results",
    )
    parser.add_argument("a", metavar="A", help="a model: a name, a folder, a checkpoint, or a run folder")
    parser.add_argument("b", metavar="B", nargs="?", help="the model that is compared with it")
    parser.add_argument(
        "--replay", action="store_true", help="of two runs: play both on the scenarios of the first"
    )
    add_options(parser)
    add_endpoint_options(parser, *_SIDES)
    parser.set_defaults(run=run, temperature=None)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when both could be measured."""
    from stateset_agents.evaluation.comparison import compare

    if is_control(args.config):
        return numeric.compare(args)
    if args.b is None:  # two runs
        if not Path(args.config).is_dir():
            raise ConfigurationError(
                f"compare needs a file and two models, or two run folders, got {args.config} {args.a}: write "
                f"compare {args.config} A {args.a}"
            )
        args.a, args.b = args.config, args.a
        if not args.replay and all((Path(run) / "metrics.jsonl").is_file() for run in (args.a, args.b)):
            return _compare_recorded(args)
    elif args.replay:
        raise ConfigurationError("--replay is for two run folders; with a file both models are played anyway")
    check_writable(args.out)
    try:
        (a, measured_a), (b, measured_b) = event_loop.run(_evaluate_both(args))
    except KeyboardInterrupt:
        if args.endpoint_a is None and args.endpoint_b is None:
            raise
        print(f"stateset-agents: {how_to_go_on(args.argv)}", file=sys.stderr)
        return 130
    result = compare(a, b)
    a_side, b_side = {**measured_a, "model": args.a}, {**measured_b, "model": args.b}
    summary = {"a": a_side, "b": b_side, "comparison": result.summary()}
    print_result(
        summary, args, "\n".join([*_side_lines("A", a_side), *_side_lines("B", b_side), *_lines(result)])
    )
    return 0


def _compare_recorded(args: argparse.Namespace) -> int:
    """Two runs by the held-out conversations in their folders."""
    from stateset_agents.evaluation.comparison import compare_runs
    from stateset_agents.tracking.jsonl import damage_named
    from stateset_agents.tracking.run_log import RunLog
    from stateset_agents.tracking.run_settings import differing_settings

    options = ("temperature", "episodes", "tries", "seed", "set")
    played = [name for name in options if getattr(args, name) not in (None, [])]
    played += [name.replace("_", "-") for name, value in vars(args).items() if name[-2:] in _ENDS and value]
    if played:
        raise ConfigurationError(
            f"--{played[0]} is for models that are played, and two runs are compared by what they recorded: "
            "leave it out, or add --replay"
        )
    check_writable(args.out)
    logs = [RunLog.open(args.a), RunLog.open(args.b)]
    result = compare_runs(*logs)
    sides, side_lines = [], []
    for label, log, name in zip("AB", logs, (args.a, args.b), strict=True):
        with damage_named(log.folder.path):
            sides.append({**log.summary()["after"], "model": name})
            side_lines += _side_lines(label, sides[-1])
    settings = differing_settings([log.config() for log in logs])
    summary = {"a": sides[0], "b": sides[1], "comparison": result.summary(), "settings": settings}
    lines = [*side_lines, *_lines(result), _ONE_SEED, *_setting_lines(settings)]
    print_result(summary, args, "\n".join(lines))
    return 0


def _side_lines(label: str, side: Mapping[str, Any]) -> list[str]:
    line = "; ".join([f"{label}  {side['model']}: {rate(side)}", *floors(side), *exclusions(side)])
    return [line, *(f"   {line}" for line in endpoint_lines(side))]


def _setting_lines(settings: Mapping[str, Sequence[str | None]]) -> list[str]:
    """What the runs differ in, and a warning where that is what they are measured by."""
    if not settings:
        return ["the two runs have the same settings"]
    lines = ["settings that differ, A -> B:"]
    lines += [f"  {name}: {a or 'not set'} -> {b or 'not set'}" for name, (a, b) in settings.items()]
    for section in ("environment", "reward"):
        if any(name.partition(".")[0] == section for name in settings):
            lines.append(f"the {section} differs, so success and reward may not mean the same in both")
    return lines


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
        lines.append(f"B - A: success {_change(success)}, sign flips {p}")
        lines.append(
            f"B wins {success.wins}, loses {success.losses}, ties {success.ties} of {success.n} scenarios"
        )
    if result.reward is not None:
        lines.append(f"B - A: mean reward {result.reward:+.3f}{bounds(result.reward_interval, '+.3f')}")
    lines.append(verdict_line(result.verdict, result.reason))
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
