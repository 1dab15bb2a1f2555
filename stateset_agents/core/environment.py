"""The world an agent talks to.

An `Environment` is shareable and holds no conversation; `start` opens a `Conversation`, which the
episode steps with the agent's replies until it is over, asks for its outcome, and closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Outcome
from stateset_agents.messages import Message

__all__ = ["Conversation", "Environment", "Observation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What came back after one agent reply."""

    messages: tuple[Message, ...] = ()
    """Tool results or the user's next words, in order."""
    reward: float | None = None
    """For this turn; None where the environment gives none."""
    terminated: bool = False
    """The conversation ended."""
    truncated: bool = False
    """A limit cut it."""


class Conversation(Protocol):
    """One live conversation. Not shared, not reused."""

    opening: tuple[Message, ...]
    """The first messages: an optional system message, then the user's words."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas (OpenAI's shape) of the tools the agent may call; may be empty."""

    async def step(self, reply: Message) -> Observation:
        """Take the agent's reply; raise only when the environment itself breaks."""
        ...

    async def outcome(self) -> Outcome:
        """The verdict on where things stand now; asked once, when the conversation is over or cut."""
        ...

    def fork(self) -> Conversation:
        """An independent copy that goes on from the same state."""
        ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """A source of conversations."""

    local: bool
    """True when no step waits on anything remote: the engine may then wait for every reply, which
    makes a run reproducible bit by bit (`scheduling: deterministic`)."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The scenarios of one split ("train", "validation", "test")."""
        ...

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Open a conversation; the same scenario, seed and replies give the same transcript."""
        ...
