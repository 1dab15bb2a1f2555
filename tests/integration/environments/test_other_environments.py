"""Training in environments of other ecosystems: two steps each, with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_snippets import fences
from repository_paths import HELPERS, ROOT
from tiny_training import make_trainer, snapshot

from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.gymnasium_text import GymnasiumText
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.experiment import Experiment, load_experiment


async def trained(folder: Path, environment: Environment, **settings: Any) -> RunLog:
    """Two steps of one group of three, which have moved the weights."""
    given = {"gradient_accumulation_steps": 1, "num_generations": 3, "max_steps": 2, **settings}
    trainer = make_trainer(folder, environment=environment, reward=EnvironmentReward(), **given)
    await trainer.initialize()
    before = snapshot(trainer)
    await trainer.train()
    after = snapshot(trainer)
    assert any((after[name] != before[name]).any() for name in before)
    await trainer.close()
    log = RunLog(trainer.run)
    assert [line.step for line in log.metrics()] == [1, 2]
    return log


async def test_gymnasium_trains_with_the_turns_own_rewards_and_forks(tmp_path: Path) -> None:
    cliff = GymnasiumText(
        "CliffWalking-v1",
        render=lambda observation: f"on {observation}",
        parse=lambda reply: len(reply) % 4,  # anything is a move: a random model says no words
        num_train=4,
        max_turns=3,
    )
    log = await trained(tmp_path, cliff, advantage_estimator="branch", advantage_normalization=False)
    rollouts = list(log.rollouts("train", branches=True))
    assert len(rollouts) > 6  # and the branches
    for rollout in rollouts:
        rewards = [turn.reward for turn in rollout.turns]
        assert set(rewards) <= {-1.0, -100.0}
        assert rollout.reward == sum(rewards)


async def test_the_yaml_file_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "other-environments.md"
    for fence in fences(page):
        if fence.title in ("rooms.py", "rooms.yaml"):
            (tmp_path / fence.title).write_text(fence.text)
    monkeypatch.chdir(tmp_path)
    async with Experiment(load_experiment("rooms.yaml", {"training.num_generations": 2})) as experiment:
        await experiment.train()
    rollouts = list(RunLog(experiment.run).rollouts("train"))
    assert [rollout.step for rollout in rollouts] == [1, 1, 2, 2]
    assert all(rollout.messages[0].content == "room 36" for rollout in rollouts)
    assert experiment.summary["deterministic"] is True  # the environment is local


async def test_a_yaml_file_trains_on_the_tools_of_an_mcp_server(tmp_path: Path) -> None:
    shop = HELPERS / "servers" / "mcp_shop.py"
    (tmp_path / "calls.jsonl").write_text('{"opening": "hello, can you cancel order E14?"}\n')
    (tmp_path / "train.yaml").write_text(
        yaml.safe_dump(
            {
                "agent": {"model_name": "embedded:desk", "max_new_tokens": 32},
                "environment": {
                    "name": "mcp",
                    "scenarios": "calls.jsonl",
                    "servers": {"shop": {"command": sys.executable, "args": [str(shop)]}},
                    "session": "shared",
                    "system_prompt": "shop desk. customer u64 is signed in.",
                    "max_turns": 3,
                },
                "reward": "helpful",
                "training": {
                    "max_steps": 2,
                    "num_generations": 4,
                    "per_device_train_batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    "output_dir": str(tmp_path / "runs"),
                },
            }
        )
    )
    async with Experiment(load_experiment(tmp_path / "train.yaml")) as experiment:
        await experiment.train()
        opened = experiment.trainer.environment._opening  # type: ignore[attr-defined]  # is it given back?
        [session] = await opened
        assert session.is_alive
    assert not session.is_alive
    rollouts = list(RunLog(experiment.run).rollouts("train"))
    assert {rollout.step for rollout in rollouts} == {1, 2}
    answers = [m.content for rollout in rollouts for m in rollout.messages if m.role == "tool"]
    assert any('"status": "shipped"' in answer for answer in answers)
    assert experiment.summary["deterministic"] is False  # a server is not taken for local
