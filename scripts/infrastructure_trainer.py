"""Does the document's trainer learn environments of dicts, by the document's defaults and by `LEARNING`?

    OMP_NUM_THREADS=1 python -m scripts.infrastructure_trainer --write

Two environments of the document's protocol: a pole on a cart, and one simulated cluster whose replicas are
scaled, paid by the simulator's money reward. Each is learned by `GRPOTrainer` with both settings, by seeds,
and compared on held-out starts with doing nothing (MAINTAIN; for the pole, which has no such action, with the
network before the training). What is there already (runs/infrastructure) is not made again. `--write` puts
the table into docs/evidence/cluster-simulator.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.page_tables import write_table
from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.grpo.config import GRPOConfig
from stateset_agents.numeric.autoscaling.grpo.environments import (
    ClusterEnvironment,
    EnvironmentCopies,
    MetricsHistory,
)
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork, NetworkPolicy
from stateset_agents.numeric.autoscaling.grpo.trainer import LEARNING, GRPOTrainer
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule, evaluation_seeds, paired_difference

ROOT = Path(__file__).resolve().parent.parent
PAGE = "evidence/cluster-simulator.md"
WINDOW = 8
SETTINGS: Mapping[str, Mapping[str, Any]] = {"the document's defaults": {}, "LEARNING": LEARNING}
REPLICAS = InfrastructureActionSpace(config_actions=[ConfigAction.NO_CHANGE], enable_traffic_actions=False)
SIDES = InfrastructureActionSpace(
    [ScalingAction.SCALE_DOWN_SMALL, ScalingAction.SCALE_UP_SMALL], [ConfigAction.NO_CHANGE], False
)
TASKS: Mapping[str, str] = {
    "money": "cluster, money a step",
    "pole": "pole, steps of an episode",
}
STEPS = 40_000


class Pole:
    """A pole on a cart (Barto, Sutton and Anderson 1983) by the document's protocol: a push to the left is
    SCALE_DOWN_SMALL, one to the right SCALE_UP_SMALL; done when it falls."""

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        drawn = random.Random(seed)
        self.state = [drawn.uniform(-0.05, 0.05) for _ in range(4)]
        self.window = np.repeat([self.state], WINDOW, axis=0)
        return self._state()

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        place, speed, angle, turn = self.state
        push = 10.0 * int(action["scaling"]) + 0.05 * turn**2 * math.sin(angle)
        bend = 9.8 * math.sin(angle) - math.cos(angle) * push / 1.1
        fall = bend / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        gain = push / 1.1 - 0.05 * fall * math.cos(angle) / 1.1
        self.state = [place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turn, turn + 0.02 * fall]
        self.window = np.concatenate([self.window[1:], [self.state]])
        has_fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return self._state(), {"done": has_fallen}

    def _state(self) -> dict[str, Any]:
        return {"metrics_history": self.window, "current_metrics": self.window[-1]}


class Balanced:
    """1 for each step."""

    def compute_reward(
        self, state: Any, previous_state: Any, action_taken: Any
    ) -> tuple[float, dict[str, float]]:
        return 1.0, {}


class Money:
    """The simulator's own reward: -(cost / ideal cost + 20 * max(late share - 1 %, 0))."""

    def compute_reward(
        self, state: Any, previous_state: Any, action_taken: Any
    ) -> tuple[float, dict[str, float]]:
        return state["money"], {}


class Rows(MetricsHistory):
    """The clusters of `ClusterEnvironment`, which are the same one by one, stepped together."""

    def action_mask(self) -> None:
        """Every action is always allowed, and bounded."""


