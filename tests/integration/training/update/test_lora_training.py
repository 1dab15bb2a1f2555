"""An adapter trained by our own updates: it learns, the rest stands still, and a run goes on bit by bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_desk import step_of_example
from tiny_models import tiny_model
from tiny_training import even_share, make_agent, make_environment
from transformers import AutoModelForCausalLM

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.update.lora import load_trainable_state, save_trainable_state
from stateset_agents.types.errors import CheckpointError, ConfigurationError

ADAPTED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def config(folder: Path, **settings) -> TrainingConfig:
    base = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    base |= {"learning_rate": 0.03, "lr_scheduler_type": "constant", "beta": 0.01, "lora": {"rank": 8}}
    return TrainingConfig(**{**base, "output_dir": str(folder), **settings})


async def test_an_adapter_learns_and_the_agent_and_its_checkpoint_speak_with_it(tmp_path):
    agent = make_agent(history="keep")
    await agent.initialize()
    before = {name: value.clone() for name, value in agent.backend.model.state_dict().items()}
    trainer = MultiTurnGRPOTrainer(
        agent, make_environment(), even_share, config(tmp_path, max_steps=14, beta=0.0)
    )
    async with trainer:
        rewards = [(await trainer.step())["reward/mean"] for _ in range(14)]
        await trainer.save_checkpoint()
        learner = trainer.learner
        assert all(torch.equal(value, before[name]) for name, value in frozen(learner).items())
        trained = {id(parameter) for parameter in learner.optimization.trained_parameters}
        assert len(trained) == 2 * 2 * len(ADAPTED)  # A and B of two layers
        assert {id(one) for one in learner.optimization.optimizer.state} == trained
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2
    after = agent.backend.master_model().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in agent.backend.model.state_dict().items())
    assert {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])} == ADAPTED

    await agent.save_pretrained(tmp_path / "agent")
    checkpoint = trainer.run.checkpoints / "step-000014"
    for folder in (tmp_path / "agent", checkpoint / "model"):
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in after.items())
    by_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(start(tmp_path, before)), checkpoint / "adapter"
    )
    ids = torch.tensor([[1, 5, 9, 200, 7]])
    with torch.no_grad():
        torch.testing.assert_close(by_peft(ids).logits, agent.backend.model(ids).logits, atol=2e-5, rtol=1e-5)
    await agent.close()


def frozen(learner) -> dict[str, torch.Tensor]:
    """The model's own weights under the adapter, by their plain names."""
    return {
        name.replace(".base_layer.", "."): value
        for name, value in learner.base.state_dict().items()
        if ".lora_" not in name
    }


def start(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    model = tiny_model()
    model.load_state_dict(weights)
    model.save_pretrained(folder / "start")
    return folder / "start"


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.long), {"advantage_estimator": "turn_gae", "beta": 0.1}],
    ids=str,
)
async def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path, changes):
    found = []
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        run = None
        for last in steps:
            agent = make_agent()
            settings = config(tmp_path / name, max_steps=3, num_iterations=2, **changes)
            trainer = MultiTurnGRPOTrainer(agent, make_environment(), even_share, settings, run=run)
            await trainer.initialize()
            if run is not None:
                await trainer.load_checkpoint()
                assert trainer.step_number == 2
                assert all(
                    torch.equal(value, found[1][name]) for name, value in trainer.learner.weights().items()
                )
            while trainer.step_number < last:
                await trainer.step()
            await trainer.save_checkpoint()
            run = trainer.run
            await trainer.stop()
            found.append(
                {name: value.clone() for name, value in agent.backend.master_model().state_dict().items()}
            )
            await agent.close()
    assert all(torch.equal(value, found[2][name]) for name, value in found[0].items())
    assert not all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_checkpoint_s_adapter_of_another_size_changes_nothing():
    parameter = torch.zeros(4, 2)
    optimizer = torch.optim.AdamW([parameter.requires_grad_()])
    kept = save_trainable_state(optimizer.state_dict(), [torch.ones(4, 2), torch.ones(3)])
    others = [torch.zeros(4, 2), torch.zeros(2)]
    with pytest.raises(CheckpointError, match="adapter is of another model"):
        load_trainable_state(kept, others)
    assert not others[0].any()
    assert load_trainable_state(kept, [others[0], torch.zeros(3)])["state"] == {}
    assert others[0].all()


def test_few_bits_have_one_name():
    for name in ("load_in_4bit", "load_in_8bit", "quantization_config"):
        with pytest.raises(ConfigurationError, match=f"write quantization: 4bit .* instead of {name}"):
            TrainingConfig(lora={"rank": 8, name: True})
    with pytest.raises(ConfigurationError, match="quantization"):
        TrainingConfig(quantization="4bit")  # without an adapter nothing could be trained


async def test_few_bits_without_bitsandbytes_give_the_cure_before_there_is_a_run_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    settings = config(tmp_path, lora={"rank": 8, "quantization": "4bit"})
    trainer = MultiTurnGRPOTrainer(make_agent(), make_environment(), even_share, settings)
    with pytest.raises(ConfigurationError, match=r'needs bitsandbytes: pip install "bitsandbytes>=0.50"'):
        await trainer.initialize()
    await trainer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
async def test_the_desk_s_file_trains_an_adapter(tmp_path):
    run = await step_of_example("desk_with_lora.yaml", tmp_path)
    assert (run.checkpoints / "step-000001" / "adapter" / "adapter_config.json").is_file()
