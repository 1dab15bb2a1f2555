"""A minute of training scales a cluster better than the best of 24 autoscalers, chosen in hindsight."""

from __future__ import annotations

import runpy

import pytest
from repository_paths import ROOT

from scripts.rivals.autoscaling_planning import HPA_GRID
from stateset_agents.algorithms.paired import paired_rewards
from stateset_agents.numeric.autoscaling.baselines import InReplicas, exactly, in_actions
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule, evaluation_seeds, paired_differences
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))  # five by scripts/autoscaling_seeds.py
async def test_a_trained_policy_beats_the_best_autoscaler_in_hindsight(tmp_path, seed):
    example = runpy.run_path(str(ROOT / "examples" / "autoscaling.py"))
    environment, seeds = InfrastructureEnv(), evaluation_seeds(10**9, 1000)
    hpas = [evaluate_rule(exactly(hpa), InReplicas(environment), seeds) for hpa in HPA_GRID]
    best = max(hpas, key=lambda played: sum(played.scored))
    policy = MlpPolicy(environment.spec, seed=seed)
    clone(policy, in_actions(example["SHOWN"]), environment, seed=seed)
    config = ControlConfig(
        **example["SETTINGS"], seed=seed, output_dir=str(tmp_path), progress=False, save_steps=0
    )
    async with ControlTrainer(policy, environment, config) as trainer:
        await trainer.train()
    differences = paired_differences(evaluate(policy, environment, seeds), best)
    assert paired_rewards(differences).verdict == "better"
