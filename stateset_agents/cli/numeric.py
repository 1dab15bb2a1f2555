"""Numeric policies in the verbs `train`, `evaluate` and `compare`: what differs from conversations."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import (
    bounds,
    check_writable,
    display_path,
    health,
    print_result,
    table,
    verdict_line,
)
from stateset_agents.cli.run_settings import is_control, overrides, run_and_checkpoint
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.numeric.environments.base import BatchedEnvironment
    from stateset_agents.numeric.evaluation import ControlEvaluation
    from stateset_agents.numeric.experiment import ControlExperiment, ControlFile
    from stateset_agents.numeric.policy import MlpPolicy
    from stateset_agents.numeric.studies.task_policy import TaskPolicy


UNTRAINED = "untrained"
"""The policy as a training would begin with it."""

# ------------------------------------------------------------------------------ train


def train(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted (a checkpoint is written, and the command to resume is printed)."""
    from stateset_agents.numeric.experiment import ControlExperiment, load_control

    if args.profile is not None:
        raise ConfigurationError("--profile is of conversations: write --set training.NAME=VALUE instead")
    folder, checkpoint = run_and_checkpoint(args.resume) if args.resume else (None, None)
    named = {
        "training.seed": args.seed,
        "training.total_steps": args.max_steps,
        "training.output_dir": args.output_dir,
    }
    config = load_control(folder.config if folder else Path(args.config), overrides(args.set, named))
    if args.no_eval and folder is None:  # the run's own config.yaml: a resume does not measure either
        config = config.model_copy(update={"evaluation": None})
    experiment = ControlExperiment(config, run=folder, checkpoint=checkpoint, measures=not args.no_eval)
    try:
        event_loop.run(_train(experiment))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stateset-agents: {_resume_hint(experiment)}", file=sys.stderr)
        return 130
    finally:
        gc.unfreeze()
    return 0


async def _train(experiment: ControlExperiment) -> None:
    from rich.console import Console

    task = asyncio.current_task()
    assert task is not None  # inside a coroutine
    with contextlib.suppress(NotImplementedError):  # Windows has no SIGTERM to handle
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    trainer = experiment.trainer
    async with experiment:
        gc.freeze()  # what is loaded stays
        print(f"run folder: {display_path(experiment.run.path)}")
        if experiment.is_over:
            steps = trainer.step_number
            done = f"this run is finished, all {steps} steps of it: give it more with --max-steps {steps * 2}"
            print(f"{done}\nreport: {display_path(experiment.run.report)}")
            return
        before = await experiment.before()
        if before:
            print(f"before: {_result(before)}")
        trainer.console = Console()
        await experiment.train()
        after = await experiment.after()
    if after:
        print(f"before: {_result(before) if before else 'not measured'}")
        print(f"after:  {_result(after)}")
        for name, rule in experiment.summary.get("rules", {}).items():
            print(f"{name}: {_result(rule)}; after - {name}: {_difference(rule)}")
    print(f"trained {trainer.step_number} steps in {trainer.progress.seconds:.0f} s")
    print("\n".join(health(experiment.run)))
    print(f"report: {display_path(experiment.run.report)}")


def _resume_hint(experiment: ControlExperiment) -> str:
    trainer = experiment.trainer
    if not trainer.is_ready:
        return "interrupted before the run began"
    command = shlex.join(["stateset-agents", "train", "--resume", display_path(trainer.run.path)])
    return f"stopped after step {trainer.step_number} of {trainer.num_steps}; resume with: {command}"


