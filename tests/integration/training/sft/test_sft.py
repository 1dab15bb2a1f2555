"""Fine-tuning from conversations to weights: what is learned, kept, resumed and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents import (
    AgentConfig,
    Callback,
    Message,
    MultiTurnAgent,
    MultiTurnGRPOTrainer,
    TrainingConfig,
)
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.loading import model_folder, trained_tokens
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.reporting.curves import learning_curves
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.sft.demonstrations import OwnSuccesses
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import SFTTrainer, sft
from stateset_agents.types.errors import CheckpointError, ConfigurationError, TrainingStopped

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {word}"},
            {"role": "assistant", "content": word},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"{word} {word}"},
        ]
    }
    for word in ("ada", "bob", "cat", "dog", "eve", "fox", "gin", "hat", "ink", "jam")
]


def settings(folder: Path, **more: Any) -> SFTConfig:
    defaults = {
        "learning_rate": 3e-3,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "validation_share": 0.2,
        "eval_steps": 2,
        "save_steps": 2,
        "output_dir": str(folder),
        "progress": False,
    }
    return SFTConfig(**{**defaults, **more})


async def trained(folder: Path, **more: Any) -> tuple[SFTTrainer, dict[str, torch.Tensor]]:
    trainer = SFTTrainer(make_agent(), CHATS, settings(folder, **more))
    async with trainer:
        await trainer.train()
        weights = {name: value.clone() for name, value in trainer.learner.weights().items()}
    return trainer, weights


async def test_the_loss_falls_and_the_run_folder_tells_it(tmp_path):
    trainer, _ = await trained(tmp_path, max_steps=20)
    log = RunLog(trainer.run)
    losses = [line.values["sft/loss"] for line in log.metrics() if "sft/loss" in line.values]
    held_out = {line.step: line.values["eval/loss"] for line in log.metrics() if "eval/loss" in line.values}
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert list(held_out) == list(range(0, 21, 2))
    best = log.summary()["best"]
    assert best == {"step": best["step"], "metric": "eval/loss", "value": min(held_out.values())}
    assert held_out[best["step"]] == best["value"]
    assert next(chart.title for chart in learning_curves(list(log.metrics()))) == "Loss"
    assert trainer.run.report.is_file()


@pytest.mark.long
async def test_the_agent_ends_with_the_lowest_held_out_loss_unless_told_otherwise(tmp_path):
    for load_best in (True, False):
        agent = make_agent()
        config = settings(tmp_path, max_steps=12, learning_rate=0.05, load_best_at_end=load_best)
        trainer = SFTTrainer(agent, CHATS, config)
        async with trainer:
            await trainer.train()
            assert trainer.progress.best_step is not None
            assert trainer.progress.best_step < 12
            spoken = dict(agent.backend.model.state_dict())
            last = trainer.learner.weights()
            is_last = all(torch.equal(spoken[name], value) for name, value in last.items())
            assert is_last != load_best
            saved = await MultiTurnAgent.from_pretrained(trainer.model_folder, chat_template="plain")
            for name, value in saved.backend.model.state_dict().items():
                assert torch.equal(spoken[name], value)
            await saved.close()


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_begin(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == self._step:
            self._trainer.request_stop()


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}, {"precision": "bf16"}])
@pytest.mark.first(1)
async def test_a_stopped_run_goes_on_bit_by_bit(tmp_path, more):
    _, whole = await trained(tmp_path, **more)
    begun = SFTTrainer(make_agent(), CHATS, settings(tmp_path, **more), callbacks=[StopAfter(3)])
    async with begun:
        await begun.train()
    assert begun.step_number == 3
    resumed = SFTTrainer(make_agent(), CHATS, settings(tmp_path, **more), run=begun.run)
    async with resumed:
        await resumed.load_checkpoint()
        assert resumed.step_number == 3
        await resumed.train()
        after = resumed.learner.weights()
    assert after.keys() == whole.keys()
    assert all(torch.equal(after[name], whole[name]) for name in whole)
    steps = [line.step for line in RunLog(begun.run).metrics() if "sft/loss" in line.values]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("share", "steps"), [(0.0, 3), (0.2, 4)])
async def test_the_agent_of_a_stopped_run_has_learned_what_the_run_did(tmp_path, share, steps):
    class Stop(Callback):
        def on_train_begin(self, trainer: SFTTrainer) -> None:
            self._trainer = trainer

        def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
            if step == steps:
                self._trainer.request_stop()

    trainer = SFTTrainer(
        make_agent(), CHATS, settings(tmp_path, validation_share=share, max_steps=9), callbacks=[Stop()]
    )
    async with trainer:
        agent = await trainer.train()
        assert trainer.step_number == steps
        spoken = agent.backend.model.state_dict()
        for name, value in trainer.learner.weights().items():
            assert torch.equal(spoken[name], value), name


@pytest.mark.long
async def test_a_checkpoint_of_other_conversations_is_refused(tmp_path):
    trainer, _ = await trained(tmp_path)
    other = SFTTrainer(make_agent(), CHATS[1:], settings(tmp_path), run=trainer.run)
    async with other:
        with pytest.raises(CheckpointError, match="other"):
            await other.load_checkpoint()


async def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_went_before(tmp_path):
    agent = make_agent()
    trainer = SFTTrainer(agent, CHATS, settings(tmp_path, max_steps=5, save_steps=1, eval_steps=5))

    class Poison(Callback):
        def on_step_end(self, step: int, metrics: Any) -> None:
            if step == 2:
                next(iter(trainer.learner.policy.model.parameters())).data.fill_(float("nan"))

    trainer.callbacks.append(Poison())
    async with trainer:
        with pytest.raises(TrainingStopped, match="step 3 has the loss nan"):
            await trainer.train()
    assert RunLog(trainer.run).summary()["ended"] == "failed"


async def test_sft_in_one_call_and_grpo_goes_on_from_it(tmp_path):
    agent = make_agent()
    await sft(agent, CHATS, learning_rate=1e-3, max_steps=2, output_dir=str(tmp_path), progress=False)
    tuned = {name: value.clone() for name, value in agent.backend.model.state_dict().items()}
    config = TrainingConfig(max_steps=1, num_generations=2, output_dir=str(tmp_path), progress=False)
    async with MultiTurnGRPOTrainer(agent, make_environment(), even_share, config) as trainer:
        began = trainer.learner.weights()
        assert all(torch.equal(began[name], tuned[name]) for name in began)


async def test_trainings_keep_which_tokens_a_model_knows_and_tell_of_others_at_the_start(tmp_path, caplog):
    words = "My parcel was delayed, I want compensation."
    config = TrainingConfig(max_steps=1, num_generations=2, output_dir=str(tmp_path), progress=False)

    async def started(name: str) -> tuple[frozenset[int], list[str]]:
        """What the model that one step of GRPO saved knows, and the warnings of its start."""
        caplog.clear()
        agent = MultiTurnAgent(AgentConfig(model_name=name, max_new_tokens=4))
        environment = ConversationEnvironment([{"opening": words}], max_turns=1)
        async with MultiTurnGRPOTrainer(agent, environment, even_share, config) as trainer:
            told = [record.getMessage() for record in caplog.records if "vocabulary" in record.getMessage()]
            await trainer.step()
            await trainer.save_checkpoint()
            return trained_tokens(str(trainer.run.checkpoints / "step-000001" / "model")), told

    desk = trained_tokens(model_folder("embedded:desk"))
    known, (told,) = await started("embedded:desk")
    assert known == desk
    assert "% of the tokens of what scenarios begin with are none that the model was trained on" in told

    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk"))
    talk = {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "Sorry."}]}
    async with SFTTrainer(agent, [talk], settings(tmp_path, validation_share=0.0, max_steps=1)) as trainer:
        await trainer.train()
        await agent.save_pretrained(tmp_path / "saved")
        shown = agent.backend.tokenizer.encode(words)
    tuned = trained_tokens(str(trainer.model_folder))
    assert not desk >= {*shown}
    assert tuned >= desk | {*shown}
    assert trained_tokens(str(tmp_path / "saved")) == tuned
    assert await started(str(trainer.run.path)) == (tuned, [])


async def test_a_config_and_settings_are_refused_together(tmp_path):
    with pytest.raises(ConfigurationError, match="a config or settings, not both"):
        await sft(make_agent(), CHATS, SFTConfig(), max_steps=2)


@pytest.mark.long
async def test_a_run_s_best_conversations_are_imitated_as_they_were_sampled(tmp_path):
    agent = make_agent()
    config = TrainingConfig(
        max_steps=3,
        num_generations=4,
        per_device_train_batch_size=2,
        output_dir=str(tmp_path),
        progress=False,
    )

    async with MultiTurnGRPOTrainer(agent, make_environment(), even_share, config) as trainer:
        await trainer.train()
        run = trainer.run.path
    rollouts = [one for one in RunLog.open(run).rollouts("train") if (one.reward or 0) > 0]
    best = {one.scenario: max(r.reward for r in rollouts if r.scenario == one.scenario) for one in rollouts}
    async with make_agent() as fresh:
        shown = OwnSuccesses(run).load(fresh)
    assert {sample.trajectory.scenario.id for sample in shown.train} == set(best)
    tokens = {(one.scenario, one.token_ids) for one in rollouts if one.reward == best[one.scenario]}
    for sample in shown.train:
        assert (sample.trajectory.scenario.id, tuple(sample.trajectory.token_ids)) in tokens
        assert set(sample.advantages) == {1.0}


LOOK = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds an order.",
        "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}},
    },
}


def request(dice: random.Random) -> tuple[str, str]:
    order = f"{dice.choice('ABCDEFGH')}{dice.randrange(10, 100)}"
    return dice.choice(["where is {}?", "find {}", "what about {}?"]).format(order), order


@pytest.mark.long
async def test_a_llama_of_random_weights_learns_tool_calls_from_200_conversations(tmp_path):
    dice = random.Random(0)
    chats = []
    for _ in range(200):
        words, order = request(dice)
        call = {"id": "1", "function": {"name": "look_up", "arguments": json.dumps({"order_id": order})}}
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": words},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                ]
            }
        )
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer.hf), max_position_embeddings=256, **shape))
    agent = MultiTurnAgent(
        AgentConfig(model_name="fresh", chat_template="plain", max_new_tokens=80),
        backend=HuggingFaceBackend(model, tokenizer, copy_model=False),
    )
    await sft(
        agent,
        chats,
        learning_rate=1e-2,
        num_train_epochs=8,
        per_device_train_batch_size=8,
        output_dir=str(tmp_path),
        progress=False,
    )
    formed = 0
    for _ in range(40):
        words, _ = request(dice)
        completion = await agent.answer([Message(role="user", content=words)], calls=True)
        calls = completion.message.tool_calls
        formed += len(calls) == 1 and calls[0].error is None and set(calls[0].arguments) == {"order_id"}
    await agent.close()
    assert formed >= 34
