"""What the numbers of a run count, by its kind: of conversations, or numeric. For pages and diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The words for one kind of run, each as a singular noun."""

    kind: Literal["conversations", "numeric"]
    choice: str
    """What the policy chooses, and entropy and KL are given for."""
    update: str
    """What each line of metrics.jsonl is of."""
    along: str
    """What `step` counts there."""
    scenario: str
    """What an episode starts from."""
    reward: str
    """What the sum of an episode's rewards is called."""


CONVERSATIONS = Units(
    kind="conversations", choice="token", update="step", along="step", scenario="scenario", reward="reward"
)
NUMERIC = Units(
    kind="numeric",
    choice="step",
    update="update",
    along="environment step",
    scenario="start",
    reward="return",
)


def units_of(config: Mapping[str, Any]) -> Units:
    """Of a run, by its config.yaml."""
    return NUMERIC if config.get("kind") == "control" else CONVERSATIONS
