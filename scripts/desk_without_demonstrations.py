"""SmolLM2 learns the retail desk under a grammar, without a demonstration: seeds, controls, measurements.

    python -m scripts.desk_without_demonstrations                  # go on where the last call stopped
    python -m scripts.desk_without_demonstrations --only base "seed 0" --steps 12
    python -m scripts.desk_without_demonstrations --table          # print docs' table
    python -m scripts.desk_without_demonstrations --table --write  # put it into the page

- base: the model as it is, with the grammar and without;
- seed 0, 1, 2: GRPO from there: first two replies, of which the grammar lets one look something up and one
  change something, and the right ones are paid for; then examples/desk_with_grammar.yaml, whole conversations
  of all six families, with a bias for calls that falls to nothing;
- unmasked: seed 0 with an update that takes each token's log-prob among all tokens, forced ones too;
- warm start: fine-tuned on 24 conversations by examples/warm_start_and_grpo.py, measured with the grammar;
- warm start, GRPO: seed 0 from there.

A measurement is 240 held-out scenarios with the grammar and 120 without (or --episodes), each sampled and
greedy. Those of as many that scripts/desk_without_demonstrations.json holds are not made again; a training
goes on from the newest checkpoint of its folder under --output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import commit
from benchmarks.processors import this_processor
from scripts.page_tables import write_table
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.types.scenario import Scenario

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "desk_with_grammar.yaml"
RESULTS = Path(__file__).with_suffix(".json")
PAGE = "evidence/desk-without-demonstrations.md"
EPISODES: Mapping[str, int] = {"grammar": 240, "free": 120}
"""Held-out scenarios of a measurement with the grammar, and without."""
CHANGE: Mapping[str, Any] = {
    "training.run_name": "change",
    "training.max_steps": 16,
    "training.per_device_train_batch_size": 8,
    "training.num_generations": 6,
    "training.advantage_clip": 3,
    "training.entropy_coef": 0.02,  # over the choices that the grammar leaves
    "training.reward_weights": {"checked": 1, "acted": 3, "tool_errors": 2},
    "environment.name": "scripts.desk_without_demonstrations:GrantedDesk",
    "environment.families": ["cancel", "address", "return", "lost_parcel"],
    "environment.tool_choice": "read, write",
    "environment.max_turns": 2,
}
"""The first stage, by what differs from the file: a look-up, then a change, of requests that are granted; the
right ones are paid for."""
CALL_BIAS: Mapping[str, Any] = {"training.call_bias": 4.0, "training.call_bias_steps": 16}
"""In whole conversations: how the second reply comes to call again."""
STAGES: Mapping[str, Mapping[str, Any]] = {"change": CHANGE, "desk": {}}


class GrantedDesk(RetailDesk):
    """The desk's requests that are granted: where the second reply has to change something, a denial could
    only be got wrong."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """Those of the split whose right answer is no refusal."""
        return [scenario for scenario in super().scenarios(split) if not self.is_denial(scenario)]


@dataclass(frozen=True)
class Row:
    """A row of the table: a model, and how it came about."""

    name: str
    seed: int = 0
    steps: int = 0
    """Of GRPO; 0 measures the model that it begins with."""
    is_masked: bool = True
    warm_start: bool = False


def rows(steps: int) -> list[Row]:
    """All rows, in the order in which they are made."""
    return [
        Row("base"),
        Row("seed 0", 0, steps),
        Row("unmasked", 0, steps, is_masked=False),
        Row("seed 1", 1, steps),
        Row("seed 2", 2, steps),
        Row("warm start", warm_start=True),
        Row("warm start, GRPO", 0, steps, warm_start=True),
    ]


def unmask() -> None:
    """Makes every update of this process one of all tokens: replies forget their grammar, and pi_old is taken
    anew among all tokens, as a trainer does that leaves the grammar to the sampler."""
    from dataclasses import replace

    from stateset_agents.core.chat.replies.parsing import ReplyParser
    from stateset_agents.training.update.objective import Objective

    read, make = ReplyParser.read_completion, Objective.__init__

    def forgetful(self: Any, *args: Any, **more: Any) -> Any:
        return replace(read(self, *args, **more), constraint=None, forced=())

    def inexact(self: Any, *args: Any, **more: Any) -> None:
        make(self, *args, **{**more, "exact_logprobs": False})

    ReplyParser.read_completion = forgetful  # type: ignore[method-assign]  # on purpose
    Objective.__init__ = inexact  # type: ignore[method-assign]  # on purpose


async def measured(config: Any, model: str, how: str, episodes: int) -> dict[str, Any]:
    """Held-out success of a model, with the grammar or without."""
    from stateset_agents import MultiTurnAgent
    from stateset_agents.core.reward import EnvironmentReward
    from stateset_agents.training.components import make_environment
    from stateset_agents.training.experiment import measure

    changes: dict[str, Any] = {"model_name": model}
    environment = dict(config.environment)
    if how == "free":
        changes["constrain"] = "off"
        del environment["tool_choice"]
    evaluation = config.evaluation.model_copy(update={"episodes": episodes})
    began = time.process_time()
    async with MultiTurnAgent(config.agent.model_copy(update=changes)) as agent:
        limits, desk = config.training.rollout_limits(), make_environment(environment)
        summary, sampled = await measure(agent, desk, EnvironmentReward(), evaluation, limits)
    played = [trajectory for group in sampled.groups for trajectory in group.trajectories]
    calls = sum(any(message.tool_calls for message in one.messages) for one in played)
    kept = ("success", "interval", "greedy", "greedy_interval", "n", "violations", "families")
    seconds = round(time.process_time() - began)
    return {**{name: summary[name] for name in kept}, "with_a_call": calls, "cpu_seconds": seconds}


async def trained(config: Any, runs: list[Path]) -> tuple[str, list[dict[str, float]]]:
    """The run folder after its steps, and how they went; goes on from the newest checkpoint of `runs`."""
    from stateset_agents.tracking.run_folder import RunFolder
    from stateset_agents.training.experiment import Experiment

    experiment = Experiment(config, run=RunFolder.open(runs[-1]) if runs else None, measures=False)
    async with experiment:
        if not experiment.is_over:
            await experiment.train()
            await experiment.after()
        lines = [json.loads(line) for line in experiment.run.metrics.read_text().splitlines()]
        return str(experiment.run.path), [curve(line) for line in lines if "step" in line]


def curve(step: Mapping[str, Any]) -> dict[str, float]:
    """What a step's metrics say of learning."""
    names = {
        "success": "success/rate",
        "reward": "reward/mean",
        "entropy": "policy/entropy",
        "seconds": "time/step",
    }
    return {short: round(step[name], 4) for short, name in names.items() if name in step}


