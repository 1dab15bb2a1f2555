"""Whatever a training writes is prompted with the tokens that were trained on, whoever loads it.

Plain transformers, without arguments, and this library load what a fine-tuning (in full) and a GRPO training
(with an adapter) wrote, with each of TRL's 72 templates, of ours, and the plain one, on another day.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from chat_templates import ALL_NAMES, IN_SUITE, OURS, chosen, trl_tokenizer
from template_talks import LOOK, full_render, opening_of, tools_of
from tiny_models import BLOCKS, tiny_tokenizer
from tiny_training import even_share, make_trainer
from tiny_vlm import TEMPLATE as VLM_TEMPLATE
from tiny_vlm import save_tiny_vlm
from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.cli.models import command
from stateset_agents.cli.run_settings import settings_of_run
from stateset_agents.core.chat.rendering import _OWN, _variables
from stateset_agents.core.environment import Observation
from stateset_agents.serving.server import AgentServer
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.training.trl.learner import TrlLearnerFactory
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

DAY = datetime.date(2024, 2, 29)
SWITCHES = ("enable_thinking", "reasoning_effort", "thinking")


class Case:
    """A model whose own template is another than the one that its agent is given."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        tokenizer = tiny_tokenizer() if name == "plain" else trl_tokenizer(name)
        self.name, self.hf = name, tokenizer.hf
        text, self.hf.chat_template = self.hf.chat_template, "{{ messages[0].content }}"
        self.tools = [LOOK] if name == "plain" else tools_of(name)
        self.opening = opening_of(name)
        self.folder = folder
        sizes = {**BLOCKS, "max_position_embeddings": 8192, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(self.hf), eos_token_id=None, **sizes))
        model.save_pretrained(folder / "base")
        self.hf.save_pretrained(folder / "base")
        ends = GenerationConfig(eos_token_id=list(tokenizer.eos_ids))
        ends.save_pretrained(folder / "base")
        switches = set() if name == "plain" else {*SWITCHES} & (_variables(text) - _OWN)
        self.settings = {
            "model_name": str(folder / "base"),
            "chat_template": name if name in (*OURS, "plain") else text,
            "chat_template_kwargs": {switch: False for switch in switches if switch != "reasoning_effort"},
            "template_date": DAY,
            "allow_hidden_tools": True,
            "max_new_tokens": 3,
            **settings,
        }

    def agent(self, **settings: Any) -> MultiTurnAgent:
        return MultiTurnAgent(AgentConfig(**{**self.settings, **settings}))

    def expect_written(self, folder: Path, ids: Sequence[int], stop_ids: Sequence[int] = ()) -> None:
        """Plain transformers makes these ids of the opening, by what stands in this folder."""
        saved = AutoTokenizer.from_pretrained(folder)
        text = full_render(self.name, self.opening, self.tools, hf=saved)
        assert saved(text, add_special_tokens=False).input_ids == list(ids)
        if stop_ids:
            assert {*GenerationConfig.from_pretrained(folder).eos_token_id} == {*stop_ids}

    async def expect_loaded(self, run: Path, ids: Sequence[int], stop_ids: Sequence[int]) -> None:
        """This library too, by the run's name alone and with its settings, as a server and as an engine."""
        model = Path(shlex.split(command(str(run)))[3])
        assert model.parent == run / "checkpoints" / "step-000001"
        self.expect_written(model, ids, stop_ids)
        of_run = settings_of_run(str(run))["agent"]
        alone = {"allow_hidden_tools": True, "max_new_tokens": 3}
        for settings in (alone, {**of_run, "template_date": None}, of_run):
            agent = MultiTurnAgent(AgentConfig(**{**settings, "model_name": str(run)}))
            async with agent, AgentServer(agent, name="tiny") as server:
                prompt = await agent.next_prompt(agent.history(), self.opening, self.tools)
                assert list(prompt.ids) == list(ids)
                assert {*agent.template.stop_ids} == {*stop_ids}
                if settings is not of_run:
                    continue
                seen = prompts_of(agent)
                async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
                    said = [message.to_openai() for message in self.opening]
                    answer = await client.chat.completions.create(
                        model="tiny", messages=said, tools=self.tools or openai.omit
                    )
                assert seen == [list(ids)]
                assert answer.usage.prompt_tokens == len(ids)


