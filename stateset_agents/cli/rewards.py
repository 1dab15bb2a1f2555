"""`stateset-agents audit` and `rescore`: rewards of agents that deserve nothing, and under another reward."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.cli.output import (
    check_writable,
    percent,
    print_result,
)
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import table
from stateset_agents.types.settings import expect_that, nearest

if TYPE_CHECKING:
    from stateset_agents.evaluation.audit import Audit
    from stateset_agents.evaluation.evaluator import Evaluation
    from stateset_agents.evaluation.rescoring import Rescored, RewardChange
    from stateset_agents.training.config import TrainingConfig


# ------------------------------------------------------------------------------ the environment


class NamedEnvironment(NamedTuple):
    """Settings as `make_environment` and `make_reward` take them."""

    environment: Mapping[str, Any]
    reward: Mapping[str, Any]
    training: TrainingConfig
    """The training settings, which hold the time limits."""


def named_environment(name: str, reward: str | None = None) -> NamedEnvironment:
    """A name, `module:Class`, `{name: ..., argument: ...}`, a YAML file or a run folder; `reward` stands in
    for the file's. A name alone needs no torch."""
    from stateset_agents.training.components import ENVIRONMENTS, read_spec
    from stateset_agents.training.config import TrainingConfig

    if not name.strip():
        raise ConfigurationError(
            f"ENV is empty: give one of {', '.join(ENVIRONMENTS)}, module:Class, a YAML file or a run folder"
        )
    spec = None if reward is None else read_spec("--reward", reward)
    is_file = name.endswith((".yaml", ".yml")) or Path(name).exists()
    if name in ENVIRONMENTS or not is_file:
        return NamedEnvironment(read_spec("ENV", name), spec or {"name": "environment"}, TrainingConfig())
    from stateset_agents.training.experiment import load_experiment

    config = load_experiment(name, {} if spec is None else {"reward": spec})
    return NamedEnvironment(config.environment, config.reward, config.training)


def run_audit(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when an agent got more than a limit or too many of its conversations broke."""
    from stateset_agents.evaluation.audit import MIN_SCORED, expect_limits

    check_writable(args.out)
    allowed = dict(_parse_limit(item) for item in args.allow)
    limits = {"max_success": args.max_success, "max_reward": args.max_reward}
    min_scored = MIN_SCORED if args.min_scored is None else args.min_scored
    expect_limits(**limits, allow=allowed, min_scored=min_scored)  # before anything is played
    result = event_loop.run(_audited(args))
    over, lost = result.over(**limits, allow=allowed), result.lost(min_scored)
    print_result(
        {**result.summary(), "over": over, "lost": lost}, args, "\n".join([*_lines(result), *over, *lost])
    )
    return int(bool(over or lost))


async def _audited(args: argparse.Namespace) -> Audit:
    from stateset_agents.evaluation.audit import audit, degenerate_agents_of
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.training.components import make_environment, make_reward

    named = named_environment(args.environment, args.reward)
    environment, reward_fn = make_environment(named.environment), make_reward(named.reward)
    expect_that(args.episodes >= 1, "--episodes", "be at least 1", args.episodes)
    available = len(held_out(environment, args.split, None))
    scenarios = held_out(environment, args.split, min(args.episodes, available))
    policies = degenerate_agents_of(environment)
    for name in args.without:
        if name not in policies:
            raise ConfigurationError(
                f"--without {name}: there are {', '.join(policies)}{nearest(name, policies)}"
            )
    return await audit(
        environment,
        reward_fn,
        scenarios,
        policies={name: make for name, make in policies.items() if name not in args.without},
        seed=args.seed,
        limits=named.training.rollout_limits(),
    )


def _parse_limit(item: str) -> tuple[str, float]:
    name, equals, limit = item.partition("=")
    try:
        if equals:
            return name, float(limit)
    except ValueError:
        pass
    raise ConfigurationError(f"--allow takes AGENT=LIMIT such as refuser=0.3, got {item!r}")


def _lines(result: Audit) -> list[str]:
    rows = [("agent", "success", "mean reward", "n")]
    rows += [(name, *_numbers(evaluation)) for name, evaluation in result.policies.items()]
    if result.honest is not None:
        rows.append(("(honest)", *_numbers(result.honest)))
    return [*table(rows, indent=""), _ceiling(result)]


def _numbers(evaluation: Evaluation) -> tuple[str, str, str]:
    success = "no verdict"
    if evaluation.success is not None:
        success = percent({"value": evaluation.success, "interval": evaluation.interval})
    reward = "unscored"
    if evaluation.mean_reward is not None:
        reward = f"{evaluation.mean_reward:+.3f}{interval_text(evaluation.reward_interval, '+.3f')}"
    counts = ((evaluation.num_failed, "failed"), (evaluation.num_unscored, "unscored"))
    lost = ", ".join(f"{number} {measure}" for number, measure in counts if number)
    return success, reward, f"{evaluation.n} ({lost})" if lost else str(evaluation.n)


def _ceiling(result: Audit) -> str:
    ceiling = result.ceiling
    parts: Mapping[str, tuple[float | None, str | None]] = {
        "success": (ceiling.success, ceiling.successful),
        "mean reward": (ceiling.mean_reward, ceiling.paid),
    }
    maxima = [f"{name} {value:.3f} ({agent})" for name, (value, agent) in parts.items() if value is not None]
    return "exploit ceiling: " + (", ".join(maxima) or "nothing was judged or scored")


# ------------------------------------------------------------------------------ rescore

_SHOWN = 5


def run_rescore(args: argparse.Namespace) -> int:
    """Exit code 0 when conversations could be scored."""
    check_writable(args.out)
    result = event_loop.run(_rescore(args))
    print_result(result.summary(), args, "\n".join(_rescored_lines(result)))
    return 0


async def _rescore(args: argparse.Namespace) -> Rescored:
    from stateset_agents.evaluation.recorded import groups_of
    from stateset_agents.evaluation.rescoring import rescore
    from stateset_agents.tracking.run_log import RunLog
    from stateset_agents.training.components import make_reward, read_spec
    from stateset_agents.training.config import TrainingConfig

    stages = ("train", "before", "after", "validation")
    expect_that(args.stage in stages, "--stage", f"be one of {', '.join(stages)}", args.stage)
    log = RunLog.open(args.run_folder)
    reward = make_reward(read_spec("--reward", args.reward))
    training = log.config().get("training") or {}
    settings = TrainingConfig(**{name: training[name] for name in _REWARD_SETTINGS if name in training})
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


_REWARD_SETTINGS = ("baseline_type", "advantage_normalization", "reward_clip", "reward_timeout")


def _rescored_lines(result: Rescored) -> list[str]:
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
