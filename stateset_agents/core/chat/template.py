"""Messages to token ids: what a model's chat template makes of a conversation, piece by piece.

An episode renders its first prompt whole and afterwards appends: the *delta* of a template is what stands
between the agent's end-of-turn token and the agent's next words. It is one text for each kind of answer,
whatever stood before; a template of which that is not true is refused when it is loaded. Many templates show
earlier replies otherwise than they were said, without their thoughts, say: `goes_on` tells where.

Text from users and tools cannot forge roles: control tokens written out in it are encoded as plain text.
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.backends.pretrained.pictures import PictureReader, with_pictures
from stateset_agents.core.chat.escaping import ControlTokenEscaper, MarkupEncoder
from stateset_agents.core.chat.plain_template import CHATML, PlainTemplate, speaks_chatml
from stateset_agents.core.chat.rendering import HINT, MARKS, PinnedTemplate, Rendering, Roles, find_roles
from stateset_agents.core.chat.replies.parsing import ReplyParser, choose_parser
from stateset_agents.core.chat.turn_ends import TOOL, TurnEnds, answers, probe_talks, refuse_unstable
from stateset_agents.types.comparison import canonical
from stateset_agents.types.errors import ConfigurationError, ConversationRefused
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.schemas import (
    call_key,
    kinds_of,
    merged,
    outside_reference,
    parameters_of,
    without_defaults,
)

# --- why a reply cannot be taught ---

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
            f"this chat template shows no thought of such a reply: leave `reasoning` out, {_OTHER_TEMPLATE}"
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
    """The cause and its mend for one call that does not come back as it was given."""
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
    """The reason why the template does not write the message, or None."""
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


ToolSchemas = Sequence[Mapping[str, Any]]

_PROBE = MARKS[0]
_ASKED = Message(role="user", content="x")
_THOUGHT_END = "\n</think>\n\n"
_NUM_DELTAS, _MOST_CHARACTERS = 256, 2000
"""Number of deltas that a template remembers, and the length of the longest messages in them."""


class JinjaTemplate:
    """The tokenizer's own chat template (transformers), and what it does with conversations that go on."""

    stop_ids: tuple[int, ...]
    """Sampling any of these ends a turn."""
    parser: ReplyParser
    """Reads what the agent sampled."""
    appends: bool
    """True if its rendering of any longer conversation begins with what stood before: prompt, reply, delta,
    ..."""
    date: datetime.date | None
    """The day that it tells the model; None where it tells none."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
        allow_hidden_tools: bool = False,
        pictures: PictureReader | None = None,
    ) -> None:
        """`tokenizer` is a `HuggingFaceTokenizer`; `chat_template` replaces the tokenizer's own text.

        `pictures` reads those of messages, for a model that is given them.

        `arguments` are the template's own, such as `enable_thinking`. A template that tells the date tells
        `date`, today's where it is not given, as long as this object lives. One that `written` wrote has both
        already, for what is not given. `allow_hidden_tools`: tools may be offered though the template does
        not list them.

        Raises ConfigurationError for a template that does not end turns by a control token, or that shows
        only part of a conversation or what depends on how far it has come; and for arguments that the
        template does not have.
        """
        self.tokenizer = tokenizer
        try:
            text = tokenizer.hf.get_chat_template(chat_template)
        except ValueError as error:
            line = " ".join(str(error).split())
            raise ConfigurationError(f"no chat template to use ({line}); {HINT} fits") from error
        if not isinstance(text, str):
            raise ConfigurationError(f"the chat template is no text, but {text!r:.60}; {HINT} fits")
        pinned = PinnedTemplate.read(text)
        self.text, day = pinned.text, date or pinned.date
        self._is_dated = day is not None
        self._pictures = pictures
        self._render = Rendering(
            tokenizer.hf,
            self.text,
            {**pinned.arguments, **(arguments or {})},
            day or datetime.date.today(),
            image_token=None if pictures is None else pictures.token,
        )
        self.date = self._render.pinned.date
        self._encoder = MarkupEncoder(tokenizer)
        self._controls = self._encoder.controls
        self._ends = TurnEnds(self._render, self._controls)
        self._roles = find_roles(self._render)
        wide = f" \n {_PROBE} \n "
        wide_words = [Message(role=role, content=wide) for role in ("user", "assistant", "user")]
        self._trims = self._render(wide_words).count(wide) < len(wide_words)
        """True where white space at the ends of a user's or the agent's words may be lost."""
        greeting = Message(role="assistant", content=_PROBE)
        self._takes_greetings = self._render.shows(greeting, _ASKED)
        refuse_unstable(self._render, self._ends, self._roles.without_tools())
        is_own = speaks_chatml(tokenizer) and not self.text.endswith(CHATML)
        self._tool_hint = HINT.replace('"plain"', '"chatml"') if is_own else HINT
        self._allow_hidden_tools = allow_hidden_tools
        self._tool_fault = self._find_tool_fault()
        self._tools_checked = False
        self._call_end = self._find_call_end()
        self.end_id = self._id(self._ends.end)
        # What ends a talk, and the tokenizer's own; not what merely stands between two messages: gpt-oss
        # closes a thought by it, too.
        ends = [self._ends.talk_end or self._ends.end, *([self._call_end] if self._call_end else [])]
        self.stop_ids = tuple(dict.fromkeys([*map(self._id, ends), *tokenizer.eos_ids]))
        self.prompt_end = self._render([Message(role="user", content=_PROBE)], generate=True).rpartition(
            _PROBE
        )[2]
        """The template's text after a user message, up to where the agent begins to speak."""
        self._last: tuple[str, list[int]] = "", []
        self._known_delta = functools.lru_cache(_NUM_DELTAS)(self._new_delta)
        self.parser = choose_parser(tokenizer, self.prompt_end, self.render_reply)
        tools = [TOOL] if self._roles.has_results else []
        self.appends = all(
            self._extends(talk[:at], talk[at], following, tools)
            for talk in probe_talks(self._roles)
            for at, following in answers(talk)
        )

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak.

        Raises ConfigurationError where the template cannot render it, or cannot be used with tools.
        """
        if tools and not self._tools_checked:
            self._check_tools(tools)
            self._tools_checked = True
        opening = repr((messages, tools))
        last_opening, ids = self._last  # taken at once: long prompts are encoded in a thread
        if opening != last_opening:  # the members of a group open alike
            ids = self._encoder.encode(lambda escaper: self._written(messages, tools, escaper))
            ids = self._with_pictures(ids, messages)
            self._last = opening, ids
        return list(ids)

    def delta(
        self, messages: Sequence[Message], calls: Sequence[ToolCall] = (), *, end: int | None = None
    ) -> list[int]:
        """Ids from right after a reply to where the agent speaks again.

        `calls` are the reply's readable ones, which the messages answer; `end` is the token that the reply
        ended by, maybe another than the template writes there. With None, a limit cut the reply: the ids
        begin with the template's own.

        The ids depend on these alone, and the members of a group hear much alike: at the retail desk four of
        five deltas have been made before.
        """
        ids = self._delta(messages, calls)
        is_missing = end is None or (end != ids[0] and (self._ends.talk_end is None or ids[0] != self.end_id))
        return list(ids if is_missing else ids[1:])

    def goes_on(
        self,
        shown: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: ToolSchemas = (),
        *,
        sampled: Sequence[int] | None = None,
    ) -> bool:
        """True if the template itself goes on from the prompt and the reply.

        Its text of `[*shown, reply, *following]` must begin with its text of `shown`, then show the reply as
        it was sampled, then end by the delta. Only white space may differ, and in calls the order of keys.

        Without `sampled` it is asked of a reply as the template writes it. Where a message cannot tell (a
        thought without words may have been cut, an inserted frame may have been sampled), the answer is
        False: then nothing can go wrong.

        Example: a template that drops earlier thoughts goes on after a reply without one.
        """
        plain = self.appends and not any(message.role == "system" for message in following)
        if plain and (sampled is None or self._writes(reply, following, sampled)):
            return True
        return self._extends(shown, reply, following, tools, sampled)

    def _writes(self, reply: Message, following: Sequence[Message], sampled: Sequence[int]) -> bool:
        """True if the template writes this reply as it was sampled, and ends it so. It is not asked for the
        whole conversation: one that only appends writes a reply as if nothing else had been said."""
        end, text = self._sampled(sampled)
        if end is not None and end != self._delta(following, reply.readable_calls)[0]:
            return False
        is_words = reply.reasoning is None and not reply.tool_calls and _THOUGHT_END.strip() not in text
        if is_words and _squeezed(text) == _squeezed(reply.content):
            return True
        try:
            return self._is_same(self.render_reply(reply), text)
        except ConfigurationError:
            return False

    def render_reply(self, reply: Message) -> str:
        """The template's text of one assistant message, from where the agent begins to speak to before
        its end token.

        Raises ConfigurationError where it does not show all of the thought, the words and the calls.
        """
        escaper = ControlTokenEscaper(self._controls)
        (message,) = self._roles.spoken([reply])
        text = escaper.shown(self._reply_text(reply, escaper))
        parts = Counter([message.content.strip(), (message.reasoning or "").strip()])
        parts += Counter(call.name for call in message.tool_calls)
        missing = [part for part, times in parts.items() if text.count(part) < times]
        if missing:
            raise ConfigurationError(f"the chat template does not show all of a reply: {missing[0]!r:.80}")
        return text

    def reply(self, message: Message, tools: ToolSchemas = ()) -> list[int]:
        """Ids of a reply as the agent would sample it after a prompt, the token that ends it included.

        Raises ConfigurationError where the template writes it so that its thought, words and calls are not
        read back.
        """
        for candidate in (message, _without_defaults(message, tools)):
            if (result := self._read_back(candidate, tools)) is not None:
                reading, unshown = result
                (reply,) = self._roles.spoken([reading])
                end = self._call_end if reply.tool_calls else None
                stop = self.stop_ids[0] if end is None else self._id(end)
                return [*self._encode_reply(reading, unshown), stop]
        why = why_unread(message, tools, self.parser, self.render_reply, self._read_back)
        shown_part = message.content or [call.name for call in message.tool_calls]
        raise ConfigurationError(f"the reply {shown_part!r:.80} cannot be shown to the agent: {why}")

    def _read_back(self, message: Message, tools: ToolSchemas) -> tuple[Message, str | None] | None:
        """The reply in the form in which what the template writes is read back, and the thought that stands
        before that text where the prompt opens one and the template shows none; None where nothing is."""
        thought = message.reasoning or ""
        readings: list[tuple[Message, str | None]] = [(message, None)]
        if message.reasoning is None:  # some prompts open a thought, which has to be closed
            readings.append((replace(message, reasoning=""), None))
        if self.prompt_end.rstrip().endswith("<think>"):  # some of them show no thoughts
            readings.append((replace(message, reasoning=None), thought))
        for reading, unshown in readings:
            try:
                text = ("" if unshown is None else unshown + _THOUGHT_END) + self.render_reply(reading)
            except ConfigurationError:
                continue
            if _says_the_same(self.parser.read(text, tools=tools), message, tools):
                return reading, unshown
        return None

    def pixels(self, messages: Sequence[Message]) -> tuple[PixelValues, ...]:
        """The pictures of these messages, in order, as their tokens stand in `prompt` and `delta`.

        Raises ConfigurationError for a model that reads text alone, ConversationRefused for a picture that
        cannot be read.
        """
        images = [image for message in messages for image in message.images]
        if not images:
            return ()
        if self._pictures is None:
            raise ConfigurationError(
                f"a message has a picture, and {self.tokenizer.hf.name_or_path or 'the model'} reads text "
                "alone: give a vision-language model with its processor, or leave the picture out"
            )
        return tuple(map(self._pictures.read, images))

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number that the prompt is never shorter than, computed without tokenising it.

        Only what every template shows counts: the words of users and of the agent, though not those beside
        a call, without white space at their ends where the template trims it.
        """
        texts = (
            "".join(message.pieces)
            for message in messages
            if message.role == "user" or (message.role == "assistant" and not message.tool_calls)
        )
        text = "".join(map(str.strip, texts) if self._trims else texts)
        return int(self.tokenizer.least_tokens(text))

    def written(self) -> str:
        """The jinja text by which plain transformers, without arguments, makes the same prompts; its clock
        goes on where no date was given."""
        pinned = self._render.pinned
        return (pinned if self._is_dated else replace(pinned, date=None)).written()

    def _reply_text(self, reply: Message, escaper: ControlTokenEscaper) -> str:
        """The template's text of a reply. The frames of its calls are no text, where the template has no
        place for calls, too."""
        (message,) = self._roles.spoken(escaper.messages([reply]))
        text = self._render([_ASKED, message])
        end = self._call_end if message.tool_calls else None
        return self._ends.said(self._ends.without_closing(text, end))

    def _encode_reply(self, reply: Message, unshown: str | None) -> list[int]:
        """Ids of a reply without its end. `unshown`: a thought that the prompt opens and the template does
        not show."""

        def written(escaper: ControlTokenEscaper) -> str:
            text = self._reply_text(reply, escaper)
            if unshown is None:
                return text
            (thought,) = escaper.messages([Message(role="assistant", content=unshown)])
            return thought.content + _THOUGHT_END + text

        start = self.tokenizer.encode_markup(self.prompt_end)
        ids = self._encoder.encode(lambda escaper: self.prompt_end + written(escaper))
        if ids[: len(start)] == start:  # some tokenizers read what follows a control token differently
            return ids[len(start) :]
        return self._encoder.encode(written)

    def _delta(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> tuple[int, ...]:
        """The ids after a reply with these calls, the token that ends it in front."""
        following, names = tuple(messages), tuple((call.name, call.id) for call in calls)
        long = sum(len(message.content) for message in following) > _MOST_CHARACTERS
        if long or any(message.tool_calls for message in following):  # a call's arguments have no hash
            return self._new_delta(following, names)
        return self._known_delta(following, names)

    def _new_delta(
        self, messages: tuple[Message, ...], calls: tuple[tuple[str, str], ...]
    ) -> tuple[int, ...]:
        """The ids of a delta, the end-of-turn token in front: some tokenizers read what follows a control
        token differently."""
        ids = self._encoder.encode(lambda escaper: "".join(self._after_reply(calls, messages, escaper)))
        return tuple(self._with_pictures(ids, messages))

    def _with_pictures(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Ids with each picture's tokens in the place of the one that stands for it."""
        pixels = self.pixels(messages)
        if not pixels or self._pictures is None:
            return ids
        return with_pictures(ids, pixels, self._pictures.place_id)

    def _written(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        escaper: ControlTokenEscaper,
        roles: Roles | None = None,
    ) -> str:
        """The text of a conversation, up to where the agent begins to speak.

        Whatever an agent sampled can be written. Templates raise where there are more calls than they take,
        or results of another number; then calls and results are told in words, in `roles` without tools.
        """
        schemas, messages = escaper.schemas(tools), self._roles.opened(messages)
        talk = (roles or self._roles).spoken(messages)
        try:
            if any(message.role == "system" for message in talk[1:]):
                self._expect_systems(talk, lambda marked: self._render(marked, schemas))
            return self._render(escaper.messages(talk), schemas, generate=True)
        except ConversationRefused as error:
            if roles is not None:
                raise
            begins = next((message.role for message in messages if message.role != "system"), "user")
            if begins == "assistant" and not self._takes_greetings:
                raise ConversationRefused(
                    f"the chat template lets no agent begin: leave its first words out, or {HINT} does"
                ) from error
            if not any(message.tool_calls or message.role == "tool" for message in messages):
                raise
        return self._written(messages, tools, escaper, self._roles.without_tools())

    def _expect_systems(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> None:
        """Raises ConversationRefused for a system message among these that `render` does not show."""
        places = [index for index, message in enumerate(messages) if message.role == "system"]
        if not places:
            return
        marks = dict(zip(places, itertools.cycle(MARKS[1:]), strict=False))
        with_marks = [
            replace(message, content=marks.get(index, message.content))
            for index, message in enumerate(messages)
        ]
        text = render(with_marks)
        missing = next((messages[index].content for index, mark in marks.items() if mark not in text), None)
        if missing is not None:
            raise ConversationRefused(
                f"the chat template does not show a system message amid the conversation, {missing!r:.60}: "
                f"say it at the beginning, or {HINT} shows it"
            )

    def _after_reply(
        self,
        calls: Sequence[tuple[str, str]],
        following: Sequence[Message],
        escaper: ControlTokenEscaper,
        roles: Roles | None = None,
    ) -> tuple[str, str]:
        """The template's text after a reply with these calls: its end token, and all that comes then up to
        where the agent speaks again. Where it cannot show these calls, they are told in words, in `roles`
        without tools."""
        reply = Message(role="assistant", content=_PROBE)
        has_calls = bool(calls) and self._roles.has_calls and roles is None
        if has_calls:
            reply = self._reply_with(calls, escaper)
        talk = (roles or self._roles).spoken(following, answers_call=has_calls)
        try:
            self._expect_systems(talk, lambda marked: "".join(self._ends.after([_ASKED], reply, marked)))
            return self._ends.after([_ASKED], reply, escaper.messages(talk))
        except ConfigurationError:
            if not has_calls:
                raise
        return self._after_reply(calls, following, escaper, self._roles.without_tools())

    def _reply_with(self, calls: Sequence[tuple[str, str]], escaper: ControlTokenEscaper) -> Message:
        """A reply with calls of these names and ids, the probe in the last place that any template shows."""
        named = tuple(ToolCall(name=name, id=id) for name, id in calls)
        (reply,) = escaper.messages([Message(role="assistant", content="", tool_calls=named)])
        probed = tuple(replace(call, arguments={"at": _PROBE}) for call in reply.tool_calls)
        return replace(reply, tool_calls=probed)

    def _find_call_end(self) -> str | None:
        """The token after a call; None where the template writes no calls."""
        if not self._roles.has_calls:
            return None
        reply = self._reply_with([("look", "call_0_0")], ControlTokenEscaper(self._controls))
        result = Message(role="tool", content="y", name="look", tool_call_id="call_0_0")
        return self._ends.after([_ASKED], reply, [result])[0]

    def _id(self, control: str) -> int:
        return int(self.tokenizer.encode_markup(control)[-1])

    def _find_tool_fault(self) -> str | None:
        """The reason why tools cannot be used with this template, or None."""
        if not self._roles.has_results:
            return (
                f"the chat template has no place for tool results; {self._tool_hint} has, or leave tools out"
            )
        try:
            refuse_unstable(self._render, self._ends, self._roles)
        except ConfigurationError as error:
            self._roles = self._roles.without_tools()
            return f"{error}, or leave tools out"
        return None

    def _check_tools(self, tools: ToolSchemas) -> None:
        """Before the first prompt with tools: the template must have a place for their results, write calls
        that can be read, write the same between turns when tools are offered, and list them."""
        if self._tool_fault is not None:
            raise ConfigurationError(self._tool_fault)
        if not self.parser.reads_calls:
            raise ConfigurationError(
                f"a tool call as the chat template writes it cannot be read back; {self._tool_hint} writes "
                'calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or give the tokenizer a '
                "response_template"
            )
        try:
            refuse_unstable(self._render, self._ends, self._roles, tools)
        except ConversationRefused as error:  # whatever is said: no conversation with these tools can begin
            raise ConfigurationError(f"the chat template does not take these tools: {error}") from error
        # A template whose model knows its tools by heart says so in a comment.
        if "tools" not in self.text and not self._allow_hidden_tools:
            raise ConfigurationError(
                f"the chat template does not tell the model which tools there are; {self._tool_hint} does, "
                "or, where the system prompt names them or the model knows them by heart, "
                "AgentConfig(allow_hidden_tools=True)"
            )

    def _text(self, messages: Sequence[Message], tools: ToolSchemas) -> str:
        """The rendered text of a conversation so far, control tokens in texts as they are."""
        escaper = ControlTokenEscaper(self._controls)
        return escaper.shown(self._written(messages, tools, escaper))

    def _extends(
        self,
        messages: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: ToolSchemas,
        sampled: Sequence[int] | None = None,
    ) -> bool:
        """`goes_on` by rendering."""
        escaper = ControlTokenEscaper(self._controls)
        calls = [(call.name, call.id) for call in reply.readable_calls]
        end, text = (None, None) if sampled is None else self._sampled(sampled)
        try:
            row, talk = self._text(messages, tools), self._text([*messages, reply, *following], tools)
            stop, after = self._after_reply(calls, following, escaper)
            text = self._as_said(reply) if sampled is None else text
        except ConfigurationError:
            return False
        delta = stop + escaper.shown(after)
        stops = self.stop_ids if end is None else (end,)
        if self._id(stop) not in stops or not (talk.startswith(row) and talk.endswith(delta)):
            return False
        return text is not None and self._is_same(talk[len(row) : len(talk) - len(delta)], text)

    def _is_same(self, shows: str, sample: str) -> bool:
        """True if the template shows of a reply what was said. White space may differ, and in calls the order
        of keys: what was lost in reading a call is missing in one of the texts."""
        return _squeezed(shows) == _squeezed(sample) or self._in_parts(shows) == self._in_parts(sample)

    def _in_parts(self, text: str) -> tuple[str, list[list[str]]]:
        """A reply's text without its calls, and the characters of each call in one order."""
        stream = self.parser.stream()
        stream.finish(text)
        for call in stream.calls:
            text = text.replace(call.written, _PROBE, 1)
        return _squeezed(text), [sorted(_squeezed(call.written)) for call in stream.calls]

    def _sampled(self, sampled: Sequence[int]) -> tuple[int | None, str]:
        """The token that a reply ended by, None where a limit cut it, and the text before."""
        end = sampled[-1] if sampled and sampled[-1] in self.stop_ids else None
        return end, str(self.tokenizer.decode_markup(sampled if end is None else sampled[:-1]))

    def _as_said(self, reply: Message) -> str | None:
        """The text of a reply in a template that goes on, without white space; None where a message cannot
        tell what was sampled.

        Raises ConfigurationError where the template does not show all of it.
        """
        (message,) = self._roles.spoken([reply])
        words, thought = _squeezed(message.content), reply.reasoning
        if thought is None and not message.tool_calls:
            return words
        if thought is None:
            text = _squeezed(self.render_reply(reply))
            return text if text.startswith(words) and text != self._with_empty_thought(message) else None
        if not words and not message.tool_calls:
            return None
        return _squeezed(self.render_reply(reply)) if thought.strip() else self._with_empty_thought(message)

    def _with_empty_thought(self, reply: Message) -> str | None:
        """A reply's text with an empty thought before it, as the template frames thoughts, or None."""
        try:
            text = self.render_reply(replace(reply, reasoning=_PROBE))
        except ConfigurationError:
            return None
        return _squeezed(text.replace(_PROBE, "", 1))


ChatTemplate = JinjaTemplate | PlainTemplate
"""Encodes conversations as one model's token ids."""


def _says_the_same(one: Message, other: Message, tools: ToolSchemas) -> bool:
    """True if both have the same thought, words and calls, white space around them and ids aside."""

    def said(message: Message) -> tuple[str, str, list[str]]:
        calls = [call_key(call.name, call.arguments, tools) for call in message.readable_calls]
        return (message.reasoning or "").strip(), message.content.strip(), calls

    return said(one) == said(other)


def _without_defaults(message: Message, tools: ToolSchemas) -> Message:
    """The reply without nulls that mean the same as leaving the argument out: where all arguments are written
    as text, a null may look like the text."""
    calls = tuple(
        replace(call, arguments=without_defaults(call.arguments, parameters_of(call.name, tools)))
        for call in message.tool_calls
    )
    return replace(message, tool_calls=calls)


def _squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
