"""Train a policy that chooses experiments, and compare it with the rules on tasks that it has not played.

    PYTHONPATH=. python scripts/acquisition_policy.py --seed 0 --output policy.pt    # a minute of one core
    PYTHONPATH=. python scripts/acquisition_policy.py --load policy.pt    # the table alone

It is trained on five variables and plays three and eight, too. Differences are paired: the same tasks and the
same noise of their experiments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import torch

from scripts.acquisition_headroom import CHUNK, seeds
from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.control.acquisition.campaign import expected_regret, play
from stateset_agents.control.acquisition.environment import AcquisitionEnv
from stateset_agents.control.acquisition.families import LinearFamily
from stateset_agents.control.acquisition.lookahead import knowledge_gradient
from stateset_agents.control.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.control.acquisition.rules import RULES
from stateset_agents.control.evaluation import evaluate
from stateset_agents.control.settings import ControlConfig
from stateset_agents.control.trainer import ControlTrainer

SIZES = (5, 3, 8)
RIVALS = {
    "EI per cost": RULES["EI per cost"],
    "sd per cost": RULES["sd per cost"],
    "knowledge gradient per cost": knowledge_gradient(samples=16),
}


def family(num_variables: int = 5) -> LinearFamily:
    """The one on which lookahead gains much; see scripts/acquisition_headroom.py."""
    return LinearFamily(num_variables=num_variables, costs=(1.0, 20.0), budget=20.0)


async def trained(seed: int, steps: int) -> AcquisitionPolicyNetwork:
    """A policy after so many experiments."""
    network = AcquisitionPolicyNetwork(seed=seed)
    config = ControlConfig(
        total_steps=steps,
        num_groups=32,
        group_size=8,
        gamma=1.0,
        learning_rate=3e-3,
        minibatch_size=1024,
        entropy_coef=0.001,
        save_steps=0,
        log_episodes=False,
        progress=False,
        seed=seed,
    )
    begun = time.process_time()
    environment = AcquisitionEnv(family(), reward="expected_regret")
    async with ControlTrainer(network, environment, config) as trainer:
        await trainer.train()
    print(f"seed {seed}: {steps:,} experiments in {time.process_time() - begun:.0f} CPU s")
    return network


def compare(network: AcquisitionPolicyNetwork, num_variables: int, num_tasks: int) -> list[str]:
    """Rows of the table."""
    starts = [seed for chunk in range(-(-num_tasks // CHUNK)) for seed in seeds(chunk)]
    environment = AcquisitionEnv(family(num_variables))
    evaluate(network, environment, starts)
    mine = expected_regret(environment.situation.belief)
    rows = []
    for name, rule in RIVALS.items():
        other = play(rule, family(num_variables).draw(starts)).expected_regret
        interval = mean_interval((other - mine).tolist())
        assert interval is not None
        low, high = (limit / other.mean() for limit in interval)
        saved = f"{1 - mine.mean() / other.mean():+.1%} [{low:+.1%}, {high:+.1%}]"
        means = f"{mine.mean():.4f} | {other.mean():.4f}"
        rows.append(f"| {num_variables} | {name} | {len(starts):,} | {means} | {saved} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300_000, help="experiments of the training")
    parser.add_argument("--tasks", type=int, default=2000, help="of each comparison")
    parser.add_argument("--output", type=Path, help="where the weights go")
    parser.add_argument("--load", type=Path, help="weights to compare, instead of training")
    given = parser.parse_args()
    os.nice(5)
    network = AcquisitionPolicyNetwork()
    if given.load is not None:
        network.load_state_dict(torch.load(given.load, weights_only=True))
    else:
        output = given.output.resolve() if given.output is not None else None
        os.chdir(tempfile.mkdtemp())  # the run's folder is not kept
        network = asyncio.run(trained(given.seed, given.steps))
        if output is not None:
            torch.save(network.state_dict(), output)
    print(
        "| variables | rule | tasks | policy's expected regret | rule's | saved |\n|---|---|---|---|---|---|"
    )
    for size in SIZES:
        print(*compare(network, size, given.tasks), sep="\n", flush=True)


if __name__ == "__main__":
    main()
