"""The grammar of a reply, from its tools' schemas and from how the chat template writes a call.

How it writes one is found by probing, as the parser is: a call with known names is rendered, and what stands
around them is the frame. The text goes to llguidance by way of `Constraint`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import regex  # type: ignore[import-untyped]  # it has no types of its own

from stateset_agents.backends.base import Tokenizer
from stateset_agents.backends.grammars import grammars_of, library_version
from stateset_agents.core.chat.replies.parsing import ReplyParser
from stateset_agents.core.chat.spelled_arguments import SpelledArguments, escaped, quoted
from stateset_agents.core.chat.template import ChatTemplate
from stateset_agents.types.constraint import Constraint, ConstraintKind
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

ToolChoice = Literal["auto", "required", "none"] | str
"""OpenAI's: words or calls, at least one call, no call, or a call of the tool that it names."""

_NAME = "probe_tool"
_ARGUMENTS = {"ka": "va", "kb": 5}
_WORDS = "Probing words."
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords beside which `properties` does not say which arguments there are."""
_ANY = "(?s:.*)"
_GAP = r"[ \n]{0,4}"
"""What may stand around a thought; a model could write any white space until it is cut."""
_UNTAGGED = r"([^<]|<[^\/ta])*"
"""What holds no tag of a thought or an answer, as a regular expression between slashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What a reply in words has to look like."""

    schema: Mapping[str, Any] | None = None
    """The JSON schema of what is said; None: any words."""
    between: tuple[str, str] | None = None
    """The texts that the words stand between."""
    thinks: bool = False
    """True if a thought between <think> and </think> comes first."""

    def __post_init__(self) -> None:
        if self.schema is not None and self.between is not None:
            raise ConfigurationError(
                f"answers are JSON of a schema or stand between {self.between}, and both were asked for: "
                "leave answer_schema or answer_between out"
            )

    @property
    def is_free(self) -> bool:
        """True if any words are."""
        return self == _FREE

    @property
    def has_free_words(self) -> bool:
        """True if any words are, behind the thought that may have to come first."""
        return self.schema is None and self.between is None

    def __str__(self) -> str:
        words = "words" if self.between is None else " ... ".join(self.between)
        words = words if self.schema is None else "JSON of a schema"
        return f"a thought before {words}" if self.thinks else words


_FREE = AnswerFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """What a chat template writes around a call's name and arguments."""

    before: str
    between: str
    """Between the name and JSON arguments."""
    after: str
    """After JSON arguments."""
    separators: tuple[str, str]
    """Of JSON arguments: between items, and behind keys."""
    spelled: SpelledArguments | None
    """The arguments, from the name on to the call's end, where they are no JSON."""
    joint: str | None
    """Between two calls; None where the template writes one call a reply."""
    words: str | None
    """Between words and a call behind them; None where it shows no words beside a call."""
    opener: str | None
    """The text from which on a reply is read as a call; None where that is a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyGrammar:
    """Writes the constraints of one chat template's replies."""

    tokenizer: Tokenizer
    parser: ReplyParser
    render: Callable[[Message], str]
    """A reply as the template writes it, without its end; raises ConfigurationError where it cannot."""
    stop_ids: tuple[int, ...]
    thinks: bool
    """True if a thought may stand before the answer where the prompt opens none."""

    @classmethod
    def of(cls, template: ChatTemplate) -> ReplyGrammar:
        """The grammars of a chat template's replies."""
        return cls(
            tokenizer=template.tokenizer,
            parser=template.parser,
            render=template.render_reply,
            stop_ids=template.stop_ids,
            thinks="<think>" in template.text,
        )

    def of_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        *,
        answer: AnswerFormat = _FREE,
        parallel: bool = True,
    ) -> Constraint:
        """The constraint of a reply that may or must call.

        Args:
            tools: In OpenAI's shape. Arguments are those of their schemas and no others; without
                `additionalProperties` an object of arguments has none.
            choice: Which calls the reply makes.
            answer: What words have to be, where they are no call.
            parallel: True if one reply may make several calls.

        Raises ConfigurationError for a tool that is not among them, for a template whose calls are not framed
        JSON, and for a schema that llguidance does not take, in its words.
        """
        if choice not in ("auto", "required", "none"):
            tools = [tool for tool in tools if _function(tool)["name"] == choice] or _refuse(choice, tools)
        if not tools and choice != "none":
            raise ConfigurationError(f"tool_choice {choice!r} without tools: offer some, or leave it out")
        frame = self._frame()
        rules = self._words(frame, answer) if choice in ("auto", "none") else []
        if choice == "none":
            return self._constraint(_kind(answer), "words", rules, answer)
        rules += self._calls(frame, tools, parallel)
        opener = frame.opener or ""
        if choice != "auto":
            return self._constraint("call", "calls", rules, answer, opener=opener)
        both = ["words", "calls"]
        if frame.words is not None and frame.opener is not None and answer.has_free_words:
            rest = self._literal(frame.before.partition(frame.opener)[2])
            if _is_control(frame.opener, self.tokenizer):
                # One lexeme, for free text would take what stands before the call as well.
                rules.append(f"spoken: /{_ANY}{escaped(frame.words)}/")
                both.append("spoken calls")
            else:
                rules.append(f"spoken[suffix={quoted(frame.words + frame.opener)}]: WORDS")
                both.append(f"spoken {rest} first {self._literal(frame.after)} more")
        return self._constraint("call_or_words", " | ".join(both), rules, answer, opener=opener)

    def of_words(self, answer: AnswerFormat) -> Constraint:
        """The constraint of a reply without tools. Raises ConfigurationError as `of_calls`."""
        return self._constraint(_kind(answer), "words", self._words(None, answer), answer)

    def raised(self, constraint: Constraint, nats: float) -> Constraint:
        """The constraint, where it allows words and calls, with the tokens that open a call raised by `nats`.

        Raises ConfigurationError where something else stands first, in a thought or in front of a call.
        """
        if not nats or constraint.kind != "call_or_words":
            return constraint
        opener = getattr(self.tokenizer, "encode_markup", self.tokenizer.encode)(constraint.opener)
        mask = grammars_of(self.tokenizer).matcher(constraint).allowed()
        if self._opens_thought or not int(mask[opener[0] // 32]) >> opener[0] % 32 & 1:
            raise ConfigurationError(
                "call_bias is for a reply's first token, and in this chat template no call begins there: "
                "leave call_bias at 0, or take another chat_template, such as chatml"
            )
        return replace(constraint, raised=(tuple(opener), nats))

    def _constraint(
        self,
        kind: ConstraintKind,
        start: str,
        rules: Sequence[str],
        answer: AnswerFormat,
        *,
        opener: str = "",
    ) -> Constraint:
        constraint = Constraint(
            grammar="\n".join([f"start: {start}", *rules]),
            kind=kind,
            stop_ids=self.stop_ids,
            version=library_version(),
            opener=opener,
        )
        grammars_of(self.tokenizer).matcher(constraint)  # raises where it cannot be followed
        if self._opens_thought:
            start = f"open_thought ({start})"
        elif answer.thinks or self.thinks:
            start = f"thought{'' if answer.thinks else '?'} ({start})"
            rules = [*rules, f"thought: /{_GAP}/ {self._literal('<think>')} open_thought"]
        else:
            return constraint
        thinking, rule = self._free_until("thinking", _UNTAGGED if answer.thinks else _ANY, "</think>")
        rules = [*rules, f"open_thought: {thinking} /{_GAP}/", *rule]
        return replace(constraint, grammar="\n".join([f"start: {start}", *rules]))

    @property
    def _opens_thought(self) -> bool:
        region = self.parser.begins_in
        return region is not None and region.holds == "reasoning"

    def _free_until(self, name: str, pattern: str, end: str) -> tuple[str, list[str]]:
        """Text of a pattern up to `end` and with it: what stands for it in a rule, and the rule it needs."""
        if _is_control(end, self.tokenizer):
            return f"{name} {self._literal(end)}", [f"{name}: /{pattern}/"]
        return name, [f"{name}[suffix={quoted(end)}]: /{pattern}/"]

    def _words(self, frame: CallFrame | None, answer: AnswerFormat) -> list[str]:
        """The rules of a reply that calls nothing; `frame`: of the calls that it may not look like."""
        if answer.schema is not None:
            return [f"words: {_json(answer.schema)}"]
        if answer.between is not None:
            begin, end = answer.between  # words are ordinary text, whatever control tokens there are
            rest = _UNTAGGED if begin.startswith("<") else _ANY
            said = f"said[suffix={quoted(end)}]: /{_GAP}[^\\s<]{rest}/"
            return [f"words: {quoted(begin)} said", said]
        if frame is None:
            return [f"words: /{_ANY}/"]
        if frame.opener is None:
            raise ConfigurationError(
                "in this chat template's replies no fixed text begins a call, so words cannot be kept apart "
                "from calls: give tool_choice required, none of the tools, or another chat_template"
            )
        if _is_control(frame.opener, self.tokenizer):
            return [f"words: /{_ANY}/"]
        return ["words: WORDS", f"WORDS: /{_ANY}/ & ~/{_ANY}{escaped(frame.opener)}{_ANY}/"]

    def _calls(self, frame: CallFrame, tools: Sequence[Mapping[str, Any]], parallel: bool) -> list[str]:
        """The rules of one call or several: `first` is a call within its frame."""
        names = [f"tool_{number}" for number in range(len(tools))]
        rules = [f"first: {' | '.join(names)}"]
        for label, tool in zip(names, tools, strict=True):
            function = _function(tool)
            schema = _arguments_schema(function)
            self._expect_read(function["name"], schema.get("properties") or {})
            if frame.spelled is not None:
                rest, more = frame.spelled.rules(label, schema, self._literal)
                rest = rest.replace(_NAME, function["name"])  # some name the tool twice
                rules += [f"{label}: {self._literal(function['name'])} ({rest})", *more]
                continue
            named = self._literal(function["name"] + frame.between)
            rules.append(f"{label}: {named} {_json(schema, frame.separators)}")
        rules.append(f"call: {self._literal(frame.before)} first {self._literal(frame.after)}")
        if frame.joint is None or not parallel:
            return [*rules, "more: ", "calls: call"]
        return [*rules, f"more: ({self._literal(frame.joint)} call)*", "calls: call more"]

    def _expect_read(self, name: str, arguments: Collection[str]) -> None:
        """Raises ConfigurationError for names that the parser does not read back from a call."""
        text = self._rendered("", _call(dict.fromkeys(arguments, 5))) or ""
        text = text.replace(_NAME, name)  # as the grammar writes it
        read = [(call.name, *call.arguments) for call in self.parser.read(text).tool_calls]
        is_plain = all(self._literal(each) == quoted(each) for each in (name, *arguments))
        if not is_plain or list(map(sorted, read)) != [sorted([name, *arguments])]:
            raise ConfigurationError(
                f"a call of tool {name!r} with the arguments {', '.join(arguments)!r:.200} cannot be read "
                "back in this chat template: rename what a template could take for a marker"
            )

    def _frame(self) -> CallFrame:
        """How the template writes a call; raises ConfigurationError where no grammar can be made of it."""
        text = self._rendered("", _call(_ARGUMENTS)) or ""
        before, _, rest = text.partition(_NAME)
        between, separators, after, spelled = "", _SEPARATORS[0], "", None
        for item, key in _SEPARATORS:
            written = json.dumps(_ARGUMENTS, separators=(item, key))
            if written in rest:
                between, _, after = rest.partition(written)
                separators = (item, key)
                break
        else:
            spelled = SpelledArguments.of(self._after_name)
        if not rest or (spelled is None and not between):
            raise ConfigurationError(
                "this chat template writes a call in a form for which there is no grammar, "
                f"{text or 'none'!r:.120}: use chatml, or leave tool_choice and constrain out"
            )
        words, two = self._rendered(_WORDS, _call(_ARGUMENTS)), self._rendered("", *[_call(_ARGUMENTS)] * 2)
        bare = text.rpartition("</think>")[2].lstrip() if "</think>" in before else text
        before = before[len(text) - len(bare) :]
        joint = None
        if two is not None and two.startswith(text) and two.endswith(bare) and len(two) >= len(text + bare):
            joint = two[len(text) : len(two) - len(bare)]
        spoken = None if words is None else words.rpartition(_WORDS)[2]
        opener = self._opener(bare)
        return CallFrame(
            before=before,
            between=between,
            after=after,
            separators=separators,
            spelled=spelled,
            joint=joint,
            words=spoken[: len(spoken) - len(bare)] if spoken and spoken.endswith(bare) else None,
            opener=opener if opener and before.lstrip().startswith(opener) else None,
        )

    def _after_name(self, arguments: Mapping[str, Any]) -> str | None:
        """What stands behind the name of a call with these arguments."""
        text = self._rendered("", _call(arguments))
        return None if text is None else text.partition(_NAME)[2]

    def _opener(self, text: str) -> str | None:
        """The fixed text that the parser takes for the beginning of this call; None where there is none."""
        for region in self.parser.regions:
            match = region.opens.search(text) if region.holds == "tool_calls" else None
            if match is not None:
                fixed = regex.match(r"(?:[^\\()\[\]{}*+?|^$.]|\\[^A-Za-z0-9])*", region.opens.pattern)[0]
                return regex.sub(r"\\(.)", r"\1", fixed) or None
        return None

    def _rendered(self, words: str, *calls: ToolCall) -> str | None:
        """A reply as the template writes it; None where it refuses."""
        try:
            return self.render(Message(role="assistant", content=words, tool_calls=calls))
        except ConfigurationError:
            return None

    def _literal(self, text: str) -> str:
        """A text in the grammar, control tokens in it by their ids."""
        control: Mapping[str, int] = getattr(self.tokenizer, "control", {})
        names = sorted(control, key=len, reverse=True)
        if not names:
            return quoted(text)
        pieces = regex.split(f"({'|'.join(map(regex.escape, names))})", text)
        parts = [f"<[{control[piece]}]>" if piece in control else quoted(piece) for piece in pieces if piece]
        return " ".join(parts) or '""'


def _kind(answer: AnswerFormat) -> ConstraintKind:
    """Of a reply in words."""
    return "json" if answer.schema is not None else "text" if answer.is_free else "format"


def _json(schema: Mapping[str, Any], separators: tuple[str, str] = _SEPARATORS[0]) -> str:
    """JSON of a schema, with no white space of a model's own: it could write that to its limit."""
    layout = {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    return f"%json {json.dumps({**schema, 'x-guidance': layout})}"


def _call(arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name=_NAME, arguments=arguments)


def _arguments_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a call's arguments: those that it names and no others. Raises ConfigurationError for no object."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    kinds, properties = schema["type"], schema.get("properties") or {}
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ConfigurationError(f"tool {function['name']!r} takes {kinds!r}: give it the type object")
    if not isinstance(properties, Mapping) or not all(
        isinstance(each, Mapping | bool) for each in properties.values()
    ):
        raise ConfigurationError(
            f"tool {function['name']!r} has properties {properties!r:.80}: give each argument a schema"
        )
    closed = {} if any(key in schema for key in _ELSEWHERE) else {"additionalProperties": False}
    return {**closed, **schema, "type": "object"}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def _refuse(choice: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    names = ", ".join(sorted(str(_function(tool)["name"]) for tool in tools)) or "none"
    raise ConfigurationError(f"tool_choice names {choice!r}, and the tools are: {names}")


def _is_control(text: str, tokenizer: Tokenizer) -> bool:
    """True if the text is a control token, which no free text of a grammar writes."""
    return text in getattr(tokenizer, "control", {})
