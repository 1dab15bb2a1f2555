"""Why a reply cannot be taught: the chat template writes it so that other words or calls would be read.

`core/chat/template.py` asks where a demonstrated reply does not come back as it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.core.chat.replies.parsing import ReplyParser
from stateset_agents.types.comparison import canonical
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.schemas import kinds_of, merged, outside_reference, parameters_of

_OTHER_TEMPLATE = "or choose another AgentConfig(chat_template=...)"


def why_unread(
    message: Message,
    tools: Sequence[Mapping[str, Any]],
    parser: ReplyParser,
    render: Callable[[Message], str],
    read_back: Callable[[Message, Sequence[Mapping[str, Any]]], object],
) -> str:
    """The cause and its mend, in one line.

    Args:
        message: The assistant message that is not read back.
        tools: In OpenAI's shape.
        parser: Reads replies of this template.
        render: Writes a reply; raises ConfigurationError for one that it cannot write.
        read_back: None for a reply that is not read back: the message is tried without its parts.
    """

    def works(**parts: Any) -> bool:
        return read_back(replace(message, **parts), tools) is not None

    words = replace(parser, begins_in=None).read(message.content)
    if words.reasoning is not None:
        return "its words hold a thought: give it as `reasoning`, and the words behind it as `content`"
    if words.tool_calls:
        return "its words hold a tool call as the model writes one: give it in `tool_calls`, or reword"
    calls = message.tool_calls
    for call in calls:
        if not works(content="", reasoning=None, tool_calls=(call,)):
            return _why_call_unread(call, tools, parser, render)
    if len(calls) > 1 and not works(content="", reasoning=None):
        return (
            f"this chat template writes one tool call a reply, and here are {len(calls)}: give each call a "
            f"reply of its own, followed by its result, {_OTHER_TEMPLATE}"
        )
    if message.content and calls and works(content=""):
        return (
            "this chat template shows no words beside a tool call: leave the words out, or say them in a "
            f"reply of their own, {_OTHER_TEMPLATE}"
        )
    if message.reasoning and works(reasoning=None):
        return (
            "this chat template does not show the thought of such a reply: leave `reasoning` out, "
            f"{_OTHER_TEMPLATE}"
        )
    return (
        f"{_refusal(message, render) or _odd_token(message, parser)}: leave the reply out, {_OTHER_TEMPLATE}"
    )


def _why_call_unread(
    call: ToolCall,
    tools: Sequence[Mapping[str, Any]],
    parser: ReplyParser,
    render: Callable[[Message], str],
) -> str:
    """Of one call that does not come back as it was given."""
    alone = Message(role="assistant", content="", tool_calls=(call,))
    refusal = _refusal(alone, render)
    if refusal is not None:
        return f"{refusal}: leave the call out, {_OTHER_TEMPLATE}"
    read = replace(parser, begins_in=None).read(render(alone), tools=tools).tool_calls
    schema = parameters_of(call.name, tools)
    for name, value in call.arguments.items():
        other = read[0].arguments.get(name) if len(read) == 1 else value
        if canonical(other) == canonical(value):
            continue
        argument = f"the argument {name!r} of {call.name}"
        if isinstance(value, str) or not isinstance(other, str):
            break
        member = merged(schema).schemas.get(name)
        if (reference := outside_reference(member, schema)) is not None:
            return (
                f"the schema of {argument} refers to {reference!r:.60}, which is not in it, so {value!r:.40} "
                "is read as text: write the definition into the schema"
            )
        if not kinds_of(member, schema):
            return (
                f"{argument} is {value!r:.40}, and this chat template writes all arguments as text: only a "
                "schema tells that it is none: give the tool in `tools`, with a type for the argument"
            )
        return (
            f"{argument} is {value!r:.40}, which this chat template writes like the text {other!r:.40}, and "
            "its schema allows texts: "
            + ("leave the argument out, or " if value is None else "")
            + "give a schema that allows no text there"
        )
    return (
        f"a text in the call of {call.name} holds what this chat template takes for the end of an argument, "
        f"or a control token: reword it, {_OTHER_TEMPLATE}"
    )


def _refusal(message: Message, render: Callable[[Message], str]) -> str | None:
    """Why the template does not write the message, or None."""
    try:
        render(message)
    except ConfigurationError as error:
        return str(error)
    return None


def _odd_token(message: Message, parser: ReplyParser) -> str:
    text = f"{message.reasoning or ''}{message.content}"
    token = next((token for token in parser.special if token in text), None)
    what = "as other words than were given" if token is None else f"without its control token {token!r}"
    return f"this chat template writes it so that it is read {what}"
