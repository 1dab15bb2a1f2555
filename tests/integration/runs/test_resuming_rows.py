"""Trainings on conversations of several rows, and with templates that tell the date, go on bit by bit."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_templates import trl_tokenizer
from tiny_models import CONFIGS, tiny_tokenizer
from tiny_training import make_environment, make_trainer, same_bits, snapshot
from transformers import AutoModelForCausalLM

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat import template
from stateset_agents.core.users.simulated_user import ScriptedUser
from stateset_agents.runs.checkpoint_files import latest_checkpoint
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import CheckpointError
from stateset_agents.types.messages import Message

SLIDE = {"history": "slide", "chat_template": "plain", "max_context_tokens": 80}
OLD_SLIDE = {"context_window": "sliding", "chat_template": "plain", "max_context_tokens": 80}
COMPACT = {
    "history": "compact",
    "compact_room": 100,
    "compact_prompt": "Sum up.",
    "chat_template": "plain",
    "max_context_tokens": 160,
}
MODES: dict[str, dict[str, Any]] = {"thoughts": {}, "slide": SLIDE, "compact": COMPACT}
_THOUGHTS = [f"<think>{number}</think>" for number in range(400)]
"""Each is one token, so that a random model thinks in every other reply."""

_DICE = random.Random()  # unseeded on purpose: no two runs wait alike


def make_agent(**settings: Any) -> MultiTurnAgent:
    """A tiny random model; with TRL's template of Qwen3, which drops earlier thoughts, if no other is set."""
    tokenizer = tiny_tokenizer() if "chat_template" in settings else trl_tokenizer("qwen3")
    if "chat_template" not in settings:
        tokenizer.hf.add_tokens(_THOUGHTS)
    config = CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer.hf), 512
    torch.manual_seed(0)
    backend = HuggingFaceBackend(AutoModelForCausalLM.from_config(config), tokenizer, copy_model=False)
    named = {"model_name": "tiny", "max_new_tokens": 6, **settings}
    return MultiTurnAgent(AgentConfig(**named), backend=backend)


class Watching:
    """A user that calls somebody before each of its lines, and takes a while that is never the same."""

    local = True

    def __init__(self, script: ScriptedUser, call: Callable[[Sequence[Message]], None]) -> None:
        self._script, self._call = script, call

    async def reply(self, messages: Sequence[Message]) -> str | None:
        self._call(messages)
        await asyncio.sleep(_DICE.uniform(0, 0.005))
        return await self._script.reply(messages)

    def fork(self) -> Watching:
        return Watching(self._script.fork(), self._call)


def trainer_of(
    folder: Path,
    settings: dict[str, Any],
    call: Callable[[Sequence[Message]], None] = lambda messages: None,
    **more: Any,
) -> MultiTurnGRPOTrainer:
    """Two steps of two groups of three; `call` as of `Watching`."""
    lines = ["go on"] if settings is DATED else ["go on", "and then?", "what else?"]
    environment = make_environment(
        max_turns=len(lines) + 1, user=lambda scenario, seed: Watching(ScriptedUser(lines), call)
    )
    more = {"agent": make_agent(**settings), "num_generations": 3, "max_steps": 2, **more}
    return make_trainer(folder, environment=environment, **more)


async def run_whole(folder: Path, settings: dict[str, Any]) -> MultiTurnGRPOTrainer:
    trainer = trainer_of(folder, settings)
    await trainer.train()
    await trainer.close()
    return trainer


async def go_on(
    folder: Path, settings: dict[str, Any], trainer: MultiTurnGRPOTrainer
) -> MultiTurnGRPOTrainer:
    """Another process would do the same: a new agent and trainer, from the run folder."""
    again = trainer_of(folder, settings, run=trainer.run)
    await again.load_checkpoint()
    await again.train()
    await again.close()
    return again


def left_by(trainer: MultiTurnGRPOTrainer) -> list[Any]:
    """What was measured, said and sampled, without clocks."""

    def lines(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()][1:]

    clocks = ("time", "memory/", "tokens/per_second")
    metrics = [
        {name: value for name, value in line.items() if not name.startswith(clocks)}
        for line in lines(trainer.run.metrics)
    ]
    return [metrics, lines(trainer.run.rollouts)]


# ------------------------------------------------------------------------------------- several rows


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
async def test_a_run_that_was_cut_in_the_middle_of_rows_goes_on_bit_by_bit(tmp_path: Path, mode: str) -> None:
    whole = await run_whole(tmp_path / "whole", MODES[mode])
    metrics, rollouts = left_by(whole)
    assert all(line["rollout/rows"] > 1.5 for line in metrics)
    summaries = sum(turn.get("is_summary", False) for record in rollouts for turn in record["turns"])
    assert (summaries > 0) == (mode == "compact")
    assert all(line["rollout/cut_replies"] <= 1 for line in metrics)

    in_a_row = asyncio.Event()

    def watch(messages: Sequence[Message]) -> None:
        if cut.step_number == 1 and len(messages) > 4:
            in_a_row.set()

    cut = trainer_of(tmp_path / "cut", OLD_SLIDE if mode == "slide" else MODES[mode], watch)
    training = asyncio.create_task(cut.train())
    await in_a_row.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    await cut.close()
    assert cut.step_number == 1

    again = await go_on(tmp_path / "cut", MODES[mode], cut)
    assert same_bits(snapshot(again), snapshot(whole))
    assert left_by(again) == left_by(whole)


