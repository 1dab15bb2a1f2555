"""Reads what an agent sampled into words, thoughts and tool calls; the agent does so after every turn."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import regex  # type: ignore[import-untyped]  # it has no types of its own

from stateset_agents.backends.tokenizers import common_prefix
from stateset_agents.core.chat.replies.call_values import (
    MAX_LEVELS,
    TaggedArguments,
    TooDeep,
    read_bare_keys,
    read_python_calls,
    with_types,
)
from stateset_agents.core.chat.replies.stream import CallText, Region, ReplyStream
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message, ToolCall, call_arguments
from stateset_agents.types.schemas import parameters_of

_log = get_logger(__name__)
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplyParser:
    """Reads the replies of one model.

    >>> message = parser.read('<think>K27?</think>One moment. <tool_call>{"name": "look"}</tool_call>')
    >>> message.reasoning, message.content, message.tool_calls[0].name
    ('K27?', 'One moment.', 'look')
    """

    regions: tuple[Region, ...]
    begins_in: Region | None = None
    """The region that the end of the prompt has opened: a thought, say."""
    keeps_outside: bool = True
    """False: words are framed, too, and what stands in no frame is dropped."""
    special: tuple[str, ...] = ()
    """Control tokens, which are left out wherever they stand."""
    skip_special_tokens: bool = True
    """True if control tokens may be missing in the text; else thoughts or calls can only be told by them."""
    reads_calls: bool = True
    """True if calls that the chat template writes are read back."""
    null: str = "null"
    """The chat template's text for a null if it writes all arguments as text."""

    def read(self, text: str, *, turn: int = 0, tools: Tools = (), calls: bool = True) -> Message:
        """The assistant message that a sampled text stands for; never raises.

        Args:
            text: Without the token that ended the turn, control tokens in it unless `skip_special_tokens`.
            turn: Of the conversation; call 0 of turn 3 gets the id `call_3_0`.
            tools: In OpenAI's format. Some formats write all arguments as text, and only the tool's schema
                tells that `3` is a number; arguments without a type there stay text.
            calls: False: nothing is called. What looks like a call stays in the words, and they keep the
                white space at their ends.

        A call that cannot be read keeps its reason in `ToolCall.error`, which the environment shows to the
        agent, and its text in `ToolCall.written`, without thoughts in it: clients get that.
        """
        if self._is_words_alone(text, calls):
            return Message(role="assistant", content=text.strip() if calls else text)
        stream = self.stream(calls=calls)
        stream.finish(text)
        items = [call for text in stream.calls for call in self._calls(text, tools)]
        return Message(
            role="assistant",
            content=stream.content,
            reasoning=stream.reasoning,
            thinks_first=stream.thinks_first,
            tool_calls=tuple(replace(call, id=f"call_{turn}_{number}") for number, call in enumerate(items)),
        )

    def read_completion(
        self, completion: Completion, *, turn: int = 0, tools: Tools = (), calls: bool = True
    ) -> Completion:
        """The completion with its raw text read as `read` does.

        Of a reply that a limit cut within a tool call the call's error says so: that the call is not closed
        would not tell the agent what to do. JSON that can be read is whole, though no token ends it.
        """
        text = completion.message.content
        message = self.read(text, turn=turn, tools=tools, calls=calls)
        is_cut = completion.finish_reason == "length" and message.tool_calls
        open_call = self._open_call(text) if is_cut else None
        is_whole = bool(open_call and open_call.region.is_json and message.tool_calls[-1].error is None)
        if open_call is not None and not is_whole:
            at = len(completion.token_ids)
            error = (
                f"the reply was cut at {at} tokens, before the tool call was complete: write a shorter one"
            )
            *whole, last = message.tool_calls
            cut = ToolCall(
                name="", id=last.id, error=error, written=self._without_thoughts(open_call.written)
            )
            message = replace(message, tool_calls=(*whole, cut))
        return replace(completion, message=message)

    def stream(self, *, calls: bool = True) -> ReplyStream:
        """A reader of a text that is still being sampled; `calls` as in `read`."""
        return ReplyStream(
            [region for region in self.regions if calls or region.holds != "tool_calls"],
            dropped=_any_of(self.special),
            region=self.begins_in,
            keeps_outside=self.keeps_outside,
            strips=calls,
        )

    def _is_words_alone(self, text: str, calls: bool) -> bool:
        """True if nothing in the text opens a region, as in most replies."""
        if self.begins_in is not None or not self.keeps_outside or self.without_special(text) != text:
            return False
        return not any(
            region.opens.search(text) for region in self.regions if calls or region.holds != "tool_calls"
        )

    def _open_call(self, text: str) -> CallText | None:
        """A call that no delimiter closes, at the end of a reply; None if there is none."""
        stream = self.stream()
        stream.finish(text)
        last = stream.calls[-1]
        return None if last.is_closed else last

    def _calls(self, call_text: CallText, tools: Tools) -> Iterator[ToolCall]:
        """The calls of one region, without ids."""

        def broken(why: str) -> ToolCall:
            return ToolCall(name="", error=why, written=self._without_thoughts(call_text.written))

        region = call_text.region
        if not call_text.is_closed and not region.closes_by_end:
            by = f" by {region.closing}" if region.closing else ""
            yield broken(f"the tool call is not closed{by}")
            return
        try:
            value = self._value(call_text)
        except (RecursionError, TooDeep):
            yield broken(_TOO_DEEP)
            return
        except Exception as error:  # parsers of transformers raise what Python raises inside them
            if self._has_thoughts(call_text.written):
                yield broken("the tool call cannot be read: a thought stands in it")  # the error may quote it
                return
            how = "is not JSON" if region.is_json and isinstance(error, ValueError) else "cannot be read"
            yield broken(f"the tool call {how}: {_line(error.__cause__ or error)}")
            return
        for item in value if isinstance(value, list) else [value]:
            try:
                name, arguments = _named(item)
            except ValueError as error:
                yield broken(str(error))
                continue
            if region.values_are_text:
                arguments = with_types(arguments, parameters_of(name, tools), self.null)
            fault = _fault([name, arguments])
            yield ToolCall(name=name, arguments=arguments) if fault is None else broken(fault)

    def _value(self, call_text: CallText) -> Any:
        """The value that a call's region reads; it may raise anything.

        Control tokens may be part of the format. Those that are not are dropped.
        """
        assert call_text.region.read is not None
        captures = {name: self.without_special(text).strip() for name, text in call_text.captures.items()}
        body = self.without_special(call_text.body)
        try:
            value = call_text.region.read(call_text.body, captures)
        except Exception as error:  # see _calls
            if body == call_text.body:
                raise
            try:
                return call_text.region.read(body, captures)
            except Exception:
                raise error from error.__cause__
        return self._without_special_in(value) if self.special else value

    def without_special(self, text: str) -> str:
        """The text without control tokens."""
        pattern = _any_of(self.special)
        return text if pattern is None else str(pattern.sub("", text))

    def _without_thoughts(self, text: str) -> str:
        """The text of a call that was not read, for others: without thoughts and control tokens."""
        if not self._has_thoughts(text):
            return self.without_special(text)
        thoughts = [region for region in self.regions if region.holds == "reasoning"]
        stream = ReplyStream(thoughts, dropped=_any_of(self.special), strips=False)
        stream.finish(text)
        return stream.content

    def _has_thoughts(self, text: str) -> bool:
        return any(region.opens.search(text) for region in self.regions if region.holds == "reasoning")

    def _without_special_in(self, value: Any, level: int = 0) -> Any:
        if isinstance(value, str):
            return self.without_special(value)
        if level > MAX_LEVELS + 2:
            raise TooDeep
        if isinstance(value, dict):
            return {
                self.without_special(key): self._without_special_in(item, level + 1)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._without_special_in(item, level + 1) for item in value]
        return value


