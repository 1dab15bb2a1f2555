"""Trainings of an example that differ in settings: success by steps, by sampled tokens, by CPU time.

    python -m scripts.learning_curves estimators          # half a minute a run (branch: one) at the desk
    python -m scripts.learning_curves curricula           # about two minutes a run of the reasoner
    python -m scripts.learning_curves estimators --write  # table and picture of its page in docs/ too

Nothing but an arm's settings and the seed changes; each run has one torch thread. Every few steps the
validation scenarios are played, at the end those of the test; what became of each scenario is kept, so that
two arms are compared scenario by scenario and seed by seed. Runs that are there already
(runs/curves/COMPARISON/ARM-SEED.json) are not made again.
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
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from scripts.page_tables import DOCS, write_table
from stateset_agents.algorithms.intervals import crossed_interval


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several ways to train one example."""

    config: str
    """The example's file."""
    arms: Mapping[str, Mapping[str, Any]]
    """Name -> what it changes in `training`; the others are compared with the first."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `training`, for all arms."""
    steps: int
    """After which each run stops."""
    every: int
    """Steps between two plays of the validation scenarios."""
    looks: tuple[int, int]
    """Steps that the table shows besides the last."""
    page: str
    """In docs/; it has the marks of the table, which are named as the comparison."""
    title: str
    """Of the picture."""


COMPARISONS: Mapping[str, Comparison] = {
    "estimators": Comparison(
        config="examples/demo.yaml",
        arms={name: {"advantage_estimator": name} for name in ("group", "turn_group", "branch", "turn_gae")},
        steps=60,
        every=10,
        looks=(20, 40),
        page="evidence/desk-trainings.md",
        title="Success on the desk's validation scenarios",
    ),
    "curricula": Comparison(
        config="examples/reason.yaml",
        arms={
            "flat": {},
            "stages": {
                "stages": [{"until": 0.25, "difficulty": 2}, {"until": 0.5, "difficulty": [2, 3]}, {}]
            },
            "success": {"scenario_order": "success"},
            "sizes": {"group_sizes": "success"},
            "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
        },
        settings={"max_steps": 150},
        steps=150,
        every=25,
        looks=(50, 100),
        page="evidence/curricula.md",
        title="Success on the reasoner's validation problems",
    ),
}


class Watch:
    """Keeps what a run shows, step by step, and stops it after so many, if any."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self.success: list[float] = []
        self.tokens: list[float] = []
        self.cpu: list[float] = []
        self.validation: dict[int, str] = {}
        self._mark = 0.0

    def on_train_begin(self, trainer: Any) -> None:
        self._trainer = trainer
        self._mark = time.process_time()

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.success.append(metrics["success/rate"])
        self.tokens.append(metrics["tokens/agent"] + metrics.get("tokens/branches", 0.0))
        self.cpu.append(time.process_time() - self._mark)
        self._mark = time.process_time()
        if step == self.steps:
            self._trainer.request_stop()

    def on_evaluate(self, step: int, evaluation: Any) -> None:
        self.validation[step] = verdicts(evaluation)
        self._mark = time.process_time()


def verdicts(evaluation: Any) -> str:
    """A 1 for each scenario that succeeded, else a 0, in the order of the split."""
    return "".join(str(int(bool(group.trajectories[0].success))) for group in evaluation.groups)


async def run(comparison: Comparison, arm: str, seed: int) -> dict[str, Any]:
    """Train once; what is given back is JSON."""
    from stateset_agents.training.experiment import Experiment, load_experiment

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **comparison.settings,
            **comparison.arms[arm],
            "seed": seed,
            "eval_steps": comparison.every,
            "eval_episodes": 150,  # all, and no example has more
            "save_steps": 0,
            "log_rollouts": False,
            "progress": False,
            "output_dir": folder,
        }
        changes = {f"training.{name}": value for name, value in settings.items()}
        watch = Watch(comparison.steps)
        config = load_experiment(comparison.config, changes)
        async with Experiment(config, callbacks=[watch], measures=False) as experiment:
            trainer = experiment.trainer
            families = [scenario.family for scenario in trainer.environment.scenarios("validation")]
            before = verdicts(await trainer.evaluate())
            await experiment.train()
            number = len(trainer.environment.scenarios("test"))
            sampled = await trainer.evaluate("test", episodes=number)
    return {
        "arm": arm,
        "seed": seed,
        "success": watch.success,
        "tokens": watch.tokens,
        "cpu": [round(seconds, 3) for seconds in watch.cpu],
        "families": families,
        "validation": {0: before, **watch.validation},
        "test": verdicts(sampled),
    }


def play(name: str, arm: str, seed: int, file: Path) -> None:
    """One run in a process of its own."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = asyncio.run(run(COMPARISONS[name], arm, seed))
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(results))
    beside.replace(file)


Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arm -> its runs, one for each seed, in the same order."""
Unit = Literal["steps", "tokens", "cpu"]


def spent(record: Mapping[str, Any], unit: Unit) -> list[float]:
    """What a run has spent when each step ends, and 0 before the first."""
    each = [1.0] * len(record["success"]) if unit == "steps" else record[unit]
    return [0.0, *accumulate(each)]


def points(record: Mapping[str, Any], unit: Unit) -> list[tuple[float, str]]:
    """What was spent at each play of the validation scenarios, and their verdicts."""
    so_far = spent(record, unit)
    return [(so_far[int(step)], marks) for step, marks in record["validation"].items()]


def solved(record: Mapping[str, Any], unit: Unit, budget: float) -> list[float]:
    """Each validation scenario's success when that much is spent, between two plays in proportion."""
    plays = points(record, unit)
    for (left, before), (right, after) in pairwise(plays):
        if left <= budget <= right:
            share = (budget - left) / (right - left)
            return [(1 - share) * int(old) + share * int(new) for old, new in zip(before, after, strict=True)]
    raise ValueError(f"the run spent {plays[-1][0]:,.0f} and not {budget:,.0f}")


