"""What a conversation is about: one scenario is one task for the agent, played by every group member."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from stateset_agents.errors import ConfigurationError

__all__ = ["Scenario", "Split", "load_scenarios", "read_scenarios"]

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One task: who calls, what they want, and what the environment needs to know about it."""

    id: str
    family: str = "default"
    """Kind of task; success is reported per family."""
    opening: str = ""
    """The user's first message; empty where the environment's user writes it."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the environment or the reward reads (facts, goals, tool data)."""
    split: Split = "train"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """Read a plain dict such as `{"topic": "refund", "context": "Order delayed"}`.

        `topic` is the family where none is given; a `context` that is text stands under
        `context["text"]`; keys with no field of their own go into the context. The id is made from
        the content when absent, so the same dict is the same scenario in every run.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"a scenario must be a mapping, got {type(data).__name__}: {data!r:.80}")
        known = {"id", "family", "opening", "context", "split"}
        context = data.get("context", {})
        context = dict(context) if isinstance(context, Mapping) else {"text": context}
        context.update({key: value for key, value in data.items() if key not in known})
        split = data.get("split", "train")
        if split not in get_args(Split):
            raise ConfigurationError(f"scenario split must be train, validation or test, got {split!r}")
        content = json.dumps(data, sort_keys=True, default=str)
        return cls(
            id=str(data.get("id") or hashlib.blake2b(content.encode(), digest_size=6).hexdigest()),
            family=str(data.get("family") or data.get("topic") or "default"),
            opening=str(data.get("opening", "")),
            context=context,
            split=split,
        )


def load_scenarios(items: Iterable[Scenario | Mapping[str, Any]]) -> list[Scenario]:
    """Scenarios from scenarios or plain dicts; an empty list or two equal ids are refused."""
    scenarios = [item if isinstance(item, Scenario) else Scenario.from_dict(item) for item in items]
    if not scenarios:
        raise ConfigurationError("scenarios is empty: give at least one scenario")
    seen: set[str] = set()
    for scenario in scenarios:
        if scenario.id in seen:
            raise ConfigurationError(f"scenario id {scenario.id!r} stands twice: ids must be unique")
        seen.add(scenario.id)
    return scenarios


def read_scenarios(path: str | Path) -> Sequence[Scenario]:
    """Scenarios from a JSONL file, one object a line; errors name file and line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"cannot read scenario file {path}: {error.strerror}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(Scenario.from_dict(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                f"{path}, line {number}: not JSON ({error.msg}): {line[:60]!r}"
            ) from error
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not items:
        raise ConfigurationError(f"{path} holds no scenario: write one JSON object a line")
    return load_scenarios(items)
