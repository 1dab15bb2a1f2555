"""JSON schemas of tools: what fits one, what an argument left out means, and one without references.

The one reader of `$ref`, `allOf`, unions, `enum` and `const`: for calls that are read and compared, for tools
that are offered, and for whoever makes arguments up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from stateset_agents.types.comparison import canonical

_ANY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_MOST_KINDS = 200
_MOST_NODES = 4000
"""Most nodes of a schema without references: one that names another a thousand times stays as it is."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("items", "additionalProperties", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """One kind of value that a schema allows."""

    types: frozenset[str]
    """Names of JSON types; `number` holds whole ones, too."""
    values: Mapping[str, Any] | None = None
    """All values of an enum or a constant, by their canonical text; None where the types alone limit
    it."""

    def allows(self, value: Any) -> bool:
        """True if this JSON value is of the kind; `true` is no number, and 3.0 is a whole one."""
        if not _has_type(value, self.types):
            return False
        return self.values is None or canonical(value) in self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The members of an object that a schema names."""

    schemas: Mapping[str, Any]
    required: frozenset[str]

    def may_be_absent(self, name: str) -> bool:
        """True if leaving this member out means null."""
        schema = self.schemas.get(name)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        return name not in self.required and default is None

    def is_default(self, name: str, value: Any) -> bool:
        """True if leaving this member out means this value."""
        if value is None:
            return self.may_be_absent(name)
        schema = mapping_of(self.schemas.get(name))
        has_default = "default" in schema and name not in self.required
        return has_default and canonical(value) == canonical(schema["default"])


def kinds_of(schema: Any, root: Any = None) -> tuple[ValueKind, ...]:
    """The kinds of values that a schema allows; none where it says nothing about that.

    `root` is the whole schema, in which its references are looked up.

    >>> [sorted(kind.types) for kind in kinds_of({"anyOf": [{"type": "integer"}, {"type": "null"}]})]
    [['integer'], ['null']]
    """
    kinds = _kinds(schema, schema if root is None else root, {})
    return () if any(kind.types == _ANY_TYPE and kind.values is None for kind in kinds) else kinds


def merged(schema: Any, root: Any = None) -> Properties:
    """The members that an object of this schema has, by name, with what references and `allOf` add.

    Of a union those of its only object: `Item | None`.
    """
    schemas: dict[str, Any] = {}
    required: set[str] = set()
    root = schema if root is None else root
    for part in _parts(schema, root):
        named = mapping_of(part.get("properties"))
        schemas |= {name: _with_reference(each, root) for name, each in named.items()}
        required |= {name for name in _sequence(part.get("required")) if isinstance(name, str)}
    return Properties(schemas=schemas, required=frozenset(required))


def outside_reference(schema: Any, root: Any) -> str | None:
    """The first reference in a schema that names nothing in the root, as one to another document; or None."""
    for part in _parts(schema, root):
        name = str(part.get("$ref", ""))
        if name and _target(name, root) is None:
            return name
    return None


def without_defaults(value: Any, schema: Any = None) -> Any:
    """A value without the members that say the same as leaving them out: null, or the schema's default.

    Without a schema every null goes. A null that means something else than its absence stays.

    >>> without_defaults({"city": "Oslo", "days": None})
    {'city': 'Oslo'}
    """
    return without_members(value, schema, Properties.is_default)


def without_members(
    value: Any, schema: Any, is_left_out: Callable[[Properties, str, Any], bool], root: Any = None
) -> Any:
    """A value without the members, at every level, that `is_left_out(members, name, value)`."""
    root = schema if root is None else root
    if isinstance(value, Mapping):
        members = merged(schema, root)
        return {
            name: without_members(item, mapping_of(members.schemas.get(name)), is_left_out, root)
            for name, item in value.items()
            if not is_left_out(members, name, item)
        }
    if isinstance(value, list | tuple):
        of_items = next((part["items"] for part in _parts(schema, root) if "items" in part), None)
        return [without_members(item, mapping_of(of_items), is_left_out, root) for item in value]
    return value


