"""How many environment steps of the autoscaling simulator a CPU second makes, by action space and by rows.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.autoscaling

Each count has the masks, the rewards and the observations in it, and its share of a reset with 8 rows per
seed. `random` draws allowed actions, so that queues overflow everywhere, which is the most work; `steady`
wishes for the replicas that hold 65 % utilization. Reports, and compares with nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.processors import this_processor
from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import IntArray

_STEPS = 60
_UTILIZATION = 0.65
_MEMBERS = 8
_SPACES = {
    "replicas (10 actions)": None,
    "and settings (49)": InfrastructureActionSpace(enable_traffic_actions=False),
    "and traffic (539)": InfrastructureActionSpace(),
}


def drawn(environment: InfrastructureEnv, dice: np.random.Generator) -> IntArray:
    """[B] actions, each moved to the next allowed one."""
    mask = environment.action_mask()
    begin = dice.integers(mask.shape[1], size=len(mask))
    order = (begin[:, None] + np.arange(mask.shape[1])) % mask.shape[1]
    place = np.take_along_axis(mask, order, axis=1).argmax(axis=1)
    actions: IntArray = (begin + place) % mask.shape[1]
    return actions


def held(environment: InfrastructureEnv, dice: np.random.Generator) -> IntArray:
    """[B] actions towards the replicas that the last step's load needs."""
    view = environment.observed()
    environment.action_mask()
    needed = view.arrival_rates[-1] / (_UTILIZATION * view.replica_capacity)
    return environment.actions_for(np.ceil(needed).astype(np.int64))


def pace(
    space: InfrastructureActionSpace | None,
    rows: int,
    act: Callable[[InfrastructureEnv, np.random.Generator], IntArray],
) -> float:
    """Steps of one row per CPU second; choosing an action is not counted, asking for the mask is."""
    environment = InfrastructureEnv(actions=space)
    dice = np.random.default_rng(0)
    began = time.process_time()
    environment.reset([row // _MEMBERS for row in range(rows)])
    resetting = time.process_time() - began
    stepping = 0.0
    for _ in range(_STEPS):
        actions = act(environment, dice)
        began = time.process_time()
        environment.action_mask()
        environment.step(actions)
        stepping += time.process_time() - began
    horizon = environment.spec.horizon
    return horizon * rows / (resetting + stepping * horizon / _STEPS)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Environment steps of the autoscaling simulator per CPU second."
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[128, 512, 2048], help="(default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="medians of so many (default: 3)")
    chosen = parser.parse_args()
    print(f"{this_processor().key}, numpy {np.__version__}; environment steps per CPU second\n")
    print(
        f"| {'actions':22} | {'played':6} | " + " | ".join(f"{rows:>5} rows" for rows in chosen.rows) + " |"
    )
    print("|---|---|" + "---|" * len(chosen.rows))
    for name, space in _SPACES.items():
        for play, act in (("random", drawn), ("steady", held)):
            paces = [
                statistics.median(pace(space, rows, act) for _ in range(chosen.repetitions))
                for rows in chosen.rows
            ]
            cells = " | ".join(f"{steps:>10,.0f}" for steps in paces)
            print(f"| {name:22} | {play:6} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
