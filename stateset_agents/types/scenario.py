"""Scenarios: each one is a task for the agent, and every member of a group plays the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stateset_agents.types.comparison import nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message
from stateset_agents.types.settings import closest

_log = get_logger(__name__)

Split = Literal["train", "validation", "test"]
_SPLITS: tuple[Split, ...] = get_args(Split)
OPENING_COLUMNS = (
    *("messages", "conversations", "traj", "prompt", "instruction"),
    *("question", "problem", "query", "user_message", "input"),
)
"""Columns in which published data have what the user says (see `core.sources.row_shapes`): where a scenario
has one of them in its context and no opening, none is made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One task: the user's goal and first message, and what else the environment needs to know."""

    id: str
    family: str = "default"
    """Kind of task; success is reported per family."""
    opening: str = ""
    """The user's first message; empty where the environment's user writes it."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the environment or the reward reads (facts, goals, tool data)."""
    split: Split = "train"
    prompt: tuple[Message, ...] = ()
    """The messages that open the conversation where it is more than the opening: a system message, earlier
    turns, a picture. The opening is what its user says last."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Schemas that this scenario's agent is offered, beside the environment's; None where it names none."""

    def __post_init__(self) -> None:
        expect_split(self.split, "scenario split")
        words = [message.content for message in self.prompt if message.role == "user"]
        if self.prompt and (not words or words[-1] != self.opening or self.prompt[-1].role == "assistant"):
            raise ConfigurationError(
                f"scenario {self.id}: its prompt must end with the opening {self.opening!r:.60}"
            )

    def messages(self, system: Sequence[Message] = ()) -> tuple[Message, ...]:
        """The messages that the agent reads first. `system`, where there is one, stands instead of the
        prompt's own."""
        prompt = self.prompt or (Message(role="user", content=self.opening),)
        if not system:
            return prompt
        return (*system, *(message for message in prompt if message.role != "system"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """Read a plain dict such as `{"topic": "refund", "context": "Order delayed"}`.

        `topic` is the family if none is given; a `context` that is text becomes `context["text"]`; keys
        without a field go into the context, with a warning if one is similar to a field's name. Without an
        id, it is made from the content, so that the same dict is the same scenario in every run.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"a scenario must be a mapping, got {type(data).__name__}: {data!r:.80}")
        context = data.get("context", {})
        context = dict(context) if isinstance(context, Mapping) else {"text": context}
        for key in data.keys() - _FIELDS:
            _warn_if_misspelt(key, data)
            if key in context and context[key] != data[key]:
                raise ConfigurationError(
                    f"scenario key {key!r} also stands in its context with another value: give it once"
                )
            context[key] = data[key]
        split: Any = data.get("split") or "train"
        opening = data.get("opening")
        if not isinstance(opening, str | None):
            raise ConfigurationError(
                f"the opening must be text, got {type(opening).__name__} {opening!r:.60}"
            )
        id = data.get("id")
        return cls(
            id=_content_id(data) if id is None or id == "" else str(id),
            family=nfc(str(data.get("family") or data.get("topic") or "default")),
            opening=opening or "",
            context=context,
            split=split,
        )

    def to_record(self) -> dict[str, Any]:
        """The scenario as plain JSON; prompt and tools where it has them."""
        data: dict[str, Any] = {
            "id": self.id,
            "family": self.family,
            "opening": self.opening,
            "context": dict(self.context),
            "split": self.split,
        }
        if self.prompt:
            data["prompt"] = [message.to_record() for message in self.prompt]
        if self.tools is not None:
            data["tools"] = [dict(schema) for schema in self.tools]
        return data

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Scenario:
        """Read what `to_record` wrote."""
        prompt, tools = data.get("prompt", ()), data.get("tools")
        rest = {key: value for key, value in data.items() if key not in ("prompt", "tools")}
        return cls(
            **rest,
            prompt=tuple(map(Message.from_record, prompt)),
            tools=None if tools is None else tuple(tools),
        )


Scenarios = Sequence[Scenario | Mapping[str, Any]]
"""Scenarios, or plain dicts in their place."""


def expect_split(split: object, name: str = "split") -> Split:
    """The split. Raises ConfigurationError for an unknown one."""
    for candidate in _SPLITS:
        if split == candidate:
            return candidate
    raise ConfigurationError(f"{name} must be train, validation or test, got {split!r:.60}")


def expect_scenarios(value: object) -> None:
    """Raises ConfigurationError for anything but a list of scenarios, or of plain dicts in their place."""
    expected = "scenarios must be a list of Scenarios or dicts"
    if isinstance(value, Scenario):
        raise ConfigurationError(f"{expected}, got one: write [scenario] (it is {value.id!r})")
    if isinstance(value, str):
        raise ConfigurationError(
            f"{expected}, got the text {value!r:.60}: write environment.scenarios({value!r:.60})"
        )
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{expected}, got {type(value).__name__} {value!r:.60}")
    for item in value:
        if not isinstance(item, Scenario | Mapping):
            raise ConfigurationError(
                f"{expected}, got {type(item).__name__} {item!r:.60} in it: write load_scenarios(...)"
            )


_FIELDS = {"id", "family", "opening", "context", "split"}
_warned_keys: set[str] = set()
"""Misspelt keys of which a warning was logged."""


def _warn_if_misspelt(key: object, data: Mapping[str, Any]) -> None:
    names = [*_FIELDS, "topic", "script", "expected_facts"]
    similar = closest(key, names, likeness=0.8) if isinstance(key, str) and key not in names else None
    if similar is not None and similar not in data and key not in _warned_keys:
        _warned_keys.add(str(key))
        _log.warning(f"scenario key {key!r} is no field and goes into the context; did you mean {similar!r}?")


def _content_id(data: Mapping[str, Any]) -> str:
    """An id that depends only on the content."""
    try:
        content = json.dumps(data, sort_keys=True)
    except TypeError as error:  # an object without a JSON form, or keys that are not all text
        raise ConfigurationError(
            f"a scenario that is no plain JSON needs an id of its own ({error})"
        ) from error
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
