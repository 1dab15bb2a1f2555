"""A student of half the teacher's size: by imitation, by the teacher's word on its own, by reinforcement.

    python -m scripts.half_size_student
    python -m scripts.half_size_student --write  # the table of docs/evidence/half-size-student.md too

The teacher is `embedded:reasoner` after 300 steps of examples/reason.yaml. The student has two layers of
a third of the inner width, and the same recipe: it can compute a little, and has the same bad habits. From
there three ways, each of which begins anew:

- traces: fine-tuning on what of the teacher's replies to training problems is right;
- on-policy: the student talks, and the teacher's log-probs of its tokens are their advantages;
- GRPO: examples/reason.yaml, for the student.

Every other step the 150 validation problems are played once, at the end the 300 of the test, four times each.
What is there already (runs/half-size-student/SEED/WAY.json) is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.learning_curves import Watch
from scripts.page_tables import mean_and_range, write_table

CONFIG = "examples/reason.yaml"
NETWORK = {"num_hidden_layers": 2, "intermediate_size": 96}
WAYS = ("traces", "on-policy", "GRPO")
NEAR = 0.03
"""So close to its teacher's success a student counts as arrived."""


def recipe(seed: int, steps: int) -> Any:
    """The reasoner's, for a network half as large."""
    from scripts.embedded_models import reasoner

    return replace(reasoner.recipe(seed=seed, steps=steps), network=NETWORK)


def experiment(model: Path | str, seed: int, changes: Mapping[str, Any]) -> Any:
    """The example's, for a model."""
    from stateset_agents.training.experiment import load_experiment

    settings = {"seed": seed, "save_steps": 0, "log_rollouts": False, "progress": False, **changes}
    named = {f"training.{name}": value for name, value in settings.items()}
    return load_experiment(CONFIG, {"agent.model_name": str(model), **named})


async def tested(agent: Any, config: Any) -> list[float]:
    """Success on the test's problems, four tries each, and its interval."""
    from stateset_agents.core.reward import EnvironmentReward
    from stateset_agents.evaluation.evaluator import evaluate, held_out
    from stateset_agents.training.components import make_environment

    environment = make_environment(config.environment)
    found = await evaluate(
        agent, environment, EnvironmentReward(), held_out(environment, "test", None), tries=4
    )
    assert found.success is not None
    assert found.interval is not None
    return [found.success, *found.interval]


async def teach(folder: Path, seed: int) -> dict[str, Any]:
    """Train the teacher."""
    from stateset_agents.training.experiment import Experiment

    config = experiment("embedded:reasoner", seed, {"output_dir": str(folder / "runs"), "max_steps": 300})
    async with Experiment(config, measures=False) as trained:
        await trained.train()
        agent = trained.trainer.agent
        await agent.save_pretrained(folder / "teacher")
        return {"test": await tested(agent, config)}


