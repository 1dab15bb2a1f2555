"""Every loss learns a task with a known answer, through the whole trainer, within seconds."""

from __future__ import annotations

from statistics import fmean

import pytest
from tiny_training import make_agent, make_environment, make_trainer, reward_curve

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.core.reward import reward_function


@reward_function(local=True)
async def answers_in_kind(trajectory):
    """1 when the first token is even for a caller who opens with a short word, odd for the others."""
    short = len(trajectory.scenario.opening) <= 2
    return float((trajectory.turns[0].completion.token_ids[0] % 2 == 0) == short)


async def rewards(folder, reward=answers_in_kind, **settings):
    """Mean reward of each step; a policy that does not listen gets .5."""
    trainer = make_trainer(
        folder,
        agent=make_agent(max_new_tokens=2),
        environment=make_environment(max_turns=1),
        reward=reward,
        num_generations=8,
        gradient_accumulation_steps=4,
        lr_scheduler_type="constant",
        save_steps=0,
        log_rollouts=False,
        **{"max_steps": 24, "learning_rate": 4e-3, "num_iterations": 2, "beta": 0.0, **settings},
    )
    curve = reward_curve(trainer)
    await trainer.train()
    await trainer.close()
    return curve


OTHERS = [pytest.param(loss, marks=pytest.mark.long) for loss in sorted(LOSSES.keys() - {"grpo"})]


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["grpo", *OTHERS])
async def test_every_loss_learns_to_answer_in_kind(tmp_path, loss_type):
    curve = await rewards(tmp_path, loss_type=loss_type)
    assert fmean(curve[:3]) < 0.7
    assert fmean(curve[-5:]) > 0.9


@pytest.mark.parametrize(
    "settings",
    [
        {"baseline_type": "leave_one_out", "advantage_normalization": "none"},
        pytest.param({"beta": 0.01}, marks=pytest.mark.long),
        pytest.param({"beta": 0.01, "kl_placement": "reward", "kl_estimator": "k1"}, marks=pytest.mark.long),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.long
async def test_it_learns_with_other_baselines_and_terms(tmp_path, settings):
    assert fmean((await rewards(tmp_path, **settings))[-5:]) > 0.9


async def test_at_learning_rate_zero_nothing_is_learned(tmp_path):
    curve = await rewards(tmp_path, learning_rate=0.0, max_steps=8)
    assert 0.4 < fmean(curve) < 0.6


@pytest.mark.long
async def test_a_strong_kl_holds_the_policy_where_it_was(tmp_path):
    assert fmean((await rewards(tmp_path, beta=5.0))[-5:]) < 0.75
