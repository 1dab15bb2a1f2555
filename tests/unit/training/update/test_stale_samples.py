"""Updates on what an earlier policy sampled: the clip keeps near the newest one, a weight does the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from test_learner import ADVANTAGES, averaged, derivative, distance, gradient, learner_of, moved, samples_for
from tiny_models import tiny_model
from tiny_training import plain_logprobs

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError

CAP = 1.25


def stale():
    """A model, and samples whose stored log-probs are an earlier policy's (the model's own plus noise)."""
    model = tiny_model().double()
    return model, samples_for(model, drift=0.4)


def expected_loss(model, samples, *, weigh):
    """Of one pass, by hand: `weigh` makes a token's weight of its (log-prob now, stored log-prob)."""
    terms = []
    for sample, advantage in zip(samples, ADVANTAGES, strict=True):
        now = plain_logprobs(model, sample.trajectory)
        acted = [bit == 1 for bit in sample.trajectory.action_mask]
        stored = torch.tensor(sample.trajectory.logprobs, dtype=torch.float64)[torch.tensor(acted)]
        terms.append(-weigh(now.detach(), stored) * advantage * now)
    return averaged("trajectory", terms, 1)


@pytest.mark.parametrize(
    "dropout", [False, True]
)  # the model has none; with it pi_old has a forward of its own
def test_the_first_pass_weighs_each_token_by_pi_old_over_the_sampler_truncated(dropout):
    model, samples = stale()
    learner = learner_of(copy.deepcopy(model), max_staleness=1, importance_cap=CAP, dropout=dropout)
    found, metrics = gradient(learner, samples)
    right = expected_loss(model, samples, weigh=lambda now, mu: (now - mu).exp().clamp(max=CAP))
    assert distance(found, derivative(model, right)) < 1e-6
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0
    tokens = sum(sample.trajectory.num_agent_tokens for sample in samples)
    with torch.no_grad():
        weights = [(now - mu).exp() for now, mu in stored_and_now(model, samples)]
    at_cap = sum(int((weight >= CAP).sum()) for weight in weights)
    assert at_cap > 0
    assert metrics["policy/weight_truncated"] == pytest.approx(at_cap / tokens, abs=1e-6)
    mean = sum(float(weight.clamp(max=CAP).sum()) for weight in weights) / tokens
    assert metrics["policy/weight"] == pytest.approx(mean, rel=1e-5)


def stored_and_now(model, samples):
    for sample in samples:
        mask = torch.tensor(sample.trajectory.action_mask) == 1
        stored = torch.tensor(sample.trajectory.logprobs, dtype=torch.float64)[mask]
        yield plain_logprobs(model, sample.trajectory), stored


def test_the_sampler_taken_for_pi_old_would_clip_what_the_step_has_not_moved():
    """The naive update: it clips against the stale policy, so tokens lose their gradient for their age."""
    model, samples = stale()
    naive, metrics = gradient(
        learner_of(copy.deepcopy(model)), samples
    )  # max_staleness 0: old is the sampler
    loss = expected_loss(model, samples, weigh=lambda now, mu: (now - mu).exp().clamp(max=2.0))
    right = derivative(model, loss)
    assert metrics["policy/first_ratio_max"] > 1.5
    assert metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"] > 0.05
    assert distance(naive, right) > 0.05
    found, _ = gradient(learner_of(copy.deepcopy(model), max_staleness=1), samples)  # the cap is 2
    assert distance(found, right) < 1e-6


def test_the_weight_is_applied_once():
    """The naive update multiplies a ratio to the sampler, which is the weight already, by the weight."""
    model, samples = stale()
    found, _ = gradient(learner_of(copy.deepcopy(model), max_staleness=1, importance_cap=9.0), samples)
    once = expected_loss(model, samples, weigh=lambda now, mu: (now - mu).exp().clamp(max=9.0))
    twice = expected_loss(model, samples, weigh=lambda now, mu: (2 * (now - mu)).exp().clamp(max=9.0))
    assert distance(found, derivative(model, once)) < 1e-6
    assert distance(found, derivative(model, twice)) > 0.05


