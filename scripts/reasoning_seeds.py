"""Does an agent learn to think, and is it the thinking that pays? Five seeds, and what they are held against.

    python -m scripts.reasoning_seeds
    python -m scripts.reasoning_seeds --write  # the table of docs/evidence/reasoner-seeds.md too

- reinforced: the training of examples/reason.yaml, of `embedded:reasoner`;
- without thinking: the same from a model whose warm start had as many tokens and never a thought;
- fine-tuned: from the same start, on careful replies to training problems, for the CPU time of `reinforced`;
- never in the format: `reinforced` from a model whose habit is the bare answer, without a thought or tags;
- format required: the same, its replies kept to the format by a grammar.

Held-out are 300 expressions of 2 to 4 operations and, one level deeper than any in training, 100 of 5. What
is there already (runs/reasoning-seeds/WAY-SEED.json) is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.page_tables import mean_and_range, write_table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "reason.yaml"
PAGE = "evidence/reasoner-seeds.md"
WAYS = ("reinforced", "without thinking", "fine-tuned", "never in the format", "format required")


async def measured(agent: Any, environment: Any, config: Any) -> dict[str, Any]:
    """Success, format and steps on the held-out problems of an environment."""
    from stateset_agents.rewards.reasoning import create_reasoning_reward
    from stateset_agents.training.experiment import measure
    from stateset_agents.training.loop.metrics import reasoning_metrics

    limits = config.training.rollout_limits()
    summary, sampled = await measure(agent, environment, create_reasoning_reward(), config.evaluation, limits)
    played = [trajectory for group in sampled.groups for trajectory in group.trajectories]
    metrics = reasoning_metrics(played)
    by_level: dict[int, list[int]] = {}
    for trajectory in played:
        level = int(trajectory.scenario.context["difficulty"])
        by_level.setdefault(level, []).append(bool(trajectory.success))
    return {
        "sampled": summary["success"],
        "interval": summary["interval"],
        "greedy": summary["greedy"],
        "pass_at_8": sampled.pass_at[8].value,
        "format": metrics.get("reasoning/format", 0.0),
        "steps": metrics.get("reasoning/steps", 0.0),
        "steps_by_difficulty": metrics.get("reasoning/steps_by_difficulty"),
        "levels": {level: fmean(right) for level, right in sorted(by_level.items())},
    }


class Budget:
    """Ends a fine-tuning once it has used so much processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.process_time()

    def on_train_begin(self, trainer: Any) -> None:
        self._trainer = trainer
        self._began = time.process_time()

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if time.process_time() - self._began >= self._seconds:
            self._trainer.request_stop()


async def play(way: str, seed: int, model: str, seconds: float) -> dict[str, Any]:
    """Before and after a training; what is given back is JSON."""
    from stateset_agents.training.components import make_environment
    from stateset_agents.training.experiment import Experiment, load_experiment

    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "agent.model_name": model,
            "training.seed": seed,
            "training.output_dir": folder,
            "training.save_steps": 0,
            "training.log_rollouts": False,
            "training.progress": False,
        }
        if way == "format required":
            changes |= {"environment.reply_format": "required", "agent.constrain": "strict"}
        config = load_experiment(str(CONFIG), changes)
        problems = make_environment(config.environment)
        deeper = make_environment({**config.environment, "min_operations": 5, "max_operations": 5})
        result: dict[str, Any] = {"way": way, "seed": seed}

        async def look(stage: str, agent: Any) -> None:
            result[stage] = await measured(agent, problems, config)
            result[f"{stage}, deeper"] = await measured(agent, deeper, config)

        if way == "fine-tuned":
            from stateset_agents import MultiTurnAgent, SFTConfig, SFTTrainer
            from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of

            shown = await demonstrate(
                problems, problems.scenarios("train"), scripted_agent_of(problems, "honest")
            )
            settings = SFTConfig(
                learning_rate=5e-4, max_steps=100_000, per_device_train_batch_size=32, validation_share=0.0
            ).model_copy(update={"seed": seed, "output_dir": folder, "save_steps": 0, "progress": False})
            async with SFTTrainer(
                MultiTurnAgent(config.agent), shown.chats, settings, callbacks=[Budget(seconds)]
            ) as trainer:
                await look("before", trainer.agent)
                began = time.process_time()
                await trainer.train()
                result["cpu_seconds"] = time.process_time() - began
                await look("after", trainer.agent)
            return result
        async with Experiment(config, measures=False) as experiment:
            await look("before", experiment.trainer.agent)
            began = time.process_time()
            await experiment.train()
            result["cpu_seconds"] = time.process_time() - began
            await look("after", experiment.trainer.agent)
        return result


