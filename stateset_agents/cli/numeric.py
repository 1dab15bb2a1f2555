"""Numeric policies in the verbs `evaluate` and `compare`, and their results in words."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.cli.output import (
    check_writable,
    print_result,
    verdict_line,
)
from stateset_agents.cli.run_settings import is_control, overrides
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import table
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.numeric.environments.base import BatchedEnvironment
    from stateset_agents.numeric.experiment import ControlFile
    from stateset_agents.numeric.policy import MlpPolicy
    from stateset_agents.numeric.studies.partitioned import TaskPolicy


UNTRAINED = "untrained"
"""The policy as a training would begin with it."""


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0 when it could be measured."""
    from stateset_agents.numeric.evaluation import against
    from stateset_agents.numeric.experiment import held_out_seeds, make_environment, measured, rule_names

    config = _file(args)
    check_writable(args.out)
    environment = make_environment(config.environment)
    name = args.model or (args.config if Path(args.config).is_dir() else UNTRAINED)
    player = _player(name, config, environment)
    seeds = held_out_seeds(config.evaluation)
    ours = measured(player, environment, seeds)
    rules = {} if isinstance(player, str) else dict.fromkeys(rule_names(environment))
    compared_rules = {rule: against(ours, measured(rule, environment, seeds)) for rule in rules}
    result = {"model": name, **ours.summary(), "rules": compared_rules}
    lines = [f"{name}: {result_line(result)}"]
    rows = [(part, f"{value:.3f}", "") for part, value in ours.components.items()]
    rows += [
        (rule, result_line(rule_result), f"{name} - {rule}: {_difference(rule_result)}")
        for rule, rule_result in compared_rules.items()
    ]
    lines += [f"lowest {_number(result['lowest'])}, highest {_number(result['highest'])}", *table(rows)]
    print_result(result, args, "\n".join(lines))
    return 0


def two_runs(args: argparse.Namespace, kind: str) -> tuple[str, str]:
    """Both sides of `compare RUN OTHER`. Raises ConfigurationError where the first is no folder."""
    if not Path(args.config).is_dir():
        raise ConfigurationError(
            f"compare needs a file and two {kind}, or two run folders, got {args.config} {args.a}"
        )
    return args.config, args.a


def compare(args: argparse.Namespace) -> int:
    """Exit code 0 when both could be measured."""
    from stateset_agents.algorithms.paired import paired_rewards
    from stateset_agents.numeric.evaluation import paired_differences
    from stateset_agents.numeric.experiment import held_out_seeds, make_environment, measured

    if args.b is None:  # two runs, or a run and a rule, on the starts of the first
        args.a, args.b = two_runs(args, "policies")
    config = _file(args)
    check_writable(args.out)
    environment = make_environment(config.environment)
    sides = [_player(name, config, environment) for name in (args.a, args.b)]
    seeds = held_out_seeds(config.evaluation)
    a, b = (measured(player, environment, seeds) for player in sides)
    differences = paired_differences(b, a)
    result = paired_rewards(differences)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    ties, left_out = len(differences) - wins - losses, len(seeds) - len(differences)
    comparison = {
        "reward": result.mean,
        "reward_interval": result.interval,
        "wins": wins,
        "losses": losses,
        "ties": ties,
        "num_pairs": len(differences),
        "num_left_out": left_out,
        "verdict": result.verdict,
        "reason": result.reason,
    }
    summary = {
        "a": {"model": args.a, **a.summary()},
        "b": {"model": args.b, **b.summary()},
        "comparison": comparison,
    }
    lines = [
        f"A  {args.a}: {result_line(summary['a'])}",
        f"B  {args.b}: {result_line(summary['b'])}",
        f"B - A: mean return {result.mean:+.3f}{interval_text(result.interval, '+.3f')}",
        f"B wins {wins}, loses {losses}, ties {ties} of {len(differences)} starts",
        verdict_line(result.verdict, result.reason),
    ]
    if left_out:
        lines.append(f"left out: {left_out} starts from which one of them failed")
    print_result(summary, args, "\n".join(lines))
    return 0


def _file(args: argparse.Namespace) -> ControlFile:
    """The settings of the file and the options. Raises ConfigurationError for options of conversations."""
    from stateset_agents.numeric.experiment import load_control

    endpoint = next((name for name in vars(args) if name.startswith("endpoint") and vars(args)[name]), None)
    if endpoint is not None:
        raise ConfigurationError(f"--{endpoint.replace('_', '-')} is of conversations: a policy plays here")
    if args.tries not in (None, 1):
        raise ConfigurationError(
            f"--tries is of conversations, got {args.tries}: give --episodes more starts"
        )
    if args.temperature not in (None, 0):
        raise ConfigurationError(
            f"a numeric policy plays its likeliest action, got --temperature {args.temperature}: leave it out"
        )
    named = {"evaluation.episodes": args.episodes, "evaluation.seed": args.seed}
    return load_control(args.config, overrides(args.set, named))


def _player(name: str, config: ControlFile, environment: BatchedEnvironment) -> MlpPolicy | TaskPolicy | str:
    """A run's or checkpoint's policy, the untrained one, or the name of one of the environment's rules.

    Raises ConfigurationError for anything else.
    """
    from stateset_agents.numeric.experiment import load_policy, rule_names

    rules = rule_names(environment)
    if name in rules:
        return name
    if name == UNTRAINED:
        return config.new_policy(environment)
    if not Path(name).is_dir() or not is_control(name):
        names = (UNTRAINED, *rules)
        raise ConfigurationError(
            f"a policy must be a run folder or a checkpoint of a numeric training, or one of "
            f"{', '.join(names)}, got {name!r}{nearest(name, names)}"
        )
    return load_policy(name, environment)


def result_line(result: Mapping[str, Any]) -> str:
    """`mean return 96.2 [93.1, 99.3], over 100 held-out starts`."""
    mean = result["mean_reward"]
    failed = f", of which {result['num_failed']} failed" * bool(result["num_failed"])
    text = (
        "no return" if mean is None else f"mean return {_number(mean)}{_interval(result['reward_interval'])}"
    )
    return f"{text}, over {result['n']} held-out starts{failed}"


def rule_lines(summary: Mapping[str, Any]) -> list[str]:
    """Lines that compare the environment's rules with the trained policy."""
    return [
        f"{name}: {result_line(rule)}; after - {name}: {_difference(rule)}"
        for name, rule in summary.get("rules", {}).items()
    ]


def _difference(rule: Mapping[str, Any]) -> str:
    return f"{rule['difference']:+.3f}{interval_text(rule['difference_interval'], '+.3f')}"


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{_number(interval[0])}, {_number(interval[1])}]"


def _number(value: float | None) -> str:
    """Four digits, as many behind the point as are left."""
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
