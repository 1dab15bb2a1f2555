"""The desk's gradient under half-precision rollouts, as evidence/stale-rollouts.md has it, on fewer talks."""

from __future__ import annotations

import asyncio
import statistics

import pytest
import torch

from scripts.importance_desk import Measured, in_eight_bits, measure
from stateset_agents.training.update.objective import weight_level


def planted(bias: float, noise: float) -> Measured:
    """Gradients of sixteen steps about (3, 4), and without weights about one that is off by `bias` of it."""
    dice = torch.Generator().manual_seed(0)
    measured = Measured()
    for _ in range(16):
        exact = torch.tensor([3.0, 4.0]) + noise * torch.randn(2, generator=dice)
        measured.gradients["exact"].append(exact)
        measured.gradients["none"].append(exact + bias * torch.tensor([4.0, -3.0]))
        measured.gradients["token"].append(exact + noise * torch.randn(2, generator=dice))
    return measured


def test_an_error_that_is_there_is_found_and_noise_is_none() -> None:
    measured = planted(0.1, 0.2)
    error, most = measured.error("none")
    assert error == pytest.approx(0.1, rel=0.03)
    assert error <= most < 0.11
    error, most = measured.error("token")
    assert error <= 0.02 < most < 0.05  # each step's difference is .06 of the gradient


def test_weights_in_eight_bits_keep_their_sizes_and_lose_their_last_digits() -> None:
    weights = torch.linspace(-2, 2, 101)
    rounded = in_eight_bits({"weight": weights})["weight"]
    assert 0.01 < float((rounded - weights).norm() / weights.norm()) < 0.05
    assert float(rounded.max()) == 2.0


@pytest.mark.long
def test_half_precision_rollouts_of_the_desk_cost_less_than_a_hundredth_of_the_gradient() -> None:
    measured = asyncio.run(measure(4))
    assert weight_level("auto", measured.rms, statistics.fmean(measured.lengths)) == "sequence"
    for way in ("none", "token", "sequence"):  # auto begins with tokens and goes on with conversations
        assert measured.error(way)[1] < 0.01, way
