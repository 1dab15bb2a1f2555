"""Grammars of arguments that are not one JSON object: tags, Python calls, bare keys; for reply_grammar.py.

<parameter=city>          city='Oslo', days=3          city:<|"|>Oslo<|"|>,days:3
Oslo
</parameter>

What stands around keys and values is read off calls that the template renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]  # it has no types of its own

from stateset_agents.backends.tokenizers import common_prefix
from stateset_agents.types.errors import ConfigurationError

_ANY = "(?s:.*)"
_NOT_OF_TEXTS = ("format", "contentEncoding", "contentMediaType")
_OF_VALUES = ("allOf", "not", "if", "then", "else", "dependentRequired", "patternProperties", "propertyNames")


@dataclass(frozen=True, slots=True)
class SpelledArguments:
    """What a template writes around the keys and values of a call's arguments."""

    empty: str
    """After the name of a call without arguments."""
    opens: str
    divides: str
    """Between a key and its value."""
    joins: str
    """Between a value and the next key."""
    closes: str
    text: tuple[str, str]
    """Around a value that is text."""
    constants: Mapping[str, str]
    """JSON's true, false and null as they are written."""
    items: tuple[str, str, str] | None
    """Opens, parts and closes a list; None where lists are JSON."""
    objects_are_json: bool
    are_sorted: bool
    """True if arguments stand in the order of their names."""

    @property
    def end(self) -> str:
        """What ends each value where texts stand bare; empty where they are quoted."""
        shared = "" if self.text[1] else common_prefix(self.joins, self.closes)
        return shared[: shared.rindex(">") + 1] if ">" in shared else shared

    @classmethod
    def of(cls, write: Callable[[Mapping[str, Any]], str | None]) -> SpelledArguments | None:
        """Read off what `write` makes of arguments behind a call's name; None where it is another form."""
        plain, empty = write({"ka": 5, "kb": 6}), write({})
        match = regex.fullmatch(r"(?s:(.*?)ka(.*?)5(.*?)kb(.*?)6(.*))", plain or "")
        if match is None or empty is None or match[2] != match[4]:
            return None
        opens, divides, joins, _, closes = match.groups()

        def value(example: Any) -> str | None:
            """One value as it is written."""
            call_text = write({"ka": example, "kb": 6})
            before, after = f"{opens}ka{divides}", f"{joins}kb{divides}6{closes}"
            if call_text is None or not (call_text.startswith(before) and call_text.endswith(after)):
                return None
            return call_text[len(before) : len(call_text) - len(after)]

        text, true, false, null = value("va"), value(True), value(False), value(None)
        if text is None or "va" not in text or true is None or false is None:
            return None
        pre, post = text.split("va", 1)
        listed = value(["va", "vb"])
        items = None
        if listed is not None and listed != json.dumps(["va", "vb"]):
            parts = regex.fullmatch(
                f"(?s:(.*?){regex.escape(text)}(.*?){regex.escape(pre)}vb{regex.escape(post)}(.*))", listed
            )
            items = None if parts is None else (parts[1], parts[2], parts[3])
        nested = {"c": "d", "e": 1}
        constants = {"true": true, "false": false, "null": "null" if null is None else null}
        if items is not None and not post:
            return None
        return cls(
            empty,
            opens,
            divides,
            joins,
            closes,
            (pre, post),
            constants,
            items,
            value(nested) == json.dumps(nested),
            write({"kb": 6, "ka": 5}) == plain,
        )

    def rules(
        self, label: str, schema: Mapping[str, Any], literal: Callable[[str], str]
    ) -> tuple[str, list[str]]:
        """What follows a call's name by the schema of its arguments: an expression, and the rules it names.

        Raises ConfigurationError for a keyword that this form cannot keep to.
        """
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        for keyword in {*_OF_VALUES, "$ref", "anyOf", "oneOf"} & schema.keys():
            _refuse("parameters", keyword)
        if not properties:
            return literal(self.empty), []
        names = sorted(properties, key=str.lower) if self.are_sorted else list(properties)
        joins, closes = self.joins.removeprefix(self.end), self.closes.removeprefix(self.end)
        rules = []
        writer = _Values(self, schema, literal, label)
        for number, name in enumerate(names):
            value = writer.value(properties[name], name)
            rules.append(f"{label}_pair_{number}: {literal(name + self.divides)} ({value})")
        for number in range(len(names) - 1, -1, -1):
            choices = []
            for other in range(number, len(names)):
                later = required & set(names[other + 1 :])
                tail = "" if other + 1 == len(names) else f"({literal(joins)} {label}_from_{other + 1})"
                choices.append(f"{label}_pair_{other} {tail}{'' if later or not tail else '?'}")
                if names[other] in required:
                    break
            rules.append(f"{label}_from_{number}: {' | '.join(choices)}")
        rules += writer.terminals
        some = f"{literal(self.opens)} {label}_from_0 {literal(closes)}"
        return (some if required else f"{literal(self.empty)} | {some}"), rules


