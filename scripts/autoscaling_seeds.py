"""Does a trained policy scale better than Kubernetes' autoscaler? Five seeds, a thousand held-out workloads.

    PYTHONPATH=. python scripts/autoscaling_seeds.py
    PYTHONPATH=. python scripts/autoscaling_seeds.py --ways trained critic --seeds 3

- trained: examples/autoscaling.py's settings, from a clone of the autoscaler;
- cold: the same without the clone;
- whole return: the same, each step credited with its episode's return against the group's;
- critic: the same, single episodes against a critic (GAE) in place of groups;
- no group: the same, but each member of a group has a load of its own.

Against them: 24 settings of the autoscaler, of which one is chosen on other workloads and one, in hindsight,
on the held-out ones; the best constant and a plan on a forecast, tuned on the former; and the clairvoyant.
What is there already (runs/autoscaling-seeds/NAME.json) is not made again; table.md and comparison.json are
written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import runpy
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS: Mapping[str, Mapping[str, Any]] = {
    "trained": {},
    "cold": {},
    "whole return": {"advantage_estimator": "group", "advantage_normalization": "population"},
    "critic": {"advantage_estimator": "gae", "group_size": 1, "num_groups": 128},
    "no group": {},
}
GROUP = 8
"""Members, as many as a training has unless it is told."""
TUNING = 256
"""Workloads on which rules are tuned."""
STATIC = (6, 8, 10, 12, 14, 16, 20, 24, 30)
CAUTIONS = (0.8, 1.0, 1.2, 1.5, 2.0)
COLUMNS = ("money_cost", "money_late", "document")
WORST = 0.05
"""Of the autoscaler's reward: a policy that is worse by more on a shifted workload is named."""


def shifts(folder: Path) -> dict[str, Any]:
    """Workloads that no training plays, by name."""
    from stateset_agents.numeric.autoscaling.trace import TraceLoad
    from stateset_agents.numeric.autoscaling.workload import GeneratedLoad

    file = folder / "two-days.csv"
    if not file.exists():  # a wave of a day, shifts of work that begin at once, and a noon peak
        lines = ["seconds,requests_per_second"]
        for minute in range(2 * 24 * 60):
            hour = minute / 60 % 24
            rate = (
                900 * (8 <= hour < 18) + 700 * max(0.0, 1 - abs(hour - 12.5)) + 400 + 250 * (minute % 60 < 5)
            )
            lines.append(f"{60 * minute},{rate:.1f}")
        file.write_text("\n".join(lines) + "\n")
    return {
        "ramps": GeneratedLoad(kind="ramps", severity=1.5),
        "steps": Steps(),
        "flash crowds, twice as large": GeneratedLoad(kind="flash_crowds", severity=2.0),
        "ten times the load, in larger replicas": None,
        "CSV": TraceLoad.from_csv(file),
    }


class Steps:
    """Load that jumps every 10 to 40 minutes."""

    mean_rate = 1500.0

    def draw(self, seed: int, num_steps: int, step_seconds: float) -> Any:
        """[num_steps] requests per second."""
        import numpy as np

        from stateset_agents.numeric.autoscaling.workload import realised

        generator = np.random.default_rng([seed, 2])
        level = generator.uniform(700, 3000)
        rates: list[float] = []
        while len(rates) < num_steps:
            lasts = int(60 * generator.uniform(10, 40) / step_seconds)
            rates += [level * generator.uniform(0.5, 1.5)] * lasts
        return realised(generator, np.array(rates[:num_steps]), step_seconds)


class Apart:
    """Clusters where the members of a group have loads of their own.

    Fewer rows with one seed are no group, but the trainer's check that equal seeds give equal episodes.
    """

    def __init__(self, environment: Any) -> None:
        self.clusters = environment
        self.spec = environment.spec

    def reset(self, seeds: Sequence[int]) -> Any:
        """The first member of a group keeps its seed."""
        from stateset_agents.types.seeds import derive

        members, seen, own = Counter(seeds), Counter[int](), []
        for seed in seeds:
            own.append(derive(seed, "member", seen[seed]) if seen[seed] and members[seed] >= GROUP else seed)
            seen[seed] += 1
        return self.clusters.reset(own)

    def step(self, actions: Any) -> Any:
        """As the clusters'."""
        return self.clusters.step(actions)

    def fork(self, rows: Any) -> Apart:
        """Copies of these rows."""
        return Apart(self.clusters.fork(rows))

    def action_mask(self) -> Any:
        """As the clusters'."""
        return self.clusters.action_mask()


