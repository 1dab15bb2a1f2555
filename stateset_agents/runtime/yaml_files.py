"""The loader of all YAML that the package reads: settings, runs, recommendations, specs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    import yaml

__all__ = ["parse_yaml", "read_yaml"]

_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises OSError if it cannot be read, else as `parse_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    return parse_yaml(text, of=str(path))


def parse_yaml(text: str, *, of: str) -> Any:
    """The value of a YAML text, as plain Python values; `of` names the text in errors.

    Raises ConfigurationError if it is not YAML, and for a key that stands twice in one mapping: PyYAML would
    silently drop the first value.
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
    """Checks every mapping before `<<` is merged into it: a key may stand in both, and overrides there."""
    import yaml

    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend((f"{path}[{index}]", item) for index, item in enumerate(node.value))
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
