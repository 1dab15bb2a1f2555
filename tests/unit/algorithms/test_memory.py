"""Bytes of a training: the quoted figures, and those measured on a learner's own tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_models import tiny_model

from scripts import memory_page
from scripts.memory_page import kept_bytes
from stateset_agents.algorithms.memory import (
    FP32_MASTERS,
    MIXED_PRECISION,
    PARAMETERS_ALONE,
    training_memory,
)
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError


@pytest.mark.parametrize(
    ("helpers", "total"),
    [
        ({"critic": 7, "reference": 7}, 238),
        ({"critic": 7, "reference": 7, "reward_model": 7}, 252),
        ({"reference": 7}, 126),
        ({}, 112),
        ({"adapter": 1}, 7 * 2 + 16),
        ({"rollouts": 2}, 112 + 14),
    ],
)
def test_mixed_precision_takes_sixteen_bytes_trained_and_two_frozen(
    helpers: dict[str, float], total: float
) -> None:
    assert MIXED_PRECISION.trained == FP32_MASTERS.trained == 16
    assert training_memory(7, **helpers).total == total


def test_the_quoted_490_and_280_count_numbers_without_gradients() -> None:
    ppo = training_memory(70, critic=70, reference=70, per_parameter=PARAMETERS_ALONE)
    grpo = training_memory(70, reference=70, per_parameter=PARAMETERS_ALONE)
    assert (ppo.total, grpo.total) == (490, 280)
    assert sum(model.moments for model in ppo.models) == 280
    assert all(model.gradients == 0 for model in ppo.models)


def test_each_model_has_its_own_line() -> None:
    memory = training_memory(10, critic=2, reference=10, reward_model=3)
    assert [model.name for model in memory.models] == ["policy", "critic", "reference", "reward model"]
    assert [memory.of(model.name) for model in memory.models] == [160, 32, 20, 6]
    assert memory.of("adapter") == 0


@pytest.mark.parametrize("name", ["critic", "reference", "reward_model", "adapter", "rollouts"])
def test_fewer_than_no_parameters_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must not be negative, got -1"):
        training_memory(7, **{name: -1})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("estimator", ["group", "token_gae"])
def test_a_learner_s_own_tensors_take_what_is_computed(precision: str, beta: float, estimator: str) -> None:
    model = tiny_model("llama")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = TrainingConfig(precision=precision, beta=beta, advantage_estimator=estimator)
    learner = Learner(model, config, num_steps=1, exact_logprobs=True)
    head = []
    if learner.critic is not None:
        head = [parameter.numel() for parameter in learner.critic.value_function.head.parameters()]
    kept = kept_bytes(learner)
    computed = training_memory(
        parameters,
        critic=sum(head),
        reference=parameters if beta else 0,
        per_parameter=FP32_MASTERS,
    )
    rounded = 0
    if beta and learner.policy.fuses:  # the reference's products have their weights in two bytes, not four
        layers = learner.policy.trunk.layers.modules()
        rounded = 2 * sum(one.weight.numel() for one in layers if isinstance(one, torch.nn.Linear))
    assert (rounded > 0) == (beta > 0 and precision == "bf16")
    assert sum(kept.values()) == pytest.approx(computed.total - rounded, rel=0.05)
    policy = computed.models[0]
    for part in ("weights", "gradients", "moments"):
        assert kept[part] == pytest.approx(getattr(policy, part), rel=0.05), part
    assert kept.get("reference", 0) == computed.of("reference") - rounded
    assert kept.get("critic", 0) == pytest.approx(computed.of("critic"), rel=0.05)


def test_an_adapter_s_learner_takes_what_is_computed() -> None:
    model = tiny_model("llama")
    frozen = sum(parameter.numel() for parameter in model.parameters())
    config = TrainingConfig(beta=0.1, lora={"rank": 4})
    learner = Learner(model, config, num_steps=1, exact_logprobs=True)
    adapter = sum(one.numel() for one in learner.policy.model.parameters() if one.requires_grad)
    computed = training_memory(frozen, adapter=adapter, per_parameter=FP32_MASTERS)
    assert sum(kept_bytes(learner).values()) == pytest.approx(computed.total, rel=0.05)


def test_the_page_and_its_picture_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory_page.py", "--check"])
    assert (memory_page.main(), capsys.readouterr().err) == (0, "")
