"""One optimiser step: the schedule, what decays, and the order of unscaling, clipping and stepping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from stateset_agents.runs.optimizer import Optimization, autocast_dtype
from stateset_agents.runs.settings import schedule
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError

CONSTANT = {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}


def factors(kind, warmup_ratio, num_steps):
    return [schedule(step, num_steps, kind=kind, warmup_ratio=warmup_ratio) for step in range(num_steps + 2)]


def test_warm_up_rises_in_a_line_from_above_zero():
    assert factors("constant", 0.4, 10)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_zero_and_stays_there():
    assert factors("linear", 0.0, 4) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_falls_in_a_half_wave():
    assert factors("cosine", 0.0, 4) == pytest.approx([1.0, 0.85355339, 0.5, 0.14644661, 0.0, 0.0])


def test_the_fall_begins_after_the_warm_up():
    assert factors("linear", 0.2, 10)[:6] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]


def make(model=None, *, num_updates=10, scale=False, **settings):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    return model, Optimization(model, TrainingConfig(**settings), num_updates=num_updates, scale=scale)


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_norms_and_biases_do_not_decay():
    model, optimization = make(weight_decay=0.5, learning_rate=0.1, **CONSTANT)
    nn.init.ones_(model[0].bias)
    before = values(model)
    loss = sum(parameter.sum() for parameter in model.parameters()) * 0.0
    optimization.backward(loss)
    optimization.step()
    weight, *rest = values(model)
    assert torch.allclose(weight, before[0] * (1 - 0.1 * 0.5))
    assert all(torch.equal(now, then) for now, then in zip(rest, before[1:], strict=True))


def test_the_learning_rate_follows_the_schedule():
    model, optimization = make(num_updates=4, learning_rate=0.1, lr_scheduler_type="linear", warmup_ratio=0.5)
    used = []
    for _ in range(4):
        optimization.backward(model[0].weight.sum())
        used.append(optimization.step().learning_rate)
    assert used == pytest.approx([0.05, 0.1, 0.1, 0.05])


@pytest.mark.parametrize("room", [0.5, 1.0 - 1e-7, 1.0, 1.0 + 1e-7, 1.0 + 1e-6, 1.0 + 1e-5, 2.0])
def test_gradients_are_clipped_as_torch_clips_them(room):
    torch.manual_seed(0)
    model = nn.Linear(50, 50)
    (model(torch.randn(8, 50)).square().sum() * 1e-3).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    limit = room * float(nn.utils.get_total_norm(gradients))
    _, optimization = make(copy.deepcopy(model), max_grad_norm=limit, learning_rate=0.1, **CONSTANT)
    seen = []
    optimization.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(part.grad.clone() for part in optimization.trained_parameters)
    )
    for parameter, gradient in zip(optimization.trained_parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = optimization.step().grad_norm
    expected = nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert norm == float(expected)
    assert all(torch.equal(a, b.grad) for a, b in zip(seen, model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_neither_weights_nor_schedule(bad):
    model, optimization = make(learning_rate=0.1)
    optimization.backward(model[0].weight.sum())
    optimization.step()
    before, state = values(model), optimization.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    optimization.backward((model[0].weight * bad).sum())
    result = optimization.step()
    assert (result.stepped, optimization.num_updates) == (False, 1)
    assert all(torch.equal(now, then) for now, then in zip(values(model), before, strict=True))
    assert torch.equal(optimization.optimizer.state_dict()["state"][0]["exp_avg"], state)
    optimization.backward(model[0].weight.sum())  # and the bad gradient is gone
    assert optimization.step().grad_norm == pytest.approx(2.0)


def test_a_loss_that_is_not_finite_moves_nothing_though_its_gradient_is():
    model, optimization = make(learning_rate=0.1)
    before = values(model)
    optimization.backward(model[0].weight.sum() + math.inf)
    result = optimization.step(usable=False)
    assert (result.stepped, optimization.num_updates) == (False, 0)
    assert math.isfinite(result.grad_norm)
    assert all(torch.equal(now, then) for now, then in zip(values(model), before, strict=True))


def test_gradients_are_unscaled_before_they_are_clipped():
    plain, one = make(nn.Linear(1, 1, bias=False), learning_rate=0.1, max_grad_norm=0.5, **CONSTANT)
    scaled, other = make(
        nn.Linear(1, 1, bias=False), learning_rate=0.1, max_grad_norm=0.5, scale=True, **CONSTANT
    )
    scaled.load_state_dict(plain.state_dict())
    for model, optimization in ((plain, one), (scaled, other)):
        optimization.backward(3.0 * model.weight.sum())
        assert optimization.step().grad_norm == pytest.approx(3.0)  # as it was before clipping
        first_moment = optimization.optimizer.state_dict()["state"][0]["exp_avg"].item()
        assert first_moment == pytest.approx(0.1 * 0.5, rel=1e-4)  # (1 - beta1) times the clipped gradient
    assert torch.allclose(plain.weight, scaled.weight)


def test_an_overflow_under_the_scaler_skips_the_step_and_lowers_the_scale():
    model, optimization = make(scale=True, **CONSTANT)
    before = values(model)
    optimization.backward((model[0].weight * math.inf).sum())
    assert not optimization.step().stepped
    assert optimization.scaler.get_scale() == 65536.0 / 2
    assert all(torch.equal(now, then) for now, then in zip(values(model), before, strict=True))


def test_its_state_goes_on_where_it_stood():
    model, optimization = make(learning_rate=0.1)
    for _ in range(2):
        optimization.backward(model[0].weight.square().sum())
        optimization.step()
    twin, restored = make(learning_rate=0.1)
    twin.load_state_dict(model.state_dict())
    restored.load(copy.deepcopy(optimization.state()))  # its tensors are the live ones
    for each, own in ((model, optimization), (twin, restored)):
        own.backward(each[0].weight.square().sum())
        own.step()
    assert all(torch.equal(a, b) for a, b in zip(values(model), values(twin), strict=True))


def test_precision_names_an_autocast_dtype():
    cpu = torch.device("cpu")
    assert autocast_dtype("auto", cpu) is None
    assert autocast_dtype("fp32", cpu) is None
    assert autocast_dtype("bf16", cpu) is torch.bfloat16
    assert autocast_dtype("fp16", torch.device("cuda")) is torch.float16
    with pytest.raises(ConfigurationError, match="use fp32 or bf16 on the CPU"):
        autocast_dtype("fp16", cpu)


def test_inverse_sqrt_falls_with_the_root_of_the_updates_counted_in_warm_ups():
    rates = [schedule(step, 40, kind="inverse_sqrt", warmup_ratio=0.1) for step in (3, 4, 16)]
    assert rates == pytest.approx([1.0, 1.0, 0.5])  # 4 updates of warm-up; 4 + 12 = four times as many
    assert factors("inverse_sqrt", 0.0, 9)[::3] == pytest.approx([1.0, 0.5, 7**-0.5, 10**-0.5])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_fall_ends_at_the_lowest_ratio(kind):
    rates = [schedule(step, 4, kind=kind, warmup_ratio=0.0, min_ratio=0.2) for step in range(6)]
    assert (rates[0], rates[2], rates[4], rates[5]) == pytest.approx((1.0, 0.6, 0.2, 0.2))


def test_a_lowest_rate_of_a_constant_one_is_refused():
    with pytest.raises(ConfigurationError, match="leave lr_min_ratio at 0"):
        TrainingConfig(lr_scheduler_type="constant_with_warmup", lr_min_ratio=0.1)
    assert TrainingConfig(lr_scheduler_type="constant_with_warmup").lr_scheduler_type == "constant"
