"""`stateset-agents sft`: conversations in, a fine-tuned model in a run folder out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import display_path
from stateset_agents.cli.run_settings import overrides, settings_of_run
from stateset_agents.runtime import event_loop
from stateset_agents.runtime.yaml_files import parse_yaml, read_yaml
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.training.sft.trainer import SFTTrainer


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("sft", help="fine-tune on conversations, a warm start; also: served")
    parser.add_argument(
        "conversations",
        nargs="?",
        help="a file of rows that show replies, or {dataset: FILE, columns: {...}}; with --best a run folder",
    )
    parser.add_argument("--model", help="what to begin with: a model, checkpoint or run")
    parser.add_argument("--config", metavar="FILE", help="a YAML file whose section agent holds")
    parser.add_argument(
        "--best", action="store_true", help="imitate the run's own best conversation of each scenario"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a fine-tuning's newest checkpoint")
    parser.add_argument("--seed", type=int, help="of the order of conversations (default 0)")
    parser.add_argument("--max-steps", type=int, help="optimiser steps, instead of sft.num_train_epochs")
    parser.add_argument("--output-dir", help="where the numbered run folder goes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of agent or sft, e.g. sft.learning_rate=1e-4",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted (a checkpoint is written, and the command to resume is printed)."""
    trainer = _trainer(args)
    try:
        event_loop.run(_run(trainer, resumes=args.resume is not None))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not trainer.is_ready:
            print("stateset-agents: interrupted before the run began", file=sys.stderr)
            return 130
        command = shlex.join(["stateset-agents", "sft", "--resume", display_path(trainer.run.path)])
        print(
            f"stateset-agents: stopped after step {trainer.step_number} of {trainer.num_steps}; resume with: "
            f"{command}",
            file=sys.stderr,
        )
        return 130
    return 0


def _trainer(args: argparse.Namespace) -> SFTTrainer:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.training.sft.own_successes import OwnSuccesses
    from stateset_agents.training.sft.settings import SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer

    if (args.conversations is None) == (args.resume is None):
        raise ConfigurationError("give a file of conversations or --resume RUN, one of the two")
    folder = None if args.resume is None else RunFolder.open(args.resume)
    sections = _new_sections(args) if folder is None else _sections_of(folder.config)
    for name, value in _settings(args).items():
        section, _, field = name.partition(".")
        if section not in ("agent", "sft") or not field:
            raise ConfigurationError(f"--set {name}: settings here are agent.NAME and sft.NAME")
        sections[section] = {**sections[section], field: value}
    if "model_name" not in sections["agent"]:
        raise ConfigurationError("--model is missing: name the model to begin with")
    source = sections["conversations"]
    return SFTTrainer(
        MultiTurnAgent(AgentConfig(**sections["agent"])),
        OwnSuccesses(Path(source["best_of"])) if isinstance(source, dict) and "best_of" in source else source,
        SFTConfig(**sections["sft"]),
        run=folder,
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    named = {
        "agent.model_name": args.model,
        "sft.seed": args.seed,
        "sft.max_steps": args.max_steps,
        "sft.output_dir": args.output_dir,
    }
    return overrides(args.set, named)


def _new_sections(args: argparse.Namespace) -> dict[str, Any]:
    """The sections agent and sft of a new fine-tuning, and its conversations."""
    from stateset_agents.training.experiment import load_experiment

    path, source = Path(args.conversations), args.conversations
    agent: dict[str, Any] = {}
    if args.best:
        agent = settings_of_run(args.conversations).get("agent", {})
        if not agent:
            raise ConfigurationError(
                f"--best imitates a run, and {args.conversations!r} is none: give its folder"
            )
        source = {"best_of": args.conversations}
    elif args.conversations.lstrip().startswith("{"):
        source = parse_yaml(args.conversations, of=f"conversations {args.conversations!r:.60}")
    elif path.is_dir():
        raise ConfigurationError(
            f"{args.conversations!r} is a folder: sft {args.conversations} --best imitates a run's own "
            f"conversations, sft --resume {args.conversations} goes on with a fine-tuning"
        )
    if args.config is not None:
        agent = load_experiment(args.config).agent.model_dump(mode="json", exclude_unset=True)
    return {"agent": agent, "sft": {}, "conversations": source}


def _sections_of(config: Path) -> dict[str, Any]:
    """The same of a fine-tuning's run folder."""
    data = read_yaml(config)
    if not isinstance(data, dict) or data.get("made_by") != "sft":
        raise ConfigurationError(
            f"{config.parent} is no fine-tuning: stateset-agents train --resume {config.parent} goes on with "
            "a training"
        )
    if data.get("conversations") is None:
        raise ConfigurationError(
            f"only the program that began {config.parent} has its conversations: go on there, with "
            f"`await trainer.load_checkpoint({str(config.parent)!r})`"
        )
    return {name: data[name] for name in ("agent", "sft", "conversations")}


async def _run(trainer: SFTTrainer, *, resumes: bool) -> None:
    from rich.console import Console

    task = asyncio.current_task()
    assert task is not None  # inside a coroutine
    with contextlib.suppress(NotImplementedError):  # Windows has no SIGTERM to handle
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with trainer:
        print(f"run folder: {display_path(trainer.run.path)}")
        if resumes:
            await trainer.load_checkpoint()
        trainer.console = Console()
        await trainer.train()
    progress = trainer.progress
    print(f"trained {progress.step} steps in {progress.seconds:.0f} s: {progress.why}")
    if progress.best_value is not None:
        print(f"held-out loss {progress.best_value:.4f} nats a token, lowest after step {progress.best_step}")
    print(f"model: {display_path(trainer.model_folder)}")
    print(f"report: {display_path(trainer.run.report)}")
