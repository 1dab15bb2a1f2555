"""The loss that a trainer shows of groups: whose members count, and at which temperature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_training import make_trainer


async def test_a_failing_member_leaves_its_siblings_in_the_loss(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.0, max_steps=3)
    await trainer.initialize()
    groups = await trainer.generate_trajectories(trainer.environment.scenarios("train")[:2])
    first = groups[0]
    unscored = replace(
        first, trajectories=(replace(first.trajectories[0], reward=None), *first.trajectories[1:])
    )
    losses = await trainer.compute_grpo_loss([unscored])
    alone = replace(first, trajectories=first.trajectories[1:])
    expected = await trainer.compute_grpo_loss([alone])
    assert torch.allclose(losses["total_loss"], expected["total_loss"], atol=1e-6)
    await trainer.close()


async def test_the_loss_follows_the_temperature_that_a_schedule_has_reached(tmp_path):
    schedule = {
        "temperature_schedule": "adaptive",
        "temperature_target": 0.0,
        "temperature_decay": 0.5,
        "temperature_min": 0.1,
    }
    async with make_trainer(tmp_path, learning_rate=1e-3, **schedule) as trainer:
        await trainer.step()
        assert trainer.temperature == 0.5  # the step itself was at 1
        groups = await trainer.generate_trajectories(list(trainer.environment.scenarios("train"))[:2])
        losses = await trainer.compute_grpo_loss(groups)
    # of the policy that sampled to itself: at another temperature it would not be 0
    assert losses["approx_kl"].item() == pytest.approx(0.0, abs=1e-6)