def parameters_of(name: Any, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, from tools in OpenAI's shape; empty where none has the name."""
    functions = (mapping_of(tool.get("function", tool)) for tool in tools if isinstance(tool, Mapping))
    named = (each for each in functions if each.get("name") == name)
    return mapping_of(next(named, mapping_of(None)).get("parameters"))


def call_key(
    name: str,
    arguments: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    fold: Callable[[str], str] = str,
) -> str:
    """One text for all spellings of a call: 20.0 or 20, a default said or left out, keys in any order.

    `tools` are those that the call was made with, in OpenAI's shape; `fold` brings texts that count as the
    same to one.
    """
    plain = without_defaults(arguments, parameters_of(name, tools))
    return canonical([name, plain], fold)


def inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what each `$ref` names in its place, and without titles, which only cost tokens.

    Many chat templates show a reference as an argument without a type. A schema that holds itself keeps its
    references, and so does one that would become very large, or that refers to what is not found in it.
    """
    try:
        whole = _inlined(schema, schema, (), [_MOST_NODES])
    except RecursionError:
        whole = _inlined(schema, None, (), [_MOST_NODES * 100])
    else:
        whole.pop("$defs", None)
        whole.pop("definitions", None)
    return dict(whole)


def _inlined(schema: Any, root: Any, inside: tuple[str, ...], left: list[int]) -> Any:
    """`inside`: the references that this schema stands in; RecursionError where it is to stay as it is."""
    if isinstance(schema, list | tuple):
        return [_inlined(item, root, inside, left) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    left[0] -= 1
    name = str(schema.get("$ref", ""))
    if left[0] < 0 or name in inside:
        raise RecursionError
    target = None if root is None else _target(name, root)
    if target is None and root is not None and name.startswith("#"):  # an anchor, say
        raise RecursionError
    beside: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "$ref" and target is not None:
            continue
        if key in ("$defs", "definitions") and root is not None:
            continue
        if key in _MAPS and isinstance(value, Mapping):
            beside[key] = {inner: _inlined(each, root, inside, left) for inner, each in value.items()}
        else:
            beside[key] = _inlined(value, root, inside, left) if key in _SCHEMAS else value
    if target is None:
        return beside
    return {**_inlined(target, root, (*inside, name), left), **beside}


def _kinds(schema: Any, root: Any, cache: dict[str, tuple[ValueKind, ...]]) -> tuple[ValueKind, ...]:
    if not isinstance(schema, Mapping):
        return (ValueKind(types=_ANY_TYPE),)
    kinds: tuple[ValueKind, ...] = (_declared(schema),)
    name = str(schema.get("$ref", ""))
    if (target := _target(name, root)) is not None:
        if name not in cache:
            cache[name] = ()  # what holds itself adds nothing
            cache[name] = _kinds(target, root, cache)
        kinds = _both(kinds, cache[name])
    for part in _sequence(schema.get("allOf")):
        kinds = _both(kinds, _kinds(part, root, cache))
    for union in ("anyOf", "oneOf"):
        if choices := _sequence(schema.get(union)):
            alternatives = (kind for choice in choices for kind in _kinds(choice, root, cache))
            kinds = _both(kinds, _distinct(alternatives))
    if schema.get("nullable") is True:
        kinds = (*kinds, ValueKind(types=frozenset({"null"})))
    return kinds


def _declared(schema: Mapping[str, Any]) -> ValueKind:
    """The kind that the schema itself declares."""
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _sequence(declared)
    types = frozenset(name for name in names if isinstance(name, str)) & _ANY_TYPE
    if not types and isinstance(schema.get("properties"), Mapping):
        types = frozenset({"object"})
    if not types and "items" in schema:
        types = frozenset({"array"})
    types = types or _ANY_TYPE
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list | tuple):
        return ValueKind(types=types)
    return ValueKind(types=types, values={canonical(v): v for v in listed if _has_type(v, types)})


def _both(some: Sequence[ValueKind], others: Sequence[ValueKind]) -> tuple[ValueKind, ...]:
    """The kinds of values that are of both."""
    if not others:
        return tuple(some)
    return _distinct(kind for one in some for other in others if (kind := _common(one, other)) is not None)


def _common(one: ValueKind, other: ValueKind) -> ValueKind | None:
    types = one.types & other.types
    for wide, narrow in ((one, other), (other, one)):
        if "number" in wide.types and "integer" in narrow.types:
            types |= {"integer"}
    some, others = (one, other) if one.values is not None else (other, one)
    values = some.values
    if values is not None:
        texts = values if others.values is None else others.values
        values = {text: v for text, v in values.items() if text in texts and _has_type(v, types)}
    return None if not types or values == {} else ValueKind(types=types, values=values)


def _distinct(kinds: Iterator[ValueKind]) -> tuple[ValueKind, ...]:
    """The kinds, all values of the same types together."""
    distinct: dict[tuple[frozenset[str], bool], ValueKind] = {}
    for kind in kinds:
        key = kind.types, kind.values is None
        earlier = distinct.setdefault(key, kind)
        if earlier.values is not None and kind.values is not None:
            distinct[key] = ValueKind(types=kind.types, values={**earlier.values, **kind.values})
        if len(distinct) > _MOST_KINDS:
            return (ValueKind(types=_ANY_TYPE),)
    return tuple(distinct.values())


def _has_type(value: Any, types: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case str():
            return "string" in types
        case list() | tuple():
            return "array" in types
    return isinstance(value, Mapping) and "object" in types


def _parts(schema: Any, root: Any, names: set[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """The schemas that all hold for an object or a list of this one, the general ones first.

    Each reference is followed once: a schema may hold itself.
    """
    if not isinstance(schema, Mapping):
        return
    names = set() if names is None else names
    name = str(schema.get("$ref", ""))
    if (target := _target(name, root)) is not None and name not in names:
        names.add(name)
        yield from _parts(target, root, names)
    for part in _sequence(schema.get("allOf")):
        yield from _parts(part, root, names)
    for union in ("anyOf", "oneOf"):
        choices = [parts for each in _sequence(schema.get(union)) if (parts := [*_parts(each, root, names)])]
        shaped = [parts for parts in choices if any("properties" in p or "items" in p for p in parts)]
        if len(shaped) == 1:
            yield from shaped[0]
    yield schema


def _with_reference(schema: Any, root: Any) -> Any:
    """A member's schema, with the default that a reference has for it."""
    target = _target(str(schema.get("$ref", "")), root) if isinstance(schema, Mapping) else None
    return {**target, **schema} if isinstance(target, Mapping) else schema


def _target(name: str, root: Any) -> Any:
    """The schema that a reference within the schema names, or None: those to other documents name nothing
    here."""
    if not name.startswith("#"):
        return None
    target = root
    for step in filter(None, unquote(name[1:]).split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or step not in target:
            return None
        target = target[step]
    return target


def mapping_of(value: Any) -> Mapping[str, Any]:
    """A schema as it is; `true`, or whatever else stands for one, allows anything."""
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def without_nulls(value: Any) -> Any:
    """The same without keys whose value is null, at every level: Arrow gives each mapping the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value
