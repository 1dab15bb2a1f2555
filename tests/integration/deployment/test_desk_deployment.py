"""The embedded desk behind a deployment: people of its environment decide, over HTTP, who answers them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_people import crowd

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.state import Move
from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
from stateset_agents.serving.limits import Limits
from stateset_agents.serving.server import AgentServer
from stateset_agents.training.components import make_environment
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import SFTTrainer

AT_ONCE = 8
START = "embedded:desk"


def retail_desk(*families: str) -> Environment:
    """Its tools are offered, as clients of a server do; calls of all families where none is named."""
    chosen = list(families) or "learnable"
    settings = {"name": "retail_desk", "families": chosen, "offer_tools": True, "prompt": "short"}
    return make_environment(settings)


async def trained_desk(folder: Path, desk: Environment, *, shown: int, steps: int) -> str:
    """The start checkpoint, fine-tuned on a few honest conversations: its folder."""
    found = await demonstrate(desk, desk.scenarios("train")[:shown], scripted_agent_of(desk, "honest"))
    file = folder / "honest.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in found.chats))
    config = SFTConfig(learning_rate=2e-3, max_steps=steps, progress=False, output_dir=str(folder / "runs"))
    trainer = SFTTrainer(MultiTurnAgent(AgentConfig(model_name=START)), str(file), config)
    async with trainer:
        await trainer.train()
    return str(trainer.model_folder)


def ruined(model: str, folder: Path) -> str:
    """The same model with noise on every weight, half as large as the weights are."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        size = 0.5 * weight.float().std()
        weights[name] = weight + (size * torch.randn(weight.shape, generator=noise)).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@dataclass
class Served:
    """How a deployment ended."""

    ended: Counter[bool]
    moves: list[Move]
    status: dict[str, Any]

    @property
    def modes(self) -> list[str]:
        return [move.mode for move in self.moves]

    def success(self, arm: str) -> float:
        found: float = self.status["arms"][arm]["success"]
        return found


async def deployed(
    folder: Path, desk: Environment, baseline: str, candidate: str, *, most: int, alpha: float
) -> Served:
    """People talk until it is decided."""
    plan = DeploymentPlan(stages=(0.5,), shadow_answers=10, hold_seconds=0, alpha=alpha, salt="of the test")
    with Journal(folder / "deployments.sqlite") as journal:
        async with (
            MultiTurnAgent(AgentConfig(model_name=baseline, max_new_tokens=48)) as old,
            MultiTurnAgent(AgentConfig(model_name=candidate, max_new_tokens=48)) as new,
            Deployed(old, new, plan, journal) as both,
            AgentServer(both, limits=Limits(max_running_per_client=AT_ONCE)) as server,
        ):
            ended = await crowd(
                server.url,
                desk,
                desk.scenarios("train")[-500:],
                model=baseline,
                most=most,
                at_once=AT_ONCE,
                is_over=lambda: both.controller.state.mode in ("full", "rolled_back"),
            )
            return Served(ended, both.controller.moves(), await both.status())


async def test_a_trained_desk_replaces_the_untrained_one_by_itself(tmp_path: Path) -> None:
    desk = retail_desk("order_status")
    trained = await trained_desk(tmp_path, desk, shown=24, steps=6)
    found = await deployed(tmp_path, desk, START, trained, most=300, alpha=0.2)
    assert found.modes == ["gradual", "full"]
    assert found.moves[1].why.startswith("success is not 0.02 lower")
    assert found.success("candidate") > found.success("baseline") + 0.2
    assert found.ended.total() < 300


@pytest.mark.long
async def test_a_ruined_desk_is_rolled_back_by_itself_and_everybody_is_answered(tmp_path: Path) -> None:
    desk = retail_desk()
    trained = await trained_desk(tmp_path, desk, shown=96, steps=24)
    wrong = ruined(trained, tmp_path / "ruined")
    found = await deployed(tmp_path, desk, trained, wrong, most=1000, alpha=0.05)
    assert found.modes == ["gradual", "rolled_back"]
    assert found.moves[1].why.startswith("success is lower")
    assert found.success("candidate") < found.success("baseline") - 0.2
    assert found.status["arms"]["baseline"]["answers"] > 0  # `talk` breaks where an answer is none
