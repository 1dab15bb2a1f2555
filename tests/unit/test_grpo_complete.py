"""The whole of GRPO in 17 tests, part by part and then together, on real components: nothing here is mocked.

pytest tests/unit/test_grpo_complete.py -v
"""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import (
    even_share,
    make_agent,
    make_environment,
    make_trainer,
    plain_logprobs,
    reward_curve,
    same_bits,
    snapshot,
)

from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.core.computational_engine import create_computational_engine
from stateset_agents.core.value_function import ValueHead, create_value_function
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.trajectory import Status


@pytest.fixture
async def trainer(tmp_path):
    """Ready, untrained: two episodes of four members a step, no KL in the loss."""
    made = make_trainer(tmp_path, beta=0.0, max_steps=3)
    await made.initialize()
    yield made
    await made.close()


@pytest.fixture
async def with_reference(tmp_path):
    made = make_trainer(tmp_path, beta=0.1, max_steps=3)
    await made.initialize()
    yield made
    await made.close()


async def rollout(trainer):
    return await trainer.generate_trajectories(trainer.environment.scenarios("train")[:2])


# ------------------------------------------------------------------------------ value head


def test_a_value_head_is_linear_relu_dropout_linear():
    head = ValueHead(16, inner_size=8, dropout=0.3)
    assert (head.inner.in_features, head.inner.out_features, head.outer.out_features) == (16, 8, 1)
    assert head.dropout.p == 0.3
    assert sum(parameter.numel() for parameter in head.parameters()) == 16 * 8 + 8 + 8 + 1


def test_a_value_head_gives_one_number_per_state():
    head = ValueHead(4, dropout=0.0)
    with torch.no_grad():
        head.inner.weight.copy_(torch.eye(4))
        head.inner.bias.zero_()
        head.outer.weight.fill_(1.0)
        head.outer.bias.fill_(0.5)
    states = torch.tensor([[[1.0, -2.0, 3.0, -4.0], [0.0, 0.0, 0.0, -1.0]]])
    assert head(states).tolist() == [[4.5, 0.5]]  # what is below 0 is cut


def test_a_value_function_reads_a_language_model_s_hidden_states():
    model = tiny_model()
    value_function = create_value_function(model)
    ids = torch.tensor([[5, 6, 7], [7, 6, 5]])
    assert value_function.compute_values(ids).shape == (2, 3)
    returns = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    first = value_function.update_value_function(ids, returns)["loss/value"]
    last = value_function.update_value_function(ids, returns, iterations=30)["loss/value"]
    assert last < first


# ------------------------------------------------------------------------------ advantages


def test_gae_over_turns_by_hand():
    value_function = create_value_function(tiny_model(), gamma=0.9, gae_lambda=0.5)
    credit = value_function.compute_gae([0.0, 1.0], [0.4, 0.6])
    # delta_1 = 1 - .6 = .4; delta_0 = .9 * .6 - .4 = .14; A_0 = .14 + .9 * .5 * .4
    assert credit.advantages == pytest.approx([0.32, 0.4])
    assert credit.returns == pytest.approx([0.72, 1.0])


def test_gae_over_tokens_skips_what_the_agent_did_not_say():
    value_function = create_value_function(tiny_model(), gamma=1.0, gae_lambda=1.0)
    credit = value_function.compute_gae([0.0, 0.0, 1.0], [0.2, 9.0, 0.5], [1, 0, 1])
    assert [credit.advantages[0], credit.advantages[2]] == pytest.approx([0.8, 0.5])


def test_group_advantages_compare_each_member_with_its_group():
    value_function = create_value_function(tiny_model())
    plain = value_function.compute_grpo_advantages(
        [[0.8, 0.5, 0.9, 0.6]], "group_mean", advantage_normalization=False
    )
    assert plain[0] == pytest.approx([0.1, -0.2, 0.2, -0.1])
    scaled = value_function.compute_grpo_advantages([[0.8, 0.5, 0.9, 0.6]], "group_mean")
    assert scaled[0] == pytest.approx([value / math.sqrt(0.025) for value in (0.1, -0.2, 0.2, -0.1)])


