"""Every format of calls and every type of argument: what a template writes is read back as it was."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, NotRequired

import pydantic
import pytest
from chat_templates import trl_template
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

from stateset_agents.core.tools import Tool, Toolbox, tool
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

FORMATS = {
    "chatml": "chatml",
    "hermes": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "qwen3_8": "qwen3_8",
    "nemotron": "nemotron_3_nano",
    "glm": "glm4moe",
    "llama3": "llama3_1",
    "harmony": "gptoss",
    "atem": "muse_glimmer",
    "gemma4": "gemma4_v5",
    "lfm2": "lfm2_v2",
    "lfm2_raw": "lfm2_2_5",
}
WITH_TEXTS = ("qwen3_5", "qwen3_8", "nemotron", "glm", "atem")
"""Formats in which every argument is text."""


class Item(pydantic.BaseModel):
    name: str
    count: int = 1


@dataclasses.dataclass
class Point:
    x: float
    y: float


class Priority(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Level(enum.IntEnum):
    ONE = 1
    TWO = 2


class Address(TypedDict):
    city: str
    zip: NotRequired[str]


TYPES: list[tuple[Any, Any]] = [
    (Item, {"count": 2, "name": 'it\'s "a" \\n'}),
    (Point, {"x": 1.5, "y": -2}),
    (Priority, "high"),
    (Level, 2),
    (Address, {"city": "Oslo"}),
    (Literal["a", "b"], "b"),
    (Literal[1, 2], 2),
    (Literal["auto", 3], 3),
    (Literal["auto", 3], "auto"),
    (Literal[True], True),
    (Item | None, None),
    (Item | None, {"count": 1, "name": "x"}),
    (Priority | None, None),
    (Priority | None, "low"),
    (int | None, 3),
    (list[Item], [{"count": 1, "name": "x"}]),
    (dict[str, Item], {"k": {"count": 3, "name": "x"}}),
    (list[str], ["null", "3"]),
    (tuple[int, str], [1, "a"]),
    (float, 20.0),
    (bool, False),
    (str, "3"),
    (str, "null"),
    (str, "None"),
    (str | None, "words"),
]


def taking(hint: Any) -> Tool:
    """A tool with one argument of a type."""

    def take(value: Any) -> str:
        return type(value).__name__

    take.__annotations__ = {"value": hint, "return": str}
    return tool(take)


def read_back(name: str, call: ToolCall, tools: list[dict[str, Any]]) -> list[ToolCall]:
    template = trl_template(FORMATS[name])
    text = template.render_reply(Message(role="assistant", content="", tool_calls=(call,)))
    if template.parser.begins_in is not None:
        text = f"</think>{text.rpartition('</think>')[2]}"
    return list(template.parser.read(text, tools=tools).tool_calls)


@pytest.mark.parametrize("name", FORMATS)
async def test_an_argument_of_every_type_reaches_its_tool(name: str) -> None:
    for hint, value in TYPES:
        taker = taking(hint)
        (call,) = read_back(name, ToolCall(name="take", arguments={"value": value}), [taker.schema])
        assert (call.error, repr(call.arguments)) == (None, repr({"value": value})), hint
        answer = await Toolbox([taker]).call(call)
        assert not answer.content.startswith("error"), (hint, answer.content)


def properties(**schemas: Any) -> list[dict[str, Any]]:
    """The tool `f` with these arguments, the first of which must be given."""
    parameters = {"type": "object", "properties": schemas, "required": [*schemas][:1]}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


TEXT, NULLABLE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", FORMATS)
def test_none_and_null_are_texts_where_a_null_may_be_left_out(name: str) -> None:
    tools = properties(must=TEXT, may={**NULLABLE, "default": None})
    for text in ("None", "null", "nil"):
        arguments = {"must": text, "may": text}
        (call,) = read_back(name, ToolCall(name="f", arguments=arguments), tools)
        assert call.arguments == arguments


@pytest.mark.parametrize(("name", "null"), [("qwen3_5", "None"), ("qwen3_8", "null"), ("glm", "null")])
def test_a_null_that_must_be_said_is_what_the_template_writes_for_it(name: str, null: str) -> None:
    tools = properties(must=NULLABLE)
    (call,) = read_back(name, ToolCall(name="f", arguments={"must": None}), tools)
    assert call.arguments == {"must": None}
    other = {"None": "null", "null": "None"}[null]
    (call,) = read_back(name, ToolCall(name="f", arguments={"must": other}), tools)
    assert call.arguments == {"must": other}


@pytest.mark.parametrize("name", WITH_TEXTS)
def test_a_demonstrated_null_that_means_its_absence_is_left_out(name: str) -> None:
    template = trl_template(FORMATS[name])
    call = ToolCall(name="f", arguments={"must": "a", "may": None})
    reply = Message(role="assistant", content="", tool_calls=(call,))
    ids = template.reply(reply, properties(must=TEXT, may={**NULLABLE, "default": None}))
    text = template.tokenizer.hf.decode(ids)
    assert "must" in text
    assert "may" not in text


FRAGMENTS = (
    *(
        "\\",
        "'",
        '"',
        "\n",
        "\\n",
        "\\\\",
        "\r",
        "\t",
        " ",
        "a",
        "é",
        "e\u0301",
        "😀",
        "{",
        "}",
        "[",
        "]",
        "\x1b",
    ),
    *("<b>", "</b>", "</tool_call>", "<tool_call>", "</parameter>", "<parameter=x>", "</arg_value>", "```"),
    *("<arg_key>", "None", "null", "3", ",", "=", ")", "(", "</function>", "</atem:parameter>", "\u2028"),
)
AMBIGUOUS = ("</parameter>", "</arg_value>", "</atem:parameter>", "'")
"""What ends a text where a template escapes nothing: with more of the frame behind it nobody can tell."""


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*FORMATS]),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=5).map("".join),
)
def test_any_text_is_read_back_or_the_reply_is_refused(name: str, text: str) -> None:
    arguments, tools = {"must": text, "days": 3}, properties(must=TEXT, days={"type": "integer"})
    template = trl_template(FORMATS[name])
    call = ToolCall(name="f", arguments=arguments)
    calls = read_back(name, call, tools)
    if [(each.name, each.arguments) for each in calls] == [("f", arguments)]:
        return
    controls = template.parser.special
    assert any(part in text for part in (*AMBIGUOUS, *controls)) or any(
        "\ud800" <= c <= "\udfff" for c in text
    )
    with pytest.raises(ConfigurationError):
        template.reply(Message(role="assistant", content="", tool_calls=(call,)), tools)


@pytest.mark.parametrize("name", FORMATS)
def test_backslashes_quotes_and_tags_in_a_text_are_kept(name: str) -> None:
    for text in (
        "C:\\new\\table",
        'it\'s "it"\\',
        "a\nb\\nc",
        "<b>x</b> </tool_call> </parameter> y",
        "\n x \n",
    ):
        arguments = {"must": text, "days": 3}
        tools = properties(must=TEXT, days={"type": "integer"})
        assert [c.arguments for c in read_back(name, ToolCall(name="f", arguments=arguments), tools)] == [
            arguments
        ]


def test_a_type_that_pydantic_refuses_is_one_line() -> None:
    class Odd:
        pass

    with pytest.raises(
        ConfigurationError, match=r"^tool take: a type in its signature cannot be used: [^\n]+$"
    ):
        taking(Odd)
