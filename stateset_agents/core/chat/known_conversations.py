"""Finds the conversation that a list of messages goes on from, among those that end with the agent's words.

Rollouts, servers and the endpoint of external programs ask: each is given whole conversations, by somebody
who need not have all of what the agent said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from stateset_agents.types.comparison import canonical
from stateset_agents.types.messages import Message, ToolCall


class KnownConversation(Protocol):
    """One that ends with the agent's words."""

    @property
    def conversation(self) -> tuple[Message, ...]:
        """As the agent said it."""
        ...

    @property
    def sent(self) -> tuple[Message, ...]:
        """The same as the other side has it."""
        ...

    @property
    def size(self) -> int:
        """What it counts against the bound."""
        ...


@dataclass(frozen=True, slots=True)
class SentConversation:
    """A `KnownConversation` and no more."""

    conversation: tuple[Message, ...]
    sent: tuple[Message, ...]
    size: int = 0


T = TypeVar("T", bound=KnownConversation)


class KnownConversations(Generic[T]):
    """Conversations that end with the agent's words.

    Messages repeat one though they leave out thoughts, give calls other ids, write their arguments otherwise
    (3.0 and 3 are one number to many clients) or drop white space at the ends of what the agent said. A
    thought that is sent and differs makes it another conversation.
    """

    def __init__(self, *, max_size: int | None = None) -> None:
        """Beyond `max_size` together the oldest are forgotten, but never the latest."""
        self._max_size = max_size
        self._oldest: deque[T] = deque()
        self._ending: dict[int, list[T]] = {}
        """The same by their ends: one is found among thousands."""
        self.size = 0
        """Of all that are known."""

    def add(self, known: T) -> None:
        """Keep a conversation."""
        self._oldest.append(known)
        self._ending.setdefault(_end(known.sent, len(known.sent)), []).append(known)
        self.size += known.size
        while self._max_size is not None and self.size > self._max_size and len(self._oldest) > 1:
            oldest = self._oldest.popleft()
            self.size -= oldest.size
            end = _end(oldest.sent, len(oldest.sent))
            del self._ending[end][0]
            if not self._ending[end]:
                del self._ending[end]

    def find(self, messages: tuple[Message, ...]) -> tuple[T, tuple[Message, ...]] | None:
        """The latest of the longest that the messages go on from, and what they add: results with the ids
        that their calls have in the conversation. None where they repeat none."""
        for length in range(len(messages) - 1, 0, -1):
            for known in reversed(self._ending.get(_end(messages, length), ())):
                begin, following = messages[:length], messages[length:]
                if _repeats(begin, known.sent):
                    if begin != known.conversation:
                        ids = _ids(begin, known.conversation)
                        following = tuple(_with_id(message, ids) for message in following)
                    return known, following
        return None


def _end(messages: Sequence[Message], length: int) -> int:
    """How many messages these are, and what the last says, as a number: another conversation may share it."""
    return hash((length, messages[length - 1].content.strip()))


def _repeats(messages: tuple[Message, ...], sent: tuple[Message, ...]) -> bool:
    if messages == sent or len(messages) != len(sent):
        return messages == sent
    ids: dict[str, str] = {}
    for message, other in zip(messages, sent, strict=True):
        if message.role == other.role == "assistant":
            if (
                message.content.strip() != other.content.strip()
                or (message.reasoning and message.reasoning != other.reasoning)
                or list(map(_as_text, message.tool_calls)) != list(map(_as_text, other.tool_calls))
            ):
                return False
            ids |= _ids([message], [other])
        elif _with_id(message, ids) != other:
            return False
    return True


def _as_text(call: ToolCall) -> tuple[str | None, str, str]:
    """All of a call but its id."""
    return call.error, call.name, canonical(call.arguments)


def _ids(messages: Sequence[Message], conversation: Sequence[Message]) -> dict[str, str]:
    """The ids that calls have in the conversation, by those in the messages, which repeat it."""
    both = (
        [call.id for message in side for call in message.tool_calls if call.error is None]
        for side in (messages, conversation)
    )
    return dict(zip(*both, strict=True))


def _with_id(message: Message, ids: dict[str, str]) -> Message:
    id = ids.get(message.tool_call_id or "")
    return replace(message, tool_call_id=id) if message.role == "tool" and id else message