def warm_started(folder: Path) -> str:
    """The model of the warm start, made by the program of docs/real-model.md."""
    best = sorted(folder.glob("warm-start/*-sft/checkpoints/best/model"))
    if not best:
        program = ROOT / "examples" / "warm_start_and_grpo.py"
        sys.argv = [str(program), "--sft-only", "--episodes", "6", "--output", str(folder)]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
        best = sorted(folder.glob("warm-start/*-sft/checkpoints/best/model"))
    return str(best[-1].resolve())


def make(row: Row, output: Path, episodes: Mapping[str, int]) -> None:
    """Train and measure what is missing of a row, and write it into the results at once."""
    from stateset_agents.training.experiment import load_experiment

    results = read_results()
    label = f"{row.name}, {row.steps} steps" if row.steps else row.name
    entry = results.setdefault(label, {"row": row.name, "seed": row.seed, "steps": row.steps})
    missing = [how for how, number in episodes.items() if entry.get(how, {"n": 0})["n"] < number]
    if not missing:
        return
    name = row.name.replace(", ", "-").replace(" ", "-")
    named: dict[str, Any] = {"training.seed": row.seed, "training.output_dir": str(output / name)}
    named["agent.matmul_precision"] = "medium"  # bf16 products where a processor has them
    if row.warm_start:
        named["agent.model_name"] = warm_started(output / "warm")
    if row.steps:
        named["training.max_steps"] = row.steps
    if not row.is_masked:
        named["training.importance"] = "none"  # ratio 1, as in trainers that take pi_old anew
        unmask()
    stages = [name for name in STAGES if name == "desk" or not row.warm_start] if row.steps else []
    for stage in stages:
        runs = sorted((output / name).glob(f"*-{stage}"))
        if stage == "desk" and not row.warm_start:
            named |= CALL_BIAS
        model, learning = asyncio.run(trained(load_experiment(CONFIG, {**named, **STAGES[stage]}), runs))
        entry.setdefault("learning", {})[stage] = learning
        named["agent.model_name"] = model
        save(label, entry)
    config = load_experiment(CONFIG, named)
    model = str(config.agent.model_name)
    for how in missing:
        entry[how] = asyncio.run(measured(config, model, how, episodes[how]))
        save(label, entry)
        print(f"{label}, {how}: {share(entry[how])}", flush=True)


