"""`stateset-agents train`: one YAML file in, one run folder out."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from stateset_agents.backends.pretrained.loading import model_folder, recommended_settings
from stateset_agents.cli import numeric
from stateset_agents.cli.output import cancel_on_sigterm, display_path, health, rate
from stateset_agents.cli.run_settings import is_control, overrides, run_and_checkpoint
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError, StatesetError, TrainingStopped
from stateset_agents.types.logs import configure_logging

if TYPE_CHECKING:
    from stateset_agents.runs.experiment import BaseExperiment


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 130 if interrupted (a checkpoint is written, and the command to resume is printed).

    Of several processes the first prints errors; another one prints only what the first cannot know.
    """
    _check_source(args)
    if args.explain:
        return _explain(args)
    experiment = None
    try:
        experiment = _experiment(args)
        event_loop.run(_run(experiment))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if experiment is None:
            raise
        return _interrupted(experiment)
    except StatesetError as error:
        if _other_rank_reports(experiment):
            return 1
        if experiment is None or not experiment.trainer.is_ready or experiment.trainer.processes.count == 1:
            raise
        if getattr(error, "is_stop", False):  # another process heard of the interruption first
            return _interrupted(experiment)
        raise TrainingStopped(f"{error}; {resume_hint(experiment.trainer)}") from error
    finally:
        gc.unfreeze()
    return 0


def _check_source(args: argparse.Namespace) -> None:
    """Raises ConfigurationError unless a file is given, or a run to go on with."""
    if (args.config is None) == (args.resume is None):
        raise ConfigurationError("give a YAML file (examples/demo.yaml) or --resume RUN, one of the two")
    if args.from_served is not None and (args.resume is not None or is_control(args.config)):
        purpose = "a new training" if args.resume is not None else "a training of conversations"
        raise ConfigurationError(f"--from-served is for {purpose}: leave it out")
    if args.config is not None and Path(args.config).is_dir():
        raise ConfigurationError(
            f"{args.config!r} is a folder: to go on with that run, stateset-agents train --resume "
            f"{args.config}; for a new run with its settings, stateset-agents train "
            f"{Path(args.config) / 'config.yaml'}"
        )


def _explain(args: argparse.Namespace) -> int:
    """Print the settings of the training that the file describes, and who set each."""
    from stateset_agents.training.experiment import load_experiment
    from stateset_agents.training.setting_origins import origins_table

    if args.resume or is_control(args.config):
        why = "config.yaml of a run has every setting" if args.resume else "numeric settings have no layers"
        raise ConfigurationError(f"--explain is for a YAML file of conversations, and {why}: leave it out")
    config = load_experiment(Path(args.config), overrides(args.set, _conversation_options(args)))
    name = config.agent.model_name
    has_card = name != "scripted" and not name.startswith("vllm:")
    card = recommended_settings(model_folder(name)) if has_card else {}
    training, recommended = config.training.with_recommended(card)
    print(origins_table(training, recommended))
    return 0