# ------------------------------------------------------------------------------------- the date

DATED = {
    "chat_template": "{% for m in messages %}"
    "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    "{{ strftime_now('%d %b %Y') if loop.first else '' }}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
}
PLAIN = {"chat_template": "plain"}
MONDAY, TUESDAY = datetime.date(2026, 11, 23), datetime.date(2026, 11, 24)


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime.date], None]:
    def be(day: datetime.date) -> None:
        monkeypatch.setattr(template, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: day)))

    be(MONDAY)
    return be


async def stopped_after_one(folder: Path, settings: dict[str, Any], *, knows: bool = True) -> Any:
    """`knows=False`: as a version left it that did not keep the date."""
    trainer = trainer_of(folder, settings)
    await trainer.initialize()
    await trainer.step()
    if not knows:
        trainer._state = replace(trainer._state, template_date=None)
    await trainer.save_checkpoint()
    await trainer.close()
    return trainer


def date_in_state(trainer: MultiTurnGRPOTrainer) -> str | None:
    path = latest_checkpoint(trainer.run.checkpoints)
    assert path is not None
    date: str | None = json.loads((path / "state.json").read_text())["progress"]["template_date"]
    return date


@pytest.mark.long
async def test_a_training_keeps_the_day_on_which_it_began(tmp_path: Path, today: Any) -> None:
    whole = await run_whole(tmp_path / "whole", DATED)
    cut = await stopped_after_one(tmp_path / "cut", DATED)
    today(TUESDAY)
    again = await go_on(tmp_path / "cut", DATED, cut)
    assert same_bits(snapshot(again), snapshot(whole))
    assert left_by(again) == left_by(whole)
    assert date_in_state(again) == "2026-11-23"
    assert again.agent.template.date == MONDAY
    other = await run_whole(tmp_path / "other", DATED)
    assert date_in_state(other) == "2026-11-24"
    assert not same_bits(snapshot(other), snapshot(whole))
    today(MONDAY)
    over_midnight = trainer_of(tmp_path / "late", DATED, lambda messages: today(TUESDAY))
    await over_midnight.train()
    await over_midnight.close()
    assert same_bits(snapshot(over_midnight), snapshot(whole))


@pytest.mark.long
async def test_trainers_of_one_agent_tell_each_its_own_day(tmp_path: Path, today: Any) -> None:
    first = await stopped_after_one(tmp_path, DATED)
    today(TUESDAY)
    agent = make_agent(**DATED)
    told: list[datetime.date | None] = []

    def tell(messages: Sequence[Message]) -> None:
        told.append(agent.template.date)

    new = trainer_of(tmp_path / "new", DATED, tell, agent=agent)
    await new.initialize()
    resumed = trainer_of(tmp_path, DATED, tell, agent=agent, run=first.run)
    await resumed.load_checkpoint()
    for trainer, day in ((new, TUESDAY), (resumed, MONDAY), (new, TUESDAY)):
        told.clear()
        await trainer.step()
        assert {*told} == {day}
    await new.stop()
    await resumed.close()


@pytest.mark.long
async def test_a_run_that_did_not_keep_its_day_tells_that_of_the_resume(tmp_path: Path, today: Any) -> None:
    old = await stopped_after_one(tmp_path, DATED, knows=False)
    assert date_in_state(old) is None
    today(TUESDAY)
    assert date_in_state(await go_on(tmp_path, DATED, old)) == "2026-11-24"


async def test_a_run_whose_template_tells_no_date_keeps_none(tmp_path: Path) -> None:
    assert date_in_state(await stopped_after_one(tmp_path, PLAIN)) is None


async def test_another_template_date_is_another_run(tmp_path: Path) -> None:
    cut = await stopped_after_one(tmp_path, {**DATED, "template_date": MONDAY})
    assert date_in_state(cut) == "2026-11-23"
    with pytest.raises(CheckpointError, match=r"agent\.template_date was '2026-11-23' and is '2026-11-24'"):
        await go_on(tmp_path, {**DATED, "template_date": TUESDAY}, cut)


# ------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"history": "keep"}, 1),
        ({"history": "template"}, 0),
        ({"history": "keep", **PLAIN}, 0),
    ],
)
async def test_a_training_that_keeps_what_its_template_drops_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: int
) -> None:
    with caplog.at_level(logging.WARNING, logger="stateset_agents"):
        async with trainer_of(tmp_path, settings):
            pass
    said = 'this training keeps them as they were sampled: serve the agent with history="keep", too'
    assert caplog.text.count(said) == warned