def parse_reply(text: str, turn: int = 0) -> Message:
    """A text in the house's own format, `<think>` and `<tool_call>{json}</tool_call>`; see `ReplyParser`."""
    return HERMES.read(text, turn=turn)


def choose_parser(tokenizer: Any, prompt_end: str, render: Callable[[Message], str]) -> ReplyParser:
    """The parser that fits a model's chat template, tried on what the template itself writes.

    Args:
        tokenizer: A `HuggingFaceTokenizer`. If the model brings a `response_template`, that is tried first.
        prompt_end: Where every prompt ends: the header of the agent's message, and what the template opens
            or closes there, `<|im_start|>assistant\\n<think>\\n` say.
        render: An assistant message as the template writes it, from where `prompt_end` begins or ends (or
            only its header, where the template shows another end in the past). Raises ConfigurationError for
            one that it cannot render.

    The first format that reads a call, a thought with words and a call with a difficult text back is taken,
    else the first that reads the call, or the thought. Where none reads a call, `reads_calls` is False.
    """
    special = tuple(token.content for token in tokenizer.hf.added_tokens_decoder.values() if token.special)
    ends = [tokenizer.piece(id) for id in tokenizer.eos_ids]
    call, odd_call, null = (
        _rendered(
            render, replace(_CALL, tool_calls=(replace(_CALL.tool_calls[0], arguments=arguments),)), ends
        )
        for arguments in (_CALL.tool_calls[0].arguments, _ODD_ARGUMENTS, {"city": None})
    )
    thought = _rendered(render, _THOUGHT, ends) or _rendered(render, replace(_THOUGHT, reasoning=None), ends)

    def reads(parser: ReplyParser) -> tuple[bool, bool, bool]:
        return (
            _reads_call(parser, prompt_end, call, _CALL.tool_calls[0].arguments),
            _reads_thought(parser, prompt_end, thought),
            _reads_call(parser, prompt_end, odd_call, _ODD_ARGUMENTS),
        )

    best, most = HERMES, (False, False, False)
    for parser in _formats(tokenizer):
        parser = replace(parser, special=special, skip_special_tokens=False)
        parser = replace(parser, begins_in=_opened_by(parser, prompt_end))
        passed = reads(parser)
        if best is HERMES or passed > most:
            best, most = replace(parser, reads_calls=passed[0]), passed
        if all(passed):
            break
    best = replace(best, null=_null_of(best, prompt_end, null))
    without = replace(best, skip_special_tokens=True)
    if reads(without) == most and not {"<think>", "</think>"} & {*special}:
        return replace(without, special=())
    return best