def child(way: str, seed: int, model: str, seconds: float, file: Path) -> None:
    """One training in a process of its own."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = asyncio.run(play(way, seed, model, seconds))
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(results))
    beside.replace(file)


def build_bare(folder: Path) -> None:
    """The model that can think, and is in the habit of bare answers."""
    import torch

    from scripts.build_embedded import build_embedded

    torch.set_num_threads(1)
    build_embedded(folder, model="reasoner", habits={"careful": 1e-9, "bare": 1.0})


def build_control(folder: Path) -> None:
    """The model that was never shown a thought, after a warm start of as many tokens."""
    import torch

    from scripts.build_embedded import build_embedded
    from scripts.embedded_models import reasoner

    torch.set_num_threads(1)
    never = {"empty": 1.0}
    with tempfile.TemporaryDirectory() as short:
        probes = [
            build_embedded(
                Path(short) / str(n), model="reasoner", steps=1, dialogues=300, habits=habits
            ).mean_tokens
            for n, habits in enumerate((reasoner.BAD_HABITS, never))
        ]
    steps = round(reasoner.STEPS * probes[0] / probes[1])
    build_embedded(folder, model="reasoner", steps=steps, habits=never)


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: each way before and after, the mean of its seeds and their range."""
    lines = [
        "| | seeds | sampled | greedy | pass@8 | format | steps | rank correlation | 5 operations | CPU s |",
        "|---" * 10 + "|",
    ]
    for way, records in results.items():
        for stage in ("before", "after"):
            at = [record[stage] for record in records]
            if stage == "before":
                at = at[:1]  # the same model for all
            deeper = [record[f"{stage}, deeper"]["sampled"] for record in records][: len(at)]
            related = [one["steps_by_difficulty"] for one in at]
            cells = [
                "" if stage == "before" else str(len(records)),
                mean_and_range([one["sampled"] for one in at]),
                mean_and_range([one["greedy"] for one in at]),
                mean_and_range([one["pass_at_8"] for one in at]),
                mean_and_range([one["format"] for one in at]),
                f"{fmean(one['steps'] for one in at):.2f}",
                "-" if None in related else f"{fmean(related):.2f}",
                mean_and_range(deeper),
                "" if stage == "before" else f"{fmean(record['cpu_seconds'] for record in records):.0f}",
            ]
            lines.append(f"| {way}, {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", default="embedded:reasoner")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/reasoning-seeds"), help="where results are kept"
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE}")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    control = chosen.folder / "control"
    if "without thinking" in chosen.ways and not (control / "recommended.yaml").is_file():
        build_control(control)
    bare = chosen.folder / "bare"
    if set(WAYS[3:]) & set(chosen.ways) and not (bare / "recommended.yaml").is_file():
        build_bare(bare)
    models = {"without thinking": control, "never in the format": bare, "format required": bare}
    apart = multiprocessing.get_context("spawn")
    seconds = 0.0
    for seed in range(chosen.seeds):
        for way in chosen.ways:
            file = chosen.folder / f"{way.replace(' ', '-')}-{seed}.json"
            model = str(models.get(way, chosen.model))
            if not file.exists():
                started = time.monotonic()
                process = apart.Process(target=child, args=(way, seed, model, seconds, file))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{file.stem} failed")
                print(f"{file.stem}: {time.monotonic() - started:.0f} s", flush=True)
            if way == "reinforced":
                seconds = json.loads(file.read_text())["cpu_seconds"]
    results = {}
    for way in WAYS:  # those of other calls, too
        files = [chosen.folder / f"{way.replace(' ', '-')}-{seed}.json" for seed in range(chosen.seeds)]
        if records := [json.loads(file.read_text()) for file in files if file.exists()]:
            results[way] = records
    made = table(results)
    print(made)
    if chosen.write:
        write_table(PAGE, "seeds", made)


if __name__ == "__main__":
    main()
