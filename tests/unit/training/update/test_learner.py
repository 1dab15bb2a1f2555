"""The learner's gradient against plain formulas in float64, and what must leave weights as they are."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import plain_logits, plain_logprobs, same_bits, talk

from stateset_agents.algorithms.losses import Metrics
from stateset_agents.algorithms.policy_losses import LOSSES, clipped_surrogate
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.errors import CheckpointError, ConfigurationError

SHAPES = [((3, 4), (2, 2)), ((5, 1),), ((2, 3), (1, 3)), ((4, 2),), ((1, 5), (3, 1))]
"""(delta, reply) lengths of five conversations: 6, 1, 6, 2 and 6 agent tokens."""
ADVANTAGES = [1.0, -0.5, 0.25, -1.5, 0.75]
LOOSE = {"max_grad_norm": 1e9, "weight_decay": 0.0}  # so that a step shows the gradient itself


def conversations(seed=0):
    dice = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(250, (length,), generator=dice).tolist()

    return [talk(*[(ids(prompt), ids(reply)) for prompt, reply in shape]) for shape in SHAPES]


def with_logprobs(trajectory, values):
    turns, values = [], iter(values)
    for turn in trajectory.turns:
        own = tuple(float(next(values)) for _ in turn.completion.token_ids)
        turns.append(replace(turn, completion=replace(turn.completion, logprobs=own)))
    return replace(trajectory, turns=tuple(turns))


def samples_for(model, *, drift=0.0, temperature=1.0, advantages=ADVANTAGES):
    """Samples whose stored log-probs are the model's own, plus noise of size `drift`."""
    dice = torch.Generator().manual_seed(1)
    made = []
    for trajectory, advantage in zip(conversations(), advantages, strict=True):
        with torch.no_grad():
            logprobs = plain_logprobs(model, trajectory, temperature)
        noise = drift * torch.randn(len(logprobs), generator=dice)
        trajectory = with_logprobs(trajectory, (logprobs + noise).tolist())
        made.append(Sample(trajectory=trajectory, advantages=(advantage,) * len(logprobs)))
    return made


def learner_of(model, **settings):
    settings = {"beta": 0.0, **LOOSE, **settings}
    return Learner(model, TrainingConfig(**settings), num_steps=10, exact_logprobs=True)


def gradient(learner, samples, step=1):
    """The gradient that the (last) optimiser step of an update saw."""
    seen = {}

    def look(*_):
        seen.update(
            {n: p.grad.clone() for n, p in learner.policy.model.named_parameters() if p.grad is not None}
        )

    hook = learner.optimization.optimizer.register_step_pre_hook(look)
    metrics = learner.update(samples, step=step)
    hook.remove()
    return seen, metrics


def distance(one, other):
    """Relative, over all parameters together."""
    a, b = (torch.cat([grads[name].flatten().double() for name in sorted(one)]) for grads in (one, other))
    return float((a - b).norm() / b.norm())


def derivative(model, loss):
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def averaged(kind, per_token, loss_length):
    """The mean that each loss takes, over lists of [N_i] tensors."""
    if kind == "trajectory":
        return sum(values.mean() for values in per_token) / len(per_token)
    total = sum(values.sum() for values in per_token)
    if kind == "token":
        return total / sum(len(values) for values in per_token)
    return total / (len(per_token) * loss_length)


