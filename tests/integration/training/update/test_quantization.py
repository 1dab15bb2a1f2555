"""Adapters on models in 4 and 8 bits, by bitsandbytes itself: the gradient is that of plain weights of
the same values, nothing else of a training changes, and what is saved says what was trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import even_share, make_agent, make_environment, sample, talk
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl_grpo_trainer import TrlGRPOTrainer
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.lora import dequantized_weight, is_quantized, quantized_copy

pytestmark = pytest.mark.quantization

IDS = torch.tensor([[1, 5, 9, 200, 7]])
BITS = ["4bit", "8bit"]


def same_in_plain(model: Any, few: Any) -> Any:
    """A plain model of the values that `few` holds."""
    plain = copy.deepcopy(model)
    for name, layer in few.named_modules():
        if is_quantized(layer):
            plain.get_submodule(name).weight.data.copy_(dequantized_weight(layer))
    return plain


def parameter_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_copy_in_few_bits_says_what_plain_weights_of_its_values_say(family: str, bits: Any) -> None:
    model = tiny_model(family).eval()
    before = copy.deepcopy(model.state_dict())
    few = quantized_copy(model, bits)
    with torch.no_grad():
        torch.testing.assert_close(few(IDS).logits, same_in_plain(model, few)(IDS).logits, atol=1e-5, rtol=0)
        assert (few(IDS).logits - model(IDS).logits).abs().max() > 0.01
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in few.parameters())


def test_the_desk_s_layers_take_a_seventh_and_a_quarter_of_their_memory() -> None:
    model, _ = load_model_and_tokenizer("embedded:desk")

    def layers(some: Any) -> int:
        return parameter_bytes(some) - parameter_bytes(some.get_input_embeddings())

    assert layers(quantized_copy(model, "4bit")) < layers(model) / 7
    assert layers(quantized_copy(model, "8bit")) < layers(model) / 3.8


def ragged() -> list[Sample]:
    """Sixteen conversations of one to three turns, with good and bad advantages, clipped and not."""
    dice = torch.Generator().manual_seed(3)

    def some(most: int) -> list[int]:
        length = int(torch.randint(1, most, (1,), generator=dice))
        return torch.randint(258, (length,), generator=dice).tolist()

    made = []
    for number in range(16):
        turns = [(some(9), some(9)) for _ in range(1 + number % 3)]
        count = sum(len(reply) for _, reply in turns)
        logprobs = (-5.5 + 0.4 * torch.randn(count, generator=dice)).tolist()
        made.append(sample(talk(*turns, logprobs=logprobs), advantage=(-1.0) ** number * (1 + number / 8)))
    return made


def gradients(model: Any, lora: dict[str, Any], **settings: Any) -> tuple[dict[str, torch.Tensor], float]:
    config = TrainingConfig(lora=lora, per_device_train_batch_size=4, beta=0.2, **settings)
    learner = Learner(model, config, num_steps=2, exact_logprobs=True)
    torch.manual_seed(7)
    with torch.no_grad():  # away from the reference
        for parameter in learner.optimization.trained_parameters:
            parameter.add_(0.02 * torch.randn_like(parameter))
    losses = learner.losses(ragged())
    losses["total_loss"].backward()
    assert losses["kl_penalty"] > 0
    assert losses["clip_fraction"] > 0
    found = {name: one.grad for name, one in learner.policy.model.named_parameters() if one.grad is not None}
    assert len(found) == len(learner.optimization.trained_parameters)
    return found, float(losses["total_loss"].detach())


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "row_layout": "padded"}], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_gradient_is_that_of_an_adapter_on_plain_weights(family: str, bits: Any, settings: Any) -> None:
    model = tiny_model(family).eval()
    few = quantized_copy(model, bits)
    plain = same_in_plain(model, few)
    found, loss = gradients(few, {"rank": 4, "quantization": bits}, **settings)
    expected, plain_loss = gradients(plain, {"rank": 4}, **settings)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=0)


def config(folder: Path, bits: str, **settings: Any) -> TrainingConfig:
    base = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    base |= {"learning_rate": 0.03, "lr_scheduler_type": "constant", "beta": 0.01}
    base |= {"lora": {"rank": 8, "quantization": bits}, "output_dir": str(folder)}
    return TrainingConfig(**{**base, **settings})


@pytest.mark.parametrize("bits", BITS)
async def test_it_learns_and_the_rollouts_are_the_policy_s_from_the_first_step(
    tmp_path: Path, bits: str
) -> None:
    agent = make_agent()
    await agent.initialize()
    start = copy.deepcopy(agent.backend.model)
    trainer = MultiTurnGRPOTrainer(
        agent, make_environment(), even_share, config(tmp_path, bits, max_steps=12)
    )
    async with trainer:
        steps = [await trainer.step() for _ in range(12)]
        await trainer.save_checkpoint()
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    assert steps[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # the adapter off, the weights the same
    assert all(step["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4) for step in steps)
    if bits == "8bit":  # pi_old is taken anew, for on a GPU it would be another than the rollouts'
        assert all(step["policy/rollout_mismatch"] < 1e-4 for step in steps)

    checkpoint = trainer.run.checkpoints / "step-000012"
    merged = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    assert getattr(merged.config, "quantization_config", None) is None
    own = agent.backend.master_model().state_dict()
    assert all(torch.equal(value, own[name]) for name, value in merged.state_dict().items())

    from peft import PeftModel

    start.save_pretrained(tmp_path / "start")
    how = {"4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}
    how["8bit"] = {"load_in_8bit": True}
    few = AutoModelForCausalLM.from_pretrained(
        tmp_path / "start", quantization_config=BitsAndBytesConfig(**how[bits]), dtype="float32"
    )
    by_peft = PeftModel.from_pretrained(few, checkpoint / "adapter")
    by_peft.train()  # or bitsandbytes rounds activations on the CPU, too
    with torch.no_grad():
        gap = (by_peft(IDS).logits - merged(IDS).logits).abs().max() / merged(IDS).logits.abs().max()
    assert gap < 1e-4


@pytest.mark.parametrize("kind", [MultiTurnGRPOTrainer, TrlGRPOTrainer])
async def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path, kind: Any
) -> None:
    found = []
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        run = None
        for last in steps:
            agent = make_agent()
            settings = config(tmp_path / name, "4bit", max_steps=3)
            trainer = kind(agent, make_environment(), even_share, settings, run=run)
            await trainer.initialize()
            if run is not None:
                await trainer.load_checkpoint()
            while trainer.step_number < last:
                await trainer.step()
            await trainer.save_checkpoint()
            run = trainer.run
            await trainer.stop()
            found.append(agent.backend.master_model().state_dict())
            await agent.close()
    assert all(torch.equal(value, found[2][name]) for name, value in found[0].items())
    assert not all(torch.equal(value, found[1][name]) for name, value in found[0].items())


async def test_trl_trains_an_adapter_in_fp32_on_four_bits(tmp_path: Path) -> None:
    agent = make_agent()
    trainer = TrlGRPOTrainer(agent, make_environment(), even_share, config(tmp_path, "4bit", max_steps=14))
    async with trainer:
        rewards = [(await trainer.step())["reward/mean"] for _ in range(14)]
        model = trainer.learner.model
        assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
        assert any(is_quantized(layer) for layer in model.modules())
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1
