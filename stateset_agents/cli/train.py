"""`stateset-agents train`: one YAML file in, one run folder out."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stateset_agents.errors import ConfigurationError

__all__ = ["add_parser", "overrides", "run"]


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("train", help="train an agent from a YAML file, or resume a run")
    parser.add_argument("config", nargs="?", help="YAML file, e.g. examples/demo.yaml")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run folder from its newest checkpoint")
    parser.add_argument("--profile", help="conservative, balanced or aggressive")
    parser.add_argument("--seed", type=int, help="of every random choice of the run")
    parser.add_argument("--max-steps", type=int, help="optimiser steps, instead of num_episodes")
    parser.add_argument("--output-dir", help="where the numbered run folder goes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting, e.g. training.beta=0.02",
    )
    parser.add_argument("--no-eval", action="store_true", help="skip the measurement before and after")
    parser.set_defaults(run=run)


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The command line's settings by dotted name; values are read as YAML."""
    named = {
        "training.profile": args.profile,
        "training.seed": args.seed,
        "training.max_steps": args.max_steps,
        "training.output_dir": args.output_dir,
    }
    found = {name: value for name, value in named.items() if value is not None}
    for item in args.set:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes NAME=VALUE such as training.beta=0.02, got {item!r}")
        found[name.strip()] = yaml.safe_load(text)
    if args.no_eval:
        found["evaluation"] = None
    return found


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 when interrupted (a checkpoint is written and the way to resume is said)."""
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.training.experiment import Experiment, load_experiment

    if (args.config is None) == (args.resume is None):
        raise ConfigurationError("give a YAML file (examples/demo.yaml) or --resume RUN, one of the two")
    folder = RunFolder.open(args.resume) if args.resume else None
    source = folder.config if folder else Path(args.config)
    experiment = Experiment(load_experiment(source, overrides(args)), run=folder)
    try:
        asyncio.run(_run(experiment))
    except (KeyboardInterrupt, asyncio.CancelledError):
        path = experiment.run.path
        print(
            f"\nstopped after step {experiment.trainer.step_number}; {path} keeps a checkpoint",
            file=sys.stderr,
        )
        print(f"resume with: stateset-agents train --resume {path}", file=sys.stderr)
        return 130
    return 0


async def _run(experiment: Any) -> None:
    from stateset_agents.tracking.console import ConsoleDisplay

    task = asyncio.current_task()
    assert task is not None  # inside a coroutine
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    trainer = experiment.trainer
    try:
        await experiment.initialize()
        print(f"run folder: {experiment.run.path}")
        if trainer.recommended:
            said = ", ".join(f"{name} {value}" for name, value in trainer.recommended.items())
            print(f"the model's card recommends (set your own to override): {said}")
        before = await experiment.before()
        if before:
            print(f"before: {_line(before)}")
        with ConsoleDisplay(trainer.num_steps) as display:
            trainer.on_step = display.update
            await experiment.train()
        after = await experiment.after()
        if after:
            print(f"before: {_line(before)}")
            print(f"after:  {_line(after)}")
        print(f"trained {trainer.step_number} steps in {trainer.train_seconds:.0f} s")
        print(f"report: {experiment.run.report}")
    finally:
        await trainer.close()


def _line(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not measured"
    low, high = result["interval"]
    return (
        f"success {result['success']:.1%} [{low:.1%}, {high:.1%}] sampled, {result['greedy']:.1%} greedy, "
        f"over {result['n']} held-out scenarios"
    )
