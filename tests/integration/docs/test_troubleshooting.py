"""docs/troubleshooting.md quotes what the program says: each of its rows is produced here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import family_tokenizer
from engines import make_engine
from environments import ChattyEnvironment, scenarios
from full_disk import files_of_at_most
from report_runs import finished_run
from repository_paths import ROOT
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, make_trainer

from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.sources.scenario_files import read_scenarios
from stateset_agents.core.tools import Toolbox, tool
from stateset_agents.core.users.simulated_user import ScriptedUser
from stateset_agents.reporting.report import write_report
from stateset_agents.runs.recorder import StepWarnings
from stateset_agents.runtime.circuit_breakers import FaultPolicy, FaultTolerance
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, _warned_keys

PAGE = ROOT / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| `([^|]+?)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

Case = Callable[[Path], Any]
"""Does what is wrong, in an empty folder, and raises (or returns) the message."""


def train(folder: Path, **parts: Any) -> None:
    async def run() -> None:
        trainer = make_trainer(folder, **{"max_steps": 1, "episode_retries": 0, **parts})
        try:
            await trainer.train()
        finally:
            await trainer.close()

    asyncio.run(run())


def converse(environment: ConversationEnvironment) -> Any:
    """One reply, and the verdict."""

    async def talk() -> Any:
        conversation = await environment.start(environment.scenarios("train")[0], 0)
        await conversation.step(Message(role="assistant", content="hello"))
        return await conversation.outcome()

    return asyncio.run(talk())


def call(entry: Any, **options: Any) -> str:
    answer = asyncio.run(Toolbox([entry], **options).call(ToolCall(name=entry.name, arguments={})))
    return answer.content


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def model(folder: Path, change: Callable[[Path], Any]) -> Any:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().hf.save_pretrained(folder)
    change(folder)
    return load_model_and_tokenizer(str(folder))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weights": folder}, folder / "pytorch_model.bin")


def remove_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


@tool(timeout=0.05)
async def slow() -> None:
    """Wait."""
    await asyncio.sleep(60)


@tool
def lost() -> str:
    """Look."""
    raise KeyError("K27")


@tool
def huge() -> str:
    """Tell all."""
    return "x" * 99


def giving(value: Any) -> Any:
    @reward_function(name="mine")
    def mine(trajectory: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return mine


@reward_function(local=True)
async def endless(trajectory: Any) -> float:
    await asyncio.sleep(60)
    return 0.0


class Absent(ScriptedUser):
    """Never there."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__([])

    async def reply(self, messages: Any) -> str:
        raise OSError("line dropped")


def hangs(folder: Path) -> str:
    async def wait(conversation: Any, reply: Any) -> None:
        await asyncio.sleep(60)

    async def run() -> Any:
        agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "ok"))
        await agent.initialize()
        engine = make_engine(
            agent, ChattyEnvironment(answer=wait), even_share, turn_timeout=0.05, episode_retries=0
        )
        [group] = await engine.rollout(scenarios(1), seed=0, step=0)
        return group.trajectories[0].error

    return str(asyncio.run(run()))


def log_on_a_full_disk(folder: Path) -> None:
    run = RunFolder.create(folder)
    with JsonlTracker(run) as tracker, files_of_at_most(run.metrics.stat().st_size + 5):
        tracker.log_metrics(1, {"reward/mean": 0.5})


def checkpoint_on_a_full_disk(folder: Path) -> None:
    with files_of_at_most(40_000):
        train(folder, log_rollouts=False)


def torn_run(folder: Path) -> None:
    run = finished_run(folder, steps=1)
    run.summary.write_text('{"steps": ')
    write_report(run.path)


def resume(folder: Path, spoil: Callable[[Path], Any], **settings: Any) -> None:
    async def run() -> None:
        trainer = make_trainer(folder, max_steps=1)
        await trainer.train()
        await trainer.close()
        checkpoint = trainer.run.checkpoints / "step-000001"
        spoil(checkpoint)
        other = make_trainer(folder, **{"max_steps": 1, **settings})
        try:
            await other.load_checkpoint(checkpoint)
        finally:
            await other.close()

    asyncio.run(run())


def two_trainings(folder: Path) -> None:
    async def run() -> None:
        agent = make_agent()
        trainers = [make_trainer(folder, agent=agent, max_steps=1) for _ in range(2)]
        try:
            await asyncio.gather(*(trainer.train() for trainer in trainers))
        finally:
            for trainer in trainers:
                await trainer.stop()
            await agent.close()

    asyncio.run(run())


def two_trackers(folder: Path) -> None:
    run = RunFolder.create(folder)
    with JsonlTracker(run):
        JsonlTracker(run)


def same_rewards(folder: Path) -> None:
    warnings = StepWarnings()
    for step in range(1, 4):
        warnings.check(step, {"group/zero_variance": 1.0, "reward/mean": 0.5}, {})


def down(folder: Path) -> None:
    """An environment that worked once."""

    async def run() -> None:
        asked = FaultTolerance(FaultPolicy(breaker_failures=2, outage_patience=0.0))
        for error in (None, OSError("away"), OSError("away"), None):
            with contextlib.suppress(OSError):
                await asked.ask("environment", partial(raising, error), down=EnvironmentFailure)

    asyncio.run(run())


