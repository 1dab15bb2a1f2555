"""The importance weights of a step: `auto` goes by the step before, and a checkpoint keeps what it saw."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import same_bits, sample, talk

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.objective import weight_level
from stateset_agents.types.errors import ConfigurationError


def learner_of(**settings: Any) -> Learner:
    config = TrainingConfig(**{"beta": 0.0, "precision": "bf16", "learning_rate": 1e-6, **settings})
    return Learner(tiny_model(), config, num_steps=9, exact_logprobs=False)


def samples_off_by(learner: Learner, gap: float) -> list[Sample]:
    """Conversations whose stored log-probs are the policy's less `gap`, and more, in turn."""
    talks = [talk(([1, 5, 9], [7, 8, 20 + number]), ([3], [9, 11])) for number in range(6)]
    plain = [sample(one, advantage=(-1.0) ** number) for number, one in enumerate(talks)]
    torch.manual_seed(0)
    by_token: dict[tuple[int, int], float] = {}
    for batch in learner._micro_batches(plain):
        places = zip(batch.trajectory_ids.tolist(), batch.places.tolist(), strict=True)
        by_token |= dict(zip(places, learner.policy.score(batch).logprobs.tolist(), strict=True))
    made = []
    for number in range(6):
        values = [by_token[number, place] + gap * (-1.0) ** place for place in range(5)]
        one = talk(([1, 5, 9], [7, 8, 20 + number]), ([3], [9, 11]), logprobs=values)
        made.append(sample(one, advantage=(-1.0) ** number))
    return made


def test_auto_begins_with_tokens_and_takes_conversations_while_gaps_are_small() -> None:
    learner = learner_of()
    levels = []
    for step, gap in enumerate((0.01, 0.01, 0.5, 0.01)):
        metrics = learner.update(samples_off_by(learner, gap), step=step)
        levels.append(metrics["policy/importance_level"])
        assert metrics["policy/mismatch_rms"] == pytest.approx(gap, rel=0.2)
        assert 0.5 < metrics["policy/importance_ess"] <= 1.0 + 1e-6
    assert levels == [1.0, 2.0, 2.0, 1.0]


def test_a_checkpoint_keeps_what_auto_goes_by() -> None:
    learner, resumed = learner_of(), learner_of()
    learner.update(samples_off_by(learner, 0.01), step=0)
    resumed.restore(copy.deepcopy(dict(learner.weights())), copy.deepcopy(learner.state()))
    samples = samples_off_by(learner, 0.01)
    one, other = learner.update(samples, step=1), resumed.update(samples, step=1)
    assert one == other
    assert one["policy/importance_level"] == 2.0
    assert same_bits(dict(learner.weights()), dict(resumed.weights()))
    learner.restore(
        copy.deepcopy(dict(resumed.weights())), {**resumed.state(), "importance": {}}
    )  # an older one
    assert learner.update(samples, step=2)["policy/importance_level"] == 1.0


def test_none_weighs_nothing_and_an_exact_sampler_s_weights_are_refused() -> None:
    learner = learner_of(importance="none")
    metrics = learner.update(samples_off_by(learner, 0.1), step=0)
    assert "policy/weight" not in metrics
    assert "policy/importance_level" not in metrics
    assert metrics["policy/mismatch_rms"] == pytest.approx(0.1, rel=0.2)  # measured all the same
    with pytest.raises(ConfigurationError, match="importance token would correct twice"):
        Learner(
            tiny_model(),
            TrainingConfig(importance="token", precision="fp32"),
            num_steps=1,
            exact_logprobs=True,
        )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_however_rows_are_cut_the_weights_are_the_same(level: str) -> None:
    gradients = []
    for tokens in (None, 12):
        learner = learner_of(importance=level, micro_batch_tokens=tokens)
        samples = samples_off_by(learner, 0.2)
        learner.losses(samples)["total_loss"].backward()
        gradients.append([parameter.grad for parameter in learner.optimization.trained_parameters])
    for whole, parts in zip(*gradients, strict=True):
        assert (whole - parts).norm() <= 0.02 * whole.norm() + 1e-6


@pytest.mark.parametrize(
    ("importance", "rms", "tokens", "level"),
    [
        ("auto", None, 1.0, "token"),
        ("auto", 0.03, 100.0, "sequence"),  # .03 * 10 = .3
        ("auto", 0.03, 101.0, "token"),
        ("auto", float("nan"), 1.0, "token"),
        ("sequence", None, 1e6, "sequence"),
        ("token", 0.0, 1.0, "token"),
        ("none", 0.0, 1.0, None),
    ],
)
def test_the_level_by_setting_gaps_and_length(
    importance: Any, rms: float | None, tokens: float, level: str | None
) -> None:
    assert weight_level(importance, rms, tokens) == level