def test_the_weight_is_truncated_at_two_unless_set():
    model = tiny_model().double()
    samples = samples_for(model, drift=1.0)
    found, metrics = gradient(learner_of(copy.deepcopy(model), max_staleness=1), samples)
    right = expected_loss(model, samples, weigh=lambda now, mu: (now - mu).exp().clamp(max=2.0))
    assert metrics["policy/weight_truncated"] > 0.1
    assert distance(found, derivative(model, right)) < 1e-6


def test_pi_old_is_of_the_policy_without_dropout():
    """With it, what the pass computes is not pi_old: fresh samples would get weights other than 1."""
    model = tiny_model().double()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    samples = samples_for(model.eval())
    _, metrics = gradient(learner_of(copy.deepcopy(model), max_staleness=1, dropout=True), samples)
    assert metrics["policy/weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/first_ratio_max"] > 1.001


def test_a_weight_where_the_ratio_is_the_correction_already_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"importance_cap 2 would correct twice .* leave importance_cap out"
    ):
        learner_of(tiny_model(), importance_cap=2.0)


def test_rollouts_in_half_precision_may_be_weighed_without_staleness():
    model, samples = stale()
    config = TrainingConfig(beta=0.0, max_grad_norm=1e9, importance_cap=CAP)
    learner = Learner(copy.deepcopy(model), config, num_steps=10, exact_logprobs=False)
    found, metrics = gradient(learner, samples)
    right = expected_loss(model, samples, weigh=lambda now, mu: (now - mu).exp().clamp(max=CAP))
    assert distance(found, derivative(model, right)) < 1e-6
    assert metrics["policy/rollout_mismatch"] > 0.1


def test_pi_old_stays_where_it_was_while_the_passes_move_the_policy():
    model, samples = stale()
    learner = learner_of(copy.deepcopy(model), max_staleness=1, num_iterations=2, learning_rate=0.01)
    _, metrics = gradient(learner, samples)
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/ratio_max"] > 1.01


def test_fresh_samples_have_weight_one():
    model = tiny_model().double()
    samples = samples_for(model)
    found, metrics = gradient(learner_of(copy.deepcopy(model), max_staleness=3), samples)
    plain, _ = gradient(learner_of(copy.deepcopy(model)), samples)
    assert distance(found, plain) < 1e-5
    assert metrics["policy/weight"] == pytest.approx(1.0, abs=1e-5)
    assert "policy/rollout_mismatch" not in metrics


def test_a_kl_in_the_reward_is_that_of_pi_old():
    start = tiny_model().double()
    learner = learner_of(
        copy.deepcopy(start), beta=0.5, kl_placement="reward", kl_estimator="k1", max_staleness=1
    )
    moved(learner.policy.model)
    model = copy.deepcopy(learner.policy.model)
    samples = samples_for(model, drift=0.3, advantages=[0.0] * 5)
    found, _ = gradient(learner, samples)
    terms = []
    for (now, stored), sample in zip(stored_and_now(model, samples), samples, strict=True):
        with torch.no_grad():
            cost = -0.5 * (now - plain_logprobs(start, sample.trajectory))
            weight = (now - stored).exp().clamp(max=2.0)
        to_go = torch.stack([cost[t:].sum() for t in range(len(cost))])
        terms.append(-weight * to_go * now)
    assert distance(found, derivative(model, averaged("trajectory", terms, 1))) < 1e-5