_TOO_DEEP = f"the tool call has more than {MAX_LEVELS} levels of objects and lists"
_THINK = Region(holds="reasoning", opens=regex.compile("<think>"), closes=regex.compile(r"</think>\s*"))
"""A region of every format: any model may write it, whatever its template knows of thoughts."""
_JSON_TEXT = (regex.compile('"'), regex.compile(r'(?:[^"\\\x00-\x1f]++|\\.)*+"'))
HERMES = ReplyParser(
    regions=(
        _THINK,
        Region(
            holds="tool_calls",
            opens=regex.compile("<tool_call>"),
            closes=regex.compile("</tool_call>"),
            closing="</tool_call>",
            read=lambda body, captures: json.loads(body),
            is_json=True,
            literal=_JSON_TEXT,
        ),
    )
)
"""The format of Qwen 2.5 and 3, and of every model without a chat template of its own."""

_CALL_PARTS = ("name", "arguments")
_THOUGHT = Message(
    role="assistant", content="One moment, please.", reasoning="They want to know where it is."
)
_CALL = Message(
    role="assistant",
    content="",
    tool_calls=(ToolCall(name="look_up", arguments={"city": "Oslo", "days": 3}),),
)
_ODD_ARGUMENTS = {"city": 'it\'s \\n "it"\n</tool_call> \\'}
_TOOLS = (
    {
        "name": "look_up",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
)


def _rendered(render: Callable[[Message], str], message: Message, ends: Sequence[str]) -> str:
    """The message as the template writes it, without the token that ends its turn; empty where it cannot."""
    try:
        text = render(message)
    except ConfigurationError:
        return ""
    return functools.reduce(str.removesuffix, ends, text.rstrip())


def _reads_call(parser: ReplyParser, prompt_end: str, text: str, arguments: Mapping[str, Any]) -> bool:
    return any(
        [(call.name, call.arguments) for call in message.tool_calls]
        == [(_CALL.tool_calls[0].name, arguments)]
        and not message.content
        and not message.reasoning
        for message in _readings(parser, prompt_end, text)
    )


def _null_of(parser: ReplyParser, prompt_end: str, text: str) -> str:
    """The template's text for a null, read from a call of which it is the only argument."""
    for message in _readings(parser, prompt_end, text):
        for call in message.tool_calls:
            if isinstance(city := call.arguments.get("city"), str):
                return city
    return parser.null


def _reads_thought(parser: ReplyParser, prompt_end: str, text: str) -> bool:
    thought = _THOUGHT.reasoning if str(_THOUGHT.reasoning) in text else None
    return any(
        message.content == _THOUGHT.content and (message.reasoning or None) == thought
        for message in _readings(parser, prompt_end, text)
    )


def _readings(parser: ReplyParser, prompt_end: str, text: str) -> Iterator[Message]:
    """A rendered message as a reply. What it has in common with the prompt's end was not sampled; if that is
    nothing, it may follow all of it or only the header."""
    stream = replace(parser, begins_in=None).stream()
    stream.add(common_prefix(prompt_end, text))
    text = text[stream.num_read :]
    if parser.skip_special_tokens:
        text = parser.without_special(text)
    for begins_in in (stream.region,) if stream.num_read else (parser.begins_in, None):
        yield replace(parser, begins_in=begins_in).read(text, tools=_TOOLS)


def _opened_by(parser: ReplyParser, prompt_end: str) -> Region | None:
    """The region of thoughts or words that stands open at the end of the prompt."""
    stream = parser.stream(calls=False)
    stream.finish(prompt_end)
    is_open = stream.region is not None and stream.region.holds in ("reasoning", "content")
    return stream.region if is_open else None


def _formats(tokenizer: Any) -> Iterator[ReplyParser]:
    """The model's own first, then those that are known here."""
    template = tokenizer.hf.response_template
    if template is not None:
        try:
            yield _from_template(template, {})
        except ValueError as error:
            _log.warning(f"the tokenizer's response_template cannot be used ({_line(error)}): trying others")
    yield HERMES
    yield from map(_known_format, response_templates())


@functools.cache
def response_templates() -> dict[str, dict[str, Any]]:
    """Fields by the format's name, in the order in which they are tried."""
    templates: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("response_templates.yaml"))
    return templates