def environments(folder: Path) -> dict[str, Any]:
    """What is compared on: the training's kind of workload, then the shifted ones."""
    from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
    from stateset_agents.numeric.autoscaling.simulator import Cluster
    from stateset_agents.numeric.autoscaling.workload import GeneratedLoad

    found: dict[str, Any] = {"held out": InfrastructureEnv()}
    for name, workload in shifts(folder).items():
        found[name] = InfrastructureEnv(workload) if workload is not None else None
    found["ten times the load, in larger replicas"] = InfrastructureEnv(
        GeneratedLoad(rates=(5000.0, 50_000.0)), Cluster(max_replicas=600)
    )
    return found


def held_out(name: str, workloads: int) -> list[int]:
    """The starts of a comparison: fewer of the shifted workloads."""
    from stateset_agents.numeric.evaluation import evaluation_seeds

    return evaluation_seeds(10**9, workloads if name == "held out" else max(workloads // 5, 1))


def plain(score: Any) -> dict[str, Any]:
    """A score as JSON."""
    components = {name: score.components[name].round(6).tolist() for name in COLUMNS}
    return {"seeds": list(score.seeds), "rewards": score.rewards.round(6).tolist(), "components": components}


def score_of(record: Mapping[str, Any]) -> Any:
    """And back."""
    import numpy as np

    from scripts.paired_scores import Score

    return Score(
        seeds=tuple(record["seeds"]),
        rewards=np.array(record["rewards"]),
        components={name: np.array(part) for name, part in record["components"].items()},
    )


def play_rules(folder: Path, workloads: int) -> dict[str, Any]:
    """Tune on one set of workloads, then play on the others."""
    from scripts.paired_scores import Score
    from scripts.rivals.autoscaling_planning import HPA_GRID, Mpc, clairvoyant, static_replicas
    from stateset_agents.numeric.autoscaling.baselines import InReplicas, exactly
    from stateset_agents.numeric.evaluation import evaluate_rule, evaluation_seeds

    every = environments(folder)
    tuning = evaluation_seeds(10**9 + 1, min(TUNING, workloads))

    def played(rule: Any, environment: Any, seeds: Any) -> Score:
        return Score.of(evaluate_rule(exactly(rule), InReplicas(environment), seeds))

    def best(rules: Mapping[str, Any]) -> str:
        means = {name: played(rule, every["held out"], tuning).mean for name, rule in rules.items()}
        return max(means, key=lambda name: means[name])

    hpas = {hpa.name: hpa for hpa in HPA_GRID}
    statics = {f"static {number}": static_replicas(number) for number in STATIC}
    fitted = Mpc.fit(every["held out"], tuning)
    mpcs = {f"{caution:g}": Mpc(forecast=fitted.forecast, caution=caution) for caution in CAUTIONS}
    chosen = {"hpa": best(hpas), "static": best(statics), "mpc": best(mpcs)}
    seeds = held_out("held out", workloads)
    scores = {name: played(rule, every["held out"], seeds) for name, rule in hpas.items()}
    hindsight = max(scores, key=lambda name: scores[name].mean)
    found: dict[str, Any] = {"tuned": chosen, "hindsight": hindsight, "caution": chosen["mpc"]}
    found["held out"] = {name: plain(score) for name, score in scores.items()} | {
        chosen["static"]: plain(played(statics[chosen["static"]], every["held out"], seeds)),
        "MPC": plain(played(mpcs[chosen["mpc"]], every["held out"], seeds)),
        "clairvoyant": plain(played(clairvoyant, every["held out"], seeds)),
    }
    for name, environment in every.items():
        if name != "held out":
            score = played(hpas[hindsight], environment, held_out(name, workloads))
            found[name] = {hindsight: plain(score)}
    return found


async def train(way: str, seed: int, folder: Path, workloads: int, steps: int | None) -> dict[str, Any]:
    """One policy, and what it earns everywhere."""
    from scripts.paired_scores import Score
    from stateset_agents.numeric.autoscaling.baselines import in_actions
    from stateset_agents.numeric.cloning import clone
    from stateset_agents.numeric.evaluation import evaluate
    from stateset_agents.numeric.policy import MlpPolicy
    from stateset_agents.numeric.settings import ControlConfig
    from stateset_agents.numeric.trainer import ControlTrainer

    example = runpy.run_path(str(ROOT / "examples" / "autoscaling.py"))
    every = environments(folder)
    environment = every["held out"]
    began = time.process_time()
    policy = MlpPolicy(environment.spec, seed=seed, critic=way == "critic")
    result: dict[str, Any] = {"way": way, "seed": seed}
    if way != "cold":
        cloned = clone(policy, in_actions(example["SHOWN"]), environment, seed=seed)
        result["agreement"] = cloned.agreement
    with tempfile.TemporaryDirectory() as runs:
        settings = {**example["SETTINGS"], **WAYS[way], "seed": seed, "output_dir": runs}
        if steps is not None:
            settings["total_steps"] = steps
        config = ControlConfig(**settings, progress=False, save_steps=0, log_episodes=False)
        played = Apart(environment) if way == "no group" else environment
        async with ControlTrainer(policy, played, config) as trainer:
            await trainer.train()
    result["cpu_seconds"] = time.process_time() - began
    for name, other in every.items():
        result[name] = plain(Score.of(evaluate(policy, other, held_out(name, workloads))))
    return result


def child(way: str | None, seed: int, file: Path, workloads: int, steps: int | None) -> None:
    """One record in a process of its own; `way` None: the rules."""
    import torch

    torch.set_num_threads(1)
    if way is None:
        record = play_rules(file.parent, workloads)
    else:
        record = asyncio.run(train(way, seed, file.parent, workloads, steps))
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(record))
    beside.replace(file)


def summarise(folder: Path, ways: list[str], seeds: int) -> tuple[str, dict[str, Any]]:
    """Markdown and JSON of all records."""
    from scripts.paired_scores import compare, difference

    rules = json.loads((folder / "rules.json").read_text())
    hindsight, tuned = rules["hindsight"], rules["tuned"]["hpa"]
    shown = dict.fromkeys([hindsight, tuned, rules["tuned"]["static"], "MPC", "clairvoyant"])
    scores = {name: score_of(rules["held out"][name]) for name in shown}
    lines, better, comparison = [], {}, {}
    records = {
        f"{way}, seed {seed}": json.loads((folder / f"{way.replace(' ', '-')}-{seed}.json").read_text())
        for way in ways
        for seed in range(seeds)
    }
    for name, record in records.items():
        scores[name] = score_of(record["held out"])
    found = compare(scores, hindsight, bound="MPC")
    comparison = {
        "hindsight": hindsight,
        "tuned": rules["tuned"],
        "rows": found.rows(),
        "gap to clairvoyant": {name: found.gap_closed(name, "clairvoyant") for name in records},
        "cpu_seconds": {name: record["cpu_seconds"] for name, record in records.items()},
    }
    lines = [
        f"Hindsight-best of 24: {hindsight}; chosen on {TUNING} others: {tuned}.",
        "",
        found.table(COLUMNS),
    ]
    for way in ways:
        names = [name for name in records if name.startswith(f"{way}, ")]
        better[way] = sum(found.difference(name).verdict == "better" for name in names)
        cpu = sum(records[name]["cpu_seconds"] for name in names) / len(names)
        lines.append(f"\n{way}: better in {better[way]} of {len(names)} seeds, {cpu:.0f} CPU s in the mean.")
    lines += ["", f"| shifted workload | {hindsight} | policy | difference, paired 95 % | by the reward |"]
    lines.append("|---|---|---|---|---|")
    shifted = []
    for place in [key for key in next(iter(records.values())) if isinstance(records[names[0]][key], dict)]:
        if place == "held out":
            continue
        reference = score_of(rules[place][hindsight])
        for name, record in records.items():
            score = score_of(record[place])
            gain = difference(score, reference)
            share = gain.mean / abs(reference.mean)
            low, high = gain.interval or (gain.mean,) * 2
            lines.append(
                f"| {place} | {reference.mean:.3f} | {name}: {score.mean:.3f} | {gain.mean:+.3f} "
                f"[{low:.3f}, {high:.3f}] | {share:+.1%}{' **worse**' if share < -WORST else ''} |"
            )
            shifted.append({"workload": place, "name": name, "share": share, "difference": gain.mean})
    comparison |= {"better": better, "shifted": shifted}
    return "\n".join(lines), comparison


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=["trained"], choices=WAYS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workloads", type=int, default=1000, help="held out")
    parser.add_argument("--steps", type=int, default=None, help="of a training; the example's when absent")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/autoscaling-seeds"))
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    work: list[tuple[str | None, int, Path]] = [(None, 0, chosen.folder / "rules.json")]
    work += [
        (way, seed, chosen.folder / f"{way.replace(' ', '-')}-{seed}.json")
        for seed in range(chosen.seeds)
        for way in chosen.ways
    ]
    shifts(chosen.folder)  # writes the CSV before anybody reads it
    todo = [item for item in work if not item[2].exists()]
    apart = multiprocessing.get_context("spawn")
    with apart.Pool(chosen.jobs, maxtasksperchild=1) as pool:
        results = [
            (file, pool.apply_async(child, (way, seed, file, chosen.workloads, chosen.steps)))
            for way, seed, file in todo
        ]
        for file, result in results:
            result.get()
            print(f"{file.stem} is there", flush=True)
    table, comparison = summarise(chosen.folder, chosen.ways, chosen.seeds)
    (chosen.folder / "table.md").write_text(table + "\n")
    (chosen.folder / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n")
    print(table)


if __name__ == "__main__":
    main()
