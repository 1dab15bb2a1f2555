"""One conversation: calls go to tau2's tools, words to the user, and at the end stands tau2's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stateset_agents.core.environment import Observation
from stateset_agents.core.tools import bounded
from stateset_agents.environments.tau2.prompts import STOP
from stateset_agents.environments.tau2.record import Called, Event, Said
from stateset_agents.environments.tau2.tasks import TaskEntry
from stateset_agents.environments.tau2.users.customer import Customer, Phone
from stateset_agents.environments.tau2.verdict import Judge
from stateset_agents.environments.tau2.world import World
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Outcome

MAX_ERRORS = 10
"""Failed calls after which a conversation is cut, as tau2 cuts it (`DEFAULT_MAX_ERRORS`)."""


@dataclass(slots=True, kw_only=True, eq=False)
class Tau2Conversation:
    """Of a task; without a customer it is a solo agent's."""

    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    entry: TaskEntry
    world: World
    customer: Customer | None
    judge: Judge
    turns_left: int
    max_result_chars: int
    events: list[Event] = field(default_factory=list)
    """All that was said and called so far, results whole."""
    num_errors: int = 0
    ended: str = ""
    """How: `own end`, `max_turns`, `max_errors`, or `words in solo`; empty as long as it goes on."""

    async def step(self, reply: Message) -> Observation:
        """Run the reply's calls, or else let the user answer its words; words beside calls nobody hears."""
        if self.ended:
            raise ConfigurationError("this tau2 conversation is over: start a new one")
        self.turns_left -= 1
        if reply.tool_calls:
            answers = self._called(reply.tool_calls)
        elif self.customer is None:
            self.ended = "own end" if STOP in reply.content else "words in solo"
            answers = ()
        else:
            answers = await self._answered(self.customer, reply.content)
        is_over = bool(self.ended)
        if not is_over and self.num_errors >= MAX_ERRORS:
            self.ended = "max_errors"
        elif not is_over and self.turns_left <= 0:
            self.ended = "max_turns"
        return Observation(messages=answers, terminated=is_over, truncated=not is_over and bool(self.ended))

    def _called(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        if self.customer is None and any(call.name == "done" and call.error is None for call in calls):
            self.ended = "own end"  # and no other call of this reply is made, as with tau2
            return ()
        return tuple(map(self._run, calls))

    def _run(self, call: ToolCall) -> Message:
        """Make one call; what is no call, or would never come back, is not made and not written down."""
        if call.error is not None or _would_hang(call):
            self.num_errors += 1
            content = f"Error: {call.error or 'powers cannot be calculated'}"
        else:
            result = self.world.call(call.name, call.arguments)
            self.events.append(
                Called(requestor="assistant", name=call.name, arguments=dict(call.arguments), result=result)
            )
            self.num_errors += result.failed
            content = bounded(result.content, self.max_result_chars)
        return Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)

    async def _answered(self, customer: Customer, text: str) -> tuple[Message, ...]:
        self.events.append(Said(speaker="assistant", text=text))
        phone = Phone(tools=self.world.domain.phone_tools, world=self.world, events=self.events)
        words = await customer.answer(text, phone)
        self.events.append(Said(speaker="user", text=STOP if words is None else words))
        if words is None:
            self.ended = "own end"
            return ()
        return (Message(role="user", content=words),)

    async def outcome(self) -> Outcome:
        """tau2's verdict; a conversation that did not come to its own end is worth 0, as with tau2."""
        changed = tuple(
            {"table": table, "row": row}
            for table, rows in self.world.changes().items()
            for row in rows
            if row
        )
        counts = {"ended": self.ended or "not yet", "num_errors": self.num_errors}
        if self.ended in ("max_turns", "max_errors", "words in solo"):
            return Outcome(reward=0.0, success=False, changes=changed, metadata=counts)
        judged = (self.entry, self.world, self.events)
        verdict = await in_thread(self.judge, *judged) if self.judge.is_slow else self.judge(*judged)
        return Outcome(
            reward=verdict.reward,
            success=verdict.reward == 1.0,
            changes=changed,
            metadata={**counts, "parts": dict(verdict.parts)},
        )

    def fork(self) -> Tau2Conversation:
        """An independent copy that goes on from the same state."""
        return replace(
            self,
            world=self.world.fork(),
            customer=None if self.customer is None else self.customer.fork(),
            events=list(self.events),
        )

    async def close(self) -> None:
        """Nothing is held."""


def _would_hang(call: ToolCall) -> bool:
    """tau2's calculator evaluates its expression, and 9**9**9**9 would take for ever."""
    return call.name == "calculate" and "**" in str(call.arguments.get("expression", "")).replace(" ", "")
