"""Value loss and exact entropy against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stateset_agents.algorithms.losses import Denominators, entropy, entropy_loss, value_loss
from stateset_agents.types.errors import ConfigurationError


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_value_loss_is_half_the_squared_error():
    values, ids = double([1.0, 0.0]), torch.tensor([0, 0])
    output = value_loss(values, values, double([0.0, 3.0]), ids, Denominators.of([2]))
    assert output.loss.item() == pytest.approx((1 + 9) / 2 / 2)
    assert output.metrics.to_dict()["value/clip_fraction"] == 0


def test_value_clip_takes_the_larger_error_and_stops_the_gradient_of_what_moved_too_far():
    values = double([1.0, -1.0]).requires_grad_()
    old, returns = double([0.0, 0.0]), double([2.0, 2.0])
    output = value_loss(values, old, returns, torch.tensor([0, 0]), Denominators.of([2]), value_clip=0.2)
    # first: held at .2, error 1.8^2 > 1; second: held at -.2, 2.2^2 < 3^2
    assert output.loss.item() == pytest.approx((1.8**2 + 3**2) / 2 / 2)
    assert output.metrics.to_dict()["value/clip_fraction"] == 0.5
    output.loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -3 / 2])


def test_value_clip_must_be_positive():
    value = double([1.0])
    with pytest.raises(ConfigurationError, match="value_clip must be positive"):
        value_loss(value, value, value, torch.tensor([0]), Denominators.of([1]), value_clip=0.0)


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
    assert output.loss.item() == -(1.5 + 6) / 2
    assert output.metrics.to_dict() == {"policy/entropy": 3.0}
