"""Reads the arguments of tool calls that are no JSON: Python calls (LFM2), bare keys (Gemma 4), tags (GLM).

[look_up(city='it's', n=[1, 2]), ping()]
{city:<|"|>Oslo<|"|>,n:[1,2]}
<arg_key>city</arg_key><arg_value>Oslo</arg_value>

Each goes through its text once: a model that repeats itself must not block the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]  # it has no types of its own

from stateset_agents.types.schemas import ValueKind, kinds_of, merged

MAX_LEVELS = 32
"""Most levels of nested objects and lists; real arguments have a handful."""
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:\[\]{}()'\"]+")
_KEY = re.compile(r"[^,:\[\]{}'\"]+(?=:)")
_CALL = re.compile(r"\s*([^\s,()\[\]{}=]+)\(")
_ARGUMENT = re.compile(r"\s*([^\s,()\[\]{}=]+)\s*=\s*")
_QUOTES = ('<|"|>', '"', "'")
_ESCAPE = re.compile(r"\\(U00[01][0-9a-fA-F]{5}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\n": ""}
_AFTER_TEXT = re.compile(r"\s*(?:,\s*[^\s,()\[\]{}=]+\s*=|\)\s*(?:\]|,\s*[^\s,()\[\]{}=]+\())")
"""Matches the text behind an argument that is text: templates that escape no quotes leave no other way to
tell."""
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class TooDeep(ValueError):
    """There are more than `MAX_LEVELS` levels of objects and lists."""


def read_python_calls(
    text: str, captures: Mapping[str, str], *, escapes: bool = True
) -> list[dict[str, Any]]:
    """`[f(x='a', n=1), g()]` as `{"function": {"name": ..., "arguments": {...}}}` each.

    `captures` is not read. A quote in a text may be escaped or not. Without `escapes` an argument that is
    text stands as it is between its quotes, backslashes included. Raises ValueError for anything else.
    """
    reader = _Reader(text, escapes=escapes)
    reader.expect("[")
    calls: list[dict[str, Any]] = []
    while not reader.accepts("]"):
        if calls:
            reader.expect(",")
        name = reader.match(_CALL, "a call, name(argument=value)").group(1)
        arguments: dict[str, Any] = {}
        while not reader.accepts(")"):
            if arguments:
                reader.expect(",")
            key = reader.match(_ARGUMENT, "an argument, name=value").group(1)
            arguments[key] = reader.argument()
        calls.append({"function": {"name": name, "arguments": arguments}})
    reader.expect_end()
    return calls


def read_bare_keys(text: str, captures: Mapping[str, str]) -> Any:
    """`{city:<|"|>Oslo<|"|>}` as the arguments of the call that `captures` name; raises ValueError."""
    if "name" not in captures:
        raise ValueError("it does not begin with call:NAME{")
    reader = _Reader(text)
    value = reader.value(0)
    reader.expect_end()
    return {"function": {"name": captures["name"], "arguments": value}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Reads `<parameter=city>Oslo</parameter>`: all values are texts. The fields are patterns of `re`."""

    opens: str
    key: str
    """A pattern that a whole key must match."""
    divides: str
    """Stands between key and value."""
    closes: str
    """Pattern of the closing text with what must follow, so that a value may hold that text; `$` is the
    end of the call's text."""
    end: str
    """The text that closes the call."""

    @property
    def literal(self) -> tuple[Any, Any]:
        """Patterns of an argument's beginning and of the rest of it; see `Region.literal`."""
        closes = self.closes.replace("$", re.escape(self.end))
        return regex.compile(self.opens), regex.compile(f"(?s:.*?){closes}")

    def __call__(self, text: str, captures: Mapping[str, str]) -> dict[str, Any]:
        """The call that `captures` name; raises ValueError where text stands in no argument."""
        if not captures.get("name"):
            raise ValueError("it names no tool where the format has the name")
        arguments: dict[str, str] = {}
        between = []
        end = 0
        while (opening := re.compile(self.opens).search(text, end)) is not None:
            divider = re.compile(self.divides).search(text, opening.end())
            closing = divider and re.compile(self.closes).search(text, divider.end())
            if divider is None or closing is None:  # then none that opens later is closed, either
                rest = _without_tags(text[opening.start() :]) or opening.group()
                raise ValueError(f"{rest[:40]!r} stands in no argument")
            key = text[opening.end() : divider.start()]
            if re.fullmatch(self.key, key, re.DOTALL) is None:
                raise ValueError(f"{key[:40]!r} is no name of an argument")
            arguments[key] = text[divider.end() : closing.start()]
            between.append(text[end : opening.start()])
            end = closing.end()
        rest = _without_tags("".join([*between, text[end:]]))
        if rest:
            raise ValueError(f"{rest[:40]!r} stands in no argument")
        return {"function": {"name": captures["name"], "arguments": arguments}}


def _without_tags(text: str) -> str:
    return re.sub(r"</?[^<>]*>", "", text).strip()


