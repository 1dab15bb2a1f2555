"""`stateset-agents sft`, and what gives it conversations: `demonstrate` and `distill`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from stateset_agents.cli import train
from stateset_agents.cli.output import cancel_on_sigterm, check_new, display_path
from stateset_agents.cli.rewards import named_environment
from stateset_agents.cli.run_settings import overrides, settings_of_run
from stateset_agents.runtime import event_loop
from stateset_agents.runtime.yaml_files import parse_yaml, read_yaml
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.demonstrations import Demonstrated
    from stateset_agents.evaluation.kept_conversations import KeptConversations
    from stateset_agents.training.experiment import ExperimentConfig
    from stateset_agents.training.sft.distillation import Distilled, Measured, ReasoningDistillation
    from stateset_agents.training.sft.traces import Traces
    from stateset_agents.training.sft.trainer import SFTTrainer


def run_demonstrate(args: argparse.Namespace) -> int:
    """Exit code 0 once the file is written."""
    check_new(args.out)
    result = event_loop.run(_demonstrated(args))
    lines = list(map(dump, result.chats))
    Path(args.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    left_out = f"; {result.num_failed} that did not succeed are left out" if result.num_failed else ""
    print(f"{len(lines)} conversations in {args.out}{left_out}")
    return 0


async def _demonstrated(args: argparse.Namespace) -> Demonstrated:
    from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.training.components import make_environment

    named = named_environment(args.environment)
    environment = make_environment(named.environment)
    return await demonstrate(
        environment,
        held_out(environment, args.split, args.episodes),
        scripted_agent_of(environment, args.agent),
        seed=args.seed,
        keep_failures=args.keep_failures,
        limits=named.training.rollout_limits(),
    )


# ------------------------------------------------------------------------------ sft


def run_sft(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted (a checkpoint is written, and the command to resume is printed)."""
    trainer = _trainer(args)
    try:
        event_loop.run(_run(trainer, resumes=args.resume is not None))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stateset-agents: {train.resume_hint(trainer, 'sft')}", file=sys.stderr)
        return 130
    return 0


def _trainer(args: argparse.Namespace) -> SFTTrainer:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.training.sft.demonstrations import OwnSuccesses
    from stateset_agents.training.sft.settings import SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer

    if (args.conversations is None) == (args.resume is None):
        raise ConfigurationError("give a file of conversations or --resume RUN, one of the two")
    folder = None if args.resume is None else RunFolder.open(args.resume)
    sections = _new_sections(args) if folder is None else _sections_of(folder.config)
    named = {
        "agent.model_name": args.model,
        "sft.seed": args.seed,
        "sft.max_steps": args.max_steps,
        "sft.output_dir": args.output_dir,
    }
    for name, value in overrides(args.set, named).items():
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
    """The sections and conversations of a fine-tuning's run folder."""
    data = read_yaml(config)
    if not isinstance(data, dict) or data.get("made_by") != "sft":
        raise ConfigurationError(
            f"{config.parent} is no fine-tuning: train --resume {config.parent} goes on with a training"
        )
    if data.get("conversations") is None:
        raise ConfigurationError(
            f"only the program that began {config.parent} has its conversations: go on there, with "
            f"`await trainer.load_checkpoint({str(config.parent)!r})`"
        )
    return {name: data[name] for name in ("agent", "sft", "conversations")}


async def _run(trainer: SFTTrainer, *, resumes: bool) -> None:

    cancel_on_sigterm()
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


# ------------------------------------------------------------------------------ distill


ONLY_OF_TRAIN = {"resume": None, "profile": None, "from_served": None, "explain": False}
"""Options of `train` that `distill` does not have, as an on-policy distillation sets them."""


def run_distill(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted."""
    config = _config(args)
    if config.training.distillation is not None:
        if args.conversations is not None:
            raise ConfigurationError(
                "--conversations keeps a teacher's replies, and here it gives none: leave it out"
            )
        return train.run(argparse.Namespace(**vars(args) | ONLY_OF_TRAIN))
    try:
        event_loop.run(_distilled(config, args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stateset-agents: {_how_to_go_on(args)}", file=sys.stderr)
        return 130
    return 0


def _config(args: argparse.Namespace) -> ExperimentConfig:
    """The settings of file and options. Raises ConfigurationError unless they have one kind of teacher."""
    from stateset_agents.training.experiment import load_experiment

    options = {"seed": args.seed, "max_steps": args.max_steps, "output_dir": args.output_dir}
    config = load_experiment(args.config, overrides(args.set, {}))
    shows, scores = config.traces is not None, config.training.distillation is not None
    if shows == scores:
        both = "both a section traces and training.distillation" if shows else "no teacher"
        raise ConfigurationError(
            f"{args.config} has {both}: give one of them, traces: {{teacher: MODEL}} for its words or "
            "training: {distillation: {teacher: MODEL}} for its log-probs"
        )
    if scores and config.sft is not None:
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
    from stateset_agents.training.components import make_environment, make_reward
    from stateset_agents.training.sft.distillation import ReasoningDistillation
    from stateset_agents.training.sft.settings import SFTConfig

    cancel_on_sigterm()
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
    for when, measurement in (("before", distilled.before), ("after", distilled.after)):
        if measurement is not None:
            print(f"{when + ':':8}{_line(measurement)}")
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
    with _kept(distillation.teacher, config, args.conversations) as store, PlayDisplay("teacher") as display:
        traces = await distillation.generate_distillation_data(
            held_out(environment, "train", settings.episodes),
            max_length=settings.max_new_tokens,
            temperature=settings.temperature,
            samples=settings.samples,
            min_reward=settings.min_reward,
            in_format=settings.in_format,
            seed=settings.seed,
            limits=config.training.rollout_limits(),
            kept=store,
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
    identity = {"environment": dict(config.environment), "split": "train"}
    usage = (lambda: teacher.usage) if isinstance(teacher, EndpointAgent) else Usage
    return KeptConversations(file, identity=identity, usage=usage)


def _write_summary(folder: RunFolder, traces: Traces, distilled: Distilled) -> None:
    from stateset_agents.reporting.report import write_report
    from stateset_agents.tracking.run_log import RunLog

    sides = {
        when: asdict(measured)
        for when, measured in (("before", distilled.before), ("after", distilled.after))
        if measured is not None
    }
    folder.write_summary({**RunLog(folder).summary(), "distillation": {"traces": traces.summary(), **sides}})
    write_report(folder.path)


def _line(result: Measured) -> str:
    form = "" if result.format is None else f"format {result.format:.1%}"
    success = "" if result.success is None else f", success {result.success:.1%}"
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.3f}"
    return f"{form}{success}{reward}, over {result.n} held-out scenarios"


def _how_to_go_on(args: argparse.Namespace) -> str:
    notice = "interrupted; a fine-tuning that has begun goes on with stateset-agents sft --resume RUN"
    if args.conversations is None:
        return f"{notice}; with --conversations FILE the teacher's replies would have been kept"
    command = shlex.join(["stateset-agents", *args.argv])
    return f"{notice}, else the teacher's replies are kept and are not asked again by: {command}"
