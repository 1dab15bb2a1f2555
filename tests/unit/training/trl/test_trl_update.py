"""TRL's step on our conversations: which tokens it trains, and that its gradient is ours."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import talk
from transformers import TrainerCallback

from stateset_agents.runs.optimizer import Optimization
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.learner import TrlLearner
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.training.update.batch import CreditedBatch, Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError

ROWS = 17


def ragged(*, per_turn: bool = True, opens_rows: float = 0.0) -> list[Sample]:
    """Conversations of one to four turns with prompts and replies of 1 to 9 tokens; a third are bad ones.

    `opens_rows`: how likely a turn is to follow none; half as likely it follows the first.
    """
    dice = random.Random(7)
    samples = []
    for number in range(ROWS):
        turns = [
            (
                [dice.randrange(256) for _ in range(dice.randint(1, 9))],
                [dice.randrange(258) for _ in range(dice.randint(1, 9))],
            )
            for _ in range(dice.randint(1, 4))
        ]
        sign = -1.0 if number % 3 == 0 else 1.0
        worth = [sign * dice.uniform(0.2, 2.0) for _ in turns]
        per_token = [value for value, (_, reply) in zip(worth, turns, strict=True) for _ in reply]
        if not per_turn:
            per_token = [per_token[0]] * len(per_token)
        weight = 0.5 if number == 4 else 1.0
        draws = [dice.random() if opens_rows else 1.0 for _ in turns]
        follows = [None if draw < opens_rows else 0 if draw < 1.5 * opens_rows else -1 for draw in draws]
        conversation = talk(*turns, follows=[None, *follows[1:]] if opens_rows else ())
        samples.append(Sample(trajectory=conversation, advantages=tuple(per_token), weight=weight))
    return samples


def settings(**changes) -> TrainingConfig:
    """A step of 24 rows in 3 passes, so that 7 rows are padding; gradients are not clipped by norm."""
    base = {"max_steps": 1, "num_generations": 8, "per_device_train_batch_size": 1}
    base |= {"gradient_accumulation_steps": 3, "num_iterations": 2, "max_grad_norm": 1e9, "clip_ratio": 0.2}
    return TrainingConfig(**{**base, "beta": 0.3, "loss_length": 40, **changes})


def moved(start, seed=3, size=0.02):
    """The weights some way off, far enough for ratios to leave the clip range."""
    dice = torch.Generator().manual_seed(seed)
    return {name: value + size * torch.randn(value.shape, generator=dice) for name, value in start.items()}


class Recorder(TrainerCallback):
    """Notes the gradients of each pass, then puts the model where the next one is to find it."""

    def __init__(self, model) -> None:
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.away = moved({name: value.detach().clone() for name, value in self.parameters.items()})
        self.passes: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_, **__) -> None:
        self.passes.append({name: value.grad.clone() for name, value in self.parameters.items()})
        for name, value in self.parameters.items():
            value.data.copy_(self.away[name])
            value.grad = None  # AdamW leaves it alone


def our_passes(
    model, samples, config, monkeypatch, adapted=None
) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    config = config.model_copy(update={"importance": "none"})  # TRL's weights have another form
    learner = Learner(copy.deepcopy(model), config, num_steps=1, exact_logprobs=False)
    if adapted is not None:
        learner.policy.model.load_state_dict(adapted)
    recorder = Recorder(learner.policy.model)
    step = Optimization.step

    def watched(self, **how):
        recorder.on_pre_optimizer_step()
        return step(self, **how)

    monkeypatch.setattr(Optimization, "step", watched)
    metrics = learner.update(samples, step=1)
    return recorder.passes, metrics


def trl_learner(model, config) -> TrlLearner:
    return TrlLearner(copy.deepcopy(model), tiny_tokenizer().hf, config, TrlSettings(), max_new_tokens=9)


def trl_passes(learner, samples) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    recorder = Recorder(learner.model)
    learner.trainer.add_callback(recorder)
    try:
        metrics = learner.learn(CreditedBatch(samples, 0, []), step=1).metrics
    finally:
        learner.close()
    return recorder.passes, metrics


def assert_equal_gradients(ours, theirs) -> None:
    """To 1e-5 of the largest gradient in the first pass. The second comes after a step of AdamW, which
    divides each gradient by its size, and so makes the rounding of the smallest as large as any: 5e-5."""
    assert len(ours) == len(theirs) == 2
    for mine, other, tolerance in zip(ours, theirs, (1e-5, 5e-5), strict=True):
        assert mine.keys() == other.keys()
        scale = max(float(gradient.abs().max()) for gradient in mine.values())
        assert max(float((mine[name] - other[name]).abs().max()) for name in mine) <= tolerance * scale


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"loss_type": "grpo"}),
        ("llama", {"loss_type": "dapo", "clip_ratio_high": 0.1}),
        ("llama", {"loss_type": "ppo", "dual_clip": 1.3}),
        ("llama", {"loss_type": "dr_grpo"}),
        ("llama", {"loss_type": "cispo"}),
        ("llama", {"loss_type": "gspo", "beta": 0.0}),
        ("gpt2", {"loss_type": "grpo", "temperature": 0.7}),
    ],
)
@pytest.mark.first(1)
def test_trl_s_gradient_is_ours_while_the_clip_acts_and_the_reference_pulls(family, changes, monkeypatch):
    model, config = tiny_model(family), settings(**changes)
    samples = ragged(per_turn=changes["loss_type"] != "gspo")
    ours, metrics = our_passes(model, samples, config, monkeypatch)
    theirs, figures = trl_passes(trl_learner(model, config), samples)
    assert_equal_gradients(ours, theirs)
    clipped = metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
    assert clipped > 0.05
    assert figures["policy/clip_fraction_high"] > 0.01
    if config.uses_reference:
        assert metrics["kl/reference"] > 0.01


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"loss_type": "grpo"}),
        ("llama", {"loss_type": "grpo", "gradient_accumulation_steps": 1}),
        ("llama", {"loss_type": "ppo", "dual_clip": 1.3}),
        ("llama", {"loss_type": "dapo"}),
        ("llama", {"loss_type": "dr_grpo"}),
        ("llama", {"loss_type": "cispo"}),
        ("gpt2", {"loss_type": "grpo"}),
    ],
)
@pytest.mark.first(2)
def test_trl_s_gradient_is_ours_for_conversations_of_several_rows(family, changes, monkeypatch):
    """In one step as many rows as TRL asks for do not hold them: they go through in two parts. The loss
    that is logged is ours, too."""
    model, config = tiny_model(family), settings(**changes)
    samples = ragged(opens_rows=0.4)[: 17 if config.gradient_accumulation_steps > 1 else 8]
    num_rows = sum(len(sample.trajectory.rows) for sample in samples)
    size = config.episodes_per_step() * config.num_generations
    assert 1 < num_rows / size < 2
    ours, metrics = our_passes(model, samples, config, monkeypatch)
    theirs, figures = trl_passes(trl_learner(model, config), samples)
    assert_equal_gradients(ours, theirs)
    total = metrics["loss/policy"] + metrics["loss/kl"]
    assert figures["loss/total"] == pytest.approx(total, rel=2e-3)
    assert metrics["kl/reference"] > 0.01
    assert figures["policy/clip_fraction_high"] > 0.01


def test_a_ratio_of_whole_conversations_is_refused_where_they_have_several_rows():
    learner = trl_learner(tiny_model(), settings(loss_type="gspo", beta=0.0))
    with pytest.raises(
        ConfigurationError, match=r"one ratio of each row, and 17 conversations have \d+ rows"
    ):
        trl_passes(learner, ragged(per_turn=False, opens_rows=0.4))


def test_an_adapter_s_gradient_is_ours_and_the_model_without_it_is_the_reference(monkeypatch):
    samples, config = ragged(), settings(lora={"rank": 4})
    learner = trl_learner(tiny_model(), config)
    theirs_at_first = copy.deepcopy(learner.model.state_dict())  # A is drawn at random
    assert learner.trainer.ref_model is None
    theirs, figures = trl_passes(learner, samples)
    ours, metrics = our_passes(tiny_model(), samples, config, monkeypatch, theirs_at_first)
    assert_equal_gradients(ours, theirs)
    assert all(".lora_" in name for name in theirs[0])
    assert metrics["kl/reference"] > 0.01 < figures["kl/times_ratio"]


def test_trained_tokens_are_the_agent_s_and_no_others():
    model, config = tiny_model(), settings(num_iterations=1, beta=0.0)
    samples = ragged()
    learner = trl_learner(model, config)
    seen: list[tuple[int, ...]] = []
    loss = learner.trainer._compute_loss

    def watched(model, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        assert torch.equal(mask.bool(), inputs["advantages"] != 0)
        for row, bits in zip(inputs["completion_ids"], mask, strict=True):
            seen.append(tuple(row[bits == 1].tolist()))
        return loss(model, inputs)

    learner.trainer._compute_loss = watched
    try:
        learner.learn(CreditedBatch(samples, 0, []), step=1)
    finally:
        learner.close()
    said = [
        tuple(token for turn in one.trajectory.turns for token in turn.completion.token_ids)
        for one in samples
    ]
    assert sorted(filter(None, seen)) == sorted(said)
    assert sum(map(len, seen)) == sum(one.trajectory.num_agent_tokens for one in samples)
    assert len(seen) == 24
