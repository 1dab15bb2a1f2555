"""Each advantage estimator through the whole trainer: what moves, what is logged, and what a resume keeps."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_training import Watched, even_share, group_of, make_agent, make_trainer, same_bits, snapshot

from stateset_agents.core.reward import RewardResult, reward_function
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.estimators import ESTIMATORS
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.errors import CheckpointError, ConfigurationError

WITH_CRITIC = sorted(name for name, estimator in ESTIMATORS.items() if estimator.critic)


@reward_function(local=True)
async def even_turns(trajectory):
    """Each turn's share of even tokens, and 1 for the whole when the first token of all is even."""
    own = [
        sum(token % 2 == 0 for token in turn.completion.token_ids) / len(turn.completion.token_ids)
        for turn in trajectory.turns
    ]
    whole = float(trajectory.turns[0].completion.token_ids[0] % 2 == 0)
    return RewardResult(score=sum(own) + whole, turn_rewards=tuple(own))


async def steps(trainer, count):
    await trainer.initialize()
    for _ in range(count):
        await trainer.step()
    return [line.values for line in RunLog(trainer.run).metrics()]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.first(2)
async def test_weights_move_and_advantages_are_logged(tmp_path, estimator):
    trainer = make_trainer(tmp_path, reward=even_turns, advantage_estimator=estimator)
    await trainer.initialize()
    before = snapshot(trainer)
    seen = await steps(trainer, 2)
    after = snapshot(trainer)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert all(line["advantage/std"] > 0 for line in seen)
    critic = {"loss/value", "value/explained_variance", "value/clip_fraction", "value/mean"}
    if ESTIMATORS[estimator].critic:
        assert all(critic <= line.keys() for line in seen)
        assert not torch.equal(before["critic head.outer.weight"], after["critic head.outer.weight"])
        assert (seen[0]["value/mean"], seen[1]["value/mean"] > 0) == (0.0, True)
    else:
        assert not any(critic & line.keys() for line in seen)
        assert not any(name.startswith("critic") for name in after)
    logged = [one.advantages for one in RunLog(trainer.run).rollouts("train")]
    assert all(logged)
    await trainer.close()


OTHERS_RESUMED = [
    pytest.param(name, marks=pytest.mark.long) for name in ["turn_group", *WITH_CRITIC] if name != "token_gae"
]


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["token_gae", *OTHERS_RESUMED])
async def test_a_resumed_run_ends_bit_equal_critic_included(tmp_path, estimator):
    settings = {"reward": even_turns, "advantage_estimator": estimator, "max_steps": 4}
    if estimator in WITH_CRITIC:
        settings["value_dropout"] = 0.2
    whole = make_trainer(tmp_path, **settings)
    await steps(whole, 4)
    half = make_trainer(tmp_path, **settings)
    await steps(half, 2)
    path = await half.save_checkpoint()
    await half.close()
    assert (path / "critic.safetensors").exists() == (estimator in WITH_CRITIC)
    assert not [file for file in path.rglob("*") if file.suffix in (".pt", ".pkl", ".bin")]
    torch.manual_seed(99)
    again = make_trainer(tmp_path, run=half.run, **settings)
    await again.load_checkpoint()
    await steps(again, 2)
    assert same_bits(snapshot(again), snapshot(whole))
    await again.close()
    await whole.close()


@pytest.mark.parametrize(("was", "now"), [("group", "turn_gae"), ("turn_gae", "group")])
async def test_a_run_with_a_critic_is_none_without_and_the_other_way_round(tmp_path, was, now):
    trainer = make_trainer(tmp_path, advantage_estimator=was)
    await steps(trainer, 1)
    await trainer.save_checkpoint()
    await trainer.close()
    other = make_trainer(tmp_path, run=trainer.run, advantage_estimator=now)
    with pytest.raises(CheckpointError, match=f"advantage_estimator was '{was}' and is '{now}'"):
        await other.load_checkpoint()
    await other.close()


async def test_a_checkpoint_whose_critic_is_damaged_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, advantage_estimator="turn_gae")
    await steps(trainer, 1)
    path = await trainer.save_checkpoint()
    await trainer.close()
    (path / "critic.safetensors").write_bytes(b"torn")
    other = make_trainer(tmp_path, run=trainer.run, advantage_estimator="turn_gae")
    with pytest.raises(CheckpointError, match=r"critic.safetensors is truncated or altered"):
        await other.load_checkpoint()
    await other.close()