# ------------------------------------------------------------------------------ the gradient


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_the_first_pass_has_ratio_one_no_clipping_and_reinforce_s_gradient(loss_type):
    model = tiny_model().double()
    samples = samples_for(model)
    found, metrics = gradient(learner_of(copy.deepcopy(model), loss_type=loss_type, loss_length=7), samples)
    terms = [
        -advantage * plain_logprobs(model, sample.trajectory)
        for sample, advantage in zip(samples, ADVANTAGES, strict=True)
    ]
    expected = derivative(model, averaged(LOSSES[loss_type].averaging, terms, 7))
    assert distance(found, expected) < 1e-6  # the stored log-probs are fp32
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), pytest.param(torch.float32, 1e-5, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_the_cut_into_micro_batches_does_not_change_the_gradient(loss_type, dtype, tolerance):
    model = tiny_model().to(dtype)
    samples = samples_for(model, drift=0.3)
    results = []
    for cut in (
        {"micro_batch_tokens": 10_000, "per_device_train_batch_size": 3},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 16, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"num_generations": 2, "per_device_train_batch_size": 1},
    ):
        learner = learner_of(copy.deepcopy(model), loss_type=loss_type, entropy_coef=0.02, beta=0.1, **cut)
        moved(learner.policy.model, 0.01)
        results.append(gradient(learner, samples))
    assert [metrics["batch/micro_batches"] for _, metrics in results] == [1, 5, 4, 3]
    whole, numbers = results[0]
    for found, metrics in results[1:]:
        assert distance(found, whole) < tolerance
        same = [name for name in numbers if not name.startswith(("batch/", "tokens/"))]
        assert [metrics[n] for n in same] == pytest.approx([numbers[n] for n in same], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("row_layout", ["packed", "padded"])
def test_only_positions_that_predict_an_agent_token_carry_gradient(row_layout):
    model = tiny_model()
    learner = learner_of(model, num_generations=8, row_layout=row_layout)
    samples = samples_for(model)
    states = []

    def keep(_, __, output):
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.retain_grad()
            states.append(output.last_hidden_state)

    hook = model.base_model.register_forward_hook(keep)
    learner.update(samples, step=1)
    hook.remove()
    (state,) = states  # one micro-batch
    rows = [sample.trajectory.token_ids for sample in samples]
    (layout,) = learner.policy.layouts(rows, max_rows=9, max_tokens=999)
    gradients = state.grad.flatten(0, 1)
    for place, flat in zip(layout.rows, layout.flat, strict=True):
        predicts = [*samples[place].trajectory.action_mask[1:], 0]
        assert (gradients[flat] != 0).any(-1).int().tolist() == predicts  # exactly zero on prompt and user
    assert int((gradients != 0).any(-1).sum()) == sum(
        sample.trajectory.num_agent_tokens for sample in samples
    )


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_a_sample_without_advantage_is_not_forwarded_and_counts_in_the_loss_s_mean(loss_type):
    model = tiny_model().double()
    samples = samples_for(model, advantages=[1.0, 0.0, -1.0, 0.0, 0.0])
    learner = learner_of(copy.deepcopy(model), loss_type=loss_type, loss_length=9)
    found, metrics = gradient(learner, samples)
    terms = [-sample.advantages[0] * plain_logprobs(model, sample.trajectory) for sample in samples]
    expected = averaged(LOSSES[loss_type].averaging, terms, 9)
    assert distance(found, derivative(model, expected)) < 1e-6
    assert metrics["batch/left_out"] == 3
    assert metrics["tokens/forwarded"] == sum(len(samples[place].trajectory.token_ids) for place in (0, 2))
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-6)  # means are over what was forwarded
    with torch.no_grad():
        logits = torch.cat([plain_logits(model, samples[place].trajectory) for place in (0, 2)])
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-6)
    surrogate = [-sample.advantages[0] * torch.ones(len(sample.advantages)) for sample in samples]
    if LOSSES[loss_type].token_loss is clipped_surrogate:  # at a ratio of 1 it is -A
        mean = averaged(LOSSES[loss_type].averaging, surrogate, 9)
        assert metrics["loss/policy"] == pytest.approx(float(mean), abs=1e-6)


def test_rollouts_at_another_temperature_are_scored_at_it():
    model = tiny_model()
    _, metrics = gradient(learner_of(model, temperature=0.6), samples_for(model, temperature=0.6))
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    other = tiny_model()
    _, metrics = gradient(learner_of(other, temperature=1.0), samples_for(other, temperature=0.6))
    assert metrics["policy/first_ratio_max"] > 1.5


def test_log_probs_of_another_precision_are_recomputed_and_the_difference_reported():
    model = tiny_model()
    samples = samples_for(model, drift=0.05)
    config = TrainingConfig(beta=0.0)
    learner = Learner(model, config, num_steps=10, exact_logprobs=False)
    metrics = learner.update(samples, step=1)
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert 0.05 < metrics["policy/rollout_mismatch"] < 0.5


def test_log_probs_of_another_precision_cost_a_forward_only_where_the_passes_are_several(monkeypatch):
    """One pass finds the policy as pi_old is: what it computes stands for both."""
    scored = []
    real = Policy.score

    def counted(self, batch):
        scored.append(len(batch.targets))
        return real(self, batch)

    monkeypatch.setattr(Policy, "score", counted)
    gradients = {}
    for passes in (1, 2):
        model = tiny_model()
        config = TrainingConfig(beta=0.0, num_iterations=passes, learning_rate=0.0)
        learner = Learner(model, config, num_steps=10, exact_logprobs=False)
        metrics = learner.update(samples_for(model, drift=0.05), step=1)
        gradients[passes] = metrics["optimizer/grad_norm"]
        assert bool(scored) == (passes > 1)
        assert 0.05 < metrics["policy/rollout_mismatch"] < 0.5
    assert gradients[1] == pytest.approx(gradients[2], rel=1e-5)


# ------------------------------------------------------------------------------ KL and entropy


def moved(model, scale=0.05):
    """A model some way off, so that it has a KL to where it started."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def kl_parts(**settings):
    """A learner whose policy has left its reference, the reference's model, and on-policy samples."""
    start = tiny_model().double()
    learner = learner_of(copy.deepcopy(start), **settings)
    moved(learner.policy.model)
    return learner, start, samples_for(learner.policy.model, advantages=[0.0] * 5)


