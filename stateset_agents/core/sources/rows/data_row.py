"""One row of somebody's data as every door reads it: scenarios, logs, fine-tuning, distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stateset_agents.types.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """What a row asks, and what it shows of the answer.

    {"prompt": "2+2?", "completion": "4"}  ->  prompt (user: 2+2?), completion (assistant: 4)
    """

    shape: str
    """The name of its shape, one of `shapes.SHAPES`."""
    columns: tuple[str, ...]
    """Which of its columns are the prompt and the completion, for the line that says so."""
    prompt: tuple[Message, ...]
    """System message, earlier turns, and the message that an agent answers first; never trained on."""
    completion: tuple[Message, ...] = ()
    """What the row shows after it, the users' later words among it; empty where it shows nothing."""
    weights: tuple[float, ...] = ()
    """[completion] of each message in a loss: OpenAI's `weight`, 1 where it has none."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """The schemas it offers, in OpenAI's format; None where it names none."""
    rest: Mapping[str, Any]
    """Its other columns as they stand, and the texts among those that were read."""
    unread: tuple[str, ...] = ()
    """Keys of its messages that have a value and no place here, one for each time."""
