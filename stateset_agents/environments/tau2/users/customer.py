"""Who speaks to the agent: what a user of tau2's is, the phone that telecom's have, and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.environments.tau2.record import Called, Event
from stateset_agents.environments.tau2.world import ToolResult, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Phone:
    """The user's own tools, in the conversation's world; every call is written down."""

    tools: Sequence[Mapping[str, Any]]
    """Their schemas, in OpenAI's shape; empty for users without a phone."""
    world: World
    events: list[Event]

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """What the phone shows."""
        result = self.world.call(name, arguments, "user")
        self.events.append(Called(requestor="user", name=name, arguments=dict(arguments), result=result))
        return result


class Customer(Protocol):
    """A user of one conversation; it holds neither the phone nor the world, so that a copy has the copy's."""

    local: bool

    async def opening(self) -> str:
        """The first words."""
        ...

    async def answer(self, text: str, phone: Phone) -> str | None:
        """What it says to the agent's words, having used the phone where it was asked to; None to leave."""
        ...

    def fork(self) -> Customer: ...


CustomerFactory = Callable[..., Customer]
"""Makes the user from tau2's `UserScenario` and the group's seed."""
