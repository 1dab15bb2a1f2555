"""A real language model learns a desk: base, after a warm start, after reinforcement, on one table.

    make demo-llm                                            # or, with more say:
    .venv/bin/python examples/warm_start_and_grpo.py --seed 1 --output runs/llm-1

SmolLM2-135M-Instruct (`make smollm2` fetches it) calls no tool by itself. It is shown a few conversations of
an honest agent in other scenarios, then trained by GRPO on the environment's own verdict: the retail desk's,
or that of tau2's tasks (`--config examples/tau2_with_smollm2.yaml`). Each stage is kept in the output folder,
the measurements of base and warm start by a hash of all that they depend on: called again after a break, the
program goes on where it was. Two controls stand beside it: `--shuffle` gives every conversation of a step
another one's reward, and `--sft-only` with more `--sft-epochs` spends the time of both on the warm start.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stateset_agents import MultiTurnAgent, RewardFunction, SFTConfig, SFTTrainer
from stateset_agents.cli.run_settings import overrides
from stateset_agents.core.reward import EnvironmentReward, RewardResult
from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
from stateset_agents.evaluation.evaluator import held_out
from stateset_agents.runtime.machine import peak_memory
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment
from stateset_agents.training.experiment import (
    EvaluationConfig,
    Experiment,
    ExperimentConfig,
    load_experiment,
    measure,
)
from stateset_agents.types.errors import RewardFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

HERE = Path(__file__).parent
WARM_START: dict[str, Any] = {
    "learning_rate": 1e-4,
    "validation_share": 0.1,
    "eval_steps": 20,
}


class ShuffledReward(RewardFunction):
    """The control: everybody gets the reward of somebody else in the group, so nothing can be learned."""

    name = "shuffled"
    scope = "group"
    local = True

    def __init__(self, seed: int = 0) -> None:
        self._reward = EnvironmentReward()
        self._dice = random.Random(seed)

    async def score(self, trajectory: Trajectory) -> RewardResult:
        return await self._reward.score(trajectory)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        results = await self._reward.score_group(trajectories)
        self._dice.shuffle(results)
        # What single turns earned fits no conversation of another length.
        return [one if isinstance(one, RewardFailure) else replace(one, turn_rewards=()) for one in results]


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "desk_with_smollm2.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/llm"), help="a folder for all stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=24, help="honest conversations (default 24)")
    parser.add_argument("--episodes", type=int, help="held-out scenarios of each measurement (default all)")
    parser.add_argument("--sft-epochs", type=int, default=10, help="times they are shown (default 10)")
    parser.add_argument("--sft-batch-size", type=int, default=4, help="conversations of a step (default 4)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting")
    parser.add_argument("--shuffle", action="store_true", help="control: rewards of other conversations")
    parser.add_argument("--sft-only", action="store_true", help="beside it: no GRPO")
    return parser.parse_args()


def digest(*parts: Any) -> str:
    """A name for all that a measurement depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


async def measured(
    name: str, config: ExperimentConfig, model: str | Path, output: Path, episodes: int | None
) -> dict[str, Any]:
    """Success on held-out scenarios; kept in the output folder."""
    agent_config = config.agent.model_copy(update={"model_name": str(model)})
    evaluation = (config.evaluation or EvaluationConfig()).model_copy(update={"episodes": episodes})
    weights = Path(model) / "model.safetensors"
    which = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else str(model)
    key = digest(which, agent_config.model_dump(exclude={"model_name"}), config.environment, evaluation)
    file = output / f"{name}-{key}.json"
    if not file.is_file():
        environment, began = make_environment(config.environment), time.process_time()
        async with MultiTurnAgent(agent_config) as agent:
            limits = config.training.rollout_limits()
            summary, _ = await measure(agent, environment, EnvironmentReward(), evaluation, limits)
        file.write_text(json.dumps({**summary, "cpu_seconds": time.process_time() - began}, indent=2))
    result: dict[str, Any] = json.loads(file.read_text())
    print(line(name, result), flush=True)
    return result


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = result["interval"]
    shares = result.get("violations", {})
    broken = f"broken rules {shares.get('any', {}).get('value', 0.0):.1%}"
    if "changes" in shares:
        broken += f", forbidden changes {shares['changes']['value']:.1%}"
    greedy = f", greedy {result['greedy']:.1%}"
    return (
        f"{name:<12} success {result['success']:.1%} [{low:.1%}, {high:.1%}]{greedy}, "
        f"{broken}, n = {result['n']}"
    )


