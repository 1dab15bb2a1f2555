"""Messages to token ids: what a model's chat template makes of a conversation, piece by piece.

An episode renders its first prompt whole and afterwards only appends: the *delta* of a template is what
stands between the agent's end-of-turn token and the agent's next words. What was sampled is never
rendered again, so a template must not rewrite history; one that does is refused when it is loaded.

Text from users and tools cannot forge roles: control tokens written out in it are encoded as plain text.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from stateset_agents.core.chat.escaping import ControlTokenEscaper
from stateset_agents.core.chat.plain_template import PlainTemplate, with_calls_as_text
from stateset_agents.core.chat.reply_parsing import parse_reply
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message

__all__ = ["ChatTemplate", "JinjaTemplate", "PlainTemplate", "parse_reply"]

_log = get_logger(__name__)

ToolSchemas = Sequence[Mapping[str, Any]]

_PROBE = f"{secrets.randbelow(10**24):024d}"
"""Stands for a message's text where we look for what a template writes around it."""
_NUM_DELTAS, _MOST_CHARACTERS = 256, 2000
"""How many deltas a template remembers, and of how long messages."""
_HINT = 'set AgentConfig(chat_template="plain") or give a template that'


class ChatTemplate(Protocol):
    """Encodes conversations as one model's token ids."""

    end_id: int
    """Appended, untrained, to a turn that was cut by length."""
    stop_ids: tuple[int, ...]
    """Sampling any of these ends a turn."""

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak."""
        ...

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Ids from right after the agent's end-of-turn token to where it speaks again."""
        ...

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number that the prompt is never shorter than, computed without tokenising it."""
        ...


class JinjaTemplate:
    """The tokenizer's own chat template (transformers). It renders the whole prompt once, then only deltas.

    Where a template has no system role, the system message stands at the head of the user message that
    follows it. Where it has no place for tool results, a result is told in a user message, `tool: ...`: a
    model may write a call, though nobody offered it tools.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """`tokenizer` is a `HuggingFaceTokenizer`; `chat_template` replaces the tokenizer's own text.

        Raises ConfigurationError for a template that does not end turns by a control token or that
        rewrites history.
        """
        self.tokenizer = tokenizer
        try:
            self.text: str = tokenizer.hf.get_chat_template(chat_template)
        except ValueError as error:
            raise ConfigurationError(f"no chat template to use ({_line(error)}); {_HINT} fits") from error
        controls = _control_tokens(tokenizer)
        self._control_ids = frozenset(controls.values())
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end, self.end_id = self._find_end()
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *tokenizer.eos_ids)))
        self._has_system_role = self._shows([_message("system", _PROBE), _message("user", "x")])
        result = Message(role="tool", content=_PROBE, name="look", tool_call_id="call_0_0")
        self._has_tool_role = self._shows([_message("user", "x"), _message("assistant", "y"), result])
        self._trims = self._trims_words()
        self._tools_checked = False
        self._last: tuple[str, list[int]] = "", []
        self._known_delta = functools.lru_cache(_NUM_DELTAS)(self._new_delta)
        self._refuse_rewriting()

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak.

        Raises ConfigurationError where the template cannot render it, or has no place for tools.
        """
        if tools and not self._tools_checked:
            self._check_tools(tools)
            self._tools_checked = True
        opening = repr((messages, tools))
        if opening != self._last[0]:  # the members of a group open alike
            spoken = self._with_roles(messages)
            ids = self._encode(
                lambda escaper: self._render(escaper.messages(spoken), escaper.schemas(tools), generate=True)
            )
            self._last = opening, ids
        return list(self._last[1])

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Ids from right after the agent's end-of-turn token to where it speaks again.

        They depend on these messages alone, and the members of a group hear much alike: at the retail desk
        four of five deltas have been made before.
        """
        following = tuple(messages)
        long = sum(len(message.content) for message in following) > _MOST_CHARACTERS
        if long or any(message.tool_calls for message in following):  # a call's arguments have no hash
            return list(self._new_delta(following))
        return list(self._known_delta(following))

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number that the prompt is never shorter than, computed without tokenising it.

        Only what every template shows counts: the words of users and of the agent, without white space at
        their ends where the template trims it.
        """
        shown = (message.content for message in messages if message.role in ("user", "assistant"))
        text = "".join(map(str.strip, shown) if self._trims else shown)
        return int(self.tokenizer.least_tokens(text))

    def _new_delta(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        spoken = self._with_roles(messages)
        # The end token goes along, for some tokenizers read what follows a control token differently.
        ids = self._encode(lambda escaper: self._end + self._after_reply(escaper.messages(spoken)))
        return tuple(ids[1:])

    def _encode(self, render: Callable[[ControlTokenEscaper], str]) -> list[int]:
        """Ids in which every control token is the template's own.

        These are the control tokens that are left when every text is escaped. Where escaping only the control
        tokens in texts leaves others, a text has become a control token after all.
        """
        escape_some, escape_all = (
            ControlTokenEscaper(self._controls),
            ControlTokenEscaper(self._controls, escape_all=True),
        )
        ids = escape_some.encode(render(escape_some), self.tokenizer)
        safe_ids = escape_all.encode(render(escape_all), self.tokenizer)
        return ids if self._controls_of(ids) == self._controls_of(safe_ids) else safe_ids

    def _controls_of(self, ids: Sequence[int]) -> list[int]:
        return [id for id in ids if id in self._control_ids]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), generate: bool = False
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.hf.apply_chat_template(
                [_template_message(message) for message in messages],
                tools=list(tools) or None,
                chat_template=self.text,
                add_generation_prompt=generate,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:  # the last two arise inside its expressions
            raise ConfigurationError(
                f"the chat template cannot render this conversation ({_line(error)}); {_HINT} can"
            ) from error
        return str(text)

    def _after_reply(self, following: Sequence[Message]) -> str:
        """What the template writes after an assistant message and its end token, up to the next one."""
        conversation = [_message("user", "x"), _message("assistant", _PROBE), *following]
        after = self._render(conversation, generate=True).rpartition(_PROBE)[2].lstrip()
        if not after.startswith(self._end):
            raise ConfigurationError(_REWRITES)
        return after[len(self._end) :]

    def _find_end(self) -> tuple[str, int]:
        """The end-of-turn token after an assistant message, as text and id.

        What the template writes between the two (a line end, say) is left to the next delta.
        """
        head = self._render([_message("user", "x"), _message("assistant", _PROBE)])
        before, _, after = head.partition(_PROBE)
        end = self._controls.match(after.lstrip()) if before != head and _PROBE not in after else None
        if end is None:
            raise ConfigurationError(
                "the chat template does not end an assistant message with a control token, so nothing could "
                f"stop a turn; {_HINT} ends turns"
            )
        return end.group(), self.tokenizer.encode_markup(end.group())[-1]

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Whether the template has a place for these messages, one of which says the probe."""
        try:
            return _PROBE in self._render(messages)
        except ConfigurationError:
            return False

    def _trims_words(self) -> bool:
        """Whether white space at the ends of a user's or the agent's words may be lost."""
        wide = f" \n {_PROBE} \n "
        messages = [_message(role, wide) for role in ("user", "assistant", "user")]
        return self._render(messages).count(wide) < len(messages)

    def _with_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in roles that the template knows."""
        if self._has_system_role and self._has_tool_role:
            return messages
        spoken: list[Message] = []
        held: list[str] = []  # what the next user message is to begin with
        for message in messages:
            if (text := self._as_user_text(message)) is not None:
                held.append(text)
                continue
            if held and message.role == "user":
                message, held = replace(message, content="\n\n".join([*held, message.content])), []
            elif held:
                spoken, held = _said_by_user(spoken, held), []
            spoken.append(message if self._has_tool_role else _without_calls(message))
        return _said_by_user(spoken, held) if held else spoken

    def _as_user_text(self, message: Message) -> str | None:
        """What a message in a role that the template does not know is in a user's words; None for others."""
        if message.role == "system" and not self._has_system_role:
            return message.content
        if message.role == "tool" and not self._has_tool_role:
            return f"tool: {message.content}"
        return None

    def _check_tools(self, tools: ToolSchemas) -> None:
        """Before the first prompt with tools: the template must show their results, and still only append."""
        if not self._has_tool_role:
            raise ConfigurationError(
                f"the chat template has no place for tool results; {_HINT} has, or leave tools out"
            )
        self._refuse_rewriting(tools)
        if "tools" not in self.text:  # a template whose model knows its tools by heart says so in a comment
            _warn_of_hidden_tools(self.text)

    def _refuse_rewriting(self, tools: ToolSchemas = ()) -> None:
        """Replies with a thinking part are tried too: many templates drop it once the talk goes on."""
        for thinking in ("", "<think>\nso\n</think>\n\n"):
            messages = [
                *([_message("system", "s")] if self._has_system_role else []),
                _message("user", "first"),
                _message("assistant", f"{thinking}one"),
                _message("user", "second"),
                _message("assistant", f"{thinking}two"),
                _message("user", "third"),
            ]
            self._refuse_unless_appending(messages, [dict(tool) for tool in tools])

    def _refuse_unless_appending(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Prompt, replies and deltas laid end to end must be what the template renders as a whole."""
        rendered = self._render(messages, tools, generate=True)
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        pattern = re.escape(self._render(messages[: replies[0]], tools, generate=True))
        for index, following in zip(replies, [*replies[1:], len(messages)], strict=True):
            reply, delta = messages[index].content, self._after_reply(messages[index + 1 : following])
            pattern += rf"\s*{re.escape(reply)}\s*{re.escape(self._end)}{re.escape(delta)}"
            so_far = self._render(messages[: index + 1], tools).rpartition(self._end)[0]
            if not rendered.startswith(so_far):
                raise ConfigurationError(_REWRITES)
        if not re.fullmatch(pattern, rendered):
            raise ConfigurationError(_REWRITES)


_REWRITES = (
    "the chat template rewrites history (a conversation reads differently as a whole than turn by turn), so "
    f"sampled tokens could not be trained as they were sampled; {_HINT} only appends"
)


@functools.cache
def _warn_of_hidden_tools(template: str) -> None:
    """Once per template, however many agents of this process have it."""
    _log.warning(
        f"the chat template does not tell the model which tools there are; {_HINT} does (a model that was "
        "trained on this template and knows them by heart should keep it: say so in a comment in the "
        "template, {# tools: known by heart #})"
    )


def _message(role: Any, content: str) -> Message:
    return Message(role=role, content=content)


def _said_by_user(spoken: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """The messages with these texts behind them, in the last user's message where that is the last: such
    templates want roles to alternate."""
    if spoken and spoken[-1].role == "user":
        *spoken, last = spoken
        return [*spoken, replace(last, content="\n\n".join([last.content, *texts]))]
    return [*spoken, _message("user", "\n\n".join(texts))]


def _without_calls(message: Message) -> Message:
    return (
        replace(message, content=with_calls_as_text(message), tool_calls=())
        if message.tool_calls
        else message
    )


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    """Every text that markup reads as one control token and plain text does not."""
    added = {token.content: id for id, token in tokenizer.hf.added_tokens_decoder.items()}
    return {content: id for content, id in added.items() if id not in tokenizer.encode(content)}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _template_message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: OpenAI's shape with tool arguments as an object."""
    data = message.to_openai()
    for call, item in zip(message.tool_calls, data.get("tool_calls", ()), strict=True):
        item["function"]["arguments"] = dict(call.arguments)
    return data
