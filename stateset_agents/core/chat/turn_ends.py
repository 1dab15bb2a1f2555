"""The text that a chat template writes around a reply, and the check of a template when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.backends.tokenizers import common_prefix
from stateset_agents.core.chat.rendering import HINT, MARKS, Rendering, Roles
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

_PROBE = MARKS[0]


def rewrites(why: str) -> ConfigurationError:
    """The error of a template to which no turn can be appended."""
    return ConfigurationError(f"the chat template rewrites history ({why}); {HINT} adds turn after turn")


class TurnEnds:
    """The texts at which replies begin and end.

    Between messages may stand another token than at the end of a talk (gpt-oss: `<|end|>`, `<|return|>`), or
    the next role's opener (GLM): the one in a talk that goes on counts. What the template writes between a
    reply and the token (a line end, say) is part of neither.
    """

    start: str
    """A prompt, ending where the agent begins to speak."""
    opening: str
    """The part of `start` that also stands before a reply that was said: some prompts open or close a
    thought besides."""
    end: str
    """The control token after a reply that a user answers."""
    talk_end: str | None
    """The one after a reply that ends a talk; None where nothing does."""
    closing: str
    """All that stands after that reply."""

    def __init__(self, render: Rendering, controls: re.Pattern[str]) -> None:
        """`controls` matches every control token as it is written.

        Raises ConfigurationError for a template that does not end turns by a control token.
        """
        self._render = render
        self._controls = controls
        user, reply = Message(role="user", content="x"), Message(role="assistant", content=_PROBE)
        self.start = render([user], generate=True)
        ended = render([user, reply])
        self.opening = self._common(self.start, ended)
        self.closing = ended.rpartition(_PROBE)[2]
        talk_end = controls.match(self.closing.lstrip())
        self.talk_end = None if talk_end is None else talk_end.group()
        going = render([user, reply, Message(role="user", content="y")], generate=True)
        end = controls.match(going.rpartition(_PROBE)[2].lstrip())
        if _PROBE not in ended or end is None:
            closing = self.closing.strip()
            cause = "nothing ends it"
            if closing:
                cause = f"it ends with {closing!r:.80}, in which the tokenizer has none"
            raise ConfigurationError(
                "the chat template does not end an assistant message with a control token, so nothing could "
                f"stop a turn: {cause}; add one to the tokenizer as a special token, or {HINT} ends turns"
            )
        self.end = end.group()

    def after(
        self,
        before: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        mark: str = _PROBE,
    ) -> tuple[str, str]:
        """The end token of a reply that ends with `mark`, and the text from there to where the agent speaks
        again.

        Raises ConfigurationError where the template cannot render this talk or does not end the reply.
        """
        schemas = [dict(tool) for tool in tools]
        _, sep, going = self._render([*before, reply, *following], schemas, generate=True).rpartition(mark)
        if not sep:
            raise rewrites("what was said is not shown any more when the conversation goes on")
        if reply.tool_calls:
            ended = self._render([*before, reply], schemas).rpartition(mark)[2]
            end = self._end_of_call(ended, going)
        else:
            going = going.lstrip()
            end = self._controls.match(going)
        if end is None:
            raise rewrites("no control token stands after a reply when the conversation goes on")
        return end.group(), going[end.end() :]

    def without_closing(self, text: str, end: str | None) -> str:
        """A talk's text without what stands after its last reply; `end` is the token after a call, if any."""
        text = text.rstrip()
        if end is None or end in (self.end, self.talk_end):
            return text.removesuffix(self.closing.strip())
        return text.removesuffix(end)

    def said(self, text: str) -> str:
        """The reply in the text of a talk of a user's "x" and one reply: it begins as a prompt does.

        Raises ConfigurationError where it does not: the prompt closes a thought that the template then shows
        open, say (Qwen 3.5 without thinking).
        """
        for beginning in (self.start, self.start.rstrip(), self.opening):
            if text.startswith(beginning):
                return text[len(beginning) :]
        raise ConfigurationError("the chat template shows this reply otherwise than after its own prompt")

    def _end_of_call(self, ended: str, going: str) -> re.Match[str] | None:
        """The end token after a call, in a talk that goes on; `ended` is what stands there in one that ends.

        Either is the call's own closing, then the token: what ends any reply (`<|im_end|>`), the last control
        token that both have (`<|call|>` of gpt-oss, `<|tool_response>` of Gemma 4) or the first of what
        follows (`<|observation|>` of GLM).
        """
        alike = len(common_prefix(ended, going))
        controls = list(self._controls.finditer(going))
        common = [control for control in controls if control.end() <= alike]
        if self.talk_end is not None:
            usual = [control for control in common if control.group() in (self.end, self.talk_end)]
            if usual:
                return usual[0]
            if common and not ended[common[-1].end() :].strip():
                return common[-1]
        return next((control for control in controls if control.end() > alike), None)

    def _common(self, one: str, other: str) -> str:
        """The beginning that both texts share, control tokens whole."""
        end = len(common_prefix(one, other))
        tokens = self._controls.finditer(one)
        return one[
            : min((token.start() for token in tokens if token.start() < end < token.end()), default=end)
        ]


# --- the check of a template on every kind of reply and answer ---

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
    """The index of each reply, with the messages that answer it."""
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
                    f"its frame of {kind} depends on what stood before: {alone[kind]!r:.120} or {here!r:.120}"
                )
        _refuse_losses(talk, render(talk, [dict(tool) for tool in tools], generate=True))


def _refuse_losses(talk: Sequence[Message], text: str) -> None:
    messages = [message for message in talk if not message.tool_calls]  # some show no words beside a call
    for message in messages:
        if (times := text.count(message.content)) != 1:
            raise rewrites(f"it shows an earlier message of role {message.role} {times} times")
    places = [text.find(message.content) for message in messages]
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
