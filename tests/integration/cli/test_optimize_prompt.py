"""`optimize-prompt`: gepa itself, between a clerk that does what it is told and a writer that reads feedback."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import contents, the_line
from prompted_models import APOLOGY, QUOTE, PromptedModels

from stateset_agents.training.experiment import load_experiment

pytestmark = pytest.mark.gepa

SHOP = '''
"""A shop whose callers ask where an order is; late ones also want to hear that somebody is sorry."""

from stateset_agents.core.environment import Observation
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome


class Shop:
    local = True

    def scenarios(self, split):
        first, number = {"train": (0, 30), "test": (100, 40)}.get(split, (0, 0))
        return [
            Scenario(id=f"K{place}", family=("late", "early")[place % 2])
            for place in range(first, first + number)
        ]

    async def start(self, scenario, seed):
        return Call(scenario)


class Call:
    tools = ()

    def __init__(self, scenario):
        self.scenario = scenario
        self.opening = (Message(role="user", content=f"Where is order {scenario.id}?"),)
        self.said = ""

    async def step(self, reply):
        self.said = reply.content
        return Observation(terminated=True)

    async def outcome(self):
        broken = {
            "no order number": int(self.scenario.id not in self.said),
            "no apology": int(self.scenario.family == "late" and "Sorry" not in self.said),
        }
        done = not any(broken.values())
        return Outcome(reward=float(done), success=done, metadata={"violations": broken})

    def fork(self):
        raise NotImplementedError

    async def close(self):
        pass
'''
FILE = {
    "agent": {"system_prompt": "You are the clerk of a shop.", "max_new_tokens": 64},
    "environment": "shop:Shop",
    "evaluation": {"max_concurrent": 4},
}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(FILE))
    return tmp_path


def command(models: PromptedModels, *others: str) -> list[str]:
    of_agent = ["optimize-prompt", "shop.yaml", "--endpoint", models.url, "--model", "clerk"]
    of_writer = ["--reflection-endpoint", models.url, "--reflection-model", "writer"]
    return [*of_agent, *of_writer, "--max-metric-calls", "120", "--scenarios", "10", *others]


async def started(folder: Path, words: list[str]) -> asyncio.subprocess.Process:
    environment = {**os.environ, "OPENAI_API_KEY": "sk-agent", "WRITER_KEY": "sk-writer"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stateset_agents", *words, cwd=folder, env=environment, stdout=pipe, stderr=pipe
    )


async def ran(folder: Path, words: list[str]) -> tuple[int, str, str]:
    process = await started(folder, words)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def spoken(err: str) -> str:
    """Without log lines."""
    return "".join(line for line in err.splitlines(keepends=True) if " INFO " not in line)


async def test_a_better_prompt_is_written_and_shown_to_be_better(shop: Path) -> None:
    async with PromptedModels() as models:
        words = command(models, "--out", "better.yaml", "--reflection-api-key-env", "WRITER_KEY")
        code, out, err = await ran(shop, words)
        assert (code, spoken(err)) == (0, "")
        assert models.keys == {"clerk": "Bearer sk-agent", "writer": "Bearer sk-writer"}
        assert "B - A: success +100.0 points" in out
        assert "\nB is better\n" in out
        assert out.endswith("the new prompt stands in better.yaml\n")
        new = load_experiment(shop / "better.yaml")
        assert new.agent.system_prompt == f"You are the clerk of a shop.\n{QUOTE}\n{APOLOGY}"
        old = load_experiment(shop / "shop.yaml")
        assert new.agent.max_new_tokens == 64
        assert (new.environment, new.evaluation) == (old.environment, old.evaluation)
        assert "mean" not in models.of("writer")[0]["messages"][0]["content"]
        told = models.of("writer")[0]["messages"][0]["content"]
        assert "Success: False. Reward: 0.0. Broken rules: no order number" in told
        assert '{"role": "user", "content": "Where is order K' in told
        train = {f"Where is order K{number}?" for number in range(30)}
        seen = {line for line in train if line in told}
        assert len(seen) == 3
        held = [f"Where is order K{number}?" for number in range(100, 140)]
        assert not any(line in body["messages"][0]["content"] for body in models.of("writer") for line in held)
        asked = [body["messages"][-1]["content"] for body in models.of("clerk")]
        assert all(asked.count(line) == 2 for line in held)
        assert set(asked) == train | set(held)  # no more of them than there are, and none left out
        code, out, err = await ran(shop, words)
        assert the_line(code, err) == "better.yaml exists: give another file to --out, or remove it"
    assert b"sk-" not in b"".join(contents(shop).values())