async def test_the_critic_never_moves_the_policy(tmp_path):
    trainer = make_trainer(
        tmp_path, reward=even_turns, advantage_estimator="token_gae", learning_rate=0.0, weight_decay=0.0
    )
    await trainer.initialize()
    before = snapshot(trainer)
    seen = await steps(trainer, 3)
    after = snapshot(trainer)
    policy = [name for name in before if "critic" not in name and "optimizer" not in name]
    assert all(torch.equal(before[name], after[name]) for name in policy)
    assert not torch.equal(before["critic head.outer.bias"], after["critic head.outer.bias"])
    assert seen[-1]["loss/value"] < seen[0]["loss/value"]
    await trainer.close()


@pytest.mark.parametrize("estimator", ["group", "token_gae"])
async def test_the_cut_into_micro_batches_changes_nothing_but_rounding(tmp_path, estimator):
    made = []
    for tokens in (16384, 40):
        trainer = make_trainer(
            tmp_path, reward=even_turns, advantage_estimator=estimator, micro_batch_tokens=tokens
        )
        (line,) = await steps(trainer, 1)
        made.append((line, snapshot(trainer)))
        await trainer.close()
    (one, weights), (other, others) = made
    assert other["batch/micro_batches"] > one["batch/micro_batches"]
    assert one["optimizer/grad_norm"] == pytest.approx(other["optimizer/grad_norm"], rel=1e-4)
    assert one["advantage/std"] == pytest.approx(other["advantage/std"], rel=1e-5)
    moments = [name for name in weights if name.endswith("exp_avg")]
    assert moments
    assert all(torch.allclose(weights[name], others[name], atol=1e-5, rtol=1e-3) for name in moments)


async def test_one_conversation_per_scenario_is_enough_for_a_critic(tmp_path):
    trainer = make_trainer(tmp_path, advantage_estimator="turn_gae", num_generations=1)
    seen = await steps(trainer, 2)
    assert all(line["group/dropped"] == 0 and line["optimizer/skipped"] == 0 for line in seen)
    await trainer.close()


async def test_what_has_no_score_trains_neither_policy_nor_critic(tmp_path):
    @reward_function(local=True)
    async def unscored(trajectory):
        return None if trajectory.member else await even_share._function(trajectory)

    trainer = make_trainer(
        tmp_path, reward=unscored, environment=Watched(), advantage_estimator="turn_gae", num_generations=2
    )
    await steps(trainer, 1)
    logged = [one.advantages is not None for one in RunLog(trainer.run).rollouts("train")]
    assert logged == [True, False, True, False]
    await trainer.close()


# ------------------------------------------------------------------------------ the loss without a step


async def test_the_loss_of_given_samples_leaves_everything_as_it_is(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.3)
    await steps(trainer, 1)
    groups = await trainer.generate_trajectories(trainer.environment.scenarios("train")[:2])
    samples = assign_credit(groups, trainer.config).samples
    before = snapshot(trainer)
    losses = trainer.learner.losses(samples)
    parts = losses["policy_loss"] + losses["kl_penalty"]
    assert losses["total_loss"].item() == pytest.approx(parts.item(), abs=1e-6)
    assert losses["kl_penalty"] > 0
    assert losses["entropy"] > 0
    doubled = trainer.learner.losses(samples, beta=0.6)
    assert doubled["kl_penalty"].item() == pytest.approx(2 * losses["kl_penalty"].item(), rel=1e-4)
    losses["total_loss"].backward()
    gradient = [parameter.grad for parameter in trainer.learner.policy.model.parameters()]
    assert all(one is not None for one in gradient)
    assert any(bool(one.any()) for one in gradient)
    assert same_bits(snapshot(trainer), before)
    await trainer.close()


async def test_a_loss_with_kl_needs_a_reference_and_a_sample(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.0, agent=make_agent())
    await trainer.initialize()
    samples = assign_credit([group_of(1.0, 0.0)], trainer.config).samples
    assert trainer.learner.losses(copy.copy(samples))["kl_penalty"] == 0
    with pytest.raises(ConfigurationError, match=r"beta 0.1 needs a reference: train with beta > 0"):
        trainer.learner.losses(samples, beta=0.1)
    with pytest.raises(ConfigurationError, match="no sample has an advantage"):
        trainer.learner.losses([])
    await trainer.close()
