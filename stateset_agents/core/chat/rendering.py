"""Conversations to text: a jinja chat template, given messages in the roles and the shape that it reads.

`core/chat/template.py` turns the text into ids.
"""

from __future__ import annotations

import datetime
import gc
import hashlib
import json
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

from stateset_agents.core.chat.plain_template import with_calls_as_text, with_thought_as_text
from stateset_agents.types.errors import ConfigurationError, ConversationRefused
from stateset_agents.types.images import IMAGE_MARK, Image
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.settings import nearest

# --- pinned templates ---

_PINNED_FIRST, _PINNED_LAST = "{#- stateset_agents: ", "{#- stateset_agents: the template #}\n"
_CLOCK = re.compile(r"\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(['\"])([^\\]*?)\1\s*\)")
_ANY_CLOCK = re.compile(r"\bstrftime_now\b(?!\s+is\s+(?:not\s+)?defined\b)")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTemplate:
    """A chat template with the arguments and the day that it is rendered with, as one text for any renderer.

        {#- stateset_agents: {"date": "2026-11-28", "arguments": {"enable_thinking": false}} #}
        {%- macro strftime_now(format) -%}{{- {'%d %b %Y': '28 Nov 2026'}[format] -}}{%- endmacro %}
        {%- set enable_thinking = enable_thinking | default(False) %}
        {#- stateset_agents: the template #}
        {{- bos_token }} ...

    `Rendering` renders this text, and `write_template` puts it beside weights: so plain transformers, other
    servers and this library prompt a model with the tokens that it was trained on. Arguments that a caller of
    `apply_chat_template` gives win over those that are pinned.
    """

    text: str
    """Jinja, without what is pinned."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    date: datetime.date | None = None
    """Day on which its clock stands still, at midnight; None where it has none, or where that goes on."""

    @classmethod
    def read(cls, text: str) -> PinnedTemplate:
        """Reads a text that `written` wrote; any other text has nothing pinned."""
        head, separator, own = text.partition(_PINNED_LAST)
        if not separator or not head.startswith(_PINNED_FIRST):
            return cls(text=text)
        pinned = json.loads(head.removeprefix(_PINNED_FIRST).split(" #}\n")[0])
        date = pinned["date"]
        return cls(
            text=own,
            arguments=pinned["arguments"],
            date=None if date is None else datetime.date.fromisoformat(date),
        )

    @property
    def tells_date(self) -> bool:
        """True if the template has a clock. Raises ConfigurationError for one that cannot be stopped."""
        if _ANY_CLOCK.search(_CLOCK.sub("", _COMMENT.sub("", self.text))):
            raise ConfigurationError(
                "the chat template computes the format of its date, or names strftime_now without a call: "
                "give one that has it as text, such as "
                "strftime_now('%Y-%m-%d'), or AgentConfig(chat_template=\"plain\")"
            )
        return _CLOCK.search(self.text) is not None

    def written(self) -> str:
        """One text for any renderer; the template's own where nothing is pinned.

        Lines end in the line end that jinja's `trim_blocks` drops, so what follows begins as it would alone.
        """
        if not self.arguments and self.date is None:
            return self.text
        date = None if self.date is None else self.date.isoformat()
        pinned = json.dumps({"date": date, "arguments": self.arguments}).replace("#", "\\u0023")
        lines = [f"{_PINNED_FIRST}{pinned} #}}\n"]
        if self.date is not None:
            days = {call[2]: self.date.strftime(call[2]) for call in _CLOCK.finditer(self.text)}
            lines.append(
                f"{{%- macro strftime_now(format) -%}}{{{{- {days!r}[format] -}}}}{{%- endmacro %}}\n"
            )
        lines += [
            f"{{%- set {name} = {name} | default({value!r}) %}}\n" for name, value in self.arguments.items()
        ]
        return "".join([*lines, _PINNED_LAST, self.text])


def write_template(folder: Path, text: str, stop_ids: Sequence[int]) -> None:
    """Let the model in `folder` be prompted by this template alone, and end its turns by these tokens, in
    plain transformers and in other servers. Raises OSError where the disk cannot take it."""
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)  # an older processor's
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)  # transformers prefers them
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id")
    if {*stop_ids} != {*(ends if isinstance(ends, list) else [ends])}:
        settings["eos_token_id"] = list(stop_ids)
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --- bounds for the code of templates, which strangers made: jinja's sandbox does not stop endless loops ---

_SECONDS, _SECONDS_EACH = 1.0, 0.01
"""Processor time of one rendering, and for each message and tool in it: a hundred times what they take."""
_FILE = "<template>"
"""The file name that jinja gives to the code of a template."""
_LINES = 8
"""Between two looks at the clock."""
_MOST_TIMES = 10_000
"""Largest number of times that a text may be repeated by `*`."""
_MOST = 10_000_000
"""Largest number in a template: `ljust` and its like fill the memory, too."""


class RenderLimit(Exception):
    """A rendering has used up its processor time."""


def within_limit(render: Callable[[], str], size: int) -> str:
    """The text that `render` returns; `size` counts messages and tools. Raises RenderLimit where it takes
    too long.

    The interpreter calls us for each line of the template that it executes, in this thread alone, so that
    nothing has to be killed. A debugger's own such function is back afterwards. A garbage collection within
    it is not its own: one of a large heap takes a second.
    """
    seconds = _SECONDS + _SECONDS_EACH * size
    deadline, lines, collection_start = time.thread_time() + seconds, 0, 0.0
    thread = threading.get_ident()
    late = RenderLimit(f"it took longer than {seconds:.1f} s of processor time")

    def on_line(_: FrameType, __: str, ___: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % _LINES == 0 and time.thread_time() > deadline:
            raise late
        return on_line

    def on_call(frame: FrameType, _: str, __: Any) -> Any:
        return on_line if frame.f_code.co_filename == _FILE else None

    def on_collection(phase: str, _: Mapping[str, int]) -> None:
        nonlocal deadline, collection_start
        if threading.get_ident() == thread:
            now = time.thread_time()
            deadline += now - collection_start if phase == "stop" else 0.0
            collection_start = now

    previous = sys.gettrace()
    sys.settrace(on_call)
    gc.callbacks.append(on_collection)
    try:
        text = render()
    finally:
        gc.callbacks.remove(on_collection)
        sys.settrace(previous)
    if time.thread_time() > deadline:
        raise late
    return text


def expect_no_bombs(tree: Any) -> None:
    """Raises ConfigurationError for a template with `**`, with `*` by what may be any number, or with a huge
    number: a single such step fills the memory, and no clock is looked at within it. `tree` is jinja's."""
    from jinja2 import nodes

    for power in tree.find_all(nodes.Pow):
        raise ConfigurationError(f"the chat template has a power (**) in line {power.lineno}: leave it out")
    for step in tree.find_all(nodes.Mul):
        sides = (step.left, step.right)
        factors = [side.value for side in sides if isinstance(side, nodes.Const)]
        if not any(isinstance(factor, int) and factor <= _MOST_TIMES for factor in factors):
            raise ConfigurationError(
                f"the chat template multiplies by any number in line {step.lineno}: at most {_MOST_TIMES:,}"
            )
    for number in tree.find_all(nodes.Const):
        if isinstance(number.value, int) and number.value > _MOST:
            raise ConfigurationError(
                f"the chat template has {str(number.value)[:20]} in line {number.lineno}: at most {_MOST:,}"
            )


