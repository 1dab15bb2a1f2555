"""Train a policy that chooses experiments, and compare it with rules on tasks that it has not played.

    PYTHONPATH=. python scripts/acquisition_policy.py --seed 0 --output 0.pt    # two minutes of one core
    PYTHONPATH=. python scripts/acquisition_policy.py --load 0.pt 1.pt 2.pt --tasks 6000 --lookahead 1000

It first does as the knowledge gradient per cost does, and is then trained on five variables. It plays
three, eight and twelve, and a family that it was not trained for, too. Differences are paired: the same
tasks and the same noise of their experiments.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from scripts.acquisition_headroom import CHUNK, seeds
from scripts.rivals.causal_bo import play_cbo
from scripts.rivals.lookahead import rollout_lookahead
from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.numeric.acquisition.campaign import CampaignOutcome, expected_regret, play
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.lookahead import knowledge_gradient
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.rules import RULES, Rule
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.evaluation import evaluate
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer

Networks = Mapping[str, AcquisitionPolicyNetwork]
Values = np.ndarray


def by_rule(rule: Rule) -> Callable[[Tasks], CampaignOutcome]:
    """Campaigns of a rule."""
    return lambda tasks: play(rule, tasks)


RIVALS: Mapping[str, Callable[[Tasks], CampaignOutcome]] = {
    "EI per cost": by_rule(RULES["EI per cost"]),
    "sd per cost": by_rule(RULES["sd per cost"]),
    "CBO": play_cbo,
    "knowledge gradient per cost": by_rule(knowledge_gradient(samples=16)),
}
ONE_LINE = ("EI per cost", "sd per cost")
BASE = "EI per cost"
LOOKAHEAD = rollout_lookahead(RULES[BASE], samples=32)


def family(num_variables: int = 5) -> LinearFamily:
    """The one on which lookahead gains much; see scripts/acquisition_headroom.py."""
    return LinearFamily(num_variables=num_variables, costs=(1.0, 20.0), budget=20.0)


# ------------------------------------------------------------------------------------------ training


async def trained(seed: int, steps: int, warm_start: int, learning_rate: float) -> AcquisitionPolicyNetwork:
    """A policy after so many episodes of the knowledge gradient, and so many experiments of its own."""
    network = AcquisitionPolicyNetwork(seed=seed)
    begun = time.process_time()
    if warm_start:
        rule = knowledge_gradient(samples=16)
        teacher = AcquisitionEnv(family())
        shown = clone(
            network, lambda env: lambda: env.rule_actions(rule), teacher, num_episodes=warm_start, seed=seed
        )
        print(f"seed {seed}: {shown.agreement:.0%} of its choices are the knowledge gradient's")
    config = ControlConfig(
        total_steps=steps,
        num_groups=32,
        group_size=8,
        gamma=1.0,
        learning_rate=learning_rate,
        minibatch_size=1024,
        entropy_coef=0.001,
        save_steps=0,
        log_episodes=False,
        progress=False,
        seed=seed,
    )
    environment = AcquisitionEnv(family(), reward="expected_regret")
    async with ControlTrainer(network, environment, config) as trainer:
        await trainer.train()
    print(f"seed {seed}: {steps:,} experiments in {time.process_time() - begun:.0f} CPU s")
    return network


# ------------------------------------------------------------------------------------------ comparison


def held_out(number: int) -> list[int]:
    """Tasks that no training plays; those of the headroom's table come first."""
    return [seed for chunk in range(-(-number // CHUNK)) for seed in seeds(chunk)][:number]


def played(network: AcquisitionPolicyNetwork, tasks_of: LinearFamily, starts: list[int]) -> Values:
    """[B] expected regret in the end of the policy's likeliest experiments."""
    found = []
    for begin in range(0, len(starts), 500):
        environment = AcquisitionEnv(tasks_of)
        evaluate(network, environment, starts[begin : begin + 500])
        found.append(expected_regret(environment.situation.exact))
    return np.concatenate(found)


def saved(mine: Values, other: Values, of: float) -> str:
    """`+10.0% [+8.0%, +12.0%]`: what is saved, as a share of `of`."""
    share = f"{(other.mean() - mine.mean()) / of:+.1%}"
    interval = mean_interval((other - mine).tolist())
    if interval is None:
        return share  # all differ by the same
    low, high = (limit / of for limit in interval)
    return f"{share} [{low:+.1%}, {high:+.1%}]"


def compare(
    networks: Networks, title: str, tasks_of: LinearFamily, num_tasks: int, rules: list[str]
) -> list[str]:
    """Rows of the table; the knowledge gradient plays the first 2,000 tasks at most."""
    starts = held_out(num_tasks)
    mine = {name: played(network, tasks_of, starts) for name, network in networks.items()}
    rows = []
    for rule in rules:
        number = min(num_tasks, 2000) if rule.startswith("knowledge") else num_tasks
        other = RIVALS[rule](tasks_of.draw(starts[:number])).expected_regret
        for name, values in mine.items():
            means = f"{values[:number].mean():.4f} | {other.mean():.4f}"
            share = saved(values[:number], other, float(other.mean()))
            rows.append(f"| {title} | {name} | {rule} | {number:,} | {means} | {share} |")
    return rows


def against_lookahead(networks: Networks, num_tasks: int) -> list[str]:
    """What share of lookahead's gain on EI per cost each policy has, and what a decision takes."""
    starts, tasks_of = held_out(num_tasks), family()
    tasks = tasks_of.draw(starts)
    base = play(RULES[BASE], tasks).expected_regret
    begun = time.process_time()
    ahead = play(LOOKAHEAD, tasks)
    each = (time.process_time() - begun) / ahead.num_experiments.sum()
    gap = float(base.mean() - ahead.expected_regret.mean())
    rows = [
        f"lookahead: {saved(ahead.expected_regret, base, float(base.mean()))} of {BASE}'s expected regret, "
        f"{1000 * each:.2f} CPU ms a decision, {num_tasks:,} tasks"
    ]
    for name, network in networks.items():
        environment = AcquisitionEnv(tasks_of)
        begun = time.process_time()
        seen = evaluate(network, environment, starts)
        own = (time.process_time() - begun) / sum(seen.lengths)
        mine = expected_regret(environment.situation.exact)
        rows.append(
            f"{name}: {saved(mine, base, gap)} of lookahead's gain, {1000 * own:.2f} CPU ms a decision, "
            f"1/{each / own:.0f} of lookahead's"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300_000, help="experiments of the training")
    parser.add_argument(
        "--warm-start", type=int, default=1000, help="the knowledge gradient's episodes; 0: none"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tasks", type=int, default=2000, help="of the comparison on five variables")
    parser.add_argument(
        "--others", type=int, default=2000, help="of every other comparison, 12 variables half"
    )
    parser.add_argument("--lookahead", type=int, default=0, help="tasks that lookahead plays, too")
    parser.add_argument("--output", type=Path, help="where the weights go")
    parser.add_argument("--load", type=Path, nargs="+", help="weights to compare, instead of training")
    given = parser.parse_args()
    os.nice(5)
    networks = {}
    if given.load is not None:
        for path in given.load:
            networks[path.stem] = AcquisitionPolicyNetwork()
            networks[path.stem].load_state_dict(torch.load(path, weights_only=True))
    else:
        output = given.output.resolve() if given.output is not None else None
        os.chdir(tempfile.mkdtemp())  # the run's folder is not kept
        network = asyncio.run(trained(given.seed, given.steps, given.warm_start, given.learning_rate))
        networks[str(given.seed)] = network
        if output is not None:
            torch.save(network.state_dict(), output)
    print("| family | seed | rule | tasks | policy's expected regret | rule's | saved |\n" + "|---" * 7 + "|")
    print(*compare(networks, "5 variables", family(), given.tasks, list(RIVALS)), sep="\n", flush=True)
    for size, number in ((3, given.others), (8, given.others), (12, given.others // 2)):
        print(
            *compare(networks, f"{size} variables", family(size), number, list(ONE_LINE)),
            sep="\n",
            flush=True,
        )
    easy = "costs .5-2, budget 5"
    print(*compare(networks, easy, LinearFamily(), given.others, list(ONE_LINE)), sep="\n", flush=True)
    if given.lookahead:
        print(*against_lookahead(networks, given.lookahead), sep="\n")


if __name__ == "__main__":
    main()
