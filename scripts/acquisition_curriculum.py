"""A curriculum from three to five variables, and five from the start: as many experiments, three seeds.

    PYTHONPATH=. python scripts/acquisition_curriculum.py    # three minutes of one core

Both are trained in the functional form and compared on the same held-out tasks of five variables.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping

from scripts.acquisition_policy import family, held_out, played, saved
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import RewardConfig
from stateset_agents.numeric.acquisition.functional.update import Difficulty, curriculum_enhanced_grpo
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork

PLANS: Mapping[str, Mapping[int, float]] = {"plain": {5: 1.0}, "curriculum": {3: 0.25, 4: 0.25, 5: 0.5}}
"""Variables of each stage, and its share of the experiments."""
REWARD = RewardConfig(horizon="campaign")


def rows(seed: int, steps: int, num_tasks: int) -> list[str]:
    """The plain training's row, and the curriculum's with what it saves of the other's regret."""
    config = GRPOConfig(
        num_groups=32,
        group_size=16,
        learning_rate=3e-3,
        entropy_coef=0.001,
        seed=seed,
    )
    found, lines = {}, []
    for name, plan in PLANS.items():
        network = AcquisitionPolicyNetwork(seed=seed)
        begun = time.process_time()
        stages = [
            Difficulty(family=family(size), total_steps=max(1, round(share * steps)), num_scms=4096)
            for size, share in plan.items()
        ]
        trained = curriculum_enhanced_grpo(
            stages, config=config, policy_network=network, reward_config=REWARD, reward_scaling="none"
        )
        took = time.process_time() - begun
        trained.load_into(network)
        found[name] = played(network, family(5), held_out(num_tasks))
        mean = float(found[name].mean())
        gain = saved(found[name], found["plain"], float(found["plain"].mean())) if name != "plain" else "-"
        lines.append(
            f"| {seed} | {name} | {trained.num_experiments:,} | {took:.0f} | "
            f"{num_tasks:,} | {mean:.4f} | {gain} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40_000, help="experiments of each training")
    parser.add_argument("--tasks", type=int, default=2000, help="of the comparison")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    os.nice(5)
    print("| seed | training | experiments | CPU s | tasks | expected regret | saved |\n" + "|---" * 7 + "|")
    for seed in range(given.seeds):
        print(*rows(seed, given.steps, given.tasks), sep="\n", flush=True)


if __name__ == "__main__":
    main()