class _Values:
    """Writes the expression of a value by its schema."""

    def __init__(
        self, form: SpelledArguments, root: Mapping[str, Any], literal: Callable[[str], str], label: str
    ) -> None:
        self.terminals: list[str] = []
        """Rules of texts: intersections are for terminals alone, whose names are in capitals."""
        self._label = label.upper()
        self._form = form
        self._root = root
        self._literal = literal
        self._end = literal(form.end) if form.end else ""

    def value(self, schema: Any, name: str, references: tuple[str, ...] = ()) -> str:
        """An expression of the values that the schema of argument `name` takes. `references`: those on the
        way."""
        if not isinstance(schema, Mapping) or not schema:
            any_value = f"{self._text({}, name)} | {self._ended('%json {}')}"
            return any_value if schema is not False else _refuse(name, "false")
        for keyword in _OF_VALUES:
            if keyword in schema:
                _refuse(name, keyword)
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]), name, references)
        if "enum" in schema or "const" in schema:
            return self._ended(" | ".join(map(self._constant, schema.get("enum", [schema.get("const")]))))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return " | ".join(f"({self.value(option, name, references)})" for option in schema[keyword])
        kinds = schema.get("type", ["string", "number", "boolean", "null"])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return " | ".join(
            self._text(schema, name)
            if kind == "string"
            else self._ended(self._of_kind(kind, schema, name, references))
            for kind in kinds
        )

    def _ended(self, expression: str) -> str:
        return f"({expression}) {self._end}" if self._end else expression

    def _of_kind(self, kind: str, schema: Mapping[str, Any], name: str, references: tuple[str, ...]) -> str:
        form = self._form
        if kind == "boolean":
            return " | ".join(self._literal(form.constants[word]) for word in ("true", "false"))
        if kind == "null":
            return self._literal(form.constants["null"])
        if kind == "array" and form.items is not None:
            return self._list(schema, name, references)
        if kind == "object" and not form.objects_are_json:
            _refuse(name, "an object")
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return f"%json {json.dumps({**schema, 'type': kind, **definitions})}"

    def _list(self, schema: Mapping[str, Any], name: str, references: tuple[str, ...]) -> str:
        assert self._form.items is not None
        opens, parts, closes = map(self._literal, self._form.items)
        for keyword in ("uniqueItems", "prefixItems", "contains"):
            if schema.get(keyword):
                _refuse(name, keyword)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        item = f"({self.value(schema.get('items', {}), name, references)})"
        if most == 0:
            return f"{opens} {closes}"
        further = f"({parts} {item}){{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        return f"{opens} {item} {further} {closes}" + (f" | {opens} {closes}" if least == 0 else "")

    def _referred(self, reference: str, name: str, references: tuple[str, ...]) -> str:
        target: Any = self._root
        for part in reference.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        if target is None or reference in references or not reference.startswith("#/"):
            _refuse(name, f"$ref {reference}")
        return self.value(target, name, (*references, reference))

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            pre, post = self._form.text
            return self._literal(pre + value + post)
        text = json.dumps(value)
        return self._literal(self._form.constants.get(text, text))

    def _text(self, schema: Mapping[str, Any], name: str) -> str:
        """Text without what would end it: its closing quote, or for bare text what closes the argument."""
        for keyword in _NOT_OF_TEXTS:
            if keyword in schema:
                _refuse(name, keyword)
        pre, post = self._form.text
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        body = f"(?s:.{{{least},{most}}})" if least or most != "" else _ANY
        if "pattern" in schema:
            pattern = str(schema["pattern"])
            start, end = ("" if pattern.startswith("^") else _ANY), ("" if pattern.endswith("$") else _ANY)
            body = f"{start}({pattern.removeprefix('^').removesuffix('$')}){end}".replace("/", "\\/")
            if least or most != "":
                _refuse(name, "pattern with a length")
        if post:
            text = self._terminal(f"/{body}/ & /[^{escaped(post[0])}\\\\\\n]*/")
            return f"{self._literal(pre)} {text} {self._literal(post)}"
        ended = escaped(self._form.end)
        free = f"/{body}/ & ~/{_ANY}{ended}{_ANY}/"
        if self._end != quoted(self._form.end):  # a control token, which no text can go on with
            return f"{self._terminal(free)} {self._end}"
        # With its end the terminal matches nothing longer, so the text is over where the parser ends it.
        return self._terminal(f"({free}) /{ended}/")

    def _terminal(self, expression: str) -> str:
        name = f"{self._label}_TEXT_{len(self.terminals)}"
        self.terminals.append(f"{name}: {expression}")
        return name


def quoted(text: str) -> str:
    """The text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The text in a regular expression between slashes."""
    lines = (regex.escape(line, special_only=True) for line in text.split("\n"))
    return "\\n".join(lines).replace("/", "\\/")


def _refuse(name: str, keyword: str) -> str:
    raise ConfigurationError(
        f"{name!r} has {keyword} in its schema, which no grammar of this chat template's calls can keep to: "
        "leave it out, or use a template whose calls are JSON, such as chatml"
    )
