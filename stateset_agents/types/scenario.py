"""What a conversation is about: one scenario is one task for the agent, played by every group member."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import closest

__all__ = ["Scenario", "Split", "expect_scenarios", "expect_split"]

_log = get_logger(__name__)

Split = Literal["train", "validation", "test"]
_SPLITS: tuple[Split, ...] = get_args(Split)


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

    def __post_init__(self) -> None:
        expect_split(self.split, "scenario split")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """Read a plain dict such as `{"topic": "refund", "context": "Order delayed"}`.

        `topic` is the family where none is given; a `context` that is text stands under
        `context["text"]`; keys with no field of their own go into the context, with a warning for one
        that is nearly a field's name. The id is made from the content when absent, so the same dict is
        the same scenario in every run.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"a scenario must be a mapping, got {type(data).__name__}: {data!r:.80}")
        context = data.get("context", {})
        context = dict(context) if isinstance(context, Mapping) else {"text": context}
        for key in data.keys() - _FIELDS:
            _say_if_misspelt(key, data)
            if key in context and context[key] != data[key]:
                raise ConfigurationError(
                    f"scenario key {key!r} also stands in its context with another value: give it once"
                )
            context[key] = data[key]
        split, opening = data.get("split", "train"), data.get("opening")
        if not isinstance(opening, str | None):
            raise ConfigurationError(f"scenario opening must be text, got {type(opening).__name__}")
        own = data.get("id")
        return cls(
            id=_content_id(data) if own is None or own == "" else str(own),
            family=str(data.get("family") or data.get("topic") or "default"),
            opening=opening or "",
            context=context,
            split=split,
        )


def expect_split(split: object, what: str = "split") -> Split:
    """The split; raises ConfigurationError for one that no scenario can be of."""
    for known in _SPLITS:
        if split == known:
            return known
    raise ConfigurationError(f"{what} must be train, validation or test, got {split!r:.60}")


def expect_scenarios(value: object) -> None:
    """Raises ConfigurationError where something else stands in the place of a list of scenarios."""
    wanted = "scenarios must be a list of Scenarios"
    if isinstance(value, Scenario):
        raise ConfigurationError(f"{wanted}, got one: write [scenario] (it is {value.id!r})")
    if isinstance(value, str):
        raise ConfigurationError(
            f"{wanted}, got the text {value!r:.60}: write environment.scenarios({value!r:.60})"
        )
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{wanted}, got {type(value).__name__} {value!r:.60}")
    for item in value:
        if not isinstance(item, Scenario):
            raise ConfigurationError(
                f"{wanted}, got {type(item).__name__} {item!r:.60} in it: write load_scenarios(...)"
            )


_FIELDS = {"id", "family", "opening", "context", "split"}
_said: set[str] = set()
"""Misspelt keys that were told of."""


def _say_if_misspelt(key: object, data: Mapping[str, Any]) -> None:
    known = [*_FIELDS, "topic", "script", "expected_facts"]
    meant = closest(key, known, likeness=0.8) if isinstance(key, str) and key not in known else None
    if meant is not None and meant not in data and key not in _said:
        _said.add(str(key))
        _log.warning(f"scenario key {key!r} is no field and goes into the context; did you mean {meant!r}?")


def _content_id(data: Mapping[str, Any]) -> str:
    """The same for the same content in every run."""
    try:
        content = json.dumps(data, sort_keys=True)
    except TypeError as error:  # an object without a JSON form, or keys that are not all text
        raise ConfigurationError(
            f"a scenario that is no plain JSON needs an id of its own ({error})"
        ) from error
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
