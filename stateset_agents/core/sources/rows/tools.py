"""Schemas of tools as people publish them, in OpenAI's format; and the nulls that Arrow adds to calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.core.sources.rows.files import without_nulls
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import MAX_NESTING, is_nested_deeper
from stateset_agents.types.schemas import without_members

_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Python's names, which xLAM's schemas have."""
_LIST = re.compile(r"list\[(\w+)\]", re.IGNORECASE)


def from_json_text(value: Any, column: str) -> Any:
    """The value, read as JSON where it is a text. Raises ConfigurationError for another text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{column} is a text that is not JSON ({error}): {value[:60]!r}; write it with json.dumps"
        ) from error


def read_schemas(value: Any) -> tuple[dict[str, Any], ...]:
    """Schemas in OpenAI's format, without nulls, of a list or its JSON text.

    An entry may be `{"type": "function", "function": {...}}` or what stands in there, its parameters JSON
    Schema or as xLAM has them, `{"city": {"type": "str, optional", "description": ...}}`.

    Raises ConfigurationError for anything else.
    """
    items = from_json_text(value, "tools")
    if isinstance(items, Mapping):
        items = [items]
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigurationError(f"tools must be a list of schemas, got {type(items).__name__} {items!r:.60}")
    named: dict[str, dict[str, Any]] = {}
    for schema in map(_schema, items):
        name = schema["function"]["name"]
        if named.setdefault(name, schema) != schema:
            raise ConfigurationError(f"tool {name!r} stands twice in tools, with two schemas: leave one")
    return tuple(named.values())


def _schema(item: Any) -> dict[str, Any]:
    item = from_json_text(item, "a tool") if isinstance(item, str) and item[:1] == "{" else item
    if is_nested_deeper(item, MAX_NESTING):
        raise ConfigurationError(f"a tool has more than {MAX_NESTING} levels of objects and lists")
    item = without_nulls(item)
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            f"a tool must be in OpenAI's shape, {{type: function, function: {{name: ...}}}}, got {item!r:.80}"
        )
    function = {key: value for key, value in function.items() if function is not item or key != "type"}
    parameters = function.pop("input_schema", None) or function.get("parameters")
    if isinstance(parameters, str):
        parameters = from_json_text(parameters, f"the parameters of tool {function['name']!r}")
    if not isinstance(parameters, Mapping | None):
        raise ConfigurationError(
            f"the parameters of tool {function['name']!r} must be a JSON schema, {{type: object, properties: "
            f"{{...}}}}, got {parameters!r:.60}"
        )
    if parameters is not None:
        function["parameters"] = _as_json_schema(parameters)
    return {"type": "function", "function": function}


def _as_json_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """xLAM's parameters as JSON Schema, others as they stand."""
    is_bare = (
        parameters
        and "properties" not in parameters
        and all(
            isinstance(value, Mapping) and isinstance(value.get("type"), str) for value in parameters.values()
        )
    )
    if not is_bare:
        return {**parameters, "type": "object"} if parameters.get("type") == "dict" else parameters
    properties: dict[str, Any] = {}
    required = []
    for name, value in parameters.items():
        first, *others = (part.strip() for part in str(value["type"]).split(","))
        is_optional = "optional" in others or "default" in value
        properties[name] = {**_typed(first), **{key: item for key, item in value.items() if key != "type"}}
        if not is_optional:
            required.append(name)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _typed(name: str) -> dict[str, Any]:
    """A type's schema; empty, which allows all, for one that JSON Schema does not have."""
    if items := _LIST.fullmatch(name):
        return {"type": "array", "items": _typed(items[1])}
    type_name = _TYPES.get(name.lower(), name.lower())
    return {"type": type_name} if type_name in _TYPES.values() else {}


def without_unasked_nulls(arguments: Any, schema: Any) -> Any:
    """The arguments of a call without nulls, but those that the schema requires.

    Arrow gives the arguments of each call the names of all: {"city": "Oslo", "days": null}. Of an argument
    that is not required null says no more than its absence.
    """
    return without_members(
        arguments, schema, lambda members, name, value: value is None and name not in members.required
    )