# ------------------------------------------------------------------------------ weights of conversations


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "gspo"},
        {"num_iterations": 2, "learning_rate": 1e-12},
        {"dropout": True},
        {"micro_batch_tokens": 1},
    ],
)
def test_a_conversation_s_weight_is_its_tokens_product_truncated(settings):
    model, samples = stale()
    options = {"importance": "sequence", "importance_cap": CAP, "max_staleness": 1, **settings}
    found, metrics = gradient(learner_of(copy.deepcopy(model), **options), samples)

    def weigh(now, mu):
        return (now - mu).sum().exp().clamp(max=CAP)

    assert distance(found, derivative(model, expected_loss(model, samples, weigh=weigh))) < 1e-6
    with torch.no_grad():
        weights = [float(weigh(now, mu)) for now, mu in stored_and_now(model, samples)]
    assert 0 < sum(weight == CAP for weight in weights) < len(weights)
    assert metrics["policy/weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    squares = sum(weight**2 for weight in weights) / len(weights)
    assert metrics["policy/importance_ess"] == pytest.approx(
        metrics["policy/weight"] ** 2 / squares, rel=1e-5
    )
    assert metrics["policy/weight_truncated"] == pytest.approx(
        sum(weight == CAP for weight in weights) / len(weights), abs=1e-6
    )
    assert metrics["policy/importance_level"] == 2.0


@pytest.mark.parametrize("importance", ["none", "token", "sequence"])
def test_gaps_and_what_the_trainer_gains_by_them_are_measured(importance):
    model, samples = stale()
    config = TrainingConfig(beta=0.0, importance=importance)
    learner = Learner(copy.deepcopy(model), config, num_steps=10, exact_logprobs=False)
    _, metrics = gradient(learner, samples)
    with torch.no_grad():
        gaps = [now - mu for now, mu in stored_and_now(model, samples)]
    everything = torch.cat(gaps)
    assert metrics["policy/mismatch_rms"] == pytest.approx(float(everything.square().mean().sqrt()), rel=1e-5)
    assert metrics["policy/rollout_mismatch"] == pytest.approx(float(everything.abs().max()), rel=1e-5)
    gain = sum(advantage * float(gap.sum()) for advantage, gap in zip(ADVANTAGES, gaps, strict=True)) / 5
    assert metrics.get("policy/importance_gain") == (
        None if importance == "none" else pytest.approx(gain, rel=1e-5)
    )


def test_a_kl_in_the_reward_is_weighed_by_conversations_too():
    start = tiny_model().double()
    options = {"beta": 0.5, "kl_placement": "reward", "kl_estimator": "k1", "importance": "sequence"}
    learner = learner_of(copy.deepcopy(start), max_staleness=1, **options)
    moved(learner.policy.model)
    model = copy.deepcopy(learner.policy.model)
    samples = samples_for(model, drift=0.3, advantages=[0.0] * 5)
    found, _ = gradient(learner, samples)
    terms = []
    for (now, stored), sample in zip(stored_and_now(model, samples), samples, strict=True):
        with torch.no_grad():
            cost = -0.5 * (now - plain_logprobs(start, sample.trajectory))
            weight = (now - stored).sum().exp().clamp(max=5.0)
        to_go = torch.stack([cost[t:].sum() for t in range(len(cost))])
        terms.append(-weight * to_go * now)
    assert distance(found, derivative(model, averaged("trajectory", terms, 1))) < 1e-5


def test_a_kl_in_the_loss_is_weighed_by_conversations_too():
    start = tiny_model().double()
    options = {"beta": 0.5, "kl_estimator": "k3", "importance": "sequence"}
    learner = learner_of(copy.deepcopy(start), max_staleness=1, **options)
    moved(learner.policy.model)
    model = copy.deepcopy(learner.policy.model)
    samples = samples_for(model, drift=0.3, advantages=[0.0] * 5)
    found, _ = gradient(learner, samples)
    terms = []
    for (now, stored), sample in zip(stored_and_now(model, samples), samples, strict=True):
        with torch.no_grad():
            reference = plain_logprobs(start, sample.trajectory)
            weight = (now - stored).sum().exp().clamp(max=5.0)
        apart = now - reference
        k3 = (-apart).exp() - 1 + apart
        terms.append(0.5 * weight * (now - now.detach()).exp() * k3)
    assert distance(found, derivative(model, averaged("trajectory", terms, 1))) < 1e-5