def save(label: str, entry: dict[str, Any]) -> None:
    """Write a row as it is so far into the results."""
    entry |= {"commit": commit(), "processor": this_processor().key}
    RESULTS.write_text(json.dumps({**read_results(), label: entry}, indent=1) + "\n")


def read_results() -> dict[str, Any]:
    """The rows so far, by their names and steps."""
    made: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return made


def share(result: Mapping[str, Any]) -> str:
    """`45.0 % [33.1, 57.5] of 60; greedy 60.0 %`."""
    low, high = (f"{100 * bound:.1f}" for bound in result["interval"])
    greedy = f"greedy {100 * result['greedy']:.1f} %"
    return f"{100 * result['success']:.1f} % [{low}, {high}] of {result['n']}; {greedy}"


def table() -> str:
    """Markdown: what is measured, and what is not yet."""
    lines = [
        "| | steps | with the grammar [95 %] | without it | calls without it | broken rules | processor |",
        "|---" * 7 + "|",
    ]
    results = read_results()
    for row in rows(0):
        entries = [entry for entry in results.values() if entry["row"] == row.name and "grammar" in entry]
        for entry in entries:
            free = entry.get("free")
            cells = [
                row.name,
                str(entry["steps"] or ""),
                share(entry["grammar"]),
                share(free) if free else "not yet measured",
                f"{free['with_a_call']} of {free['n']}" if free else "",
                f"{100 * entry['grammar']['violations']['any']['value']:.1f} %",
                entry["processor"],
            ]
            lines.append(f"| {' | '.join(cells)} |")
        if not entries:
            lines.append(f"| {row.name} | | not yet measured | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[row.name for row in rows(1)], metavar="ROW")
    parser.add_argument("--steps", type=int, default=18, help="of whole conversations (default 18)")
    parser.add_argument("--episodes", type=int, help="held-out scenarios, with the grammar and without")
    parser.add_argument("--output", type=Path, default=Path("runs/without-demonstrations"))
    parser.add_argument("--table", action="store_true", help="print the table, and make nothing")
    parser.add_argument("--write", action="store_true", help=f"put it into docs/{PAGE}")
    chosen = parser.parse_args()
    apart = multiprocessing.get_context("spawn")
    episodes = {how: chosen.episodes or number for how, number in EPISODES.items()}
    if not chosen.table:
        for row in rows(chosen.steps):
            if chosen.only is None or row.name in chosen.only:
                # In a process of its own: the control changes what it imports.
                process = apart.Process(target=make, args=(row, chosen.output, episodes))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{row.name} failed")
    made = table()
    print(made)
    if chosen.write:
        write_table(PAGE, "rows", made)


if __name__ == "__main__":
    main()
