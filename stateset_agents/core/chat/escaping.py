"""Keeps texts of users, tools and models from becoming control tokens when a template renders them.

`core/chat/template.py` renders every conversation with a `ControlTokenEscaper`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.backends.base import Tokenizer
from stateset_agents.types.images import IMAGE_MARK
from stateset_agents.types.messages import Message

_SURROGATE = re.compile("[\ud800-\udfff]")
_START, _STOP = (f"{secrets.randbelow(10**24):024d}" for _ in range(2))
_MARK = re.compile(f"{_START}([0-9]+?){_STOP}")
"""Digits, which no template escapes, strips or changes the case of; secret, so nobody can write a mark."""
_ANY_TEXT = re.compile(".+", re.DOTALL)
"""A whole text that is not empty."""


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs, which have no UTF-8 form, as U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


class ControlTokenEscaper:
    """Swaps control tokens in a conversation's texts for marks, and marks for plain-text tokens.

    Between the two the template renders. Text without control tokens goes through unchanged, so it is
    encoded exactly as the template alone would encode it. With `escape_all` every text is swapped, whatever
    it holds: for the rare case where text becomes a control token only together with what the template
    puts beside it, or by the tokenizer's own clean-up (`<|END|>` to `<|end|>`).
    """

    def __init__(self, controls: re.Pattern[str], *, escape_all: bool = False) -> None:
        """`controls` matches every control token as it is written."""
        self._controls = controls
        self._escape_all = escape_all
        self._swapped = _ANY_TEXT if escape_all else controls
        """Matches what is swapped in a text."""
        self._hidden: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with marks in it."""
        return [
            replace(
                message,
                content=IMAGE_MARK.join(map(self.text, message.pieces)),
                reasoning=None if message.reasoning is None else self.text(message.reasoning),
                name=None if message.name is None else self.text(message.name),
                tool_call_id=None
                if message.tool_call_id is None
                else self._controls_in(message.tool_call_id),
                tool_calls=tuple(
                    replace(
                        call,
                        name=self.text(call.name),
                        arguments=_mapped(dict(call.arguments), self._argument),
                        id=self._controls_in(call.id),
                    )
                    for call in message.tool_calls
                ),
            )
            for message in messages
        ]

    def schemas(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tool schemas with marks in them; templates read their keys, so these are never swapped whole."""
        return [_mapped(dict(tool), self._controls_in) for tool in tools]

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Ids of what the template made of it: marks as plain text, everything else as markup."""
        ids: list[int] = []
        for index, piece in enumerate(_MARK.split(text)):
            if index % 2:
                ids.extend(tokenizer.encode(self._hidden[int(piece)]))
            elif piece:
                ids.extend(tokenizer.encode_markup(piece))
        return ids

    def shown(self, text: str) -> str:
        """The rendered text with each mark replaced by the text that it stands for."""
        return _MARK.sub(lambda mark: self._hidden[int(mark[1])], text)

    def text(self, text: str) -> str:
        """A text with marks in it."""
        return self._swapped.sub(self._mark, encodable(text))

    def _argument(self, text: str) -> str:
        """Arguments stand in JSON, where quotes and line ends are escaped."""
        text = encodable(text)
        if self._escape_all:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        return self._swapped.sub(self._mark, text)

    def _controls_in(self, text: str) -> str:
        """A text of which only control tokens are swapped, for keys and ids that a template may look up."""
        return self._controls.sub(self._mark, encodable(text))

    def _mark(self, match: re.Match[str]) -> str:
        """Hides the match behind a mark."""
        self._hidden.append(match.group())
        return f"{_START}{len(self._hidden) - 1}{_STOP}"


class MarkupEncoder:
    """Ids of conversations as text, in which every control token is the template's own."""

    controls: re.Pattern[str]
    """Matches every control token as it is written."""

    def __init__(self, tokenizer: Any) -> None:
        """The control tokens of a `HuggingFaceTokenizer` are known; with another one every text is
        escaped."""
        self._tokenizer = tokenizer
        raw = getattr(tokenizer, "hf", None)
        added = {} if raw is None else {token.content: id for id, token in raw.added_tokens_decoder.items()}
        controls = {content: id for content, id in added.items() if id not in tokenizer.encode(content)}
        self._ids = None if raw is None else frozenset(controls.values())
        longest_first = sorted(controls, key=len, reverse=True)
        self.controls = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, render: Callable[[ControlTokenEscaper], str]) -> list[int]:
        """Ids of what `render` makes of texts that it gives to an escaper.

        Its own control tokens are those that are left when every text is escaped. Where escaping only the
        control tokens in texts leaves others, a text has become a control token after all.
        """
        escape_all = ControlTokenEscaper(self.controls, escape_all=True)
        safe_ids = escape_all.encode(render(escape_all), self._tokenizer)
        if self._ids is None:
            return safe_ids
        escape_some = ControlTokenEscaper(self.controls)
        ids = escape_some.encode(render(escape_some), self._tokenizer)
        controls, safe_controls = ([id for id in row if id in self._ids] for row in (ids, safe_ids))
        return ids if controls == safe_controls else safe_ids


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