async def reinforced(folder: Path, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A training of the student on its own words."""
    from stateset_agents.training.experiment import Experiment

    settings = {"output_dir": str(folder / "runs"), "eval_steps": 2, "eval_episodes": 150, **changes}
    config = experiment(folder / "student", seed, settings)
    watch = Watch()
    async with Experiment(config, callbacks=[watch], measures=False) as trained:
        await trained.train()
        test = await tested(trained.trainer.agent, config)
    so_far = [0.0, *accumulate(watch.tokens)]
    curve = [[so_far[step], fmean(map(int, marks))] for step, marks in watch.validation.items()]
    return {"test": test, "tokens": so_far[-1], "cpu_seconds": sum(watch.cpu), "curve": curve}


async def imitated(folder: Path, seed: int, samples: int, steps: int) -> dict[str, Any]:
    """A fine-tuning of the student on the teacher's verified replies."""
    from stateset_agents import MultiTurnAgent
    from stateset_agents.reasoning import ReasoningDistillation
    from stateset_agents.training.components import make_environment

    config = experiment(folder / "student", seed, {})
    environment = make_environment(config.environment)
    agents = [MultiTurnAgent(experiment(folder / name, seed, {}).agent) for name in ("teacher", "student")]
    for agent in agents:
        await agent.initialize()
    distillation = ReasoningDistillation(*agents, environment=environment)
    traces = await distillation.generate_distillation_data(samples=samples, temperature=1.0, seed=seed)
    began = time.process_time()
    distilled = await distillation.train_student(
        traces,
        measure_on=environment.scenarios("test")[:2],
        output_dir=str(folder / "runs"),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        validation_share=0.0,
        seed=seed,
        save_steps=0,
        progress=False,
    )
    spent = time.process_time() - began
    found = {"test": await tested(distilled.agent, config), "tokens": None, "cpu_seconds": spent}
    await distillation.close()
    return {**found, "traces": len(traces.kept)}


async def play(folder: Path, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One seed: the teacher, the student as it begins, and each way."""
    from stateset_agents import MultiTurnAgent

    async def untaught() -> dict[str, Any]:
        config = experiment(folder / "student", seed, {})
        async with MultiTurnAgent(config.agent) as agent:
            return {"test": await tested(agent, config)}

    distillation = {"teacher": str(folder / "teacher")}
    ways: Mapping[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "teacher": partial(teach, folder, seed),
        "student": untaught,
        "traces": partial(imitated, folder, seed, chosen.samples, chosen.sft_steps),
        "on-policy": partial(
            reinforced, folder, seed, {"distillation": distillation, "max_steps": chosen.steps, "beta": 0.0}
        ),
        "GRPO": partial(reinforced, folder, seed, {"max_steps": chosen.steps}),
    }
    record: dict[str, Any] = {"seed": seed}
    for way, training in ways.items():
        file = folder / f"{way}.json"
        if not file.exists():
            file.write_text(json.dumps(await training()))
            print(seed, way, file.read_text(), flush=True)
        record[way] = json.loads(file.read_text())
    return record


def arrival(record: Mapping[str, Any], way: str) -> float | None:
    """Sampled tokens when the validation success first was near the teacher's test success."""
    wanted = record["teacher"]["test"][0] - NEAR
    return next((tokens for tokens, success in record[way].get("curve", ()) if success >= wanted), None)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: means over the seeds, and their range."""
    lines = [
        "| | test success | behind the teacher, points | sampled tokens | within 3 points after | CPU s |",
        "|---" * 6 + "|",
    ]
    teachers = [record["teacher"]["test"][0] for record in records]
    for name in ("teacher", "student", *WAYS):
        at = [record[name] for record in records]
        success = [one["test"][0] for one in at]
        cells = [mean_and_range(success), "", "", "", ""]
        if name in WAYS:
            behind = (teacher - own for teacher, own in zip(teachers, success, strict=True))
            cells[1] = f"{100 * fmean(behind):.1f}"
            cells[4] = f"{fmean(one['cpu_seconds'] for one in at):.0f}"
        if name in WAYS[1:]:
            arrived = [arrival(record, name) for record in records]
            reached = [tokens for tokens in arrived if tokens is not None]
            cells[2] = f"{fmean(one['tokens'] for one in at):,.0f}"
            cells[3] = f"{fmean(reached):,.0f} ({len(reached)} of {len(arrived)})" if reached else "never"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    import torch

    from scripts.build_embedded import build_recipe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of 64 conversations")
    parser.add_argument("--samples", type=int, default=1, help="of the teacher for each training problem")
    parser.add_argument("--sft-steps", type=int, default=1200, help="of 32 traces")
    parser.add_argument("--student-steps", type=int, default=2800, help="of the student's own warm start")
    parser.add_argument("--folder", type=Path, default=Path("runs/half-size-student"))
    parser.add_argument("--write", action="store_true", help="write the table into its page of docs/evidence")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    records = []
    for seed in range(chosen.seeds):
        folder = chosen.folder / str(seed)
        if not (folder / "student" / "recommended.yaml").is_file():
            built = build_recipe(folder / "student", recipe(seed, chosen.student_steps), seed=seed)
            print(f"{built.num_parameters:,} parameters, {built.seconds:.0f} s", flush=True)
        records.append(asyncio.run(play(folder, seed, chosen)))
    made = table(records)
    print(made)
    if chosen.write:
        write_table("evidence/half-size-student.md", "half-size", made)


if __name__ == "__main__":
    main()
