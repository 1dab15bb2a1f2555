"""On-policy distillation as a training: it learns, it goes on bit by bit, each setting does something."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, make_trainer, same_bits, snapshot
from vllm_server import VLLMServer

from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.learner import TrlLearnerFactory
from stateset_agents.types.errors import CheckpointError, ConfigurationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teachers; the student's own weights are those of seed 0."""
    root = tmp_path_factory.mktemp("teachers")
    for name, seed in (("same", 0), ("other", 1), ("third", 2)):
        tiny_model(seed=seed).save_pretrained(root / name)
        tiny_tokenizer().hf.save_pretrained(root / name)
    return root


def told(folder: Path, name: str = "other", **settings: Any) -> dict[str, Any]:
    return {"teacher": str(folder / name), **settings}


async def trained(
    root: Path, distillation: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], list[Any]]:
    """What it ends with, and the metrics of each step."""
    trainer = make_trainer(root, distillation=distillation, **{"max_steps": 2, "save_steps": 0, **settings})
    await trainer.train()
    after, lines = snapshot(trainer), [line.values for line in RunLog(trainer.run).metrics()]
    await trainer.close()
    return after, lines


@pytest.mark.long
async def test_a_student_comes_near_its_teacher(folder, tmp_path):
    settings = {"max_steps": 60, "num_generations": 8, "seed": 1}
    _, lines = await trained(tmp_path, told(folder), **settings)
    kl = [line["kl/teacher"] for line in lines]
    assert sum(kl[:5]) / 5 > 2.5  # nats a token
    assert sum(kl[-10:]) / 10 < 0.6 * sum(kl[:5]) / 5
    assert all(line["time/teacher"] >= 0 for line in lines)
    assert "kl/reference" not in lines[0]  # the teacher stands in its place


@pytest.mark.long
async def test_a_teacher_with_the_student_s_own_weights_says_nothing(folder, tmp_path):
    _, (first, *_) = await trained(tmp_path, told(folder, "same"), max_steps=1)
    assert first["kl/teacher"] == pytest.approx(0.0, abs=1e-5)
    _, (other, *_) = await trained(tmp_path, told(folder), max_steps=1)
    assert first["optimizer/grad_norm"] < 1e-4 * other["optimizer/grad_norm"]


@pytest.mark.long
async def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path):
    settings = {"max_steps": 4, "save_steps": 2, "distillation": told(folder, reward_weight=0.5)}
    whole = make_trainer(tmp_path, **settings)
    await whole.train()
    expected = snapshot(whole)
    (event,) = [event for event in RunLog(whole.run).events() if event["event"] == "teacher"]
    assert event["model"] == str(folder / "other")
    assert len(event["weights"]) == 64
    await whole.close()
    part = make_trainer(tmp_path, **settings)
    await part.load_checkpoint(whole.run.checkpoints / "step-000002")
    assert part.step_number == 2
    await part.train()
    assert same_bits(snapshot(part), expected)
    await part.close()


@pytest.mark.long
async def test_a_run_does_not_go_on_under_another_teacher(folder, tmp_path):
    whole = make_trainer(tmp_path, max_steps=1, distillation=told(folder))
    await whole.train()
    await whole.close()
    moved = folder / "moved"
    moved.symlink_to(folder / "other")
    for name in ("third", "moved"):
        part = make_trainer(tmp_path, max_steps=2, distillation=told(folder, name))
        if name == "third":
            with pytest.raises(CheckpointError, match=r"from other settings \(teacher\.weights was "):
                await part.load_checkpoint(whole.run.path)
        else:  # the same weights in another place
            await part.load_checkpoint(whole.run.path)
        await part.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("teacher", "third", {}),
        ("weight", 0.2, {"reward_weight": 1.0}),
        ("reward_weight", 1.0, {}),
        ("credit", "to_go", {}),
        ("credit", "turn_sum", {}),
        ("credit", "turn_mean", {"credit": "turn_sum"}),
        ("dtype", "bf16", {}),
    ],
)
async def test_each_setting_changes_the_weights(folder, tmp_path, name, value, given):
    base = told(folder, **given)
    changed = {**base, name: str(folder / value) if name == "teacher" else value}
    one, _ = await trained(tmp_path, base, max_steps=1)
    other, _ = await trained(tmp_path, changed, max_steps=1)
    assert not same_bits(one, other)


async def test_a_device_that_does_not_exist_is_refused_before_a_run_begins(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="tpu"):
        await trained(tmp_path, told(folder, device="tpu"))
    assert not (tmp_path / "runs").exists()


async def test_what_a_run_records_is_what_it_trained_on(folder, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, distillation=told(folder, reward_weight=0.0))
    await trainer.train()
    rollouts = list(RunLog(trainer.run).rollouts("train"))
    await trainer.close()
    spreads = [len(set(rollout.advantages)) for rollout in rollouts if rollout.advantages]
    assert len(spreads) == 8
    assert min(spreads) > 1  # a reward's advantage is one number


@pytest.mark.long
async def test_a_server_s_log_probs_teach_the_same(folder, tmp_path):
    here, lines = await trained(tmp_path / "here", told(folder), max_steps=1)
    async with VLLMServer(folder / "other") as server:
        there, served = await trained(tmp_path / "there", {"teacher": server.name}, max_steps=1)
    assert any("prompt_logprobs" in body for body in server.bodies)
    assert served[0]["kl/teacher"] == pytest.approx(lines[0]["kl/teacher"], abs=1e-4)
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
async def test_an_update_by_trl_takes_the_teacher_s_word(folder, tmp_path):
    settings = {"max_steps": 1, "save_steps": 0, "gradient_accumulation_steps": 1}
    ours, _ = await trained(tmp_path, told(folder), **settings)

    config = TrainingConfig(
        num_generations=4,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        output_dir=str(tmp_path / "trl"),
        distillation=told(folder),
        **settings,
    )
    trainer = MultiTurnGRPOTrainer(
        make_agent(), make_environment(), even_share, config, learner_factory=TrlLearnerFactory()
    )
    await trainer.train()
    theirs = trainer.learner.weights()
    for name, value in theirs.items():
        torch.testing.assert_close(value.cpu(), ours[name], atol=2e-4, rtol=1e-3)
    await trainer.close()
