"""Scenarios from plain dicts and from JSONL files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

__all__ = ["load_scenarios", "read_scenarios"]


def load_scenarios(items: Iterable[Scenario | Mapping[str, Any]]) -> list[Scenario]:
    """Scenarios from scenarios or plain dicts; an empty list or two equal ids are refused."""
    scenarios = [item if isinstance(item, Scenario) else Scenario.from_dict(item) for item in items]
    if not scenarios:
        raise ConfigurationError("scenarios is empty: give at least one scenario")
    _refuse_equal_ids(
        [(f"scenario {number}", scenario) for number, scenario in enumerate(scenarios, start=1)]
    )
    return scenarios


def read_scenarios(path: str | Path) -> list[Scenario]:
    """Scenarios from a JSONL file, one object a line; errors name file and line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        where = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        raise ConfigurationError(f"cannot read scenario file {path}: {error.strerror}{where}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"scenario file {path} is not UTF-8 text (byte {error.start})") from error
    located: list[tuple[str, Scenario]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON texts may hold other line ends
        if line.strip():
            try:
                located.append((f"line {number}", Scenario.from_dict(_read_json(line))))
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not located:
        raise ConfigurationError(f"{path} holds no scenario: write one JSON object a line")
    try:
        _refuse_equal_ids(located)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}, {error}") from error
    return [scenario for _, scenario in located]


def _read_json(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"not JSON ({error.msg}): {line[:60]!r}") from error
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise ConfigurationError(f"cannot be read ({error}): {line[:60]!r}") from error


def _refuse_equal_ids(located: Sequence[tuple[str, Scenario]]) -> None:
    first: dict[str, str] = {}
    for where, scenario in located:
        if scenario.id in first:
            raise ConfigurationError(
                f"{where}: id {scenario.id!r} stands twice, first at {first[scenario.id]}: ids must be unique"
            )
        first[scenario.id] = where