def against(runs: Runs, name: str, reference: str, unit: Unit, budget: float) -> str:
    """The difference of two estimators in points with its interval, and what that says."""
    rows = [
        [b - a for a, b in zip(solved(record, unit, budget), solved(other, unit, budget), strict=True)]
        for record, other in zip(runs[reference], runs[name], strict=True)
    ]
    return difference(rows)


def difference(rows: Sequence[Sequence[float]]) -> str:
    """ "+3.2 [+0.5, +6.0] better": the mean of a table of differences, in points."""
    mean = fmean(fmean(row) for row in rows)
    interval = crossed_interval(rows)
    if interval is None:
        return f"{100 * mean:+.1f}, all alike"
    low, high = interval
    verdict = "better" if low > 0 else "worse" if high < 0 else "unclear"
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] {verdict}"


def table(runs: Runs, looks: Sequence[int]) -> str:
    """Markdown: success by steps, by tokens and by CPU time, and the same against the first arm."""
    first, *_ = runs
    steps = len(runs[first][0]["success"])
    budgets = {
        unit: min(spent(record, unit)[-1] for records in runs.values() for record in records)
        for unit in UNITS
    }
    heads = [f"after {step} steps" for step in (*looks, steps)]
    lines = [
        f"| success | {' | '.join(heads)} | after {budgets['tokens'] / 1000:,.0f} thousand tokens "
        f"| after {budgets['cpu']:.0f} CPU s | test, after {steps} steps |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for name, records in runs.items():
        shares = [
            fmean(fmean(solved(record, "steps", step)) for record in records) for step in (*looks, steps)
        ]
        shares += [fmean(fmean(solved(record, unit, budgets[unit])) for record in records) for unit in UNITS]
        shares.append(fmean(fmean(map(int, record["test"])) for record in records))
        lines.append(f"| `{name}` | {' | '.join(f'{share:.1%}' for share in shares)} |")
    lines += [
        "",
        f"| points, against `{first}` | after {looks[0]} steps | after {steps} steps | at equal tokens |",
    ]
    lines[-1] += " at equal CPU time | test |"
    lines.append("|---" * 6 + "|")
    for name in [name for name in runs if name != first]:
        tests = [
            [int(b) - int(a) for a, b in zip(record["test"], other["test"], strict=True)]
            for record, other in zip(runs[first], runs[name], strict=True)
        ]
        cells = [against(runs, name, first, "steps", step) for step in (looks[0], steps)]
        cells += [against(runs, name, first, unit, budgets[unit]) for unit in UNITS]
        lines.append(f"| `{name}` | {' | '.join([*cells, difference(tests)])} |")
    return "\n".join(lines)


UNITS: tuple[Unit, Unit] = ("tokens", "cpu")
COLOURS = ("#4b5563", "#1d4ed8", "#6d28d9", "#b91c1c", "#047857")
"""Of the arms in their order."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 320, 52, 16, 44, 48


def picture(runs: Runs, title: str) -> str:
    """An SVG of two panels: mean success on the validation scenarios by steps, and by sampled tokens."""
    axes: tuple[tuple[Unit, str], ...] = (("steps", "steps"), ("tokens", "thousand tokens sampled"))
    panels = []
    for index, (unit, along) in enumerate(axes):
        panels.append(f'<g transform="translate({index * WIDTH} 0)">{_panel(runs, unit, along)}</g>')
    keys = "".join(
        f'<text x="{LEFT + 110 * index}" y="20" fill="{colour}">\u2014 {name}</text>'
        for index, (name, colour) in enumerate(zip(runs, COLOURS, strict=False))
    )
    ends = ", ".join(
        f"{name} {fmean(fmean(map(int, points(record, 'steps')[-1][1])) for record in records):.0%}"
        for name, records in runs.items()
    )
    steps = len(next(iter(runs.values()))[0]["success"])
    seeds = len(next(iter(runs.values())))
    words = f"{title}, mean of {seeds} seeds, by steps and by sampled tokens. After {steps} steps: {ends}."
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" role="img"'
    style = 'font-family="sans-serif" font-size="13" fill="#374151"'
    back = f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return f"{box} {style}><title>{words}</title>{back}{keys}{''.join(panels)}</svg>\n"


def _panel(runs: Runs, unit: Unit, along: str) -> str:
    highest = max(points(record, unit)[-1][0] for records in runs.values() for record in records)

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / highest, 1)

    def y(share: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(share)}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>')
    for part in range(5):
        value = highest * part / 4
        label = f"{value:.0f}" if unit == "steps" else f"{value / 1000:.0f}"
        parts.append(f'<text x="{x(value)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{along}</text>'
    )
    for colour, records in zip(COLOURS, runs.values(), strict=False):
        plays = [points(record, unit) for record in records]
        line = " ".join(
            f"{x(fmean(spent for spent, _ in at))},{y(fmean(fmean(map(int, marks)) for _, marks in at))}"
            for at in zip(*plays, strict=True)
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(parts)


def stored_runs(folder: Path, names: Sequence[str]) -> tuple[Runs, list[int]]:
    """The runs of those seeds that every arm has, and the seeds."""
    files = {name: {int(p.stem.split("-")[1]): p for p in folder.glob(f"{name}-*.json")} for name in names}
    seeds = sorted(set.intersection(*(set(records) for records in files.values())))
    return {
        name: [json.loads(records[seed].read_text()) for seed in seeds] for name, records in files.items()
    }, seeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", choices=list(COMPARISONS))
    parser.add_argument("--arms", nargs="+", help="all when absent")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where runs are kept: runs/curves/COMPARISON when absent")
    parser.add_argument("--write", action="store_true", help="write table and picture into docs/")
    chosen = parser.parse_args()
    comparison = COMPARISONS[chosen.comparison]
    arms = chosen.arms or list(comparison.arms)
    if unknown := sorted(set(arms) - set(comparison.arms)):
        parser.error(f"{chosen.comparison} has no arm {unknown[0]!r}, only {', '.join(comparison.arms)}")
    folder = chosen.folder or Path("runs/curves", chosen.comparison)
    folder.mkdir(parents=True, exist_ok=True)
    apart = multiprocessing.get_context("spawn")
    for seed in range(chosen.seeds):
        for arm in arms:
            file = folder / f"{arm}-{seed}.json"
            if file.exists():
                continue
            started = time.monotonic()
            child = apart.Process(target=play, args=(chosen.comparison, arm, seed, file))
            child.start()
            child.join()
            if child.exitcode:
                raise SystemExit(f"{file.stem} failed")
            print(f"{file.stem}: {time.monotonic() - started:.0f} s", flush=True)
    runs, seeds = stored_runs(folder, arms)
    if not seeds:
        raise SystemExit("no seed has been played by every arm yet")
    made = f"Seeds {', '.join(map(str, seeds))}.\n\n{table(runs, comparison.looks)}"
    print(made)
    if chosen.write:
        image = DOCS / "images" / f"{chosen.comparison}.svg"
        image.write_text(picture(runs, comparison.title), encoding="utf-8")
        write_table(comparison.page, chosen.comparison, made)


if __name__ == "__main__":
    main()
