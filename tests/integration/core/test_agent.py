"""An agent loads a model, answers conversations, and saves what plain transformers loads."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import REWRITING
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.base import Session
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.types.errors import BackendError, ConfigurationError

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' + m.role + ': ' }}"
    "{{ m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAMILIES = ["llama", "qwen3", "gpt2"]


def save(folder: Path, family: str = "llama", template: str | None = TEMPLATE) -> str:
    tiny_model(family).save_pretrained(folder)
    hf = tiny_tokenizer(bos=family == "llama").hf
    hf.chat_template = template
    hf.save_pretrained(folder)
    return str(folder)


def generation_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "generation"]


def scripted(**config: Any) -> tuple[MultiTurnAgent, ScriptedBackend]:
    backend = ScriptedBackend(lambda request: "ok", context_length=config.pop("context_length", 1000))
    return MultiTurnAgent(AgentConfig(**config), backend=backend), backend


async def prompt_of(*messages: Any, context: Any = None, **config: Any) -> str:
    """What the model is shown, in the plain template's lines."""
    agent, backend = scripted(**config)
    async with agent:
        assert await agent.generate_response(list(messages), context) == "ok"
    return backend.requests[0].text


USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_saved_agent_loads_in_plain_transformers_and_says_the_same(
    family: str, tmp_path: Path
) -> None:
    config = AgentConfig(model_name=save(tmp_path / "a", family), temperature=0, max_new_tokens=12)
    async with MultiTurnAgent(config) as agent:
        said = await agent.generate_response("where is order K27?")
        assert await agent.save_pretrained(tmp_path / "b") == tmp_path / "b"
        ids = agent.template.prompt([Message(role="user", content="where is order K27?")])

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "b")
    talk = [{"role": "user", "content": "where is order K27?"}]
    rendered = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    assert rendered[0].tolist() == ids
    row = model.generate(
        rendered, attention_mask=torch.ones_like(rendered), max_new_tokens=12, do_sample=False
    )
    assert tokenizer.decode(row[0, len(ids) :], skip_special_tokens=True) == said != ""

    again = await MultiTurnAgent.from_pretrained(tmp_path / "b", temperature=0, max_new_tokens=12)
    assert await again.generate_response(talk) == said
    await again.close()


async def test_a_template_of_the_agent_s_own_is_saved_with_it(tmp_path: Path) -> None:
    own = TEMPLATE.replace(": ", " says ")
    config = AgentConfig(model_name=save(tmp_path / "a"), chat_template=own)
    async with MultiTurnAgent(config) as agent:
        await agent.save_pretrained(tmp_path / "b")
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == own


async def test_texts_dicts_and_messages_are_the_same_conversation(tmp_path: Path) -> None:
    config = AgentConfig(model_name=save(tmp_path), temperature=0, max_new_tokens=8)
    async with MultiTurnAgent(config) as agent:
        said = await agent.generate_response("hi")
        assert await agent.generate_response([USER]) == said
        assert await agent.generate_response([Message(role="user", content="hi")]) == said
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert await agent.generate_response(parts) == said


async def test_responses_are_sampled_from_the_agent_s_seed(tmp_path: Path) -> None:
    folder = save(tmp_path)

    async def two(seed: int) -> list[str]:
        async with MultiTurnAgent(AgentConfig(model_name=folder, seed=seed, max_new_tokens=12)) as agent:
            return [await agent.generate_response("hi"), await agent.generate_response("hi")]

    first = await two(0)
    assert first[0] != first[1]
    assert await two(0) == first
    assert await two(1) != first


async def test_the_system_prompt_stands_before_the_conversation_s_own() -> None:
    assert await prompt_of(USER) == "user: hi\nassistant:"
    assert await prompt_of(USER, system_prompt="Be kind.") == "system: Be kind.\nuser: hi\nassistant:"
    both = await prompt_of(SYSTEM, USER, system_prompt="Be kind.")
    assert both == "system: Be kind.\n  Be brief.\nuser: hi\nassistant:"
    assert await prompt_of(USER, system_prompt="") == "user: hi\nassistant:"


async def test_context_is_added_to_the_system_message() -> None:
    assert await prompt_of(USER, context="Late.") == "system: Late.\nuser: hi\nassistant:"
    told = await prompt_of(SYSTEM, USER, context={"order": "K27", "items": ["cup", 2]}, system_prompt="S")
    assert told == 'system: S\n  Be brief.\n  order: K27\n  items: ["cup", 2]\nuser: hi\nassistant:'
    assert await prompt_of(USER, context={}) == "user: hi\nassistant:"
    empty = {"role": "system", "content": ""}
    assert await prompt_of(empty, USER, context="Late.") == "system: Late.\nuser: hi\nassistant:"