class _Reader:
    """Values of JSON and Python, from a position on."""

    def __init__(self, text: str, *, escapes: bool = True) -> None:
        self.text = text
        self.position = 0
        self._escapes = escapes

    def accepts(self, mark: str) -> bool:
        """Go past this mark if it comes next, white space before it included."""
        self.position = self._matched(_SPACE).end()
        is_next = self.text.startswith(mark, self.position)
        self.position += len(mark) if is_next else 0
        return is_next

    def expect(self, mark: str) -> None:
        if not self.accepts(mark):
            raise self.error(repr(mark))

    def expect_end(self) -> None:
        if self._matched(_SPACE).end() != len(self.text):
            raise self.error("its end")

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise self.error(what)
        self.position = match.end()
        return match

    def error(self, what: str) -> ValueError:
        rest = self.text[self.position :]
        return ValueError(f"expected {what} at {rest[:20]!r}" if rest else f"expected {what} at its end")

    def value(self, level: int) -> Any:
        """A text, number, constant, object or list."""
        for quote in _QUOTES:
            if self.accepts(quote):
                return self._quoted(quote)
        if level > MAX_LEVELS:
            raise TooDeep
        if self.accepts("{"):
            return self._object(level + 1)
        if self.accepts("["):
            return self._list(level + 1)
        word = self.match(_WORD, "a value").group()
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        try:
            return json.loads(word)
        except ValueError:
            self.position -= len(word)
            raise self.error("a text in quotes, a number, true, false or null") from None

    def argument(self) -> Any:
        """The value of a Python call's argument, whose quotes may stand unescaped in it."""
        quote = next((mark for mark in _QUOTES if self.accepts(mark)), None)
        if quote is None:
            return self.value(0)
        return self._text_until(
            quote,
            lambda end: _AFTER_TEXT.match(self.text, end + len(quote)) is not None,
            escapes=self._escapes,
        )

    def _object(self, level: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self.accepts("}"):
            if members:
                self.expect(",")
            quote = next((mark for mark in _QUOTES if self.accepts(mark)), None)
            key = self.match(_KEY, "a key").group() if quote is None else self._quoted(quote)
            self.expect(":")
            members[key] = self.value(level)
        return members

    def _list(self, level: int) -> list[Any]:
        items: list[Any] = []
        while not self.accepts("]"):
            if items:
                self.expect(",")
            items.append(self.value(level))
        return items

    def _quoted(self, quote: str) -> str:
        """Reads the text from a quote to the next one; `<|"|>` is a token, and nothing is escaped in it."""
        return self._text_until(quote, lambda end: True, escapes=len(quote) == 1)

    def _text_until(self, quote: str, is_end: Callable[[int], bool], *, escapes: bool) -> str:
        """The text up to the first quote that is not escaped and of whose position `is_end` is true."""
        end = self.position - 1
        while (end := self.text.find(quote, end + 1)) >= 0:
            if not (escapes and self._is_escaped(end)) and is_end(end):
                text = self.text[self.position : end]
                self.position = end + len(quote)
                return _unescaped(text) if escapes else text
        raise self.error(f"a text that {quote} ends")

    def _is_escaped(self, position: int) -> bool:
        """True if an odd number of backslashes stands before this position."""
        before = position
        while before > self.position and self.text[before - 1] == "\\":
            before -= 1
        return (position - before) % 2 == 1

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        assert match is not None  # it matches nothing, too
        return match


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    halves = _ESCAPE.sub(_character, text)  # a character beyond U+FFFF may be escaped as two halves
    return halves.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _character(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"/" else "\\" + code)


# --- types of arguments that a format writes as text ---

_NULLS = ("null", "None")
"""Templates write constants as JSON or as Python has them."""
_PYTHON_BOOLS = {"True": True, "False": False}


def with_types(arguments: Mapping[str, Any], schema: Mapping[str, Any], null: str) -> dict[str, Any]:
    """Arguments that are texts as the values that the schema of all arguments asks for.

    A text stays one where it may be one. `null` is how the template writes a null: that alone is null where
    the argument may be any text, and only where a null cannot be said by leaving the argument out.
    """
    members = merged(schema)
    typed = {}
    for key, value in arguments.items():
        kinds = kinds_of(members.schemas.get(key), schema)
        is_null = (
            value == null and not members.may_be_absent(key) and any(kind.allows(None) for kind in kinds)
        )
        typed[key] = None if is_null else _typed(value, kinds) if isinstance(value, str) else value
    return typed


def _typed(text: str, kinds: Sequence[ValueKind]) -> Any:
    """A text as a value of one of these kinds; as it stands where it may be text, or is none of them."""
    if not kinds or any(kind.allows(text) for kind in kinds):
        return text
    plain = text.strip()
    if plain in _NULLS and any(kind.allows(None) for kind in kinds):
        return None
    try:
        value = _PYTHON_BOOLS[plain] if plain in _PYTHON_BOOLS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_whole = isinstance(value, float) and value.is_integer()
    if is_whole and not any("number" in kind.types and kind.allows(value) for kind in kinds):
        value = int(value)
    fits = any(kind.allows(value) for kind in kinds) and not isinstance(value, str)
    return value if fits else text
