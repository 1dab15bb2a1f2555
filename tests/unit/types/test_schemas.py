"""JSON schemas of tools: what fits, what leaving out means, references in place."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stateset_agents.types.schemas import call_key, inlined, kinds_of, without_defaults

COLOUR = {"$defs": {"Colour": {"enum": ["red", 3, None]}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"type": "integer"}, [3, 3.0], [3.5, True, "3", None]),
        ({"type": ["integer", "null"]}, [3, None], ["3"]),
        ({"type": "integer", "nullable": True}, [3, None], ["3"]),
        ({"$ref": "#/$defs/Colour"}, ["red", 3, 3.0, None], ["blue", True, 4]),
        ({"allOf": [{"$ref": "#/$defs/Colour"}, {"type": "string"}]}, ["red"], [3, None]),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, [3], [3.5]),
        ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "boolean"}]}, ["red", True], ["blue"]),
        ({"const": 5}, [5, 5.0], ["5", 6]),
        ({"properties": {"a": {}}}, [{"a": 1}], ["{}"]),
        ({"items": {}}, [[1]], ["[]"]),
        ({"type": ["string", {"a": 1}]}, ["a"], [1]),
        ({"anyOf": [{"enum": ["a"]}, {"enum": ["b", 1]}], "type": "string"}, ["a", "b"], [1, "c"]),
        ({"$ref": "#/%24defs/Colour"}, ["red"], ["blue"]),
    ],
)
def test_the_kinds_of_values_of_a_schema(schema: dict[str, Any], fits: list[Any], others: list[Any]) -> None:
    kinds = kinds_of(schema, COLOUR)
    assert [any(kind.allows(value) for kind in kinds) for value in fits] == [True] * len(fits)
    assert [any(kind.allows(value) for kind in kinds) for value in others] == [False] * len(others)


@pytest.mark.parametrize(
    "schema", [{}, True, None, {"type": 3}, {"$ref": "#/$defs/Loop"}, {"$ref": "https://x.org/a.json"}]
)
def test_a_schema_that_says_nothing_has_no_kinds(schema: Any) -> None:
    assert kinds_of(schema, COLOUR) == ()


def test_references_stand_in_place_and_titles_are_gone() -> None:
    schema = {
        "$defs": {"Item": {"title": "Item", "type": "object", "properties": {"title": {"type": "string"}}}},
        "properties": {
            "one": {"$ref": "#/$defs/Item", "description": "The item."},
            "many": {"title": "Many", "type": "array", "items": {"$ref": "#/$defs/Item"}},
            "other": {"default": {"title": "kept"}},
        },
    }
    item = {"type": "object", "properties": {"title": {"type": "string"}}}
    assert inlined(schema) == {
        "properties": {
            "one": {**item, "description": "The item."},
            "many": {"type": "array", "items": item},
            "other": {"default": {"title": "kept"}},
        }
    }


def test_a_schema_that_holds_itself_keeps_its_references() -> None:
    node = {"title": "Node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"$defs": {"Node": node}, "properties": {"first": {"$ref": "#/$defs/Node"}}}
    shown = inlined(schema)
    assert shown["properties"]["first"] == {"$ref": "#/$defs/Node"}
    assert shown["$defs"]["Node"] == {"properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert [kind.types for kind in kinds_of({"$ref": "#/$defs/Node"}, schema)] == [{"object"}]


def test_a_reference_to_what_is_not_found_keeps_the_definitions() -> None:
    schema = {"properties": {"a": {"$ref": "#colour"}}, "$defs": {"Colour": {"$anchor": "colour"}}}
    assert inlined(schema) == schema


def test_thousands_of_constants_take_no_time() -> None:
    union = {"anyOf": [{"enum": [f"{row}-{column}" for column in range(50)]} for row in range(150)]}
    start = time.process_time()
    [kind] = kinds_of({**union, "allOf": [union, {"const": "3-4"}]})
    assert [kind.allows(text) for text in ("3-4", "3-5")] == [True, False]
    assert time.process_time() - start < 1


def test_references_that_double_forty_times_take_no_time() -> None:
    twice = {
        f"L{level}": {"anyOf": [{"$ref": f"#/$defs/L{level + 1}"}] * 2, "properties": {}}
        for level in range(40)
    }
    schema = {"$defs": {**twice, "L40": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/L0"}}}
    start = time.process_time()
    assert inlined(schema)["properties"]["a"] == {"$ref": "#/$defs/L0"}
    kinds_of({"$ref": "#/$defs/L0"}, schema)
    without_defaults({"a": {"b": 1}}, schema)
    assert time.process_time() - start < 1


TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "$defs": {"Seat": {"properties": {"row": {"type": "integer"}, "side": {"default": "left"}}}},
            "properties": {
                "price": {"type": "number"},
                "note": {"type": ["string", "null"], "default": "none"},
                "seat": {"anyOf": [{"$ref": "#/$defs/Seat"}, {"type": "null"}], "default": None},
                "who": {"type": ["string", "null"]},
            },
            "required": ["price", "who"],
        },
    },
}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"price": 20.0}, {"price": 20}, True),
        ({"price": 1}, {"price": True}, False),
        ({"price": "20"}, {"price": 20}, False),
        ({"price": 1, "seat": None}, {"price": 1}, True),
        ({"price": 1, "note": None}, {"price": 1}, False),  # null is not its default
        ({"price": 1, "note": "none"}, {"price": 1}, True),
        ({"price": 1, "who": None}, {"price": 1}, False),  # it must be said
        ({"seat": {"row": 2, "side": "left"}}, {"seat": {"side": None, "row": 2.0}}, False),
        ({"seat": {"row": 2, "side": "left"}}, {"seat": {"row": 2.0}}, True),
        ({"who": "Zu\u0308rich"}, {"who": "Z\u00fcrich"}, True),
        ({"who": "a", "price": 2}, {"price": 2, "who": "a"}, True),
        ({"who": "a"}, {"who": "A"}, False),
    ],
)
def test_calls_are_compared_by_what_they_say(one: Any, other: Any, is_same: bool) -> None:
    assert (call_key("book", one, [TOOL]) == call_key("book", other, [TOOL])) is is_same


def test_without_a_schema_null_is_absent() -> None:
    assert call_key("f", {"a": 1, "b": None, "c": [{"d": None}]}) == call_key("f", {"a": 1, "c": [{}]})
    assert call_key("f", {"a": 1}) != call_key("g", {"a": 1})