def not_fetched(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        load_model_and_tokenizer("package:smollm2")


def talk(**settings: Any) -> None:
    """A message that the context has no place for."""

    async def run() -> None:
        async with MultiTurnAgent(AgentConfig(**settings), backend=ScriptedBackend(["ok"])) as agent:
            await agent.generate_response("where is my order?")

    asyncio.run(run())


async def raising(error: Exception | None) -> None:
    if error is not None:
        raise error


TURNS = "{% for m in messages %}{{ m.role + m.content + '<|end|>' }}{% endfor %}"
REWRITES = TURNS.replace("messages", "messages[-2:]")
DROPS = TURNS.replace("m.content", "m.content.split('</think>')[-1]")

CASES: dict[str, Case] = {
    "setting": lambda folder: TrainingConfig(learnig_rate=1.0),
    "name for config": lambda folder: MultiTurnAgent("embedded:desk"),  # type: ignore[arg-type]  # the mistake
    "swapped": lambda folder: MultiTurnGRPOTrainer(make_agent(), even_share, make_environment()),  # type: ignore[arg-type]  # the mistake
    "no scenario file": lambda folder: read_scenarios("nowhere.jsonl"),
    "no JSON": lambda folder: read_scenarios(written(folder / "calls.jsonl", '{"opening": "hi"}\n{"ope\n')),
    "misspelt key": lambda folder: Scenario.from_dict({"contxt": "late", "id": "1"}),
    "no user": lambda folder: ConversationEnvironment([{}], user=lambda s, seed: s.context["lines"]),
    "no model": lambda folder: load_model_and_tokenizer(str(folder / "nowhere")),
    "no tokenizer": lambda folder: model(folder, remove_tokenizer),
    "pickled": lambda folder: model(folder, pickled),
    "rewrites": lambda folder: JinjaTemplate(tiny_tokenizer(), REWRITES),
    "no end": lambda folder: JinjaTemplate(
        tiny_tokenizer(), "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    ),
    "keep": lambda folder: train(folder, agent=make_agent(history="keep", chat_template=DROPS)),
    "room": lambda folder: train(
        folder, agent=make_agent(history="compact", compact_room=150, max_context_tokens=100)
    ),
    "full context": lambda folder: talk(max_context_tokens=20),
    "template with a mistake": lambda folder: JinjaTemplate(tiny_tokenizer(), TURNS + "{% if %}"),
    "endless template": lambda folder: JinjaTemplate(
        tiny_tokenizer(),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TURNS,
    ),
    "hidden tools": lambda folder: JinjaTemplate(family_tokenizer("chatml")).prompt(
        [Message(role="user", content="hi")], [{"type": "function", "function": {"name": "look"}}]
    ),
    "not fetched": not_fetched,
    "two trainers": two_trackers,
    "two trainings": two_trainings,
    "long opening": lambda folder: train(
        folder, environment=make_environment(scenarios=[{"opening": "x" * 999}])
    ),
    "reward raises": lambda folder: train(folder, reward=giving(OSError("no judge"))),
    "reward is text": lambda folder: train(folder, reward=giving("good")),
    "reward hangs": lambda folder: train(folder, reward=endless, reward_timeout=0.05),
    "environment hangs": hangs,
    "tool hangs": lambda folder: call(slow),
    "tool raises": lambda folder: call(lost),
    "tool tells too much": lambda folder: call(huge, max_result_chars=10),
    "user raises": lambda folder: converse(ConversationEnvironment([{"opening": "hi"}], user=Absent)),
    "success says maybe": lambda folder: converse(
        ConversationEnvironment([{"opening": "hi"}], success=lambda *_: "maybe")  # type: ignore[arg-type, return-value]  # the mistake
    ),
    "constant reward": same_rewards,
    "cut replies": lambda folder: StepWarnings().check(1, {"rollout/cut_replies": 0.4}, {}),
    "event loop": lambda folder: StepWarnings().check(1, {"time/loop_lag": 2.0}, {}),
    "event loop, user's code": lambda folder: StepWarnings().check(
        1, {"time/loop_lag": 2.0, "time/loop_lag_user": 2.0}, {}, "my_env.py:31, step"
    ),
    "loss that is none": lambda folder: StepWarnings().check(1, {"loss/policy": math.nan}, {}),
    "environment down": down,
    "checkpoint on a full disk": checkpoint_on_a_full_disk,
    "log on a full disk": log_on_a_full_disk,
    "torn run": torn_run,
    "no folder": lambda folder: RunFolder.create(written(folder / "file", "") / "runs"),
    "other settings": lambda folder: resume(folder, lambda checkpoint: None, learning_rate=0.5),
    "damaged": lambda folder: resume(
        folder, lambda checkpoint: (checkpoint / "optimizer.safetensors").write_bytes(b"torn")
    ),
    "newer": lambda folder: resume(
        folder, lambda checkpoint: (checkpoint / "manifest.json").write_text('{"schema_version": 2}')
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case says: its error, its result, and its warnings."""
    found: dict[str, str] = {}
    _warned_keys.clear()  # this process may have said it before

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found[case] += f"{record.getMessage()}\n"

    handler = Keep()
    logging.getLogger("stateset_agents").addHandler(handler)
    for case, provoke in CASES.items():
        found[case] = ""
        try:
            message = str(provoke(tmp_path_factory.mktemp("case")))
        except Exception as error:
            message = str(error)
        found[case] += f"{message}\n"
    logging.getLogger("stateset_agents").removeHandler(handler)
    return found


def _pattern(row: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, row.split("…"))))


@pytest.mark.long
def test_every_row_of_the_page_is_what_the_program_says(told: dict[str, str]) -> None:
    assert len(ROWS) > 25
    said = "".join(told.values())
    assert [row for row in ROWS if not _pattern(row).search(said)] == []


@pytest.mark.long
def test_every_case_has_its_row(told: dict[str, str]) -> None:
    patterns = [_pattern(row) for row in ROWS]
    assert [case for case, text in told.items() if not any(p.search(text) for p in patterns)] == []
