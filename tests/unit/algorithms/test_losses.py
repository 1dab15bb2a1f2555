"""Every policy loss against hand-worked numbers; impossible options."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stateset_agents.algorithms.losses import Denominators, LossInputs, aggregate, policy_loss
from stateset_agents.algorithms.policy_losses import (
    LOSSES,
    Clip,
    clipped_surrogate,
    clipped_weight,
    log_likelihood,
)
from stateset_agents.types.errors import ConfigurationError

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
    inputs = LossInputs(logprobs[MASK], old[MASK], ADVANTAGES[MASK], IDS[MASK], COUNTS)
    tensors = {field: options.pop(field) for field in inputs.__slots__ if field in options}
    return policy_loss(name, replace(inputs, **tensors), **{**clip, **options})


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
    assert worked(name).loss.item() == pytest.approx(expected, abs=1e-8)


def test_grpo_by_hand():
    # ratios e^.3 = 1.35 (A > 0: clipped to 1.28), 1, e^-.5; then 1, e^.4 (A < 0: not clipped)
    first = -(1.28 + 1 + math.exp(-0.5)) / 3
    second = (1 + math.exp(0.4)) / 2
    assert worked("grpo").loss.item() == pytest.approx((first + second) / 2, abs=1e-12)


def test_gspo_takes_one_ratio_per_conversation():
    output = worked("gspo")
    s = [math.exp((0.3 - 0.5) / 3), math.exp(0.4 / 2)]
    assert s == pytest.approx([0.9355, 1.2214], abs=1e-4)
    assert output.loss.item() == pytest.approx((-s[0] + s[1]) / 2)
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
    logprob = double([0.001])
    output = policy_loss(
        "gspo", LossInputs(logprob, double([0.0]), double([1.0]), torch.tensor([0]), Denominators.of([1]))
    )
    assert output.loss.item() == pytest.approx(-1.0004)


def test_the_upper_bound_equals_the_lower_where_only_that_is_given():
    for name in NAMES:
        alone = worked(name, clip_ratio=0.1, clip_ratio_high=None)
        assert alone.loss == worked(name, clip_ratio=0.1, clip_ratio_high=0.1).loss


def test_decoupled_worked_loss():
    output = worked("dapo", LOGPROBS, PROXIMAL, behaviour_logprobs=OLD[MASK], clip_ratio_high=0.2)
    assert output.loss.item() == pytest.approx(-0.092912954, abs=1e-8)
    assert output.metrics.to_dict()["policy/clip_fraction_high"] == 0


# One token that the clip holds (ratio 2, A > 0), one that strays unclipped (ratio 2, A < 0).
DECOUPLED = LossInputs(
    logprobs=double([-1.0, -1.0]),
    old_logprobs=double([-1.0 - math.log(2), -1.0 - math.log(2)]),
    advantages=double([1.0, -1.0]),
    trajectory_ids=torch.tensor([0, 1]),
    denominators=Denominators.of([1, 1], max_length=4),
    behaviour_logprobs=double([-1.0 - math.log(8), -1.0 - math.log(1)]),  # weights 4 and 1/2
)


def test_decoupled_form_clips_around_the_proximal_policy_and_weighs_by_who_sampled():
    output = policy_loss("dapo", DECOUPLED, clip_ratio=0.2)
    assert output.loss.item() == pytest.approx((-4 * 1.2 + 0.5 * 2) / 2)
    assert output.metrics.to_dict()["policy/weight"] == pytest.approx((4 + 0.5) / 2)
    assert output.metrics.to_dict()["policy/clip_fraction_high"] == 0.5


def test_the_decoupled_weight_can_be_truncated():
    output = policy_loss("dapo", DECOUPLED, clip_ratio=0.2, weight_cap=3.0)
    assert output.loss.item() == pytest.approx((-3 * 1.2 + 0.5 * 2) / 2)


def test_the_kl_term_is_truncated_with_the_weight():
    """Its rho is 8 and 1: pi/pi_old of 2 times weights of 4, truncated to 3, and 1/2."""
    inputs = replace(DECOUPLED, ref_logprobs=DECOUPLED.logprobs - 0.5)
    options = {"clip_ratio": 0.2, "beta": 0.1}
    k3 = math.exp(-0.5) - 1 + 0.5
    free = policy_loss("dapo", inputs, **options).metrics.to_dict()
    assert free["loss/kl"] == pytest.approx(0.1 * (8 + 1) / 2 * k3)
    capped = policy_loss("dapo", inputs, **options, weight_cap=3.0).metrics.to_dict()
    assert capped["loss/kl"] == pytest.approx(0.1 * (2 * 3 + 1) / 2 * k3)


def test_the_decoupled_weight_has_no_gradient():
    behaviour = DECOUPLED.behaviour_logprobs.clone().requires_grad_()
    proximal = DECOUPLED.old_logprobs.clone().requires_grad_()
    logprobs = DECOUPLED.logprobs.clone().requires_grad_()
    inputs = replace(DECOUPLED, logprobs=logprobs, old_logprobs=proximal, behaviour_logprobs=behaviour)
    policy_loss("dapo", inputs, clip_ratio=0.2).loss.backward()
    assert behaviour.grad is None
    assert proximal.grad is None
    # the clipped token has none; the other -w A ratio / num_tokens = .5 * 2 / 2
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.5])


def test_gspo_weighs_whole_conversations_in_the_decoupled_form():
    mu = OLD[MASK]
    output = worked("gspo", LOGPROBS, PROXIMAL, behaviour_logprobs=mu, weight_level="sequence")
    drift = [0.2 - 0.1 - 0.3, -0.05 + 0.3]
    live = [(0.1 + 0.1 - 0.2) / 3, (0.05 + 0.1) / 2]
    expected = (-math.exp(drift[0]) * math.exp(live[0]) + math.exp(drift[1]) * math.exp(live[1])) / 2
    assert output.loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("behaviour", [None, OLD[MASK]])
def test_truncated_weights_are_refused_where_the_clip_already_corrects(behaviour):
    old = OLD[MASK] if behaviour is None else behaviour
    for start, stop in [(0, 5), (0, 3)]:  # the whole, and equal slices of one tensor
        with pytest.raises(ConfigurationError, match=r"weight_cap 2\.0 needs behaviour_logprobs apart"):
            policy_loss(
                "dapo",
                LossInputs(
                    LOGPROBS[MASK][start:stop],
                    old[start:stop],
                    ADVANTAGES[MASK][start:stop],
                    IDS[MASK][start:stop],
                    COUNTS,
                    behaviour_logprobs=None if behaviour is None else behaviour[start:stop],
                ),
                weight_cap=2.0,
            )


def test_dual_clip_bounds_the_loss_of_a_bad_token_with_a_huge_ratio():
    inputs = (double([0.0, 0.0, 0.0]), double([-2.0, -0.5, -2.0]), double([-1.0, -1.0, 1.0]))
    ids, counts = torch.tensor([0, 0, 0]), Denominators.of([3])
    plain = policy_loss("dapo", LossInputs(*inputs, ids, counts), **CLIP)
    dual = policy_loss("dapo", LossInputs(*inputs, ids, counts), **CLIP, dual_clip=3.0)
    assert plain.loss.item() == pytest.approx((math.exp(2) + math.exp(0.5) - 1.28) / 3)
    assert dual.loss.item() == pytest.approx((3 + math.exp(0.5) - 1.28) / 3)
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
        LossInputs(double([-1.0]), double([-0.5]), double([-1.0]), torch.tensor([0]), Denominators.of([1])),
        **CLIP,
    )
    assert output.metrics.to_dict()["policy/clip_fraction_low"] == 1
    assert output.loss.item() == pytest.approx(0.8)


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


def test_rejected_tokens_add_nothing_and_leave_the_denominator_alone():
    keep = torch.tensor([True, True, False, True, True])
    logprobs = LOGPROBS.clone().requires_grad_()
    output = worked("dapo", logprobs, keep=keep)
    dropped_token = -math.exp(-0.5) / 5
    assert output.loss.item() == pytest.approx(-0.0789411924 - dropped_token)
    output.loss.backward()
    assert logprobs.grad[0, 3] == 0


# ----------------------------------------------------------------------------- options and errors


def test_the_kl_term_joins_with_the_losss_own_averaging():
    for name in NAMES:
        plain = worked(name, LOGPROBS, LOGPROBS)
        with_kl = worked(name, LOGPROBS, LOGPROBS, ref_logprobs=PROXIMAL[MASK], beta=0.5)
        d = (LOGPROBS - PROXIMAL)[MASK]
        k3 = aggregate(torch.expm1(-d) + d, IDS[MASK], COUNTS, LOSSES[name].averaging)
        assert with_kl.loss.item() == pytest.approx(float(plain.loss + 0.5 * k3))
        assert with_kl.metrics.to_dict()["loss/kl"] == pytest.approx(float(0.5 * k3))


def test_in_the_decoupled_form_the_kl_ratio_is_taken_to_the_policy_that_sampled():
    inputs = replace(DECOUPLED, ref_logprobs=double([-1.5, -1.5]))  # d = .5, ratios to behaviour 8 and 1
    plain, with_kl = (policy_loss("dapo", inputs, clip_ratio=0.2, beta=beta).loss for beta in (0.0, 1.0))
    difference = with_kl - plain
    assert difference.item() == pytest.approx((8 + 1) / 2 * (math.exp(-0.5) - 0.5))


def test_a_reference_with_beta_zero_is_reported_and_not_trained():
    output = worked("grpo", ref_logprobs=PROXIMAL[MASK])
    assert output.metrics.to_dict()["kl/reference"] > 0
    assert output.loss == worked("grpo").loss


def test_half_precision_is_widened_before_any_arithmetic():
    args = [tensor[MASK].bfloat16() for tensor in (LOGPROBS, OLD, ADVANTAGES)]
    output = policy_loss("grpo", LossInputs(*args, IDS[MASK], COUNTS), **CLIP)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(0.141867731, abs=5e-3)


FAR = torch.tensor([-60.0, -45.5, -21.0, -3.0, 0.5, 3.0, 19.5, 20.5, 44.0, 60.0])
"""Log ratios, exact in fp32."""


def surrogate_slope(ratio: Tensor, advantage: float, clip: Clip) -> Tensor:
    return ratio * (ratio <= 1 + clip.high if advantage > 0 else ratio >= 1 - clip.low)


SLOPES = {
    clipped_surrogate: surrogate_slope,
    clipped_weight: lambda ratio, advantage, clip: ratio.clamp(max=1 + clip.high),
    log_likelihood: lambda ratio, advantage, clip: torch.ones_like(ratio),
}
"""Loss of a token -> what its gradient by the log-prob is -A times of."""


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_every_ratio_keeps_the_gradient_of_its_formula(name, advantage):
    """A bad token that grew a lot is pushed down by as much; each token is a conversation of its own."""
    count = len(FAR)
    logprobs = torch.full((count,), -70.0, requires_grad=True)  # fp32
    loss = policy_loss(
        name,
        LossInputs(
            logprobs,
            logprobs.detach() - FAR,
            torch.full((count,), advantage),
            torch.arange(count),
            Denominators.of([1] * count, max_length=1),
        ),
    ).loss
    loss.backward()
    assert loss.isfinite()
    ratio = FAR.double().clamp(-20, 20).exp()
    slope = SLOPES[LOSSES[name].token_loss](ratio, advantage, LOSSES[name].clip)
    assert logprobs.grad.square().sum().isfinite()  # or the step would be skipped
    torch.testing.assert_close(logprobs.grad.double(), -advantage * slope / count, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("far", [60.0, 5000.0])
def test_ratio_weight_and_kl_together_overflow_nowhere(name, far):
    """Whatever the three policies think of the token: its loss and its gradient are numbers."""
    for signs in itertools.product((-1, 0, 1), repeat=3):
        old, behaviour, ref = (torch.tensor([-6000.0 + sign * far]) for sign in signs)
        for advantage in (-10.0, 10.0):
            logprobs = torch.tensor([-6000.0], requires_grad=True)
            loss = policy_loss(
                name,
                LossInputs(
                    logprobs,
                    old,
                    torch.tensor([advantage]),
                    torch.tensor([0]),
                    Denominators.of([1], max_length=1),
                    behaviour_logprobs=behaviour,
                    ref_logprobs=ref,
                ),
                beta=0.1,
            ).loss
            loss.backward()
            assert loss.isfinite()
            assert logprobs.grad.isfinite().all()


def test_an_absurd_ratio_stays_finite_and_spoils_no_other_token():
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    old, advantages = torch.tensor([-500.0, -1.0]), torch.tensor([0.0, 1.0])
    output = policy_loss(
        "dapo", LossInputs(logprobs, old, advantages, torch.tensor([0, 0]), Denominators.of([2]))
    )
    output.loss.backward()
    assert output.loss.item() == -0.5
    assert logprobs.grad.tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, "loss_type must be one of .*grpo.*got 'grop'"),
        ("grpo", {"clip_ratio": 0.0}, "clip_ratio must be above 0 and at most 1, got 0.0"),
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
        policy_loss("dr_grpo", LossInputs(*args, Denominators.of([3, 2])))
    with pytest.raises(ConfigurationError, match="max_length must be at least 1, got 0"):
        Denominators.of([3, 2], max_length=0)


def test_tensors_of_unequal_shape_are_refused():
    with pytest.raises(ValueError, match=r"advantages must have the shape of logprobs, \[5\], got \[4\]"):
        policy_loss("grpo", LossInputs(LOGPROBS[MASK], OLD[MASK], torch.ones(4), IDS[MASK], COUNTS))
    with pytest.raises(ValueError, match="flat"):
        policy_loss("grpo", LossInputs(LOGPROBS, OLD, ADVANTAGES, IDS, COUNTS))
