"""`stateset-agents rescore`: a run's conversations under another reward, and what that would teach."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import check_writable, print_result, table
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.rescoring import Rescored, RewardChange


_SHOWN = 5


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("rescore", help="ask another reward about the conversations of a run")
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, e.g. runs/latest")
    parser.add_argument(
        "--reward",
        required=True,
        help="a name, module:name or '{name: ..., argument: ...}', as in a YAML file",
    )
    parser.add_argument("--stage", default="train", help="train (default), before, after or validation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write that object to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when conversations could be scored."""
    check_writable(args.out)
    result = event_loop.run(_rescore(args))
    print_result(result.summary(), args, "\n".join(_lines(result)))
    return 0


async def _rescore(args: argparse.Namespace) -> Rescored:
    from stateset_agents.evaluation.recorded import groups_of
    from stateset_agents.evaluation.rescoring import rescore
    from stateset_agents.tracking.run_log import RunLog
    from stateset_agents.training.components import make_reward, read_spec
    from stateset_agents.training.config import TrainingConfig

    stages = ("train", "before", "after", "validation")
    if args.stage not in stages:
        raise ConfigurationError(f"--stage must be one of {', '.join(stages)}, got {args.stage!r}")
    log = RunLog.open(args.run_folder)
    reward = make_reward(read_spec("--reward", args.reward))
    training = log.config().get("training") or {}
    settings = TrainingConfig(**{name: training[name] for name in _SETTINGS if name in training})
    rollouts = log.rollouts(args.stage)
    first = next(rollouts, None)
    if first is None:
        raise ConfigurationError(f"{args.run_folder} has no conversation of stage {args.stage!r}")
    return await rescore(
        groups_of(chain([first], rollouts)),
        reward,
        baseline=settings.baseline_type,
        scaling=settings.advantage_normalization,
        reward_clip=settings.reward_clip,
        reward_timeout=settings.reward_timeout,
    )


_SETTINGS = ("baseline_type", "advantage_normalization", "reward_clip", "reward_timeout")


def _lines(result: Rescored) -> list[str]:
    overall = result.all
    lines = [
        f"{overall.n} conversations in {result.num_groups} groups: mean reward {overall.old_mean:.3f} -> "
        f"{overall.new_mean:.3f}, rank correlation {_number(overall.rank_correlation)}, within groups "
        f"{_number(overall.within_groups)}",
        f"advantages that change sign: {overall.flipped:.1%} ({overall.encouraged} to above 0, "
        f"{overall.discouraged} to below); {overall.silenced} become 0, {overall.awakened} no longer are",
    ]
    if result.only_old or result.only_new or result.num_failed:
        lines.append(
            f"left out: {result.only_old} scored only by the run, {result.only_new} only by the other, "
            f"{result.num_failed} failed"
        )
    if result.failure is not None:
        lines.append(f"the other reward failed, first with: {result.failure}")
    rows: list[tuple[str, ...]] = [("family", "mean reward", "rank corr.", "within", "change sign", "n")]
    rows += [(name, *_cells(changes)) for name, changes in result.families.items()]
    lines += table(rows)
    if result.flips:
        lines.append("the largest changes of sign (advantage, reward):")
    for flip in result.flips[:_SHOWN]:
        moved = f"{flip.old_advantage:+.2f} -> {flip.new_advantage:+.2f}"
        rewards = f"{flip.old_reward:.3f} -> {flip.new_reward:.3f}"
        lines.append(f"  step {flip.step}, {flip.scenario}, member {flip.member}: {moved}, {rewards}")
    return lines


def _cells(changes: RewardChange) -> tuple[str, ...]:
    means = f"{changes.old_mean:.3f} -> {changes.new_mean:.3f}"
    ranks = _number(changes.rank_correlation), _number(changes.within_groups)
    return (means, *ranks, f"{changes.flipped:.1%}", str(changes.n))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
