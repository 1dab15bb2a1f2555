"""`optimize-prompt`: gepa itself, between a clerk that does as told and a writer that reads feedback."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import page_snippets
import pytest
import yaml
from command_line import contents, the_line
from prompted_models import APOLOGY, QUOTE, PromptedModels
from repository_paths import ROOT
from warm_python import warm_python

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
    return [*of_agent, "--reflection", models.url, "writer", "--scenarios", "10", *others]


async def started(folder: Path, words: list[str]) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "OPENAI_API_KEY": "sk-agent",
        "WRITER_KEY": "sk-writer",
        "OMP_NUM_THREADS": "1",
    }
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *warm_python(),
        *("-m", "stateset_agents", *words),
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
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
    (shop / "new").mkdir()
    async with PromptedModels() as models:
        words = command(models, "--out", "new/better.yaml", "--reflection-api-key-env", "WRITER_KEY")
        code, out, err = await ran(shop, [*words, "--max-metric-calls", "120"])
        assert (code, spoken(err)) == (0, "")
        assert models.keys == {"clerk": "Bearer sk-agent", "writer": "Bearer sk-writer"}
        assert "A  shop.yaml: success 0.0%" in out
        assert "B - A: success +100.0 points" in out
        assert "\nB is better\n" in out
        assert out.endswith("the new prompt stands in new/better.yaml\n")
        new, old = load_experiment(shop / "new" / "better.yaml"), load_experiment(shop / "shop.yaml")
        prompt = f"You are the clerk of a shop.\n{QUOTE}\n{APOLOGY}"
        assert new.agent == old.agent.model_copy(update={"system_prompt": prompt})
        assert (new.environment, new.evaluation) == (old.environment, old.evaluation)

        told = [body["messages"][0]["content"] for body in models.of("writer")]
        assert "temperature" not in models.of("writer")[0]
        assert "Success: False. Reward: 0.0. Broken rules: no order number" in told[0]
        train, held = (
            [f"Where is order K{place}?" for place in places] for places in (range(30), range(100, 140))
        )
        assert sum(line in told[0] for line in train) == 3
        assert not any(line in text for line in held for text in told)
        asked = [body["messages"][-1]["content"] for body in models.of("clerk")]
        assert all(asked.count(line) == 2 for line in held)
        assert set(asked) <= {*train, *held}
        sent = {json.dumps(body, sort_keys=True) for body in models.of("clerk")}
        assert len(sent) == len(asked)  # none twice with the same seed
        num_requests = len(models.bodies)
        code, out, err = await ran(shop, words)
        assert the_line(code, err) == "new/better.yaml exists: give another file, or remove it"
        assert len(models.bodies) == num_requests
    assert b"sk-" not in b"".join(contents(shop).values())


async def test_what_does_better_on_train_scenarios_alone_is_said_not_to_be_better(shop: Path) -> None:
    """The held-out callers are few: no verdict can be given on them."""
    async with PromptedModels() as models:
        words = command(models, "--out", "b.yaml", "--max-metric-calls", "60", "--episodes", "2", "--json")
        code, out, err = await ran(shop, words)
    assert (code, spoken(err)) == (0, "")
    result = json.loads(out)
    assert result["comparison"]["verdict"] == "unclear"
    assert (result["a"]["model"], result["b"]["model"]) == ("shop.yaml", "b.yaml")
    assert load_experiment(shop / "b.yaml").agent.system_prompt == result["prompt"]


async def test_prompts_that_do_no_better_write_no_file(shop: Path) -> None:
    async with PromptedModels(writes="```\nBe quick.\n```") as models:
        code, out, err = await ran(shop, command(models, "--out", "b.yaml", "--max-metric-calls", "30"))
        assert (code, spoken(err)) == (0, "")
        assert out.startswith("prompts scored: 1, kept in b.yaml.gepa\n")
        assert out.endswith("none did better there than that of shop.yaml: no file is written\n")
        assert not (shop / "b.yaml").exists()
        assert len(models.of("writer")) >= 2
        texts = {body["messages"][0]["content"] for body in models.of("clerk")}
        assert texts == {"You are the clerk of a shop.", "Be quick."}


async def test_the_page_s_command_prints_what_the_page_shows(shop: Path) -> None:
    page = ROOT / "docs" / "optimize-prompt.md"
    fences = {
        fence.language: fence.text for fence in page_snippets.fences(page) if "not-run" not in fence.words
    }
    (shop / "shop.yaml").write_text(fences["yaml"])
    async with PromptedModels() as models:
        words = shlex.split(fences["console"].replace("http://127.0.0.1:8000/v1", models.url))
        code, out, err = await ran(shop, words[1:])
    assert (code, spoken(err)) == (0, "")
    assert out == fences["text"]


async def test_ctrl_c_keeps_what_was_found_and_the_same_command_goes_on(shop: Path) -> None:
    async with PromptedModels(delay=0.05) as models:
        words = command(models, "--out", "better.yaml", "--max-metric-calls", "120")
        process = await started(shop, words)
        async with asyncio.timeout(120):
            await models.wrote_again.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, out) == (130, b"")
        told = "stateset-agents: interrupted; what had ended is kept, and is not played again by: "
        [line] = spoken(err.decode()).splitlines()
        assert line.startswith(told)
        kept = contents(shop / "better.yaml.gepa")
        [candidates] = [json.loads(text) for name, text in kept.items() if name.endswith("/candidates.json")]
        assert QUOTE in candidates[-1]["system_prompt"]

        models.delay = 0.0
        again = shlex.split(line.removeprefix(told))
        assert again == ["stateset-agents", *words]
        code, out_of_rest, _ = await ran(shop, again[1:])
        assert code == 0
        assert "\nB is better\n" in out_of_rest
        sent = [json.dumps(body, sort_keys=True) for body in models.of("clerk")]
        assert len(sent) - len(set(sent)) <= 4  # those under way when it was interrupted


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({}, ["--reflection", "{url}", "nobody"], "gave no answer: status 404: 'no such model'"),
        ({"finish_reason": "length"}, [], "the reflection was cut: raise --reflection-max-new-tokens"),
    ],
)
async def test_what_cannot_go_on_ends_with_one_line_and_spends_no_more(
    settings: dict[str, Any], others: list[str], message: str, shop: Path
) -> None:
    async with PromptedModels(**settings) as models:
        words = [word.format(url=models.url) for word in others]
        code, _, err = await ran(shop, command(models, "--out", "b.yaml", *words))
        assert message in the_line(code, spoken(err))
        assert len(models.of("clerk")) <= 13


async def test_another_model_is_not_taken_for_the_one_that_was_played(shop: Path) -> None:
    async with PromptedModels(writes="```\nBe quick.\n```") as models:
        words = command(models, "--out", "b.yaml", "--max-metric-calls", "12")
        assert (await ran(shop, words))[0] == 0
        code, _, err = await ran(shop, [*words, "--model", "other"])
        assert "holds conversations with model 'clerk', and this evaluation has 'other'" in the_line(
            code, spoken(err)
        )


async def test_the_new_file_has_the_settings_of_the_command(shop: Path) -> None:
    async with PromptedModels() as models:
        words = command(models, "--out", "b.yaml", "--max-metric-calls", "60", "--episodes", "2")
        code, _, err = await ran(shop, [*words, "--set", "agent.max_new_tokens=32"])
    assert (code, spoken(err)) == (0, "")
    assert load_experiment(shop / "b.yaml").agent.max_new_tokens == 32


async def test_a_model_in_this_process_is_loaded_once_and_prompted(shop: Path) -> None:
    desk = {
        "agent": {"model_name": "embedded:desk", "system_prompt": "Help.", "max_new_tokens": 16},
        "environment": "retail_desk",
        "evaluation": {"episodes": 4},
    }
    (shop / "desk.yaml").write_text(yaml.safe_dump(desk))
    async with PromptedModels(writes="```\nHelp more.\n```") as models:
        words = ["optimize-prompt", "desk.yaml", "--out", "b.yaml", "--reflection", models.url, "writer"]
        code, out, err = await ran(shop, [*words, "--scenarios", "4", "--max-metric-calls", "12"])
        assert (code, spoken(err)) == (0, "")
        assert len(models.of("writer")) >= 1
    assert "writer: " in out
    assert err.count("prompt scored") >= 3
