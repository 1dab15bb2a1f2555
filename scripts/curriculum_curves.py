"""Does a curriculum learn arithmetic faster than none, at as many sampled tokens?

The runs are those of examples/reason.yaml with nothing changed but one thing of docs/curriculum.md and the
seed, one torch thread each, stopped after 100 of the 300 steps. Every twenty steps the 100 validation
problems are played, at the end those of the test.

    python scripts/curriculum_curves.py          # a minute a run; again: only what is missing
    python scripts/curriculum_curves.py --write  # the table and picture of docs/curriculum.md too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.desk_curves import (
    ROOT,
    Runs,
    Watch,
    against,
    difference,
    picture,
    solved,
    spent,
    stored_runs,
    verdicts,
)

PAGE, PICTURE = ROOT / "docs" / "curriculum.md", ROOT / "docs" / "images" / "curriculum-curves.svg"
MARKS = ("<!-- curves -->", "<!-- /curves -->")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "staged": {
        "stages": [
            {"until": 0.1, "difficulty": 2},
            {"until": 0.2, "difficulty": [2, 3]},
            {"weights": {"format": 0.1, "answer": 1.0}},
        ]
    },
    "success-order": {"scenario_order": "success", "strata": "difficulty"},
    "success-sizes": {"group_sizes": "success", "strata": "difficulty"},
    "difficulty-sizes": {"group_sizes": "difficulty"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}
"""Way -> settings of `training`; the first is what the others are compared with."""


async def run(way: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; what is given back is JSON."""
    from stateset_agents.training.experiment import Experiment, load_experiment

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **WAYS[way],
            "seed": seed,
            "eval_steps": 20,
            "eval_episodes": 100,
            "save_steps": 0,
            "log_rollouts": False,
            "progress": False,
            "output_dir": folder,
        }
        changes = {f"training.{name}": value for name, value in settings.items()}
        watch = Watch(steps)
        config = load_experiment("examples/reason.yaml", changes)
        async with Experiment(config, callbacks=[watch], measures=False) as experiment:
            trainer = experiment.trainer
            before = verdicts(await trainer.evaluate())
            await experiment.train()
            number = len(trainer.environment.scenarios("test"))
            sampled = await trainer.evaluate("test", episodes=number)
    return {
        "seed": seed,
        "success": watch.success,
        "tokens": watch.tokens,
        "cpu": [round(seconds, 3) for seconds in watch.cpu],
        "validation": {0: before, **watch.validation},
        "test": verdicts(sampled),
    }


def play(way: str, seed: int, steps: int, file: Path) -> None:
    """One run in a process of its own."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = asyncio.run(run(way, seed, steps))
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(results))
    beside.replace(file)


def table(runs: Runs) -> str:
    """Markdown: success after as many tokens as the run that sampled least has, and against no curriculum."""
    first, *_ = runs
    tokens = min(spent(record, "tokens")[-1] for records in runs.values() for record in records)
    half = tokens / 2
    lines = [
        f"| | after {half / 1000:,.0f} thousand tokens | after {tokens / 1000:,.0f} thousand "
        f"| test, after all steps | points, against {first}: after {half / 1000:,.0f} "
        f"| after {tokens / 1000:,.0f} | test |",
        "|---" * 7 + "|",
    ]
    for name, records in runs.items():
        cells = [
            f"{fmean(fmean(solved(record, 'tokens', budget)) for record in records):.1%}"
            for budget in (half, tokens)
        ]
        cells.append(f"{fmean(fmean(map(int, record['test'])) for record in records):.1%}")
        if name == first:
            cells += ["", "", ""]
        else:
            cells += [against(runs, name, first, "tokens", budget) for budget in (half, tokens)]
            cells.append(
                difference(
                    [
                        [int(b) - int(a) for a, b in zip(record["test"], other["test"], strict=True)]
                        for record, other in zip(runs[first], runs[name], strict=True)
                    ]
                )
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="after which each run stops")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/curriculum-curves"), help="where runs are kept"
    )
    parser.add_argument("--write", action="store_true", help="write table and picture into docs/")
    chosen = parser.parse_args()
    if chosen.steps < 20 or chosen.steps % 20:
        parser.error(f"--steps must be a multiple of 20, when problems are played, got {chosen.steps}")
    chosen.folder = chosen.folder / f"{chosen.steps}-steps"
    chosen.folder.mkdir(parents=True, exist_ok=True)
    apart = multiprocessing.get_context("spawn")
    for seed in range(chosen.seeds):
        for way in chosen.ways:
            file = chosen.folder / f"{way.replace('-', '_')}-{seed}.json"
            if file.exists():
                continue
            started = time.monotonic()
            child = apart.Process(target=play, args=(way, seed, chosen.steps, file))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{file.stem} failed")
            print(f"{file.stem}: {time.monotonic() - started:.0f} s", flush=True)
    found, seeds = stored_runs(chosen.folder, [way.replace("-", "_") for way in chosen.ways])
    runs = {name.replace("_", "-"): records for name, records in found.items()}
    if not seeds:
        raise SystemExit("no seed has been played in every way yet")
    made = f"Seeds {', '.join(map(str, seeds))}.\n\n{table(runs)}"
    print(made)
    if chosen.write:
        PICTURE.write_text(picture(runs, "the validation problems"), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        if MARKS[0] not in page:
            raise SystemExit(f"{PAGE} has no {MARKS[0]}: say there where the table belongs")
        head, _, rest = page.partition(MARKS[0])
        _, _, tail = rest.partition(MARKS[1])
        PAGE.write_text(f"{head}{MARKS[0]}\n{made}\n{MARKS[1]}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