def test_equal_rewards_teach_nothing():
    value_function = create_value_function(tiny_model())
    assert value_function.compute_grpo_advantages([[0.7, 0.7, 0.7]]) == [[0.0, 0.0, 0.0]]


# ------------------------------------------------------------------------------ the loss


def loss_of(logprobs, old, advantages, **settings):
    """grpo's loss on one trajectory of these tokens."""
    count = len(advantages)
    return policy_loss(
        "grpo",
        LossInputs(
            logprobs,
            torch.tensor(old),
            torch.tensor(advantages),
            torch.zeros(count, dtype=torch.long),
            Denominators.of([count]),
        ),
        **settings,
    )


def test_the_policy_gradient_is_minus_the_advantage_at_the_sampling_policy():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss_of(logprobs, [-1.0, -2.0], [0.5, -0.25]).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.125])  # a mean over two tokens


def test_a_ratio_beyond_the_clip_has_no_gradient():
    ratios = [1.5, 1.1, 0.5, 0.9]
    logprobs = torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)
    output = loss_of(logprobs, [0.0] * 4, [1.0, 1.0, -1.0, -1.0], clip_ratio=0.2)
    output.loss.backward()
    # gains are clipped: 1.5 upwards with A > 0, .5 downwards with A < 0
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1 / 4, 0.0, 0.9 / 4])
    assert float(output.loss.detach()) == pytest.approx((-1.2 - 1.1 + 0.8 + 0.9) / 4)


async def test_the_loss_of_sampled_groups_is_minus_the_mean_advantage_by_hand(trainer):
    groups = await rollout(trainer)
    losses = await trainer.compute_grpo_loss(groups)
    samples = trainer.learner.credit(groups).samples
    # at ratio 1 grpo's loss is minus the mean over conversations of their mean advantage
    by_hand = -sum(sum(one.advantages) / len(one.advantages) for one in samples) / len(samples)
    assert float(losses["total_loss"].detach()) == pytest.approx(by_hand, abs=1e-5)
    assert float(losses["clip_fraction"]) == 0.0
    losses["total_loss"].backward()
    gradient = [p.grad for p in trainer.learner.policy.model.parameters() if p.grad is not None]
    assert any(bool((grad != 0).any()) for grad in gradient)  # the loss is near 0, its gradient is not


async def test_the_kl_penalty_is_beta_times_the_kl_to_the_reference(with_reference):
    trainer = with_reference
    groups = await rollout(trainer)
    members = [trajectory for group in groups for trajectory in group.trajectories]
    assert float((await trainer.compute_enhanced_grpo_loss(members))["kl_penalty"]) == 0.0  # both the start
    await trainer.training_step(groups)
    groups = await rollout(trainer)
    members = [trajectory for group in groups for trajectory in group.trajectories]
    plain = await trainer.compute_grpo_loss(groups)
    enhanced = await trainer.compute_enhanced_grpo_loss(members, beta=0.1)
    stronger = await trainer.compute_enhanced_grpo_loss(members, beta=0.3)
    model, reference = trainer.learner.policy.model.eval(), trainer.learner.reference.model
    by_hand = []
    with torch.no_grad():
        for member in members:
            gap = plain_logprobs(reference, member) - plain_logprobs(model, member)
            by_hand.append(float((gap.exp() - gap - 1).mean()))
    kl = sum(by_hand) / len(by_hand)
    assert kl > 0
    assert float(plain["kl_penalty"]) == 0.0
    assert float(enhanced["kl_penalty"]) == pytest.approx(0.1 * kl, rel=1e-3)
    assert float(stronger["kl_penalty"]) == pytest.approx(0.3 * kl, rel=1e-3)
    added = float((enhanced["total_loss"] - plain["total_loss"]).detach())
    assert added == pytest.approx(0.1 * kl, rel=1e-2, abs=1e-6)