def test_kl_in_the_loss_adds_beta_times_the_ratio_weighted_k3():
    learner, start, samples = kl_parts(beta=0.5)
    model = copy.deepcopy(learner.policy.model)
    found, metrics = gradient(learner, samples)
    terms = []
    for sample in samples:
        now = plain_logprobs(model, sample.trajectory)
        with torch.no_grad():
            reference = plain_logprobs(start, sample.trajectory)
        d = now - reference
        terms.append((now - now.detach()).exp() * (torch.exp(-d) - 1 + d))
    expected = derivative(model, 0.5 * averaged("trajectory", terms, 1))
    assert distance(found, expected) < 1e-6
    mean = averaged("token", [term.detach() for term in terms], 1)
    assert metrics["kl/reference"] == pytest.approx(float(mean), rel=1e-5)
    assert metrics["kl/reference"] > 0.01


def test_kl_in_the_reward_charges_each_token_for_what_comes_after_it():
    learner, start, samples = kl_parts(beta=0.5, kl_placement="reward", kl_estimator="k1")
    model = copy.deepcopy(learner.policy.model)
    found, _ = gradient(learner, samples)
    terms = []
    for sample in samples:
        now = plain_logprobs(model, sample.trajectory)
        with torch.no_grad():
            cost = -0.5 * (now - plain_logprobs(start, sample.trajectory))
        to_go = torch.stack([cost[t:].sum() for t in range(len(cost))])
        terms.append(-to_go * now)
    assert distance(found, derivative(model, averaged("trajectory", terms, 1))) < 1e-5


def test_without_beta_no_reference_is_loaded():
    assert learner_of(tiny_model(), beta=0.0).reference is None
    assert learner_of(tiny_model(), beta=0.1, use_reference_model=False).reference is None
    assert learner_of(tiny_model(), beta=0.1).reference is not None


def test_an_adaptive_coefficient_follows_the_measured_kl():
    learner, _, samples = kl_parts(beta=0.5, kl_controller="adaptive", kl_target=1e-4)
    metrics = learner.update(samples, step=1)
    assert metrics["kl/coefficient"] == learner.kl.beta == pytest.approx(0.75)


def test_the_entropy_bonus_adds_the_entropy_s_gradient():
    model = tiny_model().double()
    samples = samples_for(model, advantages=[0.0] * 5)
    found, before = gradient(learner_of(copy.deepcopy(model), entropy_coef=0.3), samples)
    entropies = [
        torch.distributions.Categorical(logits=plain_logits(model, sample.trajectory)).entropy()
        for sample in samples
    ]
    assert distance(found, derivative(model, -0.3 * averaged("trajectory", entropies, 1))) < 1e-6
    learner = learner_of(copy.deepcopy(model), entropy_coef=0.3, learning_rate=1e-3)
    for step in range(5):
        after = learner.update(samples, step=step)
    assert after["policy/entropy"] > before["policy/entropy"]


# ------------------------------------------------------------------------------ weights that stay


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def test_a_step_in_which_nothing_has_an_advantage_leaves_weights_and_moments_bit_identical():
    model = tiny_model()
    learner = learner_of(model, learning_rate=0.1)
    learner.update(samples_for(model), step=1)  # now AdamW has momentum that would move the weights
    before, updates = weights(learner), learner.optimization.num_updates
    metrics = learner.update(samples_for(model, advantages=[0.0] * 5), step=2)
    assert metrics["optimizer/skipped"] == 1.0
    assert same_bits(weights(learner), before)
    assert learner.optimization.num_updates == updates


def test_learning_rate_zero_leaves_weights_bit_identical():
    model = tiny_model()
    learner = learner_of(model, learning_rate=0.0, weight_decay=0.1, beta=0.1, entropy_coef=0.1)
    before = weights(learner)
    for step in range(3):
        learner.update(samples_for(model), step=step)
    assert same_bits(weights(learner), before)


def test_nearly_every_parameter_moves_at_a_learning_rate_of_a_millionth():
    model = tiny_model()
    learner = learner_of(model, learning_rate=1e-6, weight_decay=0.01, lr_scheduler_type="constant")
    before = weights(learner)
    touched = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in before.items()}
    for step in range(20):
        for name, grad in gradient(learner, samples_for(model), step)[0].items():
            touched[name] |= grad != 0
    after = weights(learner)
    moved_ones = sum(int(((after[name] != before[name]) & touched[name]).sum()) for name in before)
    assert moved_ones / sum(int(mask.sum()) for mask in touched.values()) > 0.95


