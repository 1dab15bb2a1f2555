"""What a server remembers of its clients' conversations, for `AgentConfig.history` keep and compact.

A client sends the whole conversation with every request, mostly without the agent's thoughts. The server
finds the answer that it goes on from, and puts back the agent's messages as they were sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.history import ChatHistory
from stateset_agents.core.chat.known_conversations import KnownConversations, SentConversation
from stateset_agents.types.messages import Message

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
        self._conversations = KnownConversations[SentConversation](max_size=max_characters)

    @property
    def size(self) -> int:
        """In tokens: of the turns, or of the conversations where these are longer."""
        return max(self.turns.num_tokens, self._conversations.size // _CHARACTERS_A_TOKEN)

    def restored(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """A request's messages, up to the last answer that is remembered as they were sampled."""
        messages = tuple(messages)
        if (found := self._conversations.find(messages)) is None:
            return messages
        known, following = found
        return (*known.conversation, *following)

    def add(self, messages: Sequence[Message], conversation: tuple[Message, ...]) -> None:
        """Remember a conversation that ends with an answer; `messages`: the same as the client has it."""
        size = sum(map(_num_characters, conversation))
        self._conversations.add(SentConversation(conversation, tuple(messages), size))


def _num_characters(message: Message) -> int:
    calls = len(repr(message.tool_calls)) if message.tool_calls else 0
    return len(message.content) + len(message.reasoning or "") + calls
