"""The built-in ChatML template: Qwen 2.5's text, chosen by name, for models that have its control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import family_tokenizer, tokenizer_with, trl_template
from template_talks import LOOK
from tiny_models import BLOCKS, tiny_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.backends.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.plain_template import CHATML
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

IM = ("<|im_start|>", "<|im_end|>")
SYSTEM, USER = Message(role="system", content="Be brief."), Message(role="user", content="where is K27?")
CALL = ToolCall(name="look", arguments={"at": "Zürich", "times": 2}, id="call_0_0")
SECOND = ToolCall(name="look", arguments={}, id="call_0_1")
TALK = [
    SYSTEM,
    USER,
    Message(role="assistant", content="I look.", tool_calls=(CALL, SECOND)),
    Message(role="tool", content="found", name="look", tool_call_id="call_0_0"),
    Message(role="tool", content="lost", name="look", tool_call_id="call_0_1"),
    Message(role="assistant", content="", tool_calls=(CALL,)),
    Message(role="tool", content="found", name="look", tool_call_id="call_0_0"),
    Message(role="assistant", content="It left."),
    Message(role="user", content="bye"),
]


def read(template: JinjaTemplate, messages: list[Message], tools: Any = ()) -> str:
    return str(template.tokenizer.hf.decode(template.prompt(messages, tools)))


async def agent_with(tokenizer: Any, **config: Any) -> MultiTurnAgent:
    agent = MultiTurnAgent(AgentConfig(**config), backend=ScriptedBackend(["hi"], tokenizer=tokenizer))
    await agent.initialize()
    return agent


@pytest.mark.parametrize("tools", [[], [LOOK], [LOOK, LOOK]], ids=len)
def test_a_conversation_is_written_as_qwen_2_5_writes_it(tools: list[dict[str, Any]]) -> None:
    ours, theirs = trl_template("chatml"), trl_template("qwen2_5")
    for number in range(2, len(TALK) + 1):
        if TALK[number - 1].role != "assistant":
            assert read(ours, TALK[:number], tools) == read(theirs, TALK[:number], tools)


def test_there_is_no_system_message_but_the_conversation_s_own_and_the_tools() -> None:
    template = trl_template("chatml")
    assert read(template, [USER]) == "<|im_start|>user\nwhere is K27?<|im_end|>\n<|im_start|>assistant\n"
    offered = read(template, [USER], [LOOK])
    assert offered.startswith("<|im_start|>system\n# Tools\n\nYou may call one or more functions")
    assert json.dumps(LOOK) in offered


def test_a_history_as_clients_send_it_is_rendered() -> None:
    """Contents that are null and arguments as text: what other programs give to the saved template."""
    hf = family_tokenizer("ours").hf
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "K27"}'}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert hf.apply_chat_template(talk, tokenize=False).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"at": "K27"}}\n</tool_call>'
        "<|im_end|>\n"
    )


async def test_the_settings_choose_it_by_name() -> None:
    agent = await agent_with(tokenizer_with(*IM, template="{{ messages }}"), chat_template="chatml")
    assert isinstance(agent.template, JinjaTemplate)
    assert agent.template.text == CHATML
    assert agent.template.appends
    assert agent.template.parser.reads_calls
    assert await agent.generate_response("hello") == "hi"


async def test_a_model_without_its_control_tokens_is_refused_with_the_cure() -> None:
    for controls in ((), IM[:1], IM[1:]):
        with pytest.raises(ConfigurationError) as caught:
            await agent_with(tokenizer_with(*controls), chat_template="chatml")
        assert str(caught.value).endswith(
            "<|im_start|> and <|im_end|>, which this model's tokenizer does not have: set "
            'AgentConfig(chat_template="plain")'
        )
    with pytest.raises(ConfigurationError, match="not ByteTokenizer: leave it out"):
        await agent_with(ByteTokenizer(), chat_template="chatml")


@pytest.mark.parametrize("bos", [True, False])
async def test_a_bos_stands_in_front_where_the_tokenizer_puts_one_and_in_no_delta(bos: bool) -> None:
    tokenizer = tokenizer_with(*IM, bos=bos)
    template = (await agent_with(tokenizer, chat_template="chatml")).template
    assert [id == 256 for id in template.prompt([USER])[:2]] == [bos, False]
    assert template.prompt([USER]).count(256) == bos
    assert 256 not in template.delta([USER])
    assert template.appends


async def test_the_setting_offers_tools_that_the_template_hides() -> None:
    for allowed in (False, True):
        tokenizer = family_tokenizer("chatml")
        agent = await agent_with(tokenizer, allow_hidden_tools=allowed)
        if allowed:
            assert agent.template.prompt([USER], [LOOK]) == agent.template.prompt([USER])
            continue
        with pytest.raises(ConfigurationError, match="does not tell the model which tools there are"):
            agent.template.prompt([USER], [LOOK])


async def test_it_is_saved_as_the_model_s_own(tmp_path: Path) -> None:
    hf = tiny_tokenizer(bos=False).hf
    hf.add_tokens(list(IM), special_tokens=True)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(hf), eos_token_id=257, **BLOCKS))
    backend = HuggingFaceBackend(model, HuggingFaceTokenizer(hf))
    async with MultiTurnAgent(AgentConfig(chat_template="chatml"), backend=backend) as agent:
        prompt = agent.template.prompt(TALK, [LOOK])
        await agent.save_pretrained(tmp_path)
    saved = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    again = JinjaTemplate(saved)
    assert again.prompt(TALK, [LOOK]) == prompt
    assert again.text == CHATML
