"""The base of every settings model: frozen, without unknown fields, with errors of one line."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.foreign_names import setting_hint


def closest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that is most like `name`, or None when none is (1.0 is the same)."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return matches[0] if matches else None


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'beta'?)`, or nothing when no known name is close."""
    matches = closest(name, known)
    return f" (did you mean {matches!r}?)" if matches else ""


def alternatives(names: Iterable[str], last: str = "or") -> str:
    """`a, b or c`; `a` for a single name."""
    *first, name = names
    return f"{', '.join(first)} {last} {name}" if first else name


def expect(name: str, value: object, kind: type, hint: str) -> None:
    """Raises ConfigurationError if an argument is not of this type; `hint` says what to give."""
    if isinstance(value, kind):
        return
    description = (
        f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r:.60}"
    )
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    raise ConfigurationError(f"{name} must be {article} {kind.__name__}, got {description}: {hint}")


def expect_that(
    holds: bool, name: str, rule: str, value: object, hint: str = "", *, length: int | None = None
) -> None:
    """Raises ConfigurationError, `NAME must RULE, got VALUE`, unless it holds; `hint` says what to give, and
    `length` how many characters of a value of any type are shown.

    >>> expect_that(0 < share < 1, "share", "be between 0 and 1", share)
    """
    if not holds:
        is_written = length is None and not isinstance(value, str)  # numpy's 0.0 is written as 0.0
        plain = str(value) if is_written else repr(value)[:length]
        raise ConfigurationError(
            f"{name} must {rule}, got {' '.join(plain.splitlines())}" + (f": {hint}" if hint else "")
        )


def is_number(value: object) -> bool:
    """True for an integer or a float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> bool:
    """True for an integer, no bool, from `least` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def expect_one_of(name: str, value: str, known: Collection[str]) -> None:
    """Raises ConfigurationError, with the nearest known name, if `value` is none of them."""
    if value not in known:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(known)}, got {value!r}{nearest(value, known)}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """The type of a field that names an entry of a registry: `Annotated[str, OneOf(LOSSES)]`.

    Like `Literal` of the registry's names, which are read when a value is checked: an entry that a program
    adds is accepted.
    """

    registry: Mapping[str, object]

    def __repr__(self) -> str:
        return f"OneOf({', '.join(self.registry)})"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.registry), "type": "string"}

    def _check(self, value: Any) -> str:
        for name in self.registry:
            if name == value:
                return name
        raise PydanticKnownError("literal_error", {"expected": alternatives(map(repr, self.registry))})


class Settings(BaseModel):
    """A frozen pydantic model whose errors are `ConfigurationError`s that name the value and the fix.

    The docstring under a field is its description.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, validate_default=True)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Each field's description on one line, by name."""
        texts: dict[str, str] = {}
        for model in reversed(cls.__mro__):
            texts |= _field_docstrings(model) if issubclass(model, Settings) else {}
        return {name: field.description or texts.get(name, "") for name, field in cls.model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        result = handler(schema)
        properties = handler.resolve_ref_schema(result).get("properties", {})
        for name in properties.keys() & (texts := cls.descriptions()).keys():
            properties[name]["description"] = texts[name]
        return result

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigurationError(_one_line(type(self), error)) from None

    @classmethod
    def field_names(cls) -> set[str]:
        """Every accepted name: fields and their aliases."""
        names = set(cls.model_fields)
        for field in cls.model_fields.values():
            alias = field.validation_alias
            if alias is not None:
                names.update(
                    choice for choice in getattr(alias, "choices", [alias]) if isinstance(choice, str)
                )
        return names


@functools.cache
def _field_docstrings(model: type) -> dict[str, str]:
    """The docstrings under a class's fields. They are read of its source when asked for: pydantic would do it
    when the class is made, 5 ms for each class of an import."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    except OSError:  # a program without its sources
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(str(below.value.value).split())
        for field, below in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _one_line(model: type[Settings], error: ValidationError) -> str:
    parts: list[str] = []
    expected: dict[str, list[str]] = {}  # the types of a field that may have several
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"] if "[" not in str(part))  # not `tuple[str, ...]`
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            hint = setting_hint(name, model.__name__) or nearest(name, model.field_names())
            parts.append(f"{model.__name__} has no field {name!r}{hint}")
        elif item["type"] == "missing":
            parts.append(f"{name} is missing: give {model.__name__} its {name}")
        elif isinstance(item.get("ctx", {}).get("error"), ConfigurationError):  # complete, of a section
            parts.append(f"{name}: {message}")
        elif not name:  # a rule about several fields names them itself
            parts.append(message)
        else:
            kind = message.removeprefix("Input should be ").replace("a valid tuple", "a list")
            text = f"{name}: {message[0].lower()}{message[1:]}, got {item['input']!r:.100}"
            if item["type"] == "literal_error":
                text += nearest(str(item["input"]), re.findall(r"'([^']*)'", kind))
            if name in expected and kind != message:
                kinds = alternatives([*expected[name], kind])
                text = f"{name}: input should be {kinds}, got {item['input']!r:.100}"
                parts.pop()
            expected.setdefault(name, []).append(kind)
            parts.append(text)
    return " ".join("; ".join(parts).split())