def added_to_each_loss(learner, *, loss=0.0, **metrics):
    """The learner's objective, with a number added to each piece's loss, and metrics to its metrics."""
    plain = learner._objective.loss

    def with_more(*arguments, **options):
        output = plain(*arguments, **options)
        more = Metrics(shares={name: torch.tensor(value) for name, value in metrics.items()})
        return replace(output, loss=output.loss + loss, metrics=output.metrics + more)

    learner._objective.loss = with_more


def test_metrics_are_told_whatever_their_names_and_a_loss_decides():
    samples, odd = samples_for(tiny_model()), {"loss/aux": math.nan, "kl/aux": math.inf}
    learner = learner_of(tiny_model())
    before = weights(learner)
    added_to_each_loss(learner, **odd)
    learned = learner.learn_from(samples, step=1)
    assert learned.failure is None
    assert learned.metrics["optimizer/skipped"] == 0.0
    assert math.isnan(learned.metrics["loss/aux"])
    assert not same_bits(weights(learner), before)

    learner = learner_of(tiny_model())
    added_to_each_loss(learner, loss=math.inf)  # its gradient is finite
    learned = learner.learn_from(samples, step=1)
    assert learned.failure is not None
    assert learned.failure.startswith("has the loss inf: lower learning_rate")
    assert learned.metrics["optimizer/skipped"] == 1.0
    assert all(math.isfinite(value) for value in learned.metrics.values())
    assert same_bits(weights(learner), before)


def test_a_kl_that_is_not_finite_moves_no_weight_and_no_beta():
    model = tiny_model()
    learner = learner_of(model, beta=0.1, kl_controller="adaptive")
    samples = samples_for(model)
    assert learner.reference is not None
    with torch.no_grad():
        learner.reference.model.lm_head.weight.fill_(math.nan)
    before = weights(learner)
    metrics = learner.update(samples, step=1)
    assert metrics["optimizer/skipped"] == 1.0
    assert learner.kl.beta == 0.1
    assert same_bits(weights(learner), before)
    assert not learner.midway
    assert all(parameter.grad is None for parameter in model.parameters())


# ------------------------------------------------------------------------------ dropout, memory, restore


def dropping(rate=0.5):
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = rate
    return model


def after_update(model, *, step, seed=0):
    learner = learner_of(model, seed=seed, dropout=True)
    learner.update(samples_for(tiny_model()), step=step)
    return weights(learner)


def test_dropout_draws_from_the_step_s_own_stream():
    first = after_update(dropping(), step=3)
    assert not same_bits(first, after_update(tiny_model(), step=3))  # it is on
    model, samples = dropping(), samples_for(tiny_model())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    learner = learner_of(model, dropout=True)
    learner.update(samples, step=3)
    assert same_bits(first, weights(learner))
    assert torch.equal(torch.get_rng_state(), state)  # the process's generator is left as it was
    assert not same_bits(first, after_update(dropping(), step=4))
    assert not same_bits(first, after_update(dropping(), step=3, seed=1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_s_dropout_is_off_unless_asked_for(checkpointing):
    settings = {"gradient_checkpointing": checkpointing}
    without, _ = gradient(learner_of(tiny_model(), **settings), samples_for(tiny_model()))
    off, metrics = gradient(learner_of(dropping(), **settings), samples_for(tiny_model()))
    on, _ = gradient(learner_of(dropping(), dropout=True, **settings), samples_for(tiny_model()))
    assert distance(off, without) == 0.0
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert distance(on, without) > 0.01


def test_gradient_checkpointing_saves_activations_and_changes_no_gradient():
    model = tiny_model()
    samples = samples_for(model)

    def saved(**settings):
        learner, sizes = learner_of(copy.deepcopy(model), **settings), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            found, _ = gradient(learner, samples)
        return found, sum(sizes)

    plain, size = saved()
    checkpointed, smaller = saved(gradient_checkpointing=True)
    assert distance(checkpointed, plain) < 1e-6
    assert smaller < 0.8 * size


def test_weights_of_another_model_are_refused_and_nothing_changes():
    learner = learner_of(tiny_model())
    before = weights(learner)
    other = learner_of(tiny_model("qwen3"))
    with pytest.raises(CheckpointError, match="of another model"):
        learner.restore(weights(other), other.state())
    assert same_bits(weights(learner), before)


def test_a_model_that_cannot_recompute_activations_is_refused():
    model = tiny_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigurationError, match="set gradient_checkpointing false"):
        learner_of(model, gradient_checkpointing=True)


def test_the_critic_shares_the_learner_s_clip_and_precision():
    learner = learner_of(
        tiny_model("llama"), advantage_estimator="turn_gae", max_grad_norm=0.25, precision="bf16", beta=0.0
    )
    assert learner.critic is not None
    assert learner.critic.value_function.max_grad_norm == 0.25
    assert learner.critic.value_function.autocast is torch.bfloat16
