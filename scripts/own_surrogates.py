"""Policies whose surrogate is a Gaussian process of BoTorch or an ensemble of networks, against rules.

    .venv/bin/python scripts/beside.py .venv-botorch botorch==0.18.1
    PYTHONPATH=. .venv-botorch/bin/python scripts/own_surrogates.py    # --write: into the page, too

The surrogates are those of examples/own_surrogate.py. Policies and rules play the same held-out graphs with
the same noise and the same surrogate, which also recommends in the end; regret is the true one. What is there
already (runs/own-surrogates/SURROGATE-SEED.json) is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from examples.own_surrogate import FAMILY, SURROGATES, trained
from scripts.acquisition_policy import held_out, saved
from scripts.page_tables import write_table
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.surrogates import Surrogate
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule

RULES = ("random", "sd per cost")
FOLDER = Path("runs/own-surrogates")
PAGE = "evidence/experiment-choice.md"


def regrets(surrogate: Surrogate, player: str | AcquisitionPolicyNetwork, tasks: int) -> list[float]:
    """[tasks] true regrets in the end of a rule, by its name, or of a policy's likeliest experiments."""
    environment = AcquisitionEnv(FAMILY, surrogate=surrogate)
    if isinstance(player, str):
        evaluate_rule(environment.rules()[player], environment, held_out(tasks))
    else:
        evaluate(player, environment, held_out(tasks))
    ends: list[float] = environment.regret.tolist()
    return ends


def measured(name: str, seed: int, steps: int, tasks: int, folder: Path) -> dict[str, list[float]]:
    """Regrets of the policy and, for seed 0, of the rules."""
    file = folder / f"{name.replace(' ', '-')}-{seed}.json"
    if not file.is_file():
        begun, surrogate, policy = time.process_time(), SURROGATES[name](), AcquisitionPolicyNetwork()
        trained(surrogate, steps=steps, seed=seed, log=lambda line: print(name, seed, line)).load_into(policy)
        print(f"{name}, seed {seed}: trained in {time.process_time() - begun:.0f} CPU s", flush=True)
        found = {"policy": regrets(surrogate, policy, tasks)}
        if seed == 0:
            found |= {rule: regrets(surrogate, rule, tasks) for rule in RULES}
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
        print(f"{name}, seed {seed}: {time.process_time() - begun:.0f} CPU s in all", flush=True)
    values: dict[str, list[float]] = json.loads(file.read_text())
    return values


def table(seeds: int, steps: int, tasks: int, folder: Path) -> str:
    """Mean regrets, and what a policy saves of each rule's, with paired 95 % intervals."""
    lines = [
        "| surrogate | seed | "
        + " | ".join(RULES)
        + " | policy | "
        + " | ".join(f"saved of {r}" for r in RULES),
        "|" + "---|" * (3 + 2 * len(RULES)),
    ]
    lines[0] += " |"
    for name in SURROGATES:
        rules = measured(name, 0, steps, tasks, folder)
        for seed in range(seeds):
            policy = np.array(measured(name, seed, steps, tasks, folder)["policy"])
            others = [np.array(rules[rule]) for rule in RULES]
            cells = [name, str(seed), *(f"{other.mean():.3f}" for other in others), f"{policy.mean():.3f}"]
            cells += [saved(policy, other, float(other.mean())) for other in others]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60_000, help="experiments of each training")
    parser.add_argument("--tasks", type=int, default=1000, help="held-out graphs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE}")
    given = parser.parse_args()
    os.nice(5)
    torch.set_num_threads(1)
    rows = table(given.seeds, given.steps, given.tasks, FOLDER)
    print(rows)
    if given.write:
        write_table(PAGE, "scripts/own_surrogates.py --write", rows)


if __name__ == "__main__":
    main()