@pytest.mark.parametrize(
    ("messages", "context", "message"),
    [
        ([], None, "messages is empty: give at least one user message"),
        (None, None, "messages is empty"),
        (USER, None, "messages must be a text or a list of messages, got one dict"),
        (["hi"], None, "a message must be a mapping or a Message, got str: 'hi'"),
        ([{"role": "bot", "content": "hi"}], None, "message role must be one of"),
        ("hi", ["a"], "context must be a text or a mapping, got list"),
        (
            "x" * 300,
            None,
            "the conversation has 317 tokens and the model's context 200: shorten the messages",
        ),
    ],
)
async def test_a_conversation_that_cannot_be_answered_is_one_clear_line(
    messages: Any, context: Any, message: str
) -> None:
    agent, _ = scripted(max_context_tokens=200)
    async with agent:
        with pytest.raises(ConfigurationError) as caught:
            await agent.generate_response(messages, context)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_reply_takes_no_more_tokens_than_the_context_has_left() -> None:
    agent, backend = scripted(context_length=30)
    async with agent:
        await agent.generate_response("x" * 12)
        assert agent.context_length == 30
    request = backend.requests[0]
    assert len(request.prompt_ids) + request.params.max_new_tokens == 30


async def test_before_initialize_the_agent_says_what_to_do(tmp_path: Path) -> None:
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk"))
    cure = r"await agent\.initialize\(\) first"
    with pytest.raises(BackendError, match=cure):
        await agent.generate_response("hi")
    with pytest.raises(BackendError, match=cure):
        await agent.save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=cure):
        _ = agent.backend
    await agent.close()


async def test_closing_ends_the_thread_and_initialising_again_goes_on_with_the_same_weights(
    tmp_path: Path,
) -> None:
    agent = MultiTurnAgent(AgentConfig(model_name=save(tmp_path), temperature=0, max_new_tokens=8))
    async with agent:
        assert len(generation_threads()) == 1
        state = {name: 2 * held for name, held in agent.backend.model.state_dict().items()}  # type: ignore[attr-defined]  # a HuggingFaceBackend
        await agent.backend.update_weights(state, 1)
        said = await agent.generate_response("hi")
    assert generation_threads() == []
    with pytest.raises(BackendError, match="closed"):
        await agent.generate_response("hi")
    async with agent:
        assert await agent.generate_response("hi") == said
    await agent.close()
    assert generation_threads() == []


async def test_initialising_twice_at_once_loads_once(tmp_path: Path) -> None:
    agent = MultiTurnAgent(AgentConfig(model_name=save(tmp_path)))
    await asyncio.gather(agent.initialize(), agent.initialize())
    assert len(generation_threads()) == 1
    await agent.close()
    assert generation_threads() == []


async def test_a_template_that_is_refused_leaves_no_thread(tmp_path: Path) -> None:
    rewriting = REWRITING["numbers turns"].replace("<|im_end|>", "<|end|>")
    agent = MultiTurnAgent(AgentConfig(model_name=save(tmp_path, template=rewriting)))
    with pytest.raises(ConfigurationError, match="rewrites history"):
        await agent.initialize()
    assert generation_threads() == []
    plain = MultiTurnAgent(AgentConfig(model_name=str(tmp_path), chat_template="plain", max_new_tokens=4))
    async with plain:  # the cure that the error names
        assert isinstance(await plain.generate_response("hi"), str)


async def test_an_error_inside_async_with_closes_the_agent(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with MultiTurnAgent(AgentConfig(model_name=save(tmp_path))):
            _ = 1 / 0
    assert generation_threads() == []


async def test_a_model_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="model folder '/no/such/folder' does not exist"):
        await MultiTurnAgent.from_pretrained("/no/such/folder")


async def test_a_base_model_of_transformers_gets_the_plain_template_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentConfig(model_name=save(tmp_path, "gpt2", template=None), max_new_tokens=4)
    with caplog.at_level(logging.WARNING, "stateset_agents"):
        async with MultiTurnAgent(config) as agent:
            assert isinstance(await agent.generate_response("hi"), str)
    assert [record.getMessage() for record in caplog.records if "chat_template" in record.getMessage()] == [
        "the model has no chat template: using plain; "
        f"set AgentConfig.chat_template for another  model={config.model_name}"
    ]


async def test_saving_needs_weights_and_a_folder(tmp_path: Path) -> None:
    agent, _ = scripted()
    async with agent:
        with pytest.raises(BackendError, match="a ScriptedBackend has no weights to save"):
            await agent.save_pretrained(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    async with MultiTurnAgent(AgentConfig(model_name=save(tmp_path / "a"))) as real:
        with pytest.raises(ConfigurationError, match="which is a file: give a folder"):
            await real.save_pretrained(file)


async def test_tool_calls_are_read_out_of_a_turn() -> None:
    backend = ScriptedBackend(['Wait. <tool_call>{"name": "look"}</tool_call>'])
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        params = agent.sampling(stream=1)
        completion = await agent.reply([1, 2], params, session=Session(0, 0), turn=4)
    assert completion.message.content == "Wait."
    assert [(call.name, call.id) for call in completion.message.tool_calls] == [("look", "call_4_0")]
    assert completion.prompt_ids == (1, 2)


async def test_rollouts_sample_from_the_full_distribution() -> None:
    agent, _ = scripted(temperature=0.3, top_k=5, top_p=0.5)
    async with agent:
        params = agent.sampling(stream=7)
        assert (params.temperature, params.top_k, params.top_p, params.stream) == (1.0, 5, 0.5, 7)
        assert agent.sampling(stream=7, temperature=0.0).temperature == 0.0
        with pytest.raises(ConfigurationError, match="temperature must be at least 0"):
            agent.sampling(stream=7, temperature=-1.0)