HINT = 'set AgentConfig(chat_template="plain") or give a template that'
_FIRST = 10**23 + secrets.randbelow(10**23)
MARKS = tuple(f"{number:024d}" for number in range(_FIRST, _FIRST + 32))
"""Stand for texts where we look for what a template writes around them."""
_CALL = ToolCall(name="look", arguments={"at": MARKS[0]}, id="call_0_0")
_BARE_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_OWN = {
    *("messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("strftime_now", "raise_exception", "namespace", "bos_token", "eos_token", "unk_token", "pad_token"),
}
"""Names that `apply_chat_template` or the template itself gives a meaning."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks what the agent said; transformers has it, jinja does not."""
_THOUGHTS = re.compile(r"(?:\.|['\"])(?:reasoning_content|reasoning|thinking)\b")


def checked_arguments(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a template as JSON has them; raises ConfigurationError for one that the template does
    not have, or JSON, and for a template that cannot be read."""
    _parsed(text)
    names = _variables(text) - _OWN if arguments else set()
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _OWN:
            raise ConfigurationError(f"the chat template's {name!r} is not free to be set: leave it out")
        if name not in names:
            raise ConfigurationError(f"the chat template has no argument {name!r}{nearest(name, names)}")
        try:
            plain[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the chat template's argument {name!r} must be text, a number, true, false, null, a list or "
                f"a mapping, got {value!r}: quote it"
            ) from error
    return plain


def _variables(text: str) -> set[str]:
    """The names that a template reads and does not only set itself."""
    from jinja2 import meta

    return meta.find_undeclared_variables(_parsed(text))


def _parsed(text: str) -> Any:
    """Jinja's tree of a template. Raises ConfigurationError for a text that is none, and for a bomb."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
        expect_no_bombs(tree)
    except (TemplateSyntaxError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise ConfigurationError(f"the chat template cannot be read ({line}); {HINT} can") from error
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The form in which a template reads messages; most read OpenAI's, with arguments as an object."""

    has_parts: bool = False
    """Content is a list of `{"type": "text", "text": ...}`."""
    has_arguments_as_text: bool = False
    """A call's arguments are JSON text (DeepSeek)."""
    has_short_ids: bool = False
    """A call's id has nine letters and digits (Mistral)."""
    has_thoughts: bool = False
    """It reads thoughts; other templates get them back into the content."""
    joins_thoughts: bool = False
    """It takes thought or words before a call, not both (gpt-oss)."""
    image_token: str | None = None
    """Stands for a picture in the content; None where a picture is a part, `{"type": "image"}`."""

    def written(self, message: Message) -> dict[str, Any]:
        """The message as the template reads it."""
        thought = message.reasoning
        if thought and self.joins_thoughts and message.content and message.tool_calls:
            message, thought = replace(message, content=f"{thought}\n\n{message.content}"), None
        elif thought is not None and not self.has_thoughts:
            message, thought = replace(message, content=with_thought_as_text(message)), None
        images, message = message.images, replace(message, images=())
        data = message.to_openai()
        if thought is not None:
            data |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
        text = message.content.replace(IMAGE_MARK, self.image_token or IMAGE_MARK, len(images))
        if images and self.image_token is None:
            data["content"] = replace(message, images=images).parts(lambda _: {"type": "image"})
        elif self.has_parts:
            data["content"] = [{"type": "text", "text": text}]
        elif images:
            data["content"] = text
        for call, item in zip(message.tool_calls, data.get("tool_calls", ()), strict=True):
            item["id"] = _short_id(call.id) if self.has_short_ids else call.id
            item["function"]["arguments"] = (
                json.dumps(dict(call.arguments), ensure_ascii=False)
                if self.has_arguments_as_text
                else dict(call.arguments)
            )
        if message.tool_call_id is not None and self.has_short_ids:
            data["tool_call_id"] = _short_id(message.tool_call_id)
        return data


def _short_id(id: str) -> str:
    """Nine letters and digits."""
    return hashlib.sha256(id.encode()).hexdigest()[:9]


class Rendering:
    """Renders conversations as text by a template, and finds out by trying how it reads messages."""

    def __init__(
        self,
        hf: Any,
        text: str,
        arguments: Mapping[str, Any],
        date: datetime.date,
        *,
        image_token: str | None = None,
    ) -> None:
        """`hf` is a transformers tokenizer; on `date` the template's clock stands still, at midnight.
        `image_token` stands for a picture in the text that the model reads.

        Raises ConfigurationError for arguments that the template does not have, and for a clock that cannot
        be stopped.
        """
        self._hf = hf
        own = PinnedTemplate(text=text, arguments=checked_arguments(text, arguments))
        self.pinned = replace(own, date=date) if own.tells_date else own
        self._text = self.pinned.written()
        self._endless: RenderLimit | None = None
        self._shape = _Shape(has_thoughts=_THOUGHTS.search(text) is not None)
        self._find_shape()
        if image_token is not None:
            self._find_image_shape(image_token)
        self._needs_descriptions = False
        try:
            self([Message(role="user", content="x")], [_BARE_TOOL])
        except ConversationRefused:
            self._needs_descriptions = True

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generate: bool = False
    ) -> str:
        """The text; with `generate` up to where the agent begins to speak.

        Raises ConversationRefused where the template cannot render these messages, ConfigurationError where
        it takes too long, and from then on.
        """
        from jinja2 import TemplateError

        entries = [self._shape.written(message) for message in messages]
        described = [self._described(tool) for tool in tools] or None
        try:
            if self._endless is not None:
                raise self._endless
            text = within_limit(
                lambda: self._hf.apply_chat_template(
                    entries,
                    tools=described,
                    chat_template=self._text,
                    add_generation_prompt=generate,
                    tokenize=False,
                ),
                len(messages) + len(tools),
            )
        except RenderLimit as limit:
            self._endless = limit  # a hundred conversations are tried while a template is loaded
            raise ConfigurationError(f"the chat template does not end ({limit}); {HINT} does") from None
        except (
            *(TemplateError, SyntaxError),  # Python's, of code that jinja made of a strange template
            *(ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RuntimeError),
            *(TypeError, ValueError),
        ) as error:  # all but the first arise inside its expressions
            line = " ".join(str(error).split()) or type(error).__name__
            raise ConversationRefused(
                f"the chat template cannot render this conversation ({line}); {HINT} can"
            ) from error
        return str(text)

    def shows(self, *messages: Message) -> bool:
        """True if the first mark, which one of the messages holds, stands in the text."""
        try:
            return MARKS[0] in self(messages)
        except ConversationRefused:
            return False

    def _described(self, tool: dict[str, Any]) -> dict[str, Any]:
        """The tool, with an empty description where it has none and the template cannot do without."""
        function = tool.get("function")
        if not self._needs_descriptions or not isinstance(function, Mapping):
            return tool
        return {**tool, "function": {**function, "description": function.get("description") or ""}}

    def _find_shape(self) -> None:
        user, words = Message(role="user", content=MARKS[0]), Message(role="assistant", content="y")
        self._try([replace(self._shape, has_parts=parts) for parts in (False, True)], user, words)
        self._try(
            [
                replace(self._shape, has_arguments_as_text=as_text, has_short_ids=short)
                for as_text, short in product((False, True), repeat=2)
            ],
            *_tool_round(),
        )
        if self._shape.has_thoughts:
            full = replace(words, reasoning="z", tool_calls=(_CALL,))
            self._try([replace(self._shape, joins_thoughts=joins) for joins in (False, True)], user, full)

    def _find_image_shape(self, image_token: str) -> None:
        """Finds out whether the template writes pictures that are parts; else they stand in the content."""
        picture = Image(data=b"any")
        probe = Message(role="user", content=IMAGE_MARK + MARKS[0], images=(picture,))
        try:
            has_parts = self([probe]).count(image_token) == 1
        except ConversationRefused:
            has_parts = False
        if not has_parts:
            self._shape = replace(self._shape, image_token=image_token)

    def _try(self, shapes: Sequence[_Shape], *messages: Message) -> None:
        """Take the first shape in which the template shows the mark in these messages, else the first."""
        for self._shape in shapes:
            if self.shows(*messages):
                return
        self._shape = shapes[0]


def _tool_round() -> list[Message]:
    """A result that holds the first mark, after a reply with its call."""
    call = replace(_CALL, arguments={"at": "K27"})
    return [
        Message(role="user", content="x"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=MARKS[0], name="look", tool_call_id=_CALL.id),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles that a template has a place for; messages in other roles are told in other words.

    Where it has no system role, the system message stands at the head of the user message that follows it.
    Where it has no place for a tool's result, that is told in a user message, `tool: ...`: a model may write
    a call, though nobody offered it tools, or one that cannot be read.
    """

    has_system: bool
    has_several_systems: bool
    """True if several system messages may begin a talk; else they are told as one."""
    has_results: bool
    """True if the results of tools may follow a reply with calls."""
    has_loose_results: bool
    """After a reply without one, too."""
    has_calls: bool
    has_several_calls: bool
    """True if one reply may have several calls."""

    def without_tools(self) -> Roles:
        """These roles for a template that may not be given calls and results."""
        return replace(
            self, has_results=False, has_loose_results=False, has_calls=False, has_several_calls=False
        )

    def opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        """A whole conversation, the system messages that begin it as one where the template wants one."""
        later = (index for index, message in enumerate(messages) if message.role != "system")
        first = next(later, len(messages))
        if first < 2 or self.has_several_systems or not self.has_system:
            return messages
        text = "\n\n".join(message.content for message in messages[:first])
        return [replace(messages[0], content=text), *messages[first:]]

    def spoken(self, messages: Sequence[Message], *, answers_call: bool = False) -> list[Message]:
        """The messages in roles that the template knows; the first may answer a reply with calls."""
        talk: list[Message] = []
        texts: list[str] = []  # what the next user message is to begin with
        for message in messages:
            if (text := self._as_user_text(message, answers_call)) is not None:
                texts.append(text)
                continue
            if texts and message.role == "user":
                message, texts = replace(message, content="\n\n".join([*texts, message.content])), []
            elif texts:
                talk, texts = _said_by_user(talk, texts), []
            if message.role == "assistant":
                message = self._with_readable_calls(message)
                answers_call = bool(message.tool_calls)
            talk.append(message)
        return _said_by_user(talk, texts) if texts else talk

    def _as_user_text(self, message: Message, answers_call: bool) -> str | None:
        """A message in a role that the template does not know, in a user's words; None for other messages."""
        if message.role == "system" and not self.has_system:
            return message.content
        if message.role == "tool" and not (self.has_results if answers_call else self.has_loose_results):
            return f"tool: {message.content}"
        return None

    def _with_readable_calls(self, message: Message) -> Message:
        """A call that could not be read, or that the template would leave out, stands in the content."""
        readable = tuple(call for call in message.tool_calls if call.error is None and self.has_calls)
        if len(readable) == len(message.tool_calls):
            return message
        others = tuple(call for call in message.tool_calls if call not in readable)
        text = with_calls_as_text(replace(message, tool_calls=others))
        return replace(message, content=text, tool_calls=readable)


def find_roles(rendering: Rendering) -> Roles:
    """Finds the roles of a template by trying them."""
    user, reply, result = _tool_round()
    second = replace(_CALL, id="call_0_1")
    shows_loose = rendering.shows(user, Message(role="assistant", content="y"), result)
    shows_results = rendering.shows(user, reply, result)
    shows_calls = rendering.shows(user, replace(reply, tool_calls=(_CALL,)))
    system, other = (Message(role="system", content=text) for text in (MARKS[0], "x"))
    return Roles(
        has_system=rendering.shows(system, user),
        has_several_systems=rendering.shows(system, other, user) and rendering.shows(other, system, user),
        has_results=shows_results,
        has_loose_results=shows_loose,
        has_calls=shows_results and (shows_calls or not shows_loose),
        has_several_calls=rendering.shows(
            user, replace(reply, tool_calls=(*reply.tool_calls, second)), result
        ),
    )


def _said_by_user(talk: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """The messages with these texts behind them, in the last user's message where that is the last: such
    templates want roles to alternate."""
    if talk and talk[-1].role == "user":
        *talk, last = talk
        return [*talk, replace(last, content="\n\n".join([last.content, *texts]))]
    return [*talk, Message(role="user", content="\n\n".join(texts))]
