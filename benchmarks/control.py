"""`python -m benchmarks.control`: numeric tasks by ours and by stable-baselines3's PPO, seeds in turn.

PPO has the settings of rl-baselines3-zoo (https://github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml),
and once more with 128 rows stepped together, as many as ours has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import environments
from benchmarks.environments import FOLDER
from benchmarks.sides import Side, SideError, Worker
from scripts import bootstrap

__all__ = ["TASKS", "main"]

_CART_POLE = {
    "total_steps": 110_000,
    "num_groups": 8,
    "group_size": 16,
    "steps_per_rollout": 6000,
    "lone_steps": "zero",
    "learning_rate": 5e-3,
    "entropy_coef": 0.0,
    "num_iterations": 6,
}
_ZOO_CART_POLE = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "clip_range": 0.2,
}
_LANDER = {"total_steps": 1_000_000, "steps_per_rollout": 16_384, "gamma": 0.999, "entropy_coef": 0.01}
_ZOO_LANDER = {
    "n_steps": 1024,
    "batch_size": 64,
    "gae_lambda": 0.98,
    "gamma": 0.999,
    "n_epochs": 4,
    "ent_coef": 0.01,
}


def _ours(environment: Any, training: Mapping[str, Any], hidden: Sequence[int] = (64, 64)) -> Side:
    job = {"environment": environment, "policy": {"hidden": list(hidden)}, "training": dict(training)}
    return Side(module="numeric", job=job)


def _ppo(name: str, rows: int, steps: int, settings: Mapping[str, Any], fall: Sequence[str] = ()) -> Side:
    job = {"id": name, "rows": rows, "steps": steps, "settings": dict(settings), "fall": list(fall)}
    return Side(module="sb3", job=job, environment="sb3")


TASKS: Mapping[str, Mapping[str, Side]] = {
    "cart_pole": {
        "ours": _ours("cart_pole", _CART_POLE, hidden=(32, 32)),
        "sb3": _ppo("CartPole-v1", 8, 100_000, _ZOO_CART_POLE, ["learning_rate", "clip_range"]),
        "sb3-128": _ppo(
            "CartPole-v1",
            128,
            100_000,
            _ZOO_CART_POLE,
            ["learning_rate", "clip_range"],
        ),
    },
    "lunar_lander": {
        "step_group": _ours({"gymnasium": "LunarLander-v3"}, _LANDER),
        "gae": _ours(
            {"gymnasium": "LunarLander-v3"},
            {
                **_LANDER,
                "total_steps": 600_000,
                "advantage_estimator": "gae",
                "group_size": 1,
                "num_groups": 64,
                "gae_lambda": 0.98,
                "minibatch_size": 128,
                "learning_rate": 1e-3,
            },
        ),
        "sb3": _ppo("LunarLander-v3", 16, 1_000_000, _ZOO_LANDER),
    },
}
"""Task -> its sides; the first is what the others' CPU seconds are divided by."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="make bench-control", description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), default="cart_pole")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each side (default: %(default)s)")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="only these")
    parser.add_argument("--steps", type=int, help="environment steps of each run, to try it out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where all runs are written, as JSON")
    chosen = parser.parse_args(arguments)
    sides = TASKS[chosen.task]
    if unknown := set(chosen.sides or ()) - set(sides):
        parser.error(f"{chosen.task} has no side {', '.join(unknown)}: it has {', '.join(sides)}")
    if chosen.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {chosen.seeds}")
    kept = {name: _shortened(sides[name], chosen.steps) for name in chosen.sides or sides}
    try:
        for side in kept.values():
            environments.ensure(side.environment)
        found = measured(kept, chosen.seeds)
    except (bootstrap.SetupError, SideError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines(found)))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def _shortened(side: Side, steps: int | None) -> Side:
    if steps is None:
        return side
    job = dict(side.job)
    if "training" in job:
        job["training"] = {**job["training"], "total_steps": steps}
    else:
        job["steps"] = steps
    return Side(module=side.module, job=job, environment=side.environment)


def measured(sides: Mapping[str, Side], seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Every side's runs, seed after seed, the sides in turn; who goes first changes."""
    names = list(sides)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                Worker(side, FOLDER / "logs" / f"control-{name}.log", keeps_memory=True)
            )
            for name, side in sides.items()
        }
        for worker in workers.values():
            worker.prepare()
        for seed in range(seeds):
            turn = seed % len(names)
            for name in [*names[turn:], *names[:turn]]:
                found[name].append(workers[name].run(seed))
                last = found[name][-1]
                print(
                    f"seed {seed}, {name}: return {last['return']:.1f}, {last['cpu']:.1f} CPU s", flush=True
                )
    return found


def lines(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Medians of each side, and its CPU seconds over those of the first."""
    middle = {
        name: {key: median(run[key] for run in runs) for key in ("return", "lowest", "steps", "cpu")}
        for name, runs in found.items()
    }
    first = next(iter(middle.values()))["cpu"]
    return [
        f"{name}: median return {one['return']:.1f} (lowest {one['lowest']:.0f}), {one['steps']:,.0f} steps, "
        f"{one['cpu']:.2f} CPU s, {one['cpu'] / first:.1f}x"
        for name, one in middle.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
