"""What was said and called in a conversation, by whom, in order: all that a verdict of tau2 reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.tau2.world import Requestor, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Words, to the other one."""

    speaker: Requestor
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool that was called, and its whole result."""

    requestor: Requestor
    name: str
    arguments: Mapping[str, Any]
    result: ToolResult


Event = Said | Called