@functools.cache
def _known_format(name: str) -> ReplyParser:
    fields, readers = {}, {}
    for key, field in response_templates()[name].items():
        reader = _own_reader(field)
        if reader is not None:
            readers[key], field = reader, {**field, "content": "text", "content_args": {}}
        fields[key] = field
    return _from_template({"start_anchor": "<", "fields": fields}, readers, is_known=True)


def _own_reader(field: Mapping[str, Any]) -> Callable[[str, Mapping[str, str]], Any] | None:
    """Our reader of contents that transformers has no parser for; None where it has one."""
    match field.get("content"):
        case "python-calls":
            return functools.partial(read_python_calls, **field.get("content_args", {}))
        case "bare-keys":
            return read_bare_keys
        case "tags":
            return TaggedArguments(**field["content_args"], end=field["close"])
    return None


def _from_template(
    template: Mapping[str, Any], readers: Mapping[str, Any], *, is_known: bool = False
) -> ReplyParser:
    """A response template of transformers as a parser; raises ValueError for one that is not valid."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    spec = load_response_template(dict(template))
    regions = []
    for name, field in spec.fields.items():
        if field.open_re is not None:
            regions.append(_region(field, readers.get(name), is_known))
        elif _before_end(field.close_re) is not None:  # of the words: a control token, which is no word
            regions.append(
                Region(holds="nothing", opens=_before_end(field.close_re), closes=regex.compile(""))
            )
    if not any(region.holds == "reasoning" and region.opens.fullmatch("<think>") for region in regions):
        regions.append(_THINK)
    return ReplyParser(regions=tuple(regions), keeps_outside=spec.implicit == "content")


_HOLDS: dict[str, Literal["content", "reasoning", "tool_calls"]] = {
    "content": "content",
    "tool_calls": "tool_calls",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "thinking": "reasoning",
}
"""The contents of response templates' fields by name. Other fields hold nothing that anybody reads."""


