"""The best step on the validation split, early stopping, and a temperature that follows the reward."""

from __future__ import annotations

import json

import pytest
from tiny_training import Watched, make_trainer, same_bits, snapshot

from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.checkpoint_files import best_checkpoint, latest_checkpoint, load_checkpoint
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

BEST_IS_STEP_2 = {
    "learning_rate": 0.1,
    "seed": 2,
    "gradient_accumulation_steps": 1,
    "eval_steps": 1,
    "max_steps": 3,
}
"""With these settings the validation reward is highest after step 2 of 3; each test looks that it is."""

IMPATIENT = {"eval_steps": 1, "early_stopping_patience": 2, "early_stopping_threshold": 10.0, "max_steps": 9}
"""No step improves by 10, so the third evaluation ends it."""


def metric(trainer, name):
    lines = RunLog(trainer.run).metrics()
    return [line.values[name] for line in lines if name in line.values]


async def test_without_improvement_it_stops_early_and_says_why(tmp_path):
    trainer = make_trainer(tmp_path, **IMPATIENT)
    await trainer.train()
    await trainer.close()
    assert trainer.step_number == 3
    values = metric(trainer, "eval/reward")
    assert len(values) == 3
    best = max(range(3), key=lambda place: values[place])  # the first of equals
    summary = json.loads(trainer.run.summary.read_text())
    assert summary["best"] == {"step": best + 1, "metric": "eval/reward", "value": values[best]}
    assert summary["ended"] == "finished"
    assert summary["why"] == (
        f"stopped early: eval/reward did not improve on {values[best]:.4g} of step {best + 1} "
        "in the last 2 evaluations"
    )
    with pytest.raises(ConfigurationError, match="raise early_stopping_patience to go on"):
        await make_stopped_again(tmp_path, trainer)


async def make_stopped_again(folder, trainer):
    again = make_trainer(folder, run=trainer.run, **IMPATIENT)
    try:
        await again.load_checkpoint()
        await again.step()
    finally:
        await again.close()


@pytest.mark.long
async def test_more_patience_goes_on_from_an_early_stop(tmp_path):
    trainer = make_trainer(tmp_path, **IMPATIENT)
    await trainer.train()
    await trainer.close()
    again = make_trainer(tmp_path, run=trainer.run, **{**IMPATIENT, "early_stopping_patience": 4})
    await again.load_checkpoint()
    await again.train()
    assert again.step_number == 5
    await again.close()


@pytest.mark.long
async def test_a_resumed_run_stops_at_the_same_step_with_the_same_bits(tmp_path):
    whole = make_trainer(tmp_path, **IMPATIENT)
    await whole.train()
    half = make_trainer(tmp_path, **IMPATIENT)

    class StopsAfterTwo(Callback):
        async def on_step_end(self, step, metrics):
            if step == 2:
                half.request_stop()

    half.callbacks.append(StopsAfterTwo())
    await half.train()
    assert half.step_number == 2
    await half.close()
    again = make_trainer(tmp_path, run=half.run, **IMPATIENT)
    await again.load_checkpoint()
    await again.train()
    assert same_bits(snapshot(again), snapshot(whole))
    assert again.progress.why == whole.progress.why
    assert metric(again, "eval/reward") == metric(whole, "eval/reward")
    await again.close()
    await whole.close()


async def test_the_best_checkpoint_outlives_the_last_ones(tmp_path):
    trainer = make_trainer(
        tmp_path, environment=Watched(), save_steps=1, save_total_limit=1, **BEST_IS_STEP_2
    )
    await trainer.train()
    assert trainer.progress.best_step == 2
    names = sorted(path.name for path in trainer.run.checkpoints.iterdir())
    assert names == ["best", "step-000002", "step-000003"]
    assert best_checkpoint(trainer.run.checkpoints).name == "step-000002"
    assert latest_checkpoint(trainer.run.checkpoints).name == "step-000003"
    assert load_checkpoint(trainer.run.checkpoints / "best").step == 2
    # going on from before the best step, it is not the best any more
    kept = make_trainer(tmp_path, environment=Watched(), run=trainer.run, **BEST_IS_STEP_2)
    await trainer.close()
    await kept.load_checkpoint(trainer.run.checkpoints / "best")
    assert sorted(path.name for path in trainer.run.checkpoints.iterdir()) == ["best", "step-000002"]
    await kept.close()


@pytest.mark.parametrize("loads", [True, False])
async def test_the_agent_ends_with_the_best_weights_where_that_is_asked_for(tmp_path, loads):
    trainer = make_trainer(tmp_path, environment=Watched(), load_best_at_end=loads, **BEST_IS_STEP_2)
    agent = await trainer.train()
    best = dict(load_checkpoint(trainer.run.checkpoints / "best").weights)
    last = dict(trainer.learner.weights())
    assert trainer.progress.best_step == 2
    assert not same_bits(best, last)
    own = {name: tensor for name, tensor in agent.backend.model.state_dict().items() if name in best}
    assert same_bits(own, best) is loads
    assert same_bits(dict(agent.backend.model.state_dict()), last) is not loads
    # a resume goes on from the last step either way
    assert same_bits(dict(load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).weights), last)
    await trainer.close()


async def test_splits_are_never_mixed(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, eval_steps=1)
    await trainer.train()
    await trainer.close()
    played = {(one.stage, one.split) for one in RunLog(trainer.run).rollouts()}
    assert played == {("train", "train"), ("validation", "validation")}


async def test_success_that_nobody_judges_is_refused_with_the_step_kept(tmp_path):
    trainer = make_trainer(tmp_path, eval_steps=2, metric_for_best="eval/success")
    with pytest.raises(ConfigurationError, match="set it to eval/reward"):
        await trainer.train()
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 2
    await trainer.close()


# ------------------------------------------------------------------------------ temperature

COOLING = {
    "temperature_schedule": "adaptive",
    "temperature_target": 0.0,
    "temperature_decay": 0.6,
    "max_steps": 4,
    "save_steps": 0,
}


@pytest.mark.long
async def test_the_temperature_follows_the_reward_and_the_log_probs_follow_it(tmp_path):
    trainer = make_trainer(tmp_path, **COOLING)
    await trainer.train()
    assert metric(trainer, "rollout/temperature") == pytest.approx([1.0, 0.6, 0.36, 0.3])
    # had the update another temperature than the rollout, the first ratios would not be 1
    assert metric(trainer, "policy/first_ratio_max") == pytest.approx([1.0] * 4, abs=1e-4)
    assert trainer.learner.reference.temperature == trainer.learner.policy.temperature == 0.3
    await trainer.close()


@pytest.mark.long
async def test_a_resumed_run_goes_on_at_its_temperature(tmp_path):
    whole = make_trainer(tmp_path, **COOLING)
    await whole.train()
    half = make_trainer(tmp_path, **COOLING)
    await half.initialize()
    await half.step()
    await half.step()
    await half.save_checkpoint()
    await half.close()
    again = make_trainer(tmp_path, run=half.run, **COOLING)
    await again.load_checkpoint()
    assert again.temperature == pytest.approx(0.36)
    await again.train()
    assert same_bits(snapshot(again), snapshot(whole))
    await again.close()
    await whole.close()