# ------------------------------------------------------------------------------ the step


async def test_a_training_step_moves_the_weights_and_hands_them_to_the_agent(trainer):
    before = snapshot(trainer)
    metrics = await trainer.training_step(await rollout(trainer))
    assert not same_bits(snapshot(trainer), before)
    assert same_bits(dict(trainer.agent.backend.model.state_dict()), trainer.learner.weights())
    assert metrics["optimizer/grad_norm"] > 0
    assert metrics["optimizer/learning_rate"] == pytest.approx(1e-2)  # one step of warm-up, to the peak
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)


async def test_a_step_is_a_rollout_and_a_training_step(tmp_path):
    whole, parts = make_trainer(tmp_path), make_trainer(tmp_path)
    await whole.initialize()
    await parts.initialize()
    await whole.step()
    first = [one.scenario for one in RunLog(whole.run).rollouts("train")][::4]
    chosen = {one.id: one for one in parts.environment.scenarios("train")}
    await parts.training_step(await parts.generate_trajectories([chosen[name] for name in first]))
    assert same_bits(snapshot(whole), snapshot(parts))
    await whole.close()
    await parts.close()


async def test_looking_at_a_loss_does_not_change_the_step_that_follows(tmp_path):
    looked, plain = make_trainer(tmp_path), make_trainer(tmp_path)
    for trainer in (looked, plain):
        await trainer.initialize()
        groups = await rollout(trainer)
        if trainer is looked:
            (await trainer.compute_grpo_loss(groups))["total_loss"].backward()
        await trainer.training_step(groups)
    assert same_bits(snapshot(looked), snapshot(plain))
    await looked.close()
    await plain.close()


# ------------------------------------------------------------------------------ the loop


async def test_the_full_loop_learns(tmp_path):
    settings = {"max_steps": 12, "num_generations": 8, "num_iterations": 2, "beta": 0.0}
    trainer = make_trainer(tmp_path, lr_scheduler_type="constant", log_rollouts=False, **settings)
    curve = reward_curve(trainer)
    assert await trainer.train() is trainer.agent
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.2
    await trainer.close()


async def test_the_engine_plays_groups_at_once_and_scores_them():
    async with make_agent() as agent:
        engine = create_computational_engine(agent, make_environment(), even_share, num_generations=4)
        scenarios = make_environment().scenarios("train")[:2]
        groups = await engine.rollout(scenarios, seed=0, step=0)
    assert [len(group.trajectories) for group in groups] == [4, 4]
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.status is not Status.FAILED
            assert 0.0 <= trajectory.reward <= 1.0
            assert len(trajectory.token_ids) == len(trajectory.action_mask) == len(trajectory.logprobs)


async def test_the_engine_updates_the_policy_by_real_gradients(trainer):
    [group, _] = await rollout(trainer)
    advantages = [1.0, -1.0, 0.5, -0.5]
    by_hand = await trainer._compute_group_policy_loss(group, advantages)
    assert float(by_hand.detach()) == pytest.approx(-sum(advantages) / 4, abs=1e-5)  # at ratio 1
    before = snapshot(trainer)
    model = trainer.agent.backend.model
    with torch.no_grad():
        was = [float(plain_logprobs(model, member).mean()) for member in group.trajectories]
    loss = await trainer.engine._update_policy(group.trajectories, advantages)
    assert loss == pytest.approx(float(by_hand.detach()), abs=1e-5)
    assert not same_bits(snapshot(trainer), before)
    assert same_bits(dict(model.state_dict()), trainer.learner.weights())  # and the agent has them
    with torch.no_grad():
        now = [float(plain_logprobs(model, member).mean()) for member in group.trajectories]
    gains = [after - earlier for after, earlier in zip(now, was, strict=True)]
    assert gains[0] > 0 > gains[1]  # likelier with an advantage, less likely without
