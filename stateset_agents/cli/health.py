"""`stateset-agents doctor` and `diagnose`: the health of this machine, without network, and of a run."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stateset_agents.cli.run_settings import is_control
from stateset_agents.runtime import event_loop
from stateset_agents.sandbox.levels import CURE, LEVEL_NAMES, what_is_there
from stateset_agents.tracking.monitors import Finding, Severity
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.logs import configure_logging, shown

REQUIRED = ("torch>=2.6", "transformers>=5.23,<6", "safetensors>=0.5")
"""Heavy packages without which nothing trains; the lighter ones are needed to get as far as here."""

EXTRAS = {
    "gguf>=0.18": "a GGUF file as a model",
    "peft>=0.18": "a LoRA adapter",
    "bitsandbytes>=0.50": "an adapter on a model in 4 or 8 bits",
    "trl>=1.16,<1.17": "a training by TRL",
    "tensorboard>=2.20": "report_to: tensorboard",
    "wandb>=0.22": "report_to: wandb",
    "trackio>=0.43": "report_to: trackio",
    "mlflow-skinny==3.17.2": "report_to: mlflow",
    "opentelemetry-sdk>=1.40": "report_to: opentelemetry",
    "datasets>=4": "scenarios from a Hugging Face dataset",
    "gymnasium>=1": "a Gymnasium environment",
    "mcp>=1.24,<3": "an MCP server as tools",
    "jsonschema>=4.20": "the schema reward",
}
"""Optional packages, as pip takes them, and what needs them."""

_GIGABYTE = 2**30


def run_doctor(args: argparse.Namespace) -> int:
    """Print each finding as it is made; exit code 1 when one of them is a failure."""
    if args.plan is not None:
        return _plan(args)
    if args.gpu_memory is not None:
        raise ConfigurationError("--gpu-memory is of a plan: give --plan FILE, too")
    configure_logging("ERROR")  # the trial's own warnings are no findings
    findings = []
    for finding in _findings(args.output_dir):
        findings.append(finding)
        if not args.json:
            print(finding, flush=True)
    failed = sum(finding.verdict == "fail" for finding in findings)
    warned = sum(finding.verdict == "warn" for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"{failed} to mend, {warned} to know about" if failed or warned else "all well")
    return int(failed > 0)


def _plan(args: argparse.Namespace) -> int:
    """Print the memory of a training; exit code 1 where a phase does not fit."""
    from stateset_agents.runtime.machine import gpu_memory
    from stateset_agents.training.experiment import load_experiment
    from stateset_agents.training.memory_plan import parse_memory, plan_training

    if is_control(args.plan):
        raise ConfigurationError("--plan is for trainings of language models, and this file has none")
    config = load_experiment(Path(args.plan))
    if config.trl is not None:
        raise ConfigurationError("the memory of a training by TRL is TRL's own, and is not planned")
    if config.agent.device == "cpu":
        raise ConfigurationError(
            "agent.device is cpu, which takes nothing of a GPU: leave it out to plan one"
        )
    gpu = gpu_memory("auto") if args.gpu_memory is None else (parse_memory(args.gpu_memory), 0)
    if gpu is None:
        raise ConfigurationError("there is no GPU here to plan for: say how large one is, --gpu-memory 24GB")
    plan = plan_training(config.agent, config.training, total=gpu[0], others=gpu[1])
    print(json.dumps(plan.as_json(), indent=2) if args.json else "\n".join(plan.lines()))
    return int(bool(plan.too_large))


def _findings(output_dir: str) -> Iterator[Finding]:
    machine = list(machine_findings(output_dir))
    yield from machine
    if any(finding.verdict == "fail" and finding.check in _NEEDED for finding in machine):
        yield Finding("trial", "fail", "left out", "mend the packages above first")
        return

    yield from trial_findings()


_NEEDED = {re.split(r"[<>=]", requirement)[0] for requirement in REQUIRED}


def machine_findings(output_dir: str) -> Iterator[Finding]:
    """Versions, packages, devices, threads and disk, without a model."""
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield _own_version()
    required = [_package(requirement) for requirement in REQUIRED]
    yield from required
    for requirement, use in EXTRAS.items():
        yield _package(requirement, use)
    if required[0].verdict != "fail":
        yield _devices()
        yield _threads()
    yield _sandbox()
    yield _output(Path(output_dir))


def _own_version() -> Finding:
    try:
        return Finding("stateset-agents", "ok", importlib.metadata.version("stateset-agents"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("stateset-agents", "ok", "run from a source folder, not installed")


def _package(requirement: str, use: str | None = None) -> Finding:
    """Check that a package is there, whole, of a version that works; an optional one (`use`) only warns."""
    name = re.split(r"[<>=]", requirement)[0]
    bad: Severity = "fail" if use is None else "warn"
    for_what = "" if use is None else f" (only {use} needs it)"
    hint = f'pip install "{requirement}"'
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, bad, f"a module of that name is no installed package{for_what}", hint)
    except ModuleNotFoundError as error:
        missing = "not installed" if error.name == name else f"cannot be imported ({error})"
        return Finding(name, bad, f"{missing}{for_what}", hint)
    except Exception as error:  # whatever a broken package raises is what there is to report
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, bad, f"cannot be imported ({reason:.120}){for_what}", hint)
    if not _within(version, requirement):
        return Finding(name, bad, f"{version} is not {requirement[len(name) :]}{for_what}", hint)
    return Finding(name, "ok", version)


def _within(version: str, requirement: str) -> bool:
    """`2.13.0+cpu` satisfies `torch>=2.6`."""
    have = _numbers(version)
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    return all(have >= _numbers(bound) if sign == ">=" else have < _numbers(bound) for sign, bound in bounds)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", version.partition("+")[0]))


def _devices() -> Finding:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            return Finding(
                "devices",
                "warn",
                f"the machine has NVIDIA's driver and torch {torch.__version__} sees no GPU",
                "install a CUDA build of torch (pytorch.org/get-started says which), or go on with the CPU",
            )
        return Finding("devices", "ok", "CPU; torch sees no GPU, and none is needed")
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus.append(f"cuda:{index} {name}, {free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GiB free")
    devices = "; ".join(gpus)
    if not torch.cuda.is_bf16_supported():
        return Finding("devices", "warn", f"{devices}; no bf16", "set training.precision to fp32 or fp16")
    return Finding("devices", "ok", f"{devices}; bf16")


def _threads() -> Finding:
    """Measured: on a busy machine a second thread makes a small network several times slower."""
    import torch

    cores, threads = _cores(), torch.get_num_threads()
    usage = f"{cores} cores, torch uses {threads} thread{'s' * (threads > 1)}"
    hint = "set OMP_NUM_THREADS=1 for small models, at most the number of free cores for larger ones"
    if threads > cores:
        return Finding("threads", "warn", f"{usage}, more than there are cores", hint)
    if threads == 1:
        return Finding("threads", "ok", usage)
    try:
        seconds = _small_network_seconds()
        torch.set_num_threads(1)
        slowdown = seconds / _small_network_seconds()
    finally:
        torch.set_num_threads(threads)
    usage += f"; a small network takes {slowdown:.1f} times what it takes with one"
    return Finding("threads", "warn", usage, hint) if slowdown > 1.5 else Finding("threads", "ok", usage)


def _sandbox() -> Finding:
    """The isolation that the reward `code` can put around programs here; each level was tried."""
    machine = what_is_there()
    lacking = "; ".join(f"no {level}: {why}" for level, why in machine.lacks.items())
    if not machine.levels:
        return Finding("sandbox", "warn", f"{lacking} (only the reward code needs it)", CURE)
    first, *others = (LEVEL_NAMES[level] for level in machine.levels)
    isolation = f"programs run behind {first} and seccomp"
    also = f"; also here: {', '.join(others)}" if others else ""
    return Finding("sandbox", "ok", f"{isolation}{also}{f' ({lacking})' if lacking else ''}")


def _cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _small_network_seconds() -> float:
    """The middle one of five short trainings of a network about as wide as the embedded model."""
    import torch

    layers = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    rows = torch.ones(256, 128)
    durations = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(10):
            layers(rows).sum().backward()
        durations.append(time.perf_counter() - started)
    return sorted(durations)[2]


def _output(folder: Path) -> Finding:
    """Check that a run can be written there and that the disk has room; nothing is left behind."""
    existing = folder.resolve()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    hint = "give another --output-dir (training.output_dir in the YAML file), or free the disk"
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as inside:
            Path(inside, "probe").write_bytes(b"\0" * 65536)
        free = shutil.disk_usage(existing).free / _GIGABYTE
    except OSError as error:
        return Finding("output folder", "fail", f"{folder} cannot be written ({error.strerror})", hint)
    state = f"{folder} can be written, {free:.1f} GiB free"
    verdict: Severity = "ok" if free >= 1 else "warn" if free >= 0.1 else "fail"
    return Finding("output folder", verdict, state, "" if verdict == "ok" else hint)


# ------------------------------------------------------------------------------ the trial
#
# The embedded model generates, repeats itself, learns a step and is saved, in a few seconds.

_REPORT = "report this, with the lines above"


def trial_findings() -> Iterator[Finding]:
    """One finding per stage; the first failure ends the trial, since each stage needs the one before."""
    with tempfile.TemporaryDirectory(prefix="stateset-doctor-") as folder, event_loop.runner() as loop:
        trial = _Trial(folder)
        try:
            stages = {
                "generation": trial.generation,
                "determinism": trial.determinism,
                "training step": trial.training_step,
                "checkpoint": trial.checkpoint,
            }
            for name, stage in stages.items():
                finding = loop.run(_run_stage(name, stage))
                yield finding
                if finding.verdict == "fail":
                    return
        finally:
            loop.run(trial.close())


async def _run_stage(name: str, stage: Callable[[], Awaitable[str]]) -> Finding:
    started = time.perf_counter()
    try:
        result = await stage()
    except StatesetError as error:  # it says itself what to do
        return Finding(name, "fail", " ".join(str(error).split()), _REPORT)
    except Exception as error:  # a broken installation can raise anything, and that is the finding
        return Finding(name, "fail", " ".join(f"{type(error).__name__}: {error}".split()), _REPORT)
    return Finding(name, "ok", f"{result} ({time.perf_counter() - started:.1f} s)")


class _StageFailed(StatesetError):
    """A stage ran with a wrong result."""


@dataclass
class _Trial:
    """The stages, and what they share."""

    folder: str
    trainer: Any = None

    def make_trainer(self) -> Any:
        from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
        from stateset_agents.core.reward import EnvironmentReward
        from stateset_agents.environments.retail_desk import RetailDesk
        from stateset_agents.training.config import TrainingConfig
        from stateset_agents.training.trainer import MultiTurnGRPOTrainer

        return MultiTurnGRPOTrainer(
            MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48)),
            RetailDesk(),
            EnvironmentReward(),
            TrainingConfig(
                output_dir=self.folder,
                max_steps=1,
                num_generations=4,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=1,
                progress=False,
            ),
        )

    async def generation(self) -> str:
        """Load the model, which compares cached with uncached log-probs, and generate a reply."""
        self.trainer = self.make_trainer()
        await self.trainer.initialize()
        reply = await self.trainer.agent.generate_response(
            [{"role": "user", "content": "where is order K27"}]
        )
        if not reply.strip():
            raise _StageFailed("the embedded model said nothing")
        running, rows = self.trainer.agent.backend.running, self.trainer.learner.layout["rows"]
        return (
            f"embedded:desk answers on the {running.name} path, with the log-probs of a plain forward; "
            f"linears {running.linears}; updates take {rows} rows"
        )

    async def determinism(self) -> str:
        first, second = [await self._rollout() for _ in range(2)]
        if first != second:
            raise _StageFailed("the same seed gave other tokens the second time")
        return f"{sum(map(len, first))} tokens came out the same twice"

    async def _rollout(self) -> list[list[int]]:
        scenarios = self.trainer.environment.scenarios("train")[:2]
        groups = await self.trainer.generate_trajectories(scenarios)
        return [member.token_ids for group in groups for member in group.trajectories]

    async def training_step(self) -> str:
        before = {name: weight.clone() for name, weight in self.trainer.learner.weights().items()}
        metrics = await self.trainer.step()
        norm = metrics.get("optimizer/grad_norm", math.nan)
        after = self.trainer.learner.weights()
        if not math.isfinite(norm) or all(after[name].equal(weight) for name, weight in before.items()):
            raise _StageFailed(f"a step on the desk changed no weight (gradient norm {norm})")
        return f"gradient norm {norm:.2f}, {metrics['tokens/per_second']:,.0f} sampled tokens/s"

    async def checkpoint(self) -> str:
        path = await self.trainer.save_checkpoint()
        second_trainer = self.make_trainer()
        try:
            await second_trainer.load_checkpoint(path)
            restored, current = second_trainer.learner.weights(), self.trainer.learner.weights()
            is_equal = all(restored[name].equal(current[name]) for name in current)
            if second_trainer.step_number != 1 or not is_equal:
                raise _StageFailed("a checkpoint came back with other weights")
        finally:
            await second_trainer.close()
        return "written, read back, equal in every bit"

    async def close(self) -> None:
        if self.trainer is not None:
            await self.trainer.close()


# ------------------------------------------------------------------------------ diagnose


def run_diagnose(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 if a check fails; with `--strict` also for a warning and before the first step."""
    from stateset_agents.tracking.diagnostics import all_passed, diagnose
    from stateset_agents.tracking.run_log import RunLog

    findings = diagnose(RunLog.open(args.run_folder))
    if args.json:
        result = {"all_passed": all_passed(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(result, indent=2))
    else:
        print(
            "\n".join(shown(str(finding)) for finding in findings)
            or "no step has finished yet: nothing to diagnose"
        )
    passed = (
        bool(findings) and all_passed(findings)
        if args.strict
        else all(finding.verdict != "fail" for finding in findings)
    )
    return int(not passed)