def prompts_of(agent: MultiTurnAgent) -> list[list[int]]:
    """Every prompt that the agent's backend gets from now on."""
    backend: Any = agent.backend
    generate, seen = backend.generate, []

    async def generated(ids: Sequence[int], *arguments: Any, **more: Any) -> Any:
        seen.append(list(ids))
        return await generate(ids, *arguments, **more)

    backend.generate = generated
    return seen


class OneTurn:
    local = True

    def __init__(self, case: Case) -> None:
        self.opening, self.tools = case.opening, case.tools

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(id="one")]

    async def start(self, scenario: Scenario, seed: int) -> OneTurn:
        return self

    async def step(self, reply: Message) -> Observation:
        return Observation(terminated=True)

    async def outcome(self) -> Outcome:
        return Outcome(reward=1.0)

    async def close(self) -> None: ...


async def grpo(case: Case, agent: MultiTurnAgent, **settings: Any) -> tuple[Path, list[int]]:
    """The run folder of one step, and what was prompted with."""
    await agent.initialize()
    seen, factory = prompts_of(agent), settings.pop("learner_factory", None)
    trainer = make_trainer(
        case.folder, agent=agent, environment=OneTurn(case), reward=even_share, max_steps=1, **settings
    )
    trainer._factory = factory or trainer._factory
    try:
        await trainer.train()
    finally:
        await trainer.stop()
    assert all(ids == seen[0] for ids in seen)
    return trainer.run.path, seen[0]


def fine_tuning(case: Case, agent: MultiTurnAgent, run: RunFolder | None = None) -> SFTTrainer:
    said = [message.to_openai() for message in case.opening]
    chats = [{"messages": [*said, {"role": "assistant", "content": text}]} for text in ("one", "two")]
    config = SFTConfig(
        max_steps=1, validation_share=0.0, output_dir=str(case.folder / "runs"), progress=False
    )
    return SFTTrainer(agent, chats, config, tools=case.tools, run=run)


async def fine_tuned(case: Case, agent: MultiTurnAgent) -> tuple[Path, list[int]]:
    """The run folder of one step, and the tokens before a reply that it trained."""
    trainer = fine_tuning(case, agent)
    try:
        await trainer.train()
        (first, _) = trainer._parts.demonstrations.train
    finally:
        await trainer.stop()
    return trainer.run.path, list(first.trajectory.turns[0].prompt_ids)


