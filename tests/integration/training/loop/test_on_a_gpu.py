"""The same training on an NVIDIA GPU: each precision learns, a resume goes on, what it takes is told."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_environment, make_trainer, reward_curve, snapshot

from stateset_agents import AgentConfig, MultiTurnAgent, MultiTurnGRPOTrainer, SFTConfig, SFTTrainer
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.reward import reward_function
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.trajectory import Trajectory

pytestmark = pytest.mark.gpu

PRECISIONS = ("fp32", "bf16", "fp16")


@reward_function(local=True)
async def answers_in_kind(trajectory: Trajectory) -> float:
    """1 when the first token is even for a caller who opens with a short word, odd for the others."""
    short = len(trajectory.scenario.opening) <= 2
    return float((trajectory.turns[0].completion.token_ids[0] % 2 == 0) == short)


def agent_on_a_gpu(dtype: Any = None) -> MultiTurnAgent:
    config = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=2)
    backend = HuggingFaceBackend(
        tiny_model("llama"), tiny_tokenizer(), device="cuda", dtype=dtype, copy_model=False
    )
    return MultiTurnAgent(config, backend=backend)


def trainer_on_a_gpu(
    folder: Path, *, dtype: Any = None, run: RunFolder | None = None, **settings: Any
) -> MultiTurnGRPOTrainer:
    fixed = {"num_generations": 8, "gradient_accumulation_steps": 4, "beta": 0.0, "num_iterations": 2}
    return make_trainer(
        folder,
        agent=agent_on_a_gpu(dtype),
        environment=make_environment(max_turns=1),
        reward=answers_in_kind,
        run=run,
        **{**fixed, "lr_scheduler_type": "constant", "learning_rate": 4e-3, **settings},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_each_precision_learns(tmp_path: Path, precision: Any) -> None:
    trainer = trainer_on_a_gpu(tmp_path, dtype=precision, precision=precision, max_steps=24)
    curve = reward_curve(trainer)
    await trainer.train()
    await trainer.close()
    assert fmean(curve[:3]) < 0.7
    assert fmean(curve[-5:]) > 0.9
    steps = [line.values for line in RunLog(trainer.run).metrics() if "time/step" in line.values]
    assert all(math.isfinite(values.get("loss/policy", 0.0)) for values in steps)  # none where all were alike
    assert 0 < steps[-1]["memory/gpu/peak_mib"] < steps[-1]["memory/gpu/limit_mib"]
    weights = trainer.learner.weights()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


async def test_fp16_finds_its_scale_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    trainer = trainer_on_a_gpu(tmp_path, dtype="fp16", precision="fp16", max_steps=2, save_steps=1)
    await trainer.initialize()
    scaler = trainer.learner.optimization.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**40})  # too much: every gradient is infinite
    await trainer.train()
    await trainer.close()
    scale = trainer.learner.optimization.scaler.get_scale()
    assert scale < 2.0**40
    again = trainer_on_a_gpu(tmp_path, dtype="fp16", precision="fp16", max_steps=2, run=trainer.run)
    await again.load_checkpoint()
    assert again.learner.optimization.scaler.get_scale() == scale
    await again.close()


async def test_a_resumed_run_ends_near_the_one_that_nobody_disturbed(tmp_path: Path) -> None:
    whole = trainer_on_a_gpu(tmp_path / "whole", max_steps=4, save_steps=2, precision="fp32")
    await whole.train()
    broken = trainer_on_a_gpu(tmp_path / "broken", max_steps=4, save_steps=2, precision="fp32")
    broken.callbacks.append(StopAfter(2, broken))
    await broken.train()
    await broken.close()
    again = trainer_on_a_gpu(tmp_path / "broken", max_steps=4, save_steps=2, precision="fp32", run=broken.run)
    await again.load_checkpoint()
    assert again.step_number == 2
    await again.train()
    wanted, found = snapshot(whole), snapshot(again)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():  # CUDA adds in no fixed order, so not every bit
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)
    await whole.close()
    await again.close()


class StopAfter:
    """Asks a trainer to stop after a step."""

    def __init__(self, step: int, trainer: MultiTurnGRPOTrainer) -> None:
        self._step, self._trainer = step, trainer

    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == self._step:
            self._trainer.request_stop()


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_the_update_s_log_probs_are_those_that_were_sampled(tmp_path: Path, precision: Any) -> None:
    trainer = trainer_on_a_gpu(tmp_path, dtype=precision, precision=precision, max_steps=1)
    await trainer.train()
    await trainer.close()
    first = next(line.values for line in RunLog(trainer.run).metrics() if "time/step" in line.values)
    assert first["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-3)
    if precision != "fp32":  # else the ratio is to the rollouts' own log-probs
        assert first["policy/rollout_mismatch"] < {"bf16": 0.5, "fp16": 0.05}[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_fine_tuning_lowers_the_loss(tmp_path: Path, precision: Any) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"say {word}"},
                {"role": "assistant", "content": word},
            ]
        }
        for word in ("ada", "bob", "cat", "dog", "eve", "fox", "gin", "hat", "ink", "jam")
    ]
    settings = SFTConfig(
        learning_rate=3e-3,
        max_steps=20,
        per_device_train_batch_size=4,
        output_dir=str(tmp_path),
        progress=False,
        precision=precision,
    )
    async with SFTTrainer(agent_on_a_gpu(precision), chats, settings) as trainer:
        await trainer.train()
    losses = [line.values["sft/loss"] for line in RunLog(trainer.run).metrics() if "sft/loss" in line.values]
    assert losses[-1] < losses[0] / 2
