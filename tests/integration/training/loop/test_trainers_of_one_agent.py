"""Several trainers, or several trainings, of one agent: each samples from its own weights."""

from __future__ import annotations

import asyncio

import pytest
from tiny_training import Watched, make_agent, make_trainer, same_bits, snapshot

from stateset_agents.backends.base import exclusive
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

STEEP = {"learning_rate": 5e-2, "lr_scheduler_type": "constant"}
"""Weights a step apart give ratios far from 1."""


def first_ratios(trainer):
    """Of each step: 1 where the weights that sampled are the weights that learn."""
    values = [line.values.get("policy/first_ratio_max") for line in RunLog(trainer.run).metrics()]
    return [value for value in values if value is not None]


@pytest.mark.parametrize("ready", [False, True])
async def test_two_trainings_of_one_agent_at_once_are_refused(tmp_path, ready):
    agent = make_agent()
    one, other = (make_trainer(tmp_path, agent=agent, seed=seed, **STEEP) for seed in (0, 5))
    if ready:
        await one.initialize()
        await other.initialize()
    results = await asyncio.gather(one.train(), other.train(), return_exceptions=True)
    (refusal,) = [result for result in results if result is not agent]
    assert isinstance(refusal, ConfigurationError)
    assert str(refusal).startswith("another trainer is training this agent: await its end")
    trained = one if results[0] is agent else other
    assert first_ratios(trained) == pytest.approx([1.0] * 3, abs=1e-4)
    await one.stop()
    await other.stop()
    await agent.close()


async def test_a_step_beside_another_trainers_training_is_refused(tmp_path):
    agent = make_agent()
    one, other = (make_trainer(tmp_path, agent=agent) for _ in range(2))
    await one.initialize()
    await other.initialize()
    step = asyncio.create_task(one.step())
    await asyncio.sleep(0)
    for call in (other.step(), other.train(), other.load_checkpoint(), other.generate_trajectories([])):
        with (
            exclusive(agent.backend, one._lifecycle),  # the step may be over before the last call
            pytest.raises(ConfigurationError, match="another trainer is training this agent"),
        ):
            await call
    await step
    await other.step()
    await one.stop()
    await other.close()


@pytest.mark.long
async def test_trainers_that_take_turns_each_sample_from_their_own_weights(tmp_path):
    agent = make_agent()
    one = make_trainer(tmp_path, agent=agent, **STEEP)
    await one.train()
    other = make_trainer(tmp_path, agent=agent, seed=5, max_steps=4, **STEEP)  # the first was never closed
    await other.initialize()
    one.config = one.config.model_copy(update={"max_steps": 5})
    for _ in range(2):
        await other.step()
        await one.step()
        await other.step()
        if one.step_number == 5:
            break
    assert first_ratios(one) == pytest.approx([1.0] * one.step_number, abs=1e-4)
    assert first_ratios(other) == pytest.approx([1.0] * 4, abs=1e-4)
    await one.stop()
    await other.close()


@pytest.mark.long
async def test_a_training_that_ended_with_its_best_weights_goes_on_from_its_last(tmp_path):
    settings = {"eval_steps": 1, "eval_episodes": 4, "load_best_at_end": True, **STEEP}
    trainer = make_trainer(tmp_path, environment=Watched(), **settings)
    await trainer.train()
    assert trainer.progress.best_step < 3
    assert trainer.agent.backend.version == trainer.progress.best_step
    last = snapshot(trainer)
    trainer.config = trainer.config.model_copy(update={"max_steps": 4})
    await trainer.train()
    assert not same_bits(snapshot(trainer), last)
    assert first_ratios(trainer) == pytest.approx([1.0] * 4, abs=1e-4)
    await trainer.close()
