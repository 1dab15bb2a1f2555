"""Why a demonstrated reply cannot be taught: each cause has a line of its own, with its mend."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import trl_template

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

CALL = ToolCall(name="look", arguments={"at": "K27", "times": 2}, id="call_0_0")


def said(content: str = "", thought: str | None = None, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, reasoning=thought, tool_calls=calls)


def tool(**properties: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


TYPED = tool(at={"type": "string"}, times={"type": "integer"})
CAUSES: dict[str, tuple[str, Message, list[dict[str, Any]], str]] = {
    "a thought in the words": (
        "qwen3",
        said("<think>so</think>yes"),
        [],
        "hold a thought: give it as `reasoning`",
    ),
    "a call in the words": (
        "qwen3",
        said('ok <tool_call>{"name": "a", "arguments": {}}</tool_call>'),
        [],
        "hold a tool call as the model writes one: give it in `tool_calls`",
    ),
    "words beside a call": (
        "llama3_1",
        said("I look.", None, CALL),
        TYPED,
        "no words beside a tool call: leave",
    ),
    "parallel calls": (
        "llama3_1",
        said("", None, CALL, CALL),
        TYPED,
        "one tool call a reply, and here are 2: give",
    ),
    "a number without a schema": (
        "qwen3_8",
        said("", None, CALL),
        [],
        "'times' of look is 2, .* a type for the",
    ),
    "a reference elsewhere": (
        "glm4moe",
        said("", None, CALL),
        tool(at={"type": "string"}, times={"$ref": "https://x.org/a.json"}),
        "refers to 'https://x.org/a.json', which is not in it.*write the definition into the schema",
    ),
    "a number or a text": (
        "qwen3_8",
        said("", None, CALL),
        tool(at={"type": "string"}, times={"type": ["integer", "string"]}),
        "writes like the text '2', and its schema allows texts: give a schema",
    ),
    "a text that ends its argument": (
        "qwen3_8",
        said("", None, ToolCall(name="look", arguments={"at": "a\n</parameter>\n<parameter=b>\nc"})),
        TYPED,
        "takes for the end of an argument",
    ),
    "a thought that is not shown": ("qwen3_5_nothink", said("yes", "so"), [], "shows no thought"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_line(cause: str) -> None:
    name, reply, tools, why = CAUSES[cause]
    with pytest.raises(ConfigurationError, match=why) as error:
        trl_template(name).reply(reply, tools)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("the reply ")
    assert len(str(error.value)) < 400


def test_a_reference_within_the_schema_is_no_cause() -> None:
    tools = tool(at={"type": "string"}, times={"$ref": "#/$defs/Times"})
    tools[0]["function"]["parameters"]["$defs"] = {"Times": {"enum": [1, 2]}}
    for name in ("qwen3_8", "glm4moe", "nemotron_3_nano", "muse_glimmer"):
        assert trl_template(name).reply(said("", None, CALL), tools)