# ------------------------------------------------------------------------------ evaluate and compare


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0 when it could be measured."""
    from stateset_agents.numeric.experiment import held_out_seeds, make_environment, measured, rule_names

    config = _file(args)
    check_writable(args.out)
    environment = make_environment(config.environment)
    name = args.model or (args.config if Path(args.config).is_dir() else UNTRAINED)
    player = _player(name, config, environment)
    seeds = held_out_seeds(_measurement(config))
    ours = measured(player, environment, seeds)
    rules = {} if isinstance(player, str) else dict.fromkeys(rule_names(environment))
    found = {rule: _against(ours, measured(rule, environment, seeds)) for rule in rules}
    result = {"model": name, **ours.summary(), "rules": found}
    lines = [f"{name}: {_result(result)}"]
    rows = [(part, f"{value:.3f}", "") for part, value in ours.components.items()]
    rows += [(rule, _result(one), f"{name} - {rule}: {_difference(one)}") for rule, one in found.items()]
    lines += [f"lowest {_number(result['lowest'])}, highest {_number(result['highest'])}", *table(rows)]
    print_result(result, args, "\n".join(lines))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Exit code 0 when both could be measured."""
    from stateset_agents.algorithms.paired import paired_rewards
    from stateset_agents.numeric.evaluation import paired_differences
    from stateset_agents.numeric.experiment import held_out_seeds, make_environment, measured

    if args.b is None:  # two runs, or a run and a rule, on the starts of the first
        if not Path(args.config).is_dir():
            raise ConfigurationError(
                f"compare needs a file and two policies, or two run folders, got {args.config} {args.a}: "
                f"write compare {args.config} A {args.a}"
            )
        args.a, args.b = args.config, args.a
    config = _file(args)
    check_writable(args.out)
    environment = make_environment(config.environment)
    sides = [_player(name, config, environment) for name in (args.a, args.b)]
    seeds = held_out_seeds(_measurement(config))
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
        f"A  {args.a}: {_result(summary['a'])}",
        f"B  {args.b}: {_result(summary['b'])}",
        f"B - A: mean return {result.mean:+.3f}{bounds(result.interval, '+.3f')}",
        f"B wins {wins}, loses {losses}, ties {ties} of {len(differences)} starts",
        verdict_line(result.verdict, result.reason),
    ]
    if left_out:
        lines.append(f"left out: {left_out} starts from which one of them failed")
    print_result(summary, args, "\n".join(lines))
    return 0


def _file(args: argparse.Namespace) -> ControlFile:
    """What the file and the options say. Raises ConfigurationError for options of conversations."""
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
            f"a numeric policy plays its likeliest actions, got --temperature {args.temperature}: leave "
            "it out"
        )
    named = {"evaluation.episodes": args.episodes, "evaluation.seed": args.seed}
    return load_control(args.config, overrides(args.set, named))


def _measurement(config: ControlFile) -> Any:
    from stateset_agents.numeric.experiment import MeasurementConfig

    return config.evaluation or MeasurementConfig()


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
        known = (UNTRAINED, *rules)
        raise ConfigurationError(
            f"a policy must be a run folder or a checkpoint of a numeric training, or one of "
            f"{', '.join(known)}, got {name!r}{nearest(name, known)}"
        )
    return load_policy(name, environment)


def _against(ours: ControlEvaluation, rule: ControlEvaluation) -> dict[str, Any]:
    from stateset_agents.numeric.evaluation import paired_difference

    difference, interval = paired_difference(ours, rule)
    return {**rule.summary(), "difference": difference, "difference_interval": interval}


def _result(result: Mapping[str, Any]) -> str:
    """`mean return 96.2 [93.1, 99.3], over 100 held-out starts`."""
    mean = result["mean_reward"]
    failed = f", of which {result['num_failed']} failed" * bool(result["num_failed"])
    shown = (
        "no return" if mean is None else f"mean return {_number(mean)}{_interval(result['reward_interval'])}"
    )
    return f"{shown}, over {result['n']} held-out starts{failed}"


def _difference(rule: Mapping[str, Any]) -> str:
    return f"{rule['difference']:+.3f}{bounds(rule['difference_interval'], '+.3f')}"


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" [{_number(interval[0])}, {_number(interval[1])}]"


def _number(value: float | None) -> str:
    """Four digits, as many behind the point as are left."""
    return "-" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
