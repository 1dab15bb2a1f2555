"""Every policy loss against hand-worked numbers, and what must hold however the batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateset_agents.algorithms.aggregation import Denominators, Metrics, aggregate, mean_per_trajectory
from stateset_agents.algorithms.losses import LOSSES, entropy, entropy_loss, policy_loss, value_loss
from stateset_agents.errors import ConfigurationError

NAMES = sorted(LOSSES)
CLIP = {"clip_ratio": 0.2, "clip_ratio_high": 0.28}


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two conversations laid out as rows; only masked positions are the agent's.
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]).bool()
LOGPROBS = double([[-1, -0.5, -9, -2], [-0.3, -1.2, -0.7, 0]])
OLD = double([[-1.3, -0.5, -9, -1.5], [-0.3, -1.6, -0.2, 0]])
PROXIMAL = double([[-1.1, -0.6, -9, -1.8], [-0.35, -1.3, -0.5, 0]])
ADVANTAGES = double([[1] * 4, [-1] * 4])
IDS = torch.tensor([[0] * 4, [1] * 4])
COUNTS = Denominators.of([3, 2], max_length=8)


def worked(name: str, logprobs: Tensor = LOGPROBS, old: Tensor = OLD, **options):
    clip = {} if name == "gspo" else CLIP
    return policy_loss(
        name, logprobs[MASK], old[MASK], ADVANTAGES[MASK], IDS[MASK], COUNTS, **{**clip, **options}
    )


# ------------------------------------------------------------------------------- worked numbers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 0.141867731),
        ("dapo", -0.078941192),
        ("dr_grpo", -0.024669123),
        ("gspo", 0.142947887),
        ("cispo", 0.231412264),
        ("ppo", -0.078941192),
        # -A logprob: (1 + .5 + 2) for the first row, -(.3 + 1.2) for the second, over 5 tokens
        ("reinforce", (3.5 - 1.5) / 5),
    ],
)
def test_worked_loss(name, expected):
    assert float(worked(name).loss) == pytest.approx(expected, abs=1e-8)


def test_grpo_by_hand():
    # ratios e^.3 = 1.35 (A > 0: clipped to 1.28), 1, e^-.5; then 1, e^.4 (A < 0: not clipped)
    first = -(1.28 + 1 + math.exp(-0.5)) / 3
    second = (1 + math.exp(0.4)) / 2
    assert float(worked("grpo").loss) == pytest.approx((first + second) / 2, abs=1e-12)


def test_gspo_takes_one_ratio_per_conversation():
    output = worked("gspo")
    s = [math.exp((0.3 - 0.5) / 3), math.exp(0.4 / 2)]
    assert s == pytest.approx([0.9355, 1.2214], abs=1e-4)
    assert float(output.loss) == pytest.approx((-s[0] + s[1]) / 2)
    assert output.metrics.to_dict()["policy/ratio"] == pytest.approx(sum(s) / 2)


def test_gspo_has_the_gradient_of_the_sequence_form():
    logprobs = LOGPROBS.clone().requires_grad_()
    worked("gspo", logprobs).loss.backward()
    sequence = LOGPROBS.clone().requires_grad_()
    ratios = (((sequence - OLD) * MASK).sum(1) / MASK.sum(1)).exp()
    clipped = ratios.clamp(1 - 3e-4, 1 + 4e-4)
    advantages = ADVANTAGES[:, 0]
    (-torch.minimum(ratios * advantages, clipped * advantages)).mean().backward()
    assert torch.allclose(logprobs.grad, sequence.grad, rtol=1e-12, atol=0)
    assert logprobs.grad[MASK].abs().min() > 0


def test_gspo_brings_its_own_narrow_range():
    assert worked("gspo").loss == worked("gspo", clip_ratio=3e-4, clip_ratio_high=4e-4).loss
    one = double([0.001])
    output = policy_loss("gspo", one, double([0.0]), double([1.0]), torch.tensor([0]), Denominators.of([1]))
    assert float(output.loss) == pytest.approx(-1.0004)


def test_the_upper_bound_equals_the_lower_where_only_that_is_given():
    for name in NAMES:
        alone = worked(name, clip_ratio=0.1, clip_ratio_high=None)
        assert alone.loss == worked(name, clip_ratio=0.1, clip_ratio_high=0.1).loss


def test_decoupled_worked_loss():
    output = worked("dapo", LOGPROBS, PROXIMAL, behaviour_logprobs=OLD[MASK], clip_ratio_high=0.2)
    assert float(output.loss) == pytest.approx(-0.092912954, abs=1e-8)
    assert output.metrics.to_dict()["policy/clip_fraction_high"] == 0


# One token that the clip holds (ratio 2, A > 0), one that strays unclipped (ratio 2, A < 0).
DECOUPLED = {
    "logprobs": double([-1.0, -1.0]),
    "old_logprobs": double([-1.0 - math.log(2), -1.0 - math.log(2)]),
    "advantages": double([1.0, -1.0]),
    "trajectory_ids": torch.tensor([0, 1]),
    "denominators": Denominators.of([1, 1], max_length=4),
    "behaviour_logprobs": double([-1.0 - math.log(8), -1.0 - math.log(1)]),  # weights 4 and 1/2
    "clip_ratio": 0.2,
}


def test_decoupled_form_clips_around_the_proximal_policy_and_weighs_by_who_sampled():
    output = policy_loss("dapo", **DECOUPLED)
    assert float(output.loss) == pytest.approx((-4 * 1.2 + 0.5 * 2) / 2)
    assert output.metrics.to_dict()["policy/weight"] == pytest.approx((4 + 0.5) / 2)
    assert output.metrics.to_dict()["policy/clip_fraction_high"] == 0.5


def test_the_decoupled_weight_can_be_truncated():
    output = policy_loss("dapo", **DECOUPLED, weight_cap=3.0)
    assert float(output.loss) == pytest.approx((-3 * 1.2 + 0.5 * 2) / 2)


def test_the_decoupled_weight_has_no_gradient():
    behaviour = DECOUPLED["behaviour_logprobs"].clone().requires_grad_()
    proximal = DECOUPLED["old_logprobs"].clone().requires_grad_()
    logprobs = DECOUPLED["logprobs"].clone().requires_grad_()
    inputs = {"logprobs": logprobs, "old_logprobs": proximal, "behaviour_logprobs": behaviour}
    policy_loss("dapo", **{**DECOUPLED, **inputs}).loss.backward()
    assert behaviour.grad is None
    assert proximal.grad is None
    # the clipped token has none; the other -w A ratio / num_tokens = .5 * 2 / 2
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.5])


def test_gspo_weighs_whole_conversations_in_the_decoupled_form():
    mu = OLD[MASK]
    output = worked("gspo", LOGPROBS, PROXIMAL, behaviour_logprobs=mu)
    drift = [(0.2 - 0.1 - 0.3) / 3, (-0.05 + 0.3) / 2]
    live = [(0.1 + 0.1 - 0.2) / 3, (0.05 + 0.1) / 2]
    expected = (-math.exp(drift[0]) * math.exp(live[0]) + math.exp(drift[1]) * math.exp(live[1])) / 2
    assert float(output.loss) == pytest.approx(expected)


@pytest.mark.parametrize("behaviour", [None, OLD[MASK]])
def test_truncated_weights_are_refused_where_the_clip_already_corrects(behaviour):
    old = OLD[MASK] if behaviour is None else behaviour
    for start, stop in [(0, 5), (0, 3)]:  # the whole, and equal slices of one tensor
        with pytest.raises(ConfigurationError, match=r"weight_cap 2\.0 needs behaviour_logprobs apart"):
            policy_loss(
                "dapo",
                LOGPROBS[MASK][start:stop],
                old[start:stop],
                ADVANTAGES[MASK][start:stop],
                IDS[MASK][start:stop],
                COUNTS,
                behaviour_logprobs=None if behaviour is None else behaviour[start:stop],
                weight_cap=2.0,
            )


def test_dual_clip_bounds_the_loss_of_a_bad_token_with_a_huge_ratio():
    inputs = (double([0.0, 0.0, 0.0]), double([-2.0, -0.5, -2.0]), double([-1.0, -1.0, 1.0]))
    ids, counts = torch.tensor([0, 0, 0]), Denominators.of([3])
    plain = policy_loss("dapo", *inputs, ids, counts, **CLIP)
    dual = policy_loss("dapo", *inputs, ids, counts, **CLIP, dual_clip=3.0)
    assert float(plain.loss) == pytest.approx((math.exp(2) + math.exp(0.5) - 1.28) / 3)
    assert float(dual.loss) == pytest.approx((3 + math.exp(0.5) - 1.28) / 3)
    assert dual.metrics.to_dict()["policy/clip_fraction_dual"] == pytest.approx(1 / 3)


def test_cispo_keeps_a_gradient_on_clipped_tokens():
    logprobs = LOGPROBS.clone().requires_grad_()
    worked("cispo", logprobs).loss.backward()
    assert logprobs.grad[0, 0] == pytest.approx(-1.28 / 5)  # ratio 1.35, clipped to a weight of 1.28
    clipped = LOGPROBS.clone().requires_grad_()
    worked("dapo", clipped).loss.backward()
    assert clipped.grad[0, 0] == 0


# -------------------------------------------------------------------------------------- metrics


def test_metrics_of_the_worked_batch():
    metrics = worked("dapo").metrics.to_dict()
    ratios = [math.exp(d) for d in (0.3, 0.0, -0.5, 0.0, 0.4)]
    assert metrics["policy/ratio"] == pytest.approx(sum(ratios) / 5)
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(0.4))
    assert metrics["policy/clip_fraction_high"] == pytest.approx(1 / 5)  # e^.3 > 1.28 with A > 0
    assert metrics["policy/clip_fraction_low"] == 0
    assert metrics["kl/old"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5)
    assert metrics["loss/policy"] == pytest.approx(-0.078941192, abs=1e-8)


def test_the_low_clip_counts_bad_tokens_that_already_shrank():
    output = policy_loss(
        "dapo",
        double([-1.0]),
        double([-0.5]),
        double([-1.0]),
        torch.tensor([0]),
        Denominators.of([1]),
        **CLIP,
    )
    assert output.metrics.to_dict()["policy/clip_fraction_low"] == 1
    assert float(output.loss) == pytest.approx(0.8)


@pytest.mark.parametrize("name", NAMES)
def test_with_nothing_stale_ratios_are_one_and_the_gradient_is_reinforces(name):
    logprobs = LOGPROBS.clone().requires_grad_()
    output = worked(name, logprobs, LOGPROBS)
    metrics = output.metrics.to_dict()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-15)
    assert metrics["policy/ratio_max"] == 1
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0
    assert metrics["kl/old"] == 0
    output.loss.backward()
    reinforce = LOGPROBS.clone().requires_grad_()
    aggregate(-ADVANTAGES[MASK] * reinforce[MASK], IDS[MASK], COUNTS, LOSSES[name].averaging).backward()
    assert torch.allclose(logprobs.grad, reinforce.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_positions_the_agent_did_not_sample_have_no_gradient_at_all(name):
    logprobs = LOGPROBS.clone().requires_grad_()
    worked(name, logprobs, ref_logprobs=PROXIMAL[MASK], beta=0.1).loss.backward()
    assert torch.equal(logprobs.grad[~MASK], torch.zeros(3, dtype=torch.float64))


# ----------------------------------------------------------------------- however the batch is cut


class Batch:
    """Six conversations of a tiny softmax policy: a gradient in shared parameters, as in a real model."""

    lengths = (4, 1, 7, 3, 2, 5)

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_tokens, num_features, num_words = sum(self.lengths), 5, 7
        self.parameters = draw(num_features, num_words).to(dtype)
        self.features = draw(num_tokens, num_features).to(dtype)
        self.tokens = torch.randint(num_words, (num_tokens,), generator=generator)
        self.advantages = draw(num_tokens).to(dtype)
        self.ids = torch.repeat_interleave(torch.arange(6), torch.tensor(self.lengths))
        self.counts = Denominators.of(self.lengths, max_length=10)
        with torch.no_grad():
            clean = self._logprobs(self.parameters, torch.arange(num_tokens))
        self.old = clean + 0.3 * draw(num_tokens).to(dtype)
        self.behaviour = self.old + 0.2 * draw(num_tokens).to(dtype)
        self.reference = clean + 0.5 * draw(num_tokens).to(dtype)
        self.keep = draw(num_tokens) > -1

    def _logprobs(self, parameters: Tensor, rows: Tensor) -> Tensor:
        logits = self.features[rows] @ parameters
        return logits.log_softmax(-1).gather(-1, self.tokens[rows, None])[:, 0]

    def learn(self, name: str, pieces: list[Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        """(summed loss, gradient, merged metrics) over micro-batches given as token indices."""
        parameters = self.parameters.clone().requires_grad_()
        total, metrics = torch.zeros((), dtype=parameters.dtype), Metrics()
        for rows in pieces:
            output = policy_loss(
                name,
                self._logprobs(parameters, rows),
                self.old[rows],
                self.advantages[rows],
                self.ids[rows],
                self.counts,
                behaviour_logprobs=self.behaviour[rows],
                weight_cap=1.3,
                keep=self.keep[rows],
                ref_logprobs=self.reference[rows],
                beta=0.1,
            )
            output.loss.backward()
            total, metrics = total + output.loss.detach(), metrics + output.metrics
        return total, parameters.grad, metrics


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000), name=st.sampled_from(NAMES), where=st.lists(st.integers(0, 3), min_size=22)
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_any_split_into_micro_batches_gives_the_same_gradient(dtype, tolerance, seed, name, where):
    batch = Batch(seed, dtype)
    # gspo keeps conversations whole; the others may be cut anywhere, even inside one
    piece = torch.tensor(where)[batch.ids] if LOSSES[name].level == "sequence" else torch.tensor(where[:22])
    whole = batch.learn(name, [torch.arange(22)])
    split = batch.learn(name, [(piece == part).nonzero()[:, 0] for part in range(4)])
    assert abs(float(split[0] - whole[0])) < tolerance * max(1.0, abs(float(whole[0])))
    assert _relative(split[1], whole[1]) < tolerance
    assert split[2].to_dict() == pytest.approx(whole[2].to_dict(), rel=10 * tolerance, abs=10 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_with_their_own_conversations_sum_to_one_batch(name):
    batch = Batch(3)
    whole_loss, whole_gradient, _ = batch.learn(name, [torch.arange(22)])
    total, gradient = 0.0, torch.zeros_like(whole_gradient)
    for first, last in [(0, 2), (2, 6)]:
        half = Batch(3)
        rows = ((batch.ids >= first) & (batch.ids < last)).nonzero()[:, 0]
        half.ids = batch.ids - first  # each numbers its own; only the totals are shared
        half.counts = replace(
            Denominators.of(batch.lengths[first:last], max_length=10),
            num_trajectories=batch.counts.num_trajectories,
            num_tokens=batch.counts.num_tokens,
        )
        loss, part, _ = half.learn(name, [rows])
        total, gradient = total + float(loss), gradient + part
    assert total == pytest.approx(float(whole_loss), rel=1e-12)
    assert _relative(gradient, whole_gradient) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_tokens_and_the_numbering_of_conversations_change_nothing(name):
    batch, other = Batch(5), Batch(5)
    loss, gradient, _ = batch.learn(name, [torch.arange(22)])
    other.ids = 5 - batch.ids
    other.counts = Denominators.of(batch.lengths[::-1], max_length=10)
    backwards = other.learn(name, [torch.arange(22).flip(0)])
    assert float(backwards[0]) == pytest.approx(float(loss), rel=1e-12)
    assert _relative(backwards[1], gradient) < 1e-12


def test_gspo_refuses_a_conversation_that_is_cut_in_two():
    batch = Batch(1)
    with pytest.raises(ValueError, match="trajectory 2 has 7 tokens but 3 are in this micro-batch"):
        batch.learn("gspo", [torch.arange(8)])


def test_rejected_tokens_add_nothing_and_leave_the_denominator_alone():
    keep = torch.tensor([True, True, False, True, True])
    logprobs = LOGPROBS.clone().requires_grad_()
    output = worked("dapo", logprobs, keep=keep)
    dropped_token = -math.exp(-0.5) / 5
    assert output.loss.item() == pytest.approx(-0.0789411924 - dropped_token)
    output.loss.backward()
    assert logprobs.grad[0, 3] == 0


def test_a_trajectory_without_trained_tokens_does_not_count():
    counts = Denominators.of([3, 0, 2])
    assert (counts.num_trajectories, counts.num_tokens) == (2, 5)


def test_an_empty_micro_batch_adds_zero():
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for name in NAMES:
        output = policy_loss(name, empty, empty, empty, torch.zeros(0, dtype=torch.int64), COUNTS)
        assert output.loss.item() == 0
        output.loss.backward()


def test_a_batch_without_a_trained_token_has_no_denominators():
    with pytest.raises(ValueError, match="skip its optimiser step"):
        Denominators.of([0, 0])


def test_mean_per_trajectory_gives_each_token_its_conversations_mean():
    ids, counts = torch.tensor([1, 0, 1]), Denominators.of([1, 2])
    assert mean_per_trajectory(double([1, 5, 3]), ids, counts).tolist() == [2, 5, 2]


# ----------------------------------------------------------------------------- options and errors


def test_the_kl_term_joins_with_the_losss_own_averaging():
    for name in NAMES:
        plain = worked(name, LOGPROBS, LOGPROBS)
        with_kl = worked(name, LOGPROBS, LOGPROBS, ref_logprobs=PROXIMAL[MASK], beta=0.5)
        d = (LOGPROBS - PROXIMAL)[MASK]
        k3 = aggregate(torch.expm1(-d) + d, IDS[MASK], COUNTS, LOSSES[name].averaging)
        assert float(with_kl.loss) == pytest.approx(float(plain.loss + 0.5 * k3))
        assert with_kl.metrics.to_dict()["loss/kl"] == pytest.approx(float(0.5 * k3))


def test_a_reference_with_beta_zero_is_reported_and_not_trained():
    output = worked("grpo", ref_logprobs=PROXIMAL[MASK])
    assert output.metrics.to_dict()["kl/reference"] > 0
    assert output.loss == worked("grpo").loss


def test_half_precision_is_widened_before_any_arithmetic():
    args = [tensor[MASK].bfloat16() for tensor in (LOGPROBS, OLD, ADVANTAGES)]
    output = policy_loss("grpo", *args, IDS[MASK], COUNTS, **CLIP)
    assert output.loss.dtype == torch.float32
    assert float(output.loss) == pytest.approx(0.141867731, abs=5e-3)


def test_an_absurd_ratio_stays_finite_and_spoils_no_other_token():
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    old, advantages = torch.tensor([-500.0, -1.0]), torch.tensor([0.0, 1.0])
    output = policy_loss("dapo", logprobs, old, advantages, torch.tensor([0, 0]), Denominators.of([2]))
    output.loss.backward()
    assert float(output.loss) == -0.5
    assert logprobs.grad.tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, "loss_type must be one of .*grpo.*got 'grop'"),
        ("grpo", {"clip_ratio": 0.0}, "clip_ratio must lie between 0 and 1, got 0.0"),
        ("grpo", {"clip_ratio_high": -0.1}, "clip_ratio_high must be positive, got -0.1"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip must be above 1"),
        ("cispo", {"dual_clip": 3.0}, "no effect on cispo"),
        ("reinforce", {"dual_clip": 3.0}, "no effect on reinforce"),
        ("grpo", {"beta": 0.1}, "beta 0.1 needs ref_logprobs"),
        ("grpo", {"weight_cap": 0.0}, "weight_cap must be positive"),
    ],
)
def test_impossible_options_are_named(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        worked(name, **options)


def test_dr_grpo_needs_its_constant():
    args = [tensor[MASK] for tensor in (LOGPROBS, OLD, ADVANTAGES, IDS)]
    with pytest.raises(ConfigurationError, match="max_length"):
        policy_loss("dr_grpo", *args, Denominators.of([3, 2]))
    with pytest.raises(ConfigurationError, match="max_length must be at least 1, got 0"):
        Denominators.of([3, 2], max_length=0)


def test_tensors_of_unequal_shape_are_refused():
    with pytest.raises(ValueError, match=r"advantages must have the shape of logprobs, \[5\], got \[4\]"):
        policy_loss("grpo", LOGPROBS[MASK], OLD[MASK], torch.ones(4), IDS[MASK], COUNTS)
    with pytest.raises(ValueError, match="flat"):
        policy_loss("grpo", LOGPROBS, OLD, ADVANTAGES, IDS, COUNTS)


# ----------------------------------------------------------------------------- value and entropy


def test_value_loss_is_half_the_squared_error():
    values, ids = double([1.0, 0.0]), torch.tensor([0, 0])
    output = value_loss(values, values, double([0.0, 3.0]), ids, Denominators.of([2]))
    assert float(output.loss) == pytest.approx((1 + 9) / 2 / 2)
    assert output.metrics.to_dict()["value/clip_fraction"] == 0


def test_value_clip_takes_the_larger_error_and_stops_the_gradient_of_what_moved_too_far():
    values = double([1.0, -1.0]).requires_grad_()
    old, returns = double([0.0, 0.0]), double([2.0, 2.0])
    output = value_loss(values, old, returns, torch.tensor([0, 0]), Denominators.of([2]), value_clip=0.2)
    # first: held at .2, error 1.8^2 > 1; second: held at -.2, 2.2^2 < 3^2
    assert float(output.loss) == pytest.approx((1.8**2 + 3**2) / 2 / 2)
    assert output.metrics.to_dict()["value/clip_fraction"] == 0.5
    output.loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -3 / 2])


def test_value_clip_must_be_positive():
    one = double([1.0])
    with pytest.raises(ConfigurationError, match="value_clip must be positive"):
        value_loss(one, one, one, torch.tensor([0]), Denominators.of([1]), value_clip=0.0)


def test_entropy_of_known_distributions():
    logits = double(
        [[0, 0, 0, 0], [math.log(3), 0, -math.inf, -math.inf], [0, -math.inf, -math.inf, -math.inf]]
    )
    three_to_one = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy(logits).tolist() == pytest.approx([math.log(4), three_to_one, 0.0])


def test_entropy_has_the_exact_gradient_and_survives_forbidden_tokens():
    logits = double([[0.3, -1.0, 2.0], [0.1, 0.2, 0.3]]).requires_grad_()
    assert torch.autograd.gradcheck(entropy, logits)
    banned = double([[0.3, -math.inf, 2.0]]).requires_grad_()
    entropy(banned).sum().backward()
    assert banned.grad.isfinite().all()


def test_entropy_is_computed_in_fp32_and_row_by_row():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    assert entropy(logits.bfloat16()).dtype == torch.float32
    assert torch.equal(torch.cat([entropy(chunk) for chunk in logits.split(4)]), entropy(logits))


def test_entropy_loss_rewards_spread_and_reports_the_token_mean():
    output = entropy_loss(
        double([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]), Denominators.of([2, 1]), averaging="trajectory"
    )
    assert float(output.loss) == -(1.5 + 6) / 2
    assert output.metrics.to_dict() == {"policy/entropy": 3.0}
