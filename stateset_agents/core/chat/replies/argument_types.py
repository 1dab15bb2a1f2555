"""Types of arguments that a format writes as text: `3` is a number where the tool's schema says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.types.schemas import ValueKind, kinds_of, merged

_NULLS = ("null", "None")
"""Templates write constants as JSON or as Python has them."""
_CONSTANTS = {"True": True, "False": False}


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
        value = _CONSTANTS[plain] if plain in _CONSTANTS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_whole = isinstance(value, float) and value.is_integer()
    if is_whole and not any("number" in kind.types and kind.allows(value) for kind in kinds):
        value = int(value)
    fits = any(kind.allows(value) for kind in kinds) and not isinstance(value, str)
    return value if fits else text