def _region(field: Any, reader: Callable[[str, Mapping[str, str]], Any] | None, is_known: bool) -> Region:
    """A field of a loaded response template."""
    from transformers.utils.chat_parsing.content_parsers import parse_content, process_field

    keys = _keys_in_content(field)

    def read(body: str, captures: Mapping[str, str]) -> Any:
        if "name" in field.open_re.groupindex and not captures.get("name"):
            raise ValueError("it names no tool where the format has the name")
        if keys is None:
            return process_field(body, field, dict(captures))
        value = parse_content(body, field.content, field.content_args)
        items = value if isinstance(value, list) else [value]
        return [{keys.get(key, key): part for key, part in item.items()} for item in items]

    literal = field.close_literals or [""]
    return Region(
        holds=_HOLDS.get(field.name, "nothing"),
        opens=field.open_re,
        closes=_before_end(field.close_re),
        closing=literal[0],
        waits=not is_known and field.name == "tool_calls",
        closes_by_end=not is_known or field.close_re is None or bool(field.close_re.search("")),
        read=reader or read,
        is_json=field.content == "json",
        literal=_JSON_TEXT if field.content == "json" else getattr(reader, "literal", None),
        values_are_text=isinstance(reader, TaggedArguments) or field.content in ("xml-inline", "kv-lines"),
    )


def _keys_in_content(field: Any) -> dict[str, str] | None:
    """The JSON keys of a call's name and arguments; None where the format has the name before the JSON.

    The transformation of a response template reads these two and would lose every other key.
    """
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content != "json" or not isinstance(function, dict):
        return None
    places = [regex.fullmatch(r"\{(?:content\.)?(\w+)\}", str(function.get(key))) for key in _CALL_PARTS]
    keys = [place[1] for place in places if place is not None]
    if len(keys) < len(_CALL_PARTS) or "content" in keys or {*keys} & {*field.open_re.groupindex}:
        return None
    return dict(zip(keys, _CALL_PARTS, strict=True))


def _before_end(pattern: Any) -> Any:
    """A closing delimiter without the end of the text, which closes anyway: `<\\|call\\|>|\\Z`.

    While a reply is sampled, each end would match, and hide a delimiter of which only a part has come.
    """
    source = "" if pattern is None else regex.sub(r"(?:^|\|)(?:\\Z|\$)$", "", pattern.pattern)
    if pattern is None or source == pattern.pattern:
        return pattern
    return regex.compile(source, pattern.flags) if source else None


@functools.lru_cache(maxsize=64)
def _any_of(texts: tuple[str, ...]) -> Any:
    """A pattern that matches any of these texts, the longest where several fit; None for none.

    Common beginnings are shared: of hundreds of control tokens nearly all begin alike.
    """
    return regex.compile(_alternatives([text for text in texts if text])) if any(texts) else None


def _alternatives(texts: Sequence[str]) -> str:
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    may_end = by_first.pop("", None) is not None
    if not by_first:
        return ""
    choices = "|".join(regex.escape(first) + _alternatives(rests) for first, rests in by_first.items())
    return f"(?:{choices}){'?' if may_end else ''}"


def _named(item: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call; raises ValueError where an argument might get lost."""
    function = item.get("function") if isinstance(item, dict) and "name" not in item else item
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise ValueError('the tool call must be an object with "name" and "arguments"')
    if not name.strip():
        raise ValueError('the tool call names no tool: write {"name": ..., "arguments": {...}}')
    arguments, unknown = call_arguments(function if function is item else {**item, **function})
    if unknown or (arguments is None and "id" in function):
        raise ValueError(
            f"the tool call has {(*unknown, 'id')[0]!r:.60} beside its name: put every argument into "
            '"arguments": {...}'
        )
    if not isinstance(arguments, dict) and (arguments is not None or "arguments" in function):
        raise ValueError("the tool call's arguments must be an object")
    return name, arguments or {}


def _line(error: BaseException) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"


def _fault(value: Any, level: int = 0) -> str | None:
    """The reason why a value that Python reads as JSON must not travel on, or None.

    NaN and infinities are no JSON, half a surrogate pair cannot be written to a file, and deep nesting
    would break whoever walks it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "the tool call holds a number that is not finite"
    if isinstance(value, str):
        has_half = not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        return "the tool call holds half a character" if has_half else None
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        if level == MAX_LEVELS:
            return _TOO_DEEP
        faults = (_fault(item, level + 1) for item in value)
        return next((fault for fault in faults if fault is not None), None)
    return None