@pytest.mark.parametrize("name", chosen((*IN_SUITE, "plain"), ("chatml", "plain", *ALL_NAMES[:-1])))
@pytest.mark.first(1)
async def test_what_trainings_write_is_prompted_as_it_was_trained(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    async with case.agent() as agent:
        run, ids = await fine_tuned(case, agent)
        await agent.save_pretrained(tmp_path / "saved")
        stop_ids = agent.template.stop_ids
    case.expect_written(tmp_path / "saved", ids, stop_ids)
    await case.expect_loaded(run, ids, stop_ids)
    async with case.agent() as agent:
        run, of_grpo = await grpo(case, agent, lora={"rank": 2})
        await agent.save_pretrained(tmp_path / "again")
    assert of_grpo == ids
    case.expect_written(tmp_path / "again", ids, stop_ids)
    case.expect_written(run / "checkpoints" / "step-000001" / "adapter", ids)
    await case.expect_loaded(run, ids, stop_ids)


@pytest.mark.quantization
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
async def test_what_an_adapter_on_few_bits_writes_is_prompted_as_it_was_trained(
    bits: str, tmp_path: Path
) -> None:
    case = Case("llama3_2", tmp_path)
    async with case.agent() as agent:
        run, ids = await grpo(case, agent, lora={"rank": 2, "quantization": bits})
        stop_ids = agent.template.stop_ids
    case.expect_written(run / "checkpoints" / "step-000001" / "adapter", ids)
    await case.expect_loaded(run, ids, stop_ids)


@pytest.mark.long
async def test_a_training_s_own_day_is_told_on_later_days(tmp_path: Path, monkeypatch: Any) -> None:
    """And by a training that goes on from it, unless `template_date` is set."""
    case = Case("llama3_2", tmp_path, template_date=None)
    async with case.agent() as agent:
        await agent.save_pretrained(tmp_path / "untrained")
        run, ids = await fine_tuned(case, agent)
    assert "strftime_now" in (tmp_path / "untrained" / "chat_template.jinja").read_text()
    assert "stateset_agents" not in (tmp_path / "untrained" / "chat_template.jinja").read_text()
    later = SimpleNamespace(date=SimpleNamespace(today=lambda: datetime.date(2031, 5, 1)))
    monkeypatch.setattr("stateset_agents.core.chat.template.datetime", later)
    case.expect_written(run / "checkpoints" / "step-000001" / "model", ids)
    async with case.agent(model_name=str(run), chat_template=None) as agent:
        _, told = await grpo(case, agent, learner_factory=TrlLearnerFactory())
    assert told == ids
    day = datetime.date(2031, 5, 2)
    async with case.agent(model_name=str(run), template_date=day) as agent:
        told = HuggingFaceTokenizer(case.hf).decode(agent.template.prompt(case.opening))
    assert "02 May 2031" in told


async def test_a_fine_tuning_goes_on_with_its_own_day(tmp_path: Path, monkeypatch: Any) -> None:
    """By its folder and by its checkpoint; on another day the conversations would be other tokens."""
    case = Case("llama3_2", tmp_path, template_date=None)
    async with case.agent() as agent:
        run, ids = await fine_tuned(case, agent)
    later = SimpleNamespace(date=SimpleNamespace(today=lambda: datetime.date(2031, 5, 1)))
    monkeypatch.setattr("stateset_agents.core.chat.template.datetime", later)
    for path in (None, run):
        async with case.agent() as agent:
            trainer = fine_tuning(case, agent, run=RunFolder.open(run) if path is None else None)
            if path is None:
                await trainer.initialize()
            await trainer.load_checkpoint(path)
            assert trainer.step_number == 1
            assert list(trainer._parts.demonstrations.train[0].trajectory.turns[0].prompt_ids) == ids
            await trainer.stop()


async def test_who_samples_by_trl_tells_the_trainer_s_day(tmp_path: Path) -> None:
    case = Case("llama3_2", tmp_path, template_date=None)
    async with case.agent() as agent:
        learner = SimpleNamespace(sample=None, config=SimpleNamespace(temperature=1.0))
        player = await TrlLearnerFactory(TrlSettings(generation="trl")).player(agent, learner)
        agent.pin_date(DAY)
        assert player.template is agent.template
        assert player.template.date == DAY


async def test_the_processor_of_pictures_has_the_template_too(tmp_path: Path) -> None:
    folder = save_tiny_vlm(tmp_path / "base", template=VLM_TEMPLATE.replace("<|user|>", "<|system|>"))
    (tmp_path / "saved" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'old' }}")
    async with MultiTurnAgent(AgentConfig(model_name=folder, chat_template=VLM_TEMPLATE)) as agent:
        await agent.save_pretrained(tmp_path / "saved")
        expected = agent.template.prompt([Message(role="user", content="hi")])
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    for loader in (AutoProcessor, AutoTokenizer):
        saved = loader.from_pretrained(tmp_path / "saved")
        text = saved.apply_chat_template(said, tools=[LOOK], add_generation_prompt=True, tokenize=False)
        assert AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids == expected
