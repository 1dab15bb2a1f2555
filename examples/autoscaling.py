"""A small policy learns to scale a simulated cluster, from Kubernetes' autoscaler on; a minute of one core.

python examples/autoscaling.py
python examples/autoscaling.py --steps 200000  # a shorter training
"""

import argparse
import asyncio

import torch

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.numeric.autoscaling.baselines import Hpa, InReplicas, exactly, in_actions
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.evaluation import (
    ControlEvaluation,
    evaluate,
    evaluate_rule,
    evaluation_seeds,
    paired_difference,
)
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer

SETTINGS = {"gamma": 0.95, "learning_rate": 2e-3, "minibatch_size": 4096, "total_steps": 2_600_000}
"""A discount of .95 looks 20 steps ahead, five start-ups of a replica."""
SHOWN = Hpa(target=0.6, window_seconds=0.0)
"""What the policy is cloned from."""
COLUMNS = ("money_cost", "money_late", "document")


def table(played: dict[str, ControlEvaluation], horizon: int) -> str:
    """Markdown, the best first: means of a step, and paired differences with 95 % intervals."""
    lines = [
        f"| policy | reward | {' | '.join(COLUMNS)} | against {SHOWN.name} |",
        "|---|---|---|---|---|---|",
    ]
    for name, evaluation in sorted(played.items(), key=lambda item: -sum(item[1].scored)):
        parts = [sum(evaluation.scored) / len(evaluation.scored)]
        parts += [evaluation.components[column] for column in COLUMNS]
        cells = [name, *(f"{part / horizon:.3f}" for part in parts)]
        difference, interval = paired_difference(evaluation, played[SHOWN.name])
        if interval is None:  # all are equal: it is the autoscaler itself
            cells.append("-")
        else:
            low, high = (end / horizon for end in interval)
            cells.append(f"{difference / horizon:+.3f}{interval_text((low, high), '.3f')}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


async def main() -> None:
    """Clone, train, and compare on workloads that no training plays."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=SETTINGS["total_steps"])
    arguments.add_argument("--workloads", type=int, default=200, help="held out")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    environment = InfrastructureEnv()
    policy = MlpPolicy(environment.spec)
    cloned = clone(policy, in_actions(SHOWN), environment)
    print(
        f"cloned: acts as {SHOWN.name} in {cloned.agreement:.1%} of the steps (always {cloned.commonest:.1%})"
    )
    seeds = evaluation_seeds(0, chosen.workloads)
    played = {
        rule.name: evaluate_rule(exactly(rule), InReplicas(environment), seeds) for rule in (Hpa(), SHOWN)
    }
    played["cloned"] = evaluate(policy, environment, seeds)
    config = ControlConfig(**SETTINGS | {"total_steps": chosen.steps}, save_steps=0)
    async with ControlTrainer(policy, environment, config) as trainer:
        await trainer.train()
    played["trained"] = evaluate(policy, environment, seeds)
    print(table(played, environment.spec.horizon))


if __name__ == "__main__":
    asyncio.run(main())