def _conversation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a training of conversations, as settings by their dotted names."""
    served = args.from_served and {"name": "served", "logs": str(Path(args.from_served).resolve())}
    return {
        "environment": served,
        "training.profile": args.profile,
        "training.seed": args.seed,
        "training.max_steps": args.max_steps,
        "training.output_dir": args.output_dir,
    }


def _experiment(args: argparse.Namespace) -> BaseExperiment[Any, Any]:
    named = {"training.seed": args.seed, "training.output_dir": args.output_dir}
    load: Callable[..., Any]
    make: Callable[..., BaseExperiment[Any, Any]]
    if is_control(args.config or args.resume):
        from stateset_agents.numeric.experiment import ControlExperiment, load_control

        if args.profile is not None:
            raise ConfigurationError("--profile is of conversations: write --set training.NAME=VALUE instead")
        load, make = load_control, ControlExperiment
        named["training.total_steps"] = args.max_steps
    else:
        from stateset_agents.training.experiment import Experiment, load_experiment

        load, make = load_experiment, Experiment
        named |= _conversation_options(args)
    folder, checkpoint = run_and_checkpoint(args.resume) if args.resume else (None, None)
    config: Any = load(folder.config if folder else Path(args.config), overrides(args.set, named))
    if args.no_eval and folder is None:  # the run's own config.yaml: a resume does not measure either
        config = config.model_copy(update={"evaluation": None})
    if _is_other_rank():
        configure_logging("ERROR")  # the first process says it for all
    return make(config, run=folder, checkpoint=checkpoint, measures=not args.no_eval)


def _interrupted(experiment: BaseExperiment[Any, Any]) -> int:
    if not _is_other_rank():
        print(f"stateset-agents: {resume_hint(experiment.trainer)}", file=sys.stderr)
    return 130


def _other_rank_reports(experiment: BaseExperiment[Any, Any] | None) -> bool:
    """True if another process prints this error: the first of the group if connected, else of the node."""
    processes = experiment.trainer.processes if experiment is not None else None
    if processes is not None and processes.count > 1:
        return not processes.is_first and not processes.has_lost_others
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _is_other_rank() -> bool:
    """True in a process with a rank other than 0."""
    return os.environ.get("RANK", "0") != "0"


def resume_hint(trainer: Any, verb: str = "train") -> str:
    """A line that says where an interrupted trainer stopped, and the command that goes on."""
    if not trainer.is_ready:
        return "interrupted before the run began"
    count = trainer.processes.count if verb == "train" else 1
    launcher = ["torchrun", "--nproc-per-node", str(count), "-m", "stateset_agents"]
    program = launcher if count > 1 else ["stateset-agents"]
    command = shlex.join([*program, verb, "--resume", display_path(trainer.run.path)])
    return f"stopped after step {trainer.step_number} of {trainer.num_steps}; resume with: {command}"


async def _run(experiment: BaseExperiment[Any, Any]) -> None:

    from stateset_agents.tracking.console import PlayDisplay

    cancel_on_sigterm()
    trainer = experiment.trainer
    async with experiment:
        gc.freeze()  # what is loaded stays: a full collection need not look through 1.5 million objects of it
        if _is_other_rank():
            if not experiment.is_over:
                await experiment.before()
                await experiment.train()
                await experiment.after()
            return
        print(f"run folder: {display_path(experiment.run.path)}")
        if experiment.is_over:
            steps = trainer.step_number
            done = f"this run is finished, all {steps} steps of it: give it more with --max-steps {steps * 2}"
            print(f"{done}\nreport: {display_path(experiment.run.report)}")
            return
        if not experiment.resumes:  # config.yaml names every setting, and not who set it
            print("".join(_settings_line(trainer)), end="")
        with PlayDisplay("before") as display:
            before = await experiment.before(display.on_progress)
        if before:
            print(f"before: {_result_line(before)}")
        trainer.console = Console()
        await experiment.train()
        with PlayDisplay("after") as display:
            after = await experiment.after(display.on_progress)
    if after:
        print(f"after:  {_result_line(after)}")
        for line in numeric.rule_lines(experiment.summary):
            print(line)
    unit = "step" if trainer.step_number == 1 else "steps"
    print(f"trained {trainer.step_number} {unit} in {trainer.progress.seconds:.0f} s")
    print("\n".join(health(experiment.run)))
    print(f"report: {display_path(experiment.run.report)}")


def _settings_line(trainer: Any) -> Iterator[str]:
    from stateset_agents.training.config import TrainingConfig
    from stateset_agents.training.setting_origins import counted_origins, setting_origins

    if isinstance(trainer.config, TrainingConfig):
        origins = counted_origins(setting_origins(trainer.config, trainer.recommended))
        yield f"settings: {origins}; --explain lists them\n"


def _result_line(result: Mapping[str, Any]) -> str:
    if "greedy" not in result:
        return numeric.result_line(result)
    greedy = "" if result["greedy"] is None else f", {result['greedy']:.1%} greedy"
    n, tries = result["n"], result.get("tries", 1)
    of = f"{n} held-out scenarios" if tries == 1 else f"{n} tries, {tries} of each held-out scenario"
    return f"{rate(result)} sampled{greedy}, over {of}"
