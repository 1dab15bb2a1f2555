"""The loader of all YAML that the package reads: settings, runs, recommendations, specs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stateset_agents.runtime.named_code import is_code_below
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.foreign_names import setting_hint
from stateset_agents.types.settings import Settings, nearest

if TYPE_CHECKING:
    import yaml

_Model = TypeVar("_Model", bound=Settings)


_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_DIGITS = 200
"""Most characters of a number: so an integer fits into a float, and Python can write it out, also 0xff... and
1:59:59..."""
_MAX_NODES = 100_000
"""Most values that aliases may add to a text: nine lists of nine aliases each, one in the other, are a
billion."""


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises ConfigurationError where it cannot be read, and as `parse_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    return parse_yaml(text, of=str(path))


def parse_yaml(text: str, *, of: str) -> Any:
    """The value of a YAML text, as plain Python values; `of` names the text in errors.

    Raises ConfigurationError if it is not YAML, for a key that stands twice in one mapping (PyYAML would
    silently drop the first value), for a number beyond 200 characters, and for aliases that would be too
    many values, or contain themselves.
    """
    import yaml

    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_keys_and_numbers(root, of)
        _refuse_bombs(root, of)
        return loader.construct_document(root)
    except ConfigurationError:
        raise
    except RecursionError as error:
        raise ConfigurationError(f"{of} is not YAML that can be read: it is nested too deeply") from error
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # `!!bool maybe`, `!!int ''`
        raise ConfigurationError(f"{of} is not YAML: a value does not fit its tag ({error})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{of} is not YAML: {' '.join(str(error).split())}") from error
    finally:
        if loader is not None:
            loader.dispose()


def read_sections(path: Path) -> dict[str, Any]:
    """A settings file, section by section.

    Raises ConfigurationError where it cannot be read or has no sections.
    """
    data = read_yaml(path)
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"{path} must hold sections such as agent, environment, training")
    return data


def override(data: dict[str, Any], name: str, value: Any) -> None:
    """Set `section.field` (or deeper) of a settings file; a section that is only a name gets room for
    fields."""
    *path, field = name.split(".")
    here = data
    for part in path:
        inner = here.get(part)
        if inner is None or isinstance(inner, str):
            inner = here[part] = {} if inner is None else {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{name} cannot be set: {part} is {inner!r:.40}, which has no fields")
        here = inner
    here[field] = value


def settings_from(
    data: Mapping[str, Any],
    model: type[_Model],
    *,
    of: Path,
    sections: Mapping[str, type[Settings]],
    required: Mapping[str, str],
) -> _Model:
    """The model of a whole file `of`; its `sections` are looked through for a field that stands outside.

    Raises ConfigurationError, naming the file, for a name that no section has, a wrong value, and a missing
    section; `required`: section -> what to write.
    """
    for name in data:
        if name not in model.model_fields:
            homes = [section for section, inner in sections.items() if name in inner.field_names()]
            near = setting_hint(name) or nearest(name, model.model_fields)
            hint = f" (did you mean {homes[0] + '.' + name!r}?)" if homes else near
            raise ConfigurationError(f"{of}: {model.__name__} has no field {name!r}{hint}")
    fields = {name: value for name, value in data.items() if value is not None}  # a section left empty
    for name, value in fields.items():
        if isinstance(value, dict) and not all(isinstance(field, str) for field in value):
            raise ConfigurationError(f"{of}: {name} must have names as keys, got {list(value)!r:.60}")
    for name, example in required.items():
        if name not in fields:
            raise ConfigurationError(f"{of}: {name} is missing: {example}")
    try:
        return model(**fields)
    except ConfigurationError as error:
        raise ConfigurationError(f"{of}: {error}") from None


def absolute_paths(value: Any, base: Path) -> Any:
    """The value with its paths made absolute, however deep they stand: texts that start with ./ or ../, and
    names of code such as "shop:make" where `base` holds shop.py. Links stay: `.venv/bin/python` is one."""
    if isinstance(value, list):
        return [absolute_paths(item, base) for item in value]
    if isinstance(value, dict):
        return {key: absolute_paths(item, base) for key, item in value.items()}
    if not isinstance(value, str) or "\n" in value:
        return value
    is_path = value.startswith(("./", "../")) or is_code_below(value, base)
    return os.path.abspath(base / value) if is_path else value


def _refuse_bombs(root: yaml.Node, of: str) -> None:
    """An alias is read in no time, but what walks through the value meets it anew at each place."""
    sizes: dict[int, int] = {}  # with aliases written out; 0 while a node is counted

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0
            items = [] if isinstance(node.value, str) else node.value
            parts = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        if sizes[id(node)] == 0:
            raise ConfigurationError(f"{of}: the alias in line {node.start_mark.line + 1} contains itself")
        return sizes[id(node)]

    if size(root) - len(sizes) > _MAX_NODES:
        raise ConfigurationError(
            f"{of}: its aliases stand for more than {_MAX_NODES:,} values: write out those that are needed"
        )


def _refuse_keys_and_numbers(root: yaml.Node, of: str) -> None:
    """Checks every mapping before `<<` is merged into it (a key may stand in both, and overrides there), and
    every number before it is read."""
    import yaml

    seen_ids: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen_ids:  # an alias
            continue
        seen_ids.add(id(node))
        if node.tag in _NUMBERS and len(node.value) > _MAX_DIGITS:
            raise ConfigurationError(
                f"{of}: {path}{path and ': '}{node.value[:20]}... is a number of {len(node.value):,} "
                f"characters: write one of at most {_MAX_DIGITS}, or a text in quotes"
            )
        if isinstance(node, yaml.SequenceNode):
            waiting.extend((f"{path}[{index}]", item) for index, item in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting.append((f"{path}, a key".lstrip(", "), key))
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                places = f"in lines {first} and {line}" if first != line else f"in line {line}"
                raise ConfigurationError(f"{of}: {name} stands twice, {places}: keep one of them")
            lines[key.tag, key.value] = line
            waiting.append((name, value))
