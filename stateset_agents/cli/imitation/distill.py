"""`stateset-agents distill`: a teacher's verified replies imitated, or its log-probs followed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from stateset_agents.cli import train
from stateset_agents.cli.output import display_path
from stateset_agents.cli.run_settings import overrides
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.kept_conversations import KeptConversations
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.training.experiment import ExperimentConfig
    from stateset_agents.training.sft.distillation import Distilled, Measured, ReasoningDistillation
    from stateset_agents.training.sft.traces import Traces


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("distill", help="let a model learn from a teacher's replies or log-probs")
    parser.add_argument("config", help="YAML file with a section traces, or with training.distillation")
    parser.add_argument(
        "--conversations", metavar="FILE", help="where the teacher's replies are kept, to go on from"
    )
    parser.add_argument("--seed", type=int, help="of every random choice")
    parser.add_argument("--max-steps", type=int, help="optimiser steps")
    parser.add_argument("--output-dir", help="where the numbered run folder goes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, e.g. traces.samples=4"
    )
    parser.add_argument("--no-eval", action="store_true", help="skip the measurement before and after")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted."""
    config = _config(args)
    if config.training.distillation is not None:
        if args.conversations is not None:
            raise ConfigurationError(
                "--conversations keeps a teacher's replies, and here it gives none: leave it out"
            )
        return train.run(
            argparse.Namespace(**vars(args) | {"resume": None, "profile": None, "from_served": None})
        )
    try:
        event_loop.run(_distilled(config, args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stateset-agents: {_how_to_go_on(args)}", file=sys.stderr)
        return 130
    return 0


def _config(args: argparse.Namespace) -> ExperimentConfig:
    """What file and options say. Raises ConfigurationError unless it has one kind of teacher."""
    from stateset_agents.training.experiment import load_experiment

    options = {"seed": args.seed, "max_steps": args.max_steps, "output_dir": args.output_dir}
    chosen = load_experiment(args.config, overrides(args.set, {}))
    shows, scores = chosen.traces is not None, chosen.training.distillation is not None
    if shows == scores:
        both = "both a section traces and training.distillation" if shows else "no teacher"
        raise ConfigurationError(
            f"{args.config} has {both}: give one of them, traces: {{teacher: MODEL}} for its words or "
            "training: {distillation: {teacher: MODEL}} for its log-probs"
        )
    if scores and chosen.sft is not None:
        raise ConfigurationError(
            "sft goes with traces, and on-policy distillation reads training: take sft out"
        )
    section = "training" if scores else "sft"
    named = {f"{section}.{name}": value for name, value in options.items()}
    if shows:
        named["traces.seed"] = args.seed
    return load_experiment(args.config, overrides(args.set, named))


async def _distilled(config: ExperimentConfig, args: argparse.Namespace) -> None:
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.training.components import make_environment, make_reward
    from stateset_agents.training.sft.distillation import ReasoningDistillation
    from stateset_agents.training.sft.settings import SFTConfig

    task = asyncio.current_task()
    assert task is not None  # inside a coroutine
    with contextlib.suppress(NotImplementedError):  # Windows has no SIGTERM to handle
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    environment, measured = make_environment(config.environment), config.evaluation
    scenarios = []
    if measured is not None and not args.no_eval:  # before anything slow
        scenarios = list(held_out(environment, measured.split, measured.episodes))
    sft = config.sft or SFTConfig()
    if "run_name" not in sft.model_fields_set:
        sft = sft.model_copy(update={"run_name": "distill"})
    distillation = ReasoningDistillation(
        _teacher(config),
        MultiTurnAgent(config.agent),
        environment=environment,
        reward=make_reward(config.reward),
    )
    try:
        traces = await _traces(distillation, config, args)
        folder = await asyncio.to_thread(RunFolder.create, sft.output_dir, sft.run_name)
        print(f"run folder: {display_path(folder.path)}")
        limits = config.training.rollout_limits()
        if measured is not None:
            limits = replace(limits, max_concurrent=measured.max_concurrent)
        distilled = await distillation.train_student(
            traces, sft, measure_on=scenarios, run=folder, limits=limits
        )
    finally:
        await distillation.close()
    _write_summary(folder, traces, distilled)
    for when, seen in (("before", distilled.before), ("after", distilled.after)):
        if seen is not None:
            print(f"{when + ':':8}{_line(seen)}")
    print(f"traces: {display_path(folder.path / 'traces.jsonl')}")
    print(f"model: {display_path(distilled.model_folder)}")
    print(f"report: {display_path(folder.report)}")


def _teacher(config: ExperimentConfig) -> Any:
    """The teacher's agent, here or behind an endpoint."""
    from stateset_agents.backends.openai.client import ChatClient
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.core.rollout.endpoint_agent import EndpointAgent

    settings = config.traces
    assert settings is not None  # the file has it
    if settings.endpoint is None:
        return MultiTurnAgent(settings.teacher)
    client = ChatClient(
        settings.endpoint,
        settings.teacher.model_name,
        api_key_env=settings.api_key_env,
        max_concurrent=config.training.max_concurrent,
    )
    return EndpointAgent(client, settings.teacher)


async def _traces(
    distillation: ReasoningDistillation, config: ExperimentConfig, args: argparse.Namespace
) -> Traces:
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.tracking.console import PlayDisplay

    settings, environment = config.traces, distillation.environment
    assert settings is not None
    assert environment is not None
    with _kept(distillation.teacher, config, args.conversations) as kept, PlayDisplay("teacher") as display:
        traces = await distillation.generate_distillation_data(
            held_out(environment, "train", settings.episodes),
            max_length=settings.max_new_tokens,
            temperature=settings.temperature,
            samples=settings.samples,
            min_reward=settings.min_reward,
            in_format=settings.in_format,
            seed=settings.seed,
            limits=config.training.rollout_limits(),
            kept=kept,
            on_progress=display.on_progress,
        )
    counts = traces.counts
    left_out = [
        f"{count} {name}" for name, count in asdict(counts).items() if count and name not in ("asked", "kept")
    ]
    why = f" ({', '.join(left_out)})" if left_out else ""
    print(
        f"teacher: {counts.kept} of {counts.asked} replies are shown{why}, {traces.format:.1%} in the format"
    )
    return traces


def _kept(
    teacher: Any, config: ExperimentConfig, file: str | None
) -> AbstractContextManager[KeptConversations | None]:
    """The file of the teacher's conversations, where one is named."""
    from stateset_agents.core.rollout.endpoint_agent import EndpointAgent, Usage
    from stateset_agents.evaluation.kept_conversations import KeptConversations

    if file is None:
        return contextlib.nullcontext()
    asked = {"environment": dict(config.environment), "split": "train"}
    usage = (lambda: teacher.usage) if isinstance(teacher, EndpointAgent) else Usage
    return KeptConversations(file, identity=asked, usage=usage)


def _write_summary(folder: RunFolder, traces: Traces, distilled: Distilled) -> None:
    from stateset_agents.reporting.report import write_report
    from stateset_agents.tracking.run_log import RunLog

    seen = {
        when: asdict(measured)
        for when, measured in (("before", distilled.before), ("after", distilled.after))
        if measured is not None
    }
    folder.write_summary({**RunLog(folder).summary(), "distillation": {"traces": traces.summary(), **seen}})
    write_report(folder.path)


def _line(seen: Measured) -> str:
    form = "" if seen.format is None else f"format {seen.format:.1%}"
    success = "" if seen.success is None else f", success {seen.success:.1%}"
    reward = "" if seen.mean_reward is None else f", mean reward {seen.mean_reward:.3f}"
    return f"{form}{success}{reward}, over {seen.n} held-out scenarios"


def _how_to_go_on(args: argparse.Namespace) -> str:
    begun = "interrupted; a fine-tuning that has begun goes on with stateset-agents sft --resume RUN"
    if args.conversations is None:
        return f"{begun}; with --conversations FILE the teacher's replies would have been kept"
    command = shlex.join(["stateset-agents", *args.argv])
    return f"{begun}, else the teacher's replies are kept and are not asked again by: {command}"