def measured(task: str, settings: str, seed: int, episodes: int) -> dict[str, Any]:
    """One training and its comparison."""
    torch.set_num_threads(1)
    reward: Any
    env: Any
    if task == "pole":
        horizon, space, env, reward = 200, SIDES, Pole(), Balanced()
    else:
        horizon, space, reward = 120, REPLICAS, Money()
        env = ClusterEnvironment(space, history_length=WINDOW, horizon=horizon)
    network = GRPOPolicyNetwork(
        state_dim=32,
        hidden_dim=64,
        num_heads=4,
        num_layers=1,
        action_space=space,
        num_metrics=len(env.reset(0)["current_metrics"]),
        history_length=WINDOW,
        seed=seed,
    )
    first = copy.deepcopy(network)
    with tempfile.TemporaryDirectory() as folder:
        run = {"seed": seed, "total_steps": STEPS, "max_episode_steps": horizon, "output_dir": folder}
        config = GRPOConfig(**run, eval_steps=0, progress=False, **SETTINGS[settings])
        trainer = GRPOTrainer(network, config, space, reward, device="cpu")
        started = time.process_time()
        trainer.train(env)
        seconds, steps = time.process_time() - started, trainer.training.step_number
    starts = evaluation_seeds(10**6, episodes)
    if task == "pole":
        copies = EnvironmentCopies(env, space, reward, horizon=horizon)
        learned, before = (evaluate(NetworkPolicy(each), copies, starts) for each in (network, first))
    else:
        rows = Rows(InfrastructureEnv(actions=space, horizon=horizon), WINDOW)
        idle = space.encode_action(ScalingAction.MAINTAIN, ConfigAction.NO_CHANGE)
        learned = evaluate(NetworkPolicy(network), rows, starts)
        before = evaluate_rule(lambda _: lambda: np.full(episodes, idle), rows, starts)
    difference, interval = paired_difference(learned, before)
    assert learned.mean is not None
    assert before.mean is not None
    unit = 1 if task == "pole" else horizon
    return {
        "policy": learned.mean / unit,
        "before": before.mean / unit,
        "difference": difference / unit,
        "interval": [value / unit for value in interval or (difference, difference)],
        "steps": steps,
        "seconds": seconds,
    }


def table(results: Mapping[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    """A row per environment and settings; values by seed."""
    lines = [
        "| environment, reward | settings | seeds | learned | doing nothing | difference, 95 % | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, settings), rows in results.items():
        digits = {"pole": 0, "money": 2}[task]

        def shown(value: float, sign: str = "", digits: int = digits) -> str:
            return f"{value:{sign}.{digits}f}"

        learned = ", ".join(shown(row["policy"]) for row in rows)
        without = ", ".join(dict.fromkeys(shown(row["before"]) for row in rows))
        triples = [[shown(value, "+") for value in (row["difference"], *row["interval"])] for row in rows]
        differences = "; ".join(f"{mean} [{low}, {high}]" for mean, low, high in triples)
        seconds = sorted(row["seconds"] for row in rows)
        spent = f"{seconds[0]:.0f} to {seconds[-1]:.0f}"
        seeds = ", ".join(str(row["seed"]) for row in rows)
        lines.append(
            f"| {TASKS[task]} | {settings} | {seeds} | {learned} | {without} | {differences} | {spent} |"
        )
    return lines


def main() -> None:
    """Make what is missing, print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=256, help="held-out starts")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "infrastructure")
    parser.add_argument("--only", nargs=3, metavar=("TASK", "SETTINGS", "SEED"), help="make this one alone")
    parser.add_argument("--made", action="store_true", help="make nothing: the table of what is there")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE}")
    chosen = parser.parse_args()
    if chosen.only:
        task, settings, seed = chosen.only
        print(json.dumps(measured(task, settings, int(seed), chosen.episodes)))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)

    def result(task: str, settings: str, seed: int) -> dict[str, Any]:
        file = chosen.folder / f"{task}-{settings.replace(' ', '-')}-{seed}-{chosen.episodes}.json"
        if not file.exists() and chosen.made:
            return {}
        if not file.exists():
            only = ["--only", task, settings, str(seed), "--episodes", str(chosen.episodes)]
            done = subprocess.run(
                [sys.executable, "-m", "scripts.infrastructure_trainer", *only],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            file.write_text(done.stdout.splitlines()[-1])
        return {**json.loads(file.read_text()), "seed": seed}

    cases = [(task, settings) for task in TASKS for settings in SETTINGS]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        made = {
            (*case, seed): pool.submit(result, *case, seed) for seed in range(chosen.seeds) for case in cases
        }
        results = {case: [made[*case, seed].result() for seed in range(chosen.seeds)] for case in cases}
    lines = table({case: [row for row in rows if row] for case, rows in results.items()})
    print("\n".join(lines))
    print(f"{chosen.episodes} held-out starts; {platform.machine()}")
    if chosen.write:
        write_table(PAGE, "infrastructure-trainer", "\n".join(lines))


if __name__ == "__main__":
    main()
