"""A small policy learns which experiment on a causal model to pay for next; two minutes of one core.

python examples/acquisition.py    # writes campaigns.html
python examples/acquisition.py --steps 20000 --shown 100    # a shorter training
"""

import argparse
import asyncio
from pathlib import Path

import torch

from stateset_agents.numeric.acquisition.campaign_page import by_policy, by_rule, campaigns
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.lookahead import knowledge_gradient
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.rules import RULES
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.evaluation import evaluation_seeds
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer

FAMILY = LinearFamily(num_variables=5, costs=(1.0, 20.0), budget=20.0)
SETTINGS = {"num_groups": 32, "gamma": 1.0, "learning_rate": 1e-3, "entropy_coef": 0.001}
SHOWN = knowledge_gradient(samples=16)
"""What the policy is cloned from."""


async def main() -> None:
    """Clone, train, and show campaigns on models that no training plays."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=300_000, help="experiments of the training")
    arguments.add_argument("--shown", type=int, default=1000, help="episodes of the rule that is cloned")
    arguments.add_argument("--tasks", type=int, default=500, help="held out, on the page")
    arguments.add_argument("--output", type=Path, default=Path("campaigns.html"))
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    policy = AcquisitionPolicyNetwork()
    cloned = clone(
        policy,
        lambda env: lambda: env.rule_actions(SHOWN),
        AcquisitionEnv(FAMILY),
        num_episodes=chosen.shown,
    )
    print(f"cloned: {cloned.agreement:.0%} of its experiments are the knowledge gradient's")
    config = ControlConfig(**SETTINGS, total_steps=chosen.steps, save_steps=0, log_episodes=False)
    async with ControlTrainer(policy, AcquisitionEnv(FAMILY, reward="expected_regret"), config) as trainer:
        await trainer.train()
    players = {"the policy": by_policy(policy)}
    players |= {name: by_rule(RULES[name]) for name in ("EI per cost", "sd per cost", "random")}
    page = campaigns(FAMILY, players, evaluation_seeds(0, chosen.tasks), name="Causal acquisition")
    for line in page.charts[0].series:
        print(f"{line.name}: regret {line.values[-1]:.4f} in the end")
    print(page.write(chosen.output))


if __name__ == "__main__":
    asyncio.run(main())
