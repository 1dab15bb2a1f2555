"""Tries a chat template on conversations with every kind of reply and of answer, when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.core.chat.rendering import MARKS, Rendering, Roles
from stateset_agents.core.chat.turn_ends import TurnEnds, rewrites
from stateset_agents.types.messages import Message, ToolCall

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "Where."}},
            "required": ["at"],
        },
    },
}


def probe_talks(roles: Roles) -> list[list[Message]]:
    """Two talks of plain and thinking replies. The second begins with a system message and has tool rounds,
    where there are tools: of one call and of two, a round after a round, and a user's words after one. Each
    text is another mark."""
    return [_talk(roles, is_long=False), _talk(roles, is_long=True)]


def answers(talk: Sequence[Message]) -> Iterator[tuple[int, Sequence[Message]]]:
    """Where each reply stands, and the messages that answer it."""
    replies = [index for index, message in enumerate(talk) if message.role == "assistant"]
    for index, end in zip(replies, [*replies[1:], len(talk)], strict=True):
        yield index, talk[index + 1 : end]


def refuse_unstable(
    render: Rendering, ends: TurnEnds, roles: Roles, tools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Raises ConfigurationError unless what stands between a reply and the agent's next words is one text for
    each kind of answer, whatever stood before and though tools be offered, and all that was said stands in
    the whole, once and in order."""

    def around(
        before: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        mark = reply.tool_calls[-1].arguments["at"] if reply.tool_calls else reply.content
        text = "".join(ends.after(before, reply, following, tools, mark))
        for message in following:
            text = text.replace(message.content, "...")
        return text

    alone: dict[str, str] = {}  # by the kind of answer: the text after a first reply
    for talk in probe_talks(roles):
        for at, following in answers(talk):
            kind = " and ".join(message.role for message in following)
            if kind not in alone:
                first = replace(talk[at], reasoning=None)
                alone[kind] = around([Message(role="user", content="x")], first, following, ())
            here = around(talk[:at], talk[at], following, tools)
            if here != alone[kind]:
                raise rewrites(
                    f"what it writes around an answer of {kind} depends on what stood before: "
                    f"{alone[kind]!r:.120} or {here!r:.120}"
                )
        _refuse_losses(talk, render(talk, [dict(tool) for tool in tools], generate=True))


def _refuse_losses(talk: Sequence[Message], text: str) -> None:
    shown = [message for message in talk if not message.tool_calls]  # some show no words beside a call
    for message in shown:
        if (times := text.count(message.content)) != 1:
            raise rewrites(f"it shows an earlier message of role {message.role} {times} times")
    places = [text.find(message.content) for message in shown]
    if places != sorted(places):
        raise rewrites("it shows messages in another order")


def _talk(roles: Roles, *, is_long: bool) -> list[Message]:
    marks = iter(MARKS[1:])

    def said(role: Any, **more: Any) -> Message:
        return Message(role=role, content=next(marks), **more)

    def tool_round(*ids: str, **more: Any) -> list[Message]:
        """A reply with calls of these ids, and their results."""
        results = [said("tool", name="look", tool_call_id=id) for id in ids]
        if not roles.has_calls:
            return [said("assistant", **more), *results]
        at = next(marks)
        calls = tuple(ToolCall(name="look", arguments={"at": at}, id=id) for id in ids)
        return [Message(role="assistant", content="", tool_calls=calls, **more), *results]

    talk = [said("system")] if is_long and roles.has_system else []
    talk += [said("user"), said("assistant"), said("user"), said("assistant", reasoning="so")]
    talk += [said("user"), said("assistant", reasoning=""), said("user")]
    if is_long and roles.has_results:
        ids = ("call_0_0", "call_0_1") if roles.has_several_calls else ("call_0_0",)
        talk += [*tool_round(ids[0]), *tool_round(ids[0], reasoning="so"), said("assistant", reasoning="so")]
        talk += [said("user"), *tool_round(*ids), said("assistant"), said("user")]
    return talk
