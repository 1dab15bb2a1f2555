"""`stateset-agents rescore`: a run's conversations under another reward, and what that would teach."""

from __future__ import annotations

import argparse
import asyncio
from itertools import chain
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import refuse_unwritable, table, tell
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.rescoring import Changed, Rescored

__all__ = ["add_parser", "run"]

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
    refuse_unwritable(args.out)
    result = asyncio.run(_rescored(args))
    tell(result.summary(), args, "\n".join(_lines(result)))
    return 0


async def _rescored(args: argparse.Namespace) -> Rescored:
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
    whole = result.all
    lines = [
        f"{whole.n} conversations in {result.num_groups} groups: mean reward {whole.old_mean:.3f} -> "
        f"{whole.new_mean:.3f}, rank correlation {_number(whole.rank_correlation)}, within groups "
        f"{_number(whole.within_groups)}",
        f"advantages that change sign: {whole.flipped:.1%} ({whole.encouraged} to above 0, "
        f"{whole.discouraged} to below); {whole.silenced} become 0, {whole.awakened} no longer are",
    ]
    if result.only_old or result.only_new or result.num_failed:
        lines.append(
            f"left out: {result.only_old} scored only by the run, {result.only_new} only by the other, "
            f"{result.num_failed} failed"
        )
    if result.failure is not None:
        lines.append(f"the other reward failed, first with: {result.failure}")
    rows: list[tuple[str, ...]] = [("family", "mean reward", "rank corr.", "within", "change sign", "n")]
    rows += [(name, *_row(one)) for name, one in result.families.items()]
    lines += table(rows)
    if result.flips:
        lines.append("the largest changes of sign (advantage, reward):")
    for flip in result.flips[:_SHOWN]:
        moved = f"{flip.old_advantage:+.2f} -> {flip.new_advantage:+.2f}"
        rewards = f"{flip.old_reward:.3f} -> {flip.new_reward:.3f}"
        lines.append(f"  step {flip.step}, {flip.scenario}, member {flip.member}: {moved}, {rewards}")
    return lines


def _row(one: Changed) -> tuple[str, ...]:
    means = f"{one.old_mean:.3f} -> {one.new_mean:.3f}"
    ranks = _number(one.rank_correlation), _number(one.within_groups)
    return (means, *ranks, f"{one.flipped:.1%}", str(one.n))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
