"""An estimator and a loss that a program adds to the registries train like those of the package."""

from __future__ import annotations

from statistics import fmean

import torch
from tiny_training import make_trainer, snapshot

from stateset_agents.algorithms.policy_losses import LOSSES, PolicyLoss, log_likelihood
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.estimators import ESTIMATORS, Advantages, Estimator, ScoredStep


def above_the_mean(step: ScoredStep) -> Advantages:
    """1 for a conversation that earned more than its group's mean, else 0."""
    groups = [group.rewards for group in step.groups.values()]
    credit = [[(float(reward > fmean(rewards)),) for reward in rewards] for rewards in groups]
    return Advantages(credit, credit)


async def test_a_step_trains_by_both(tmp_path, monkeypatch):
    estimator = Estimator(credit=above_the_mean, per="conversation", normalizations=("none",))
    imitation = PolicyLoss(token_loss=log_likelihood, averaging="trajectory", clips="none")
    monkeypatch.setitem(ESTIMATORS, "above_mean", estimator)
    monkeypatch.setitem(LOSSES, "imitation", imitation)
    trainer = make_trainer(tmp_path, advantage_estimator="above_mean", loss_type="imitation", beta=0.0)
    await trainer.initialize()
    before = snapshot(trainer)["lm_head.weight"]
    await trainer.step()
    assert not torch.equal(before, snapshot(trainer)["lm_head.weight"])
    log = RunLog(trainer.run)
    [metrics] = [line.values for line in log.metrics()]
    assert metrics["loss/policy"] > 0  # minus a log-prob, where a clipped surrogate is minus an advantage
    assert {number for rollout in log.rollouts("train") for number in rollout.advantages} == {0.0, 1.0}
    await trainer.close()
