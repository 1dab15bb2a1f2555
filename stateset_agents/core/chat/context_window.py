"""Which messages of a long conversation the model is shown; `core/chat/history.py` asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stateset_agents.types.messages import Message

_SUMMARY = "Summary of the conversation so far:"


@dataclass(frozen=True, slots=True)
class View:
    """A conversation whose oldest messages are shown as others; by default it is shown as it is."""

    num_replaced: int = 0
    replacement: tuple[Message, ...] = ()

    def of(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """What is shown of these messages."""
        return (*self.replacement, *messages[self.num_replaced :])


def slide_window(messages: tuple[Message, ...], fits: Callable[[View], bool]) -> View:
    """The system message and as many of the newest exchanges as fit; always at least the newest one.

    An exchange is a user message with all that follows it up to the next: answers, tool calls, their results.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return View()
    head = messages[: starts[0]]
    while head and head[-1].role != "system":  # an agent that spoke first
        head = head[:-1]

    def without(number: int) -> View:
        return View(starts[number], head) if number else View()

    low, high = 0, len(starts) - 1  # the fewest exchanges to leave out lie in between
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(without(middle)) else (middle + 1, high)
    return without(low)


def with_summary(messages: tuple[Message, ...], summary: str) -> View:
    """The opening and a summary in the place of all that was said before the last reply."""
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    *system, last = messages[: replies[0]] or (Message(role="user", content=""),)
    if last.role != "user":
        system, last = [*system, last], Message(role="user", content="")
    content = "\n\n".join(filter(None, [last.content, f"{_SUMMARY}\n{summary}"]))
    return View(replies[-1], (*system, replace(last, content=content)))


def num_replies(messages: Sequence[Message]) -> int:
    """How often the agent has spoken."""
    return sum(message.role == "assistant" for message in messages)
