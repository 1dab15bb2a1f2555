"""The one loader of every YAML text that the package reads: settings, runs, recommendations, specs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

__all__ = ["parse_yaml", "read_yaml"]

_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """What a file holds; OSError where it cannot be read, else as `parse_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    return parse_yaml(text, of=str(path))


def parse_yaml(text: str, *, of: str) -> Any:
    """What a text holds, as plain values; `of` names it in errors.

    Raises ConfigurationError for what is not YAML, and for a key that stands twice in one mapping, which
    PyYAML would pass over: the first value would be lost.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_second_keys(root, of)
        return loader.construct_document(root)
    except RecursionError as error:
        raise ConfigurationError(f"{of} is not YAML that can be read: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{of} is not YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _refuse_second_keys(root: yaml.Node, of: str) -> None:
    """Looks at every mapping before `<<` is merged into it: a key may stand there and in what is merged."""
    import yaml

    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend((f"{path}[{place}]", item) for place, item in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            name, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                places = f"in lines {first} and {line}" if first != line else f"in line {line}"
                raise ConfigurationError(f"{of}: {name} stands twice, {places}: keep one of them")
            lines[key.tag, key.value] = line
            waiting.append((name, value))
