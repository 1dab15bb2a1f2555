"""What a server remembers of its clients' conversations, for `AgentConfig.history` keep and compact.

A client sends the whole conversation with every request, mostly without the agent's thoughts. The server
finds the answer that it goes on from, and puts back the agent's messages as they were sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.history import ChatHistory
from stateset_agents.types.messages import Message, ToolCall

__all__ = ["ClientHistories", "ClientHistory"]

_MAX_CLIENTS = 1024
_CHARACTERS_A_TOKEN = 4


class ClientHistories:
    """A `ClientHistory` for each client: no prompt holds what the agent thought for another client.

    They are bounded together. Beyond that the clients are forgotten that have asked for nothing for the
    longest time, and of each client its oldest turns.
    """

    def __init__(self, agent: MultiTurnAgent, *, max_tokens: int) -> None:
        """`max_tokens`: of all turns that are remembered, each with its prompt; of one client a quarter."""
        self._agent = agent
        self._max_tokens = max_tokens
        self._histories: OrderedDict[str, ClientHistory] = OrderedDict()

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._histories)

    def of(self, client: str) -> ClientHistory:
        """A client's own."""
        if client not in self._histories:
            most = self._max_tokens // 4
            turns = self._agent.history(max_tokens=most)
            self._histories[client] = ClientHistory(turns, max_characters=_CHARACTERS_A_TOKEN * most)
        self._histories.move_to_end(client)
        size = sum(history.size for history in self._histories.values())
        while len(self._histories) > 1 and (size > self._max_tokens or len(self._histories) > _MAX_CLIENTS):
            size -= self._histories.popitem(last=False)[1].size
        return self._histories[client]


class ClientHistory:
    """The answers to one client's requests, each with its conversation as it was sampled."""

    def __init__(self, turns: ChatHistory, *, max_characters: int) -> None:
        """`max_characters`: of all conversations that are remembered, each counted whole."""
        self.turns = turns
        """The answers with their prompts; it has a bound of its own."""
        self._max_characters = max_characters
        self._num_characters = 0
        self._conversations: dict[bytes, tuple[tuple[Message, ...], int]] = {}
        """By what the client has of them (`_keys`), the oldest first: each ends with an answer, and has
        so many characters."""

    @property
    def size(self) -> int:
        """In tokens: of the turns, or of the conversations where these are longer."""
        return max(self.turns.num_tokens, self._num_characters // _CHARACTERS_A_TOKEN)

    def restored(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """A request's messages, up to the last answer that is remembered as they were sampled.

        Clients may leave out thoughts, give calls other ids, write their arguments otherwise and drop white
        space at the ends of answers. A thought that is sent and differs is taken as it is.
        """
        for length, key in reversed(list(_keys(messages))):
            conversation, _ = self._conversations.get(key, ((), 0))
            if conversation and _has_its_thoughts(messages[:length], conversation):
                return (*conversation, *_with_sampled_ids(messages, conversation))
        return tuple(messages)

    def add(self, messages: Sequence[Message], conversation: tuple[Message, ...]) -> None:
        """Remember a conversation that ends with an answer; `messages`: the same as the client has it."""
        *_, (_, key) = _keys(messages)
        self._forget(key)
        num_characters = sum(map(_num_characters, conversation))
        self._conversations[key] = conversation, num_characters
        self._num_characters += num_characters
        while self._num_characters > self._max_characters and len(self._conversations) > 1:
            self._forget(next(iter(self._conversations)))

    def _forget(self, key: bytes) -> None:
        self._num_characters -= self._conversations.pop(key, ((), 0))[1]


def _keys(messages: Sequence[Message]) -> Iterator[tuple[int, bytes]]:
    """For each of the agent's messages: how many end with it, and a digest of all that they say.

    A result's call is known by its number in the conversation: clients may give calls ids of their own.
    """
    digest = hashlib.blake2b(digest_size=16)
    num_calls, numbers = 0, dict[str, int]()
    for length, message in enumerate(messages, 1):
        said: tuple[Any, ...] = message.role, message.content, message.name
        if message.role == "tool":
            id = message.tool_call_id or ""
            said = message.role, message.content, numbers.get(id, id)
        elif message.role == "assistant":
            said = message.role, message.content.strip(), *map(_as_text, message.tool_calls)
            for call in message.tool_calls:
                numbers[call.id] = num_calls
                num_calls += 1
        digest.update(repr(said).encode("utf-8", "surrogatepass"))
        if message.role == "assistant":
            yield length, digest.digest()


def _as_text(call: ToolCall) -> str:
    """Name and arguments; 3.0 and 3 are one number to many clients."""
    arguments = json.dumps(dict(call.arguments), sort_keys=True)
    return f"{call.name} {json.dumps(json.loads(arguments, parse_float=_number))}"


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _has_its_thoughts(messages: Sequence[Message], conversation: Sequence[Message]) -> bool:
    """Those that the client sent."""
    pairs = zip(messages, conversation, strict=True)
    return all(not sent.reasoning or sent.reasoning == sampled.reasoning for sent, sampled in pairs)


def _with_sampled_ids(messages: Sequence[Message], conversation: Sequence[Message]) -> Iterator[Message]:
    """The messages behind the conversation; results have the ids that its calls have there."""
    start = len(conversation)
    calls = [call for message in conversation for call in message.tool_calls if call.error is None]
    sent = [call for message in messages[:start] for call in message.tool_calls]
    ids = {call.id: sampled.id for call, sampled in zip(sent, calls, strict=True)}
    for message in messages[start:]:
        id = ids.get(message.tool_call_id or "")
        yield replace(message, tool_call_id=id) if message.role == "tool" and id else message


def _num_characters(message: Message) -> int:
    calls = len(repr(message.tool_calls)) if message.tool_calls else 0
    return len(message.content) + len(message.reasoning or "") + calls