def check_folder(config: ExperimentConfig, options: argparse.Namespace) -> None:
    """Leave the program where the output folder's warm start is of other settings than these."""
    file = options.output / "warm-start-settings.json"
    settings = {
        "--seed": options.seed,
        "--demonstrations": options.demonstrations,
        "--sft-epochs": options.sft_epochs,
        "--sft-batch-size": options.sft_batch_size,
        "agent.model_name": str(config.agent.model_name),
        "environment": json.loads(json.dumps(config.environment, default=str)),
    }
    if file.is_file():
        for name, before in json.loads(file.read_text()).items():
            if settings[name] != before:
                sys.exit(
                    f"{options.output} was begun with {name} {before}, not {settings[name]}: name another "
                    "--output"
                )
    file.write_text(json.dumps(settings, indent=2))


def one_of_each_pair(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Twins begin alike, and one thing in the world tells them apart: of a family's pairs the first twin and
    the second in turn, so that few conversations are of many callers."""
    pairs: dict[object, list[Scenario]] = {}
    for scenario in scenarios:
        pairs.setdefault(scenario.context.get("pair", scenario.id), []).append(scenario)
    turns: Counter[str] = Counter()
    chosen = []
    for pair in pairs.values():
        family = pair[0].family
        chosen.append(pair[turns[family] % len(pair)])
        turns[family] += 1
    return chosen


async def warm_started(config: ExperimentConfig, options: argparse.Namespace) -> Path:
    """The folder of the fine-tuned model; goes on with a warm start that broke off."""
    output = options.output / "warm-start"
    shown = options.output / "honest.jsonl"
    if not shown.is_file():
        # The environment's own seed chooses the scenarios: GRPO trains on others.
        desk = make_environment(
            {**config.environment, "seed": 1_000_003, "num_train": 2 * options.demonstrations}
        )
        scenarios = one_of_each_pair(held_out(desk, "train", None))[: options.demonstrations]
        talks = await demonstrate(desk, scenarios, scripted_agent_of(desk, "honest"))
        shown.write_text("".join(json.dumps(chat) + "\n" for chat in talks.chats), encoding="utf-8")
    runs = sorted(output.glob("*-sft"))
    settings = SFTConfig(
        **WARM_START,
        num_train_epochs=options.sft_epochs,
        per_device_train_batch_size=options.sft_batch_size,
        output_dir=str(output),
        seed=options.seed,
        precision=config.training.precision,
    )
    folder = RunFolder.open(runs[-1]) if runs else None
    trainer = SFTTrainer(MultiTurnAgent(config.agent), shown, settings, run=folder)
    if folder is not None and RunLog(folder).summary().get("ended") == "finished":
        return (folder.path / "checkpoints" / "best" / "model").resolve()
    async with trainer:
        if folder is not None:
            await trainer.load_checkpoint()
        await trainer.train()
        return trainer.model_folder.resolve()


async def reinforced(
    config: ExperimentConfig, options: argparse.Namespace, before: dict[str, Any]
) -> Experiment:
    """GRPO from the warm start, whose measurement the report shows beside what comes after; or on from
    the checkpoint of a run that broke off."""
    output = options.output / ("shuffled" if options.shuffle else "grpo")
    training = config.training.model_copy(update={"output_dir": str(output)})
    runs = sorted(output.glob(f"*-{config.training.run_name}"))
    reward = (
        {"name": "warm_start_and_grpo:ShuffledReward", "seed": options.seed}
        if options.shuffle
        else config.reward
    )
    config = config.model_copy(update={"training": training, "reward": reward})
    experiment = Experiment(config, run=RunFolder.open(runs[-1]) if runs else None)
    async with experiment:
        if not experiment.is_over:
            experiment.summary["before"] = before
            await experiment.train()
            await experiment.after()
    return experiment


async def main() -> None:
    """All stages that are not done yet."""
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    named = {"training.seed": options.seed, "evaluation.episodes": options.episodes}
    config = load_experiment(options.config, overrides(options.set, named))
    check_folder(config, options)
    began, clock = time.process_time(), time.monotonic()
    results = {
        "base": await measured("base", config, config.agent.model_name, options.output, options.episodes)
    }
    model = await warm_started(config, options)
    results["warm start"] = await measured("warm start", config, model, options.output, options.episodes)
    if not options.sft_only:
        agent = config.agent.model_copy(update={"model_name": str(model)})
        experiment = await reinforced(
            config.model_copy(update={"agent": agent}), options, results["warm start"]
        )
        results["after GRPO"] = experiment.summary["after"]
        print(line("after GRPO", results["after GRPO"]))
        print(f"report: {experiment.run.report}")
        print(f"talk to it: stateset-agents chat --model {experiment.run.path}")
    (options.output / "results.json").write_text(json.dumps(results, indent=2))
    seconds, minutes = time.process_time() - began, (time.monotonic() - clock) / 60
    peak = peak_memory().get("memory/peak_mib", 0.0)
    print(f"this call: {minutes:.0f} minutes, {seconds:.0f} CPU seconds, at most {peak:,.0f} MiB")


if __name__ == "__main__":
    asyncio.run(main())
