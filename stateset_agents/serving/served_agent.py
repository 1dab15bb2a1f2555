"""An agent as a server asks it: its own prompt and limits around a request, its reply as an answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.backends.dialects.request import Answer, ChatRequest, as_sent, invalid, new_text
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.history import ChatHistory, KnownConversations, SentConversation
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.serving.limits import Limits
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.seeds import derive

_MAX_CLIENTS = 1024
CHARACTERS_A_TOKEN = 4


class ClientHistories:
    """A `ClientHistory` for each client, for `AgentConfig.history` keep and compact: no prompt holds what the
    agent thought for another client.

    A client sends the whole conversation with every request, mostly without the agent's thoughts. The server
    finds the answer that it goes on from, and puts back the agent's messages as they were sampled.

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
            self._histories[client] = ClientHistory(turns, max_characters=CHARACTERS_A_TOKEN * most)
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
        """Tokens of the turns, or of the conversations where these are longer."""
        return max(self.turns.num_tokens, self._conversations.size // CHARACTERS_A_TOKEN)

    def restored(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """A request's messages, up to the last answer that is remembered as they were sampled."""
        messages = tuple(messages)
        if (result := self._conversations.find(messages)) is None:
            return messages
        record, following = result
        return (*record.conversation, *following)

    def add(self, messages: Sequence[Message], conversation: tuple[Message, ...]) -> None:
        """Remember a conversation that ends with an answer; `messages`: the same as the client has it."""
        size = sum(
            len(message.content)
            + len(message.reasoning or "")
            + (len(repr(message.tool_calls)) if message.tool_calls else 0)
            for message in conversation
        )
        self._conversations.add(SentConversation(conversation, tuple(messages), size))


OnDelta = Callable[[Mapping[str, str]], None]
"""Gets what a stream adds to an answer's `content` or `reasoning`, as it is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request, before it is known which agent answers."""

    request: ChatRequest
    client: str
    conversation: str
    """The conversation's id where a deployment is served, else ""."""
    head: Answer
    """The fields that all answers have in common."""


class ServedAgent:
    """An agent with what it remembers of its clients' conversations."""

    def __init__(self, agent: MultiTurnAgent, limits: Limits) -> None:
        self.agent = agent
        self.max_output_tokens = limits.max_output_tokens or agent.context_length
        self._histories: ClientHistories | None = None
        """Unset where every prompt is the template's rendering of what the client sends."""
        if agent.config.history in ("keep", "compact"):
            self._histories = ClientHistories(agent, max_tokens=limits.max_remembered)

    async def answer(
        self,
        pending: PendingRequest,
        number: int = 0,
        on_delta: OnDelta | None = None,
        *,
        is_sent: bool = True,
    ) -> Answer:
        """Answer `number` to a request; all of its text went to `on_delta` before. The agent's errors travel.

        Not `is_sent`: nobody will see it, so the conversation does not go on from it.
        """
        history = self._histories.of(pending.client) if self._histories is not None and is_sent else None
        messages = self.agent.with_system_prompt(pending.request.messages)
        restored = messages if history is None else history.restored(messages)
        constraint = await self._constraint(pending.request)
        stream = self.agent.template.parser.stream(calls=bool(pending.request.tools))
        is_complete = False

        def on_text(piece: str) -> None:
            # A backend's thread may tell its last pieces after its result.
            if is_complete or on_delta is None:
                return
            stream.add(piece)
            if delta := stream.delta():
                on_delta(delta)

        completion = await self.agent.answer(
            restored,
            pending.request.tools,
            history=None if history is None else history.turns,
            on_text=None if on_delta is None else on_text,
            sampling={**self._sampling(pending.request, number), "constraint": constraint},
        )
        is_complete = True
        answer = self._to_answer(pending, completion, number)
        sent_message = Message(role="assistant", content=stream.content, reasoning=stream.reasoning)
        if on_delta is not None and (rest := new_text(answer.message, sent_message)):
            on_delta(rest)
        if history is not None:
            is_whole = answer.message == as_sent(completion.message)  # else only its first call was sent
            reply = completion.message if is_whole else answer.message
            history.add([*messages, answer.message], (*restored, reply))
        return answer

    async def num_prompt_tokens(self, pending: PendingRequest) -> int:
        """Tokens of the prompt that an answer to the request would follow. The agent's errors travel."""
        histories = self._histories
        messages = self.agent.with_system_prompt(pending.request.messages)
        if histories is not None:
            messages = histories.of(pending.client).restored(messages)
        history = self.agent.history(summarizes=False)
        return len((await self.agent.next_prompt(history, messages, pending.request.tools)).ids)

    async def _constraint(self, request: ChatRequest) -> Constraint | None:
        """The grammar of an answer, by the request and `AgentConfig.constrain`. Raises ApiError for what no
        grammar can keep."""
        limits = ReplyLimits(
            tool_choice=request.tool_choice,
            answer_schema=request.answer_schema,
            parallel_tool_calls=not request.single_call,
            is_requested=True,
        )
        try:
            constraint = await self.agent.constraint(request.tools, limits)
        except ConfigurationError as error:
            wants = "response_format" if request.answer_schema is not None else "tool_choice"
            raise invalid(str(error), wants, code="unsupported_constraint") from error
        if constraint is not None and (stop := request.sampling.get("stop") or self.agent.config.stop):
            raise invalid(
                f"stop {', '.join(map(repr, stop)):.60} could cut an answer of a grammar: leave it out",
                "stop",
                code="unsupported_constraint",
            )
        return constraint

    def _sampling(self, request: ChatRequest, number: int) -> dict[str, Any]:
        """Each answer has its own random stream."""
        most = min(self.agent.config.max_new_tokens, self.max_output_tokens)
        sampling = {"max_new_tokens": most, **_sampling(request.sampling)}
        if "seed" in request.sampling and number:
            sampling["stream"] = derive(request.sampling["seed"], "response", number)
        return sampling

    def _to_answer(self, pending: PendingRequest, completion: Completion, number: int) -> Answer:
        message = as_sent(completion.message)
        if pending.request.single_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        logprobs = self._logprobs(completion) if pending.request.logprobs else None
        return replace(pending.head.completed(message, completion), index=number, logprobs=logprobs)

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        """Entries in OpenAI's format, one for each sampled token, end-of-turn tokens included."""
        piece = self.agent.backend.tokenizer.piece
        entries = []
        for token, logprob in zip(map(piece, completion.token_ids), completion.logprobs, strict=True):
            # Part of a character has no bytes of its own. JSON has no infinity: OpenAI sends -9999.
            utf8_bytes = None if "\ufffd" in token else list(token.encode())
            entries.append(
                {
                    "token": token,
                    "logprob": min(max(logprob, -9999.0), 0.0),
                    "bytes": utf8_bytes,
                    "top_logprobs": [],
                }
            )
        return entries


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The validated fields of a request as those of `SamplingParams`."""
    changes = {name: fields[name] for name in ("top_k", "stop") if name in fields}
    changes |= {name: float(fields[name]) for name in ("temperature", "top_p") if name in fields}
    if "max_tokens" in fields:
        changes["max_new_tokens"] = fields["max_tokens"]
    if "seed" in fields:
        changes["stream"] = derive(fields["seed"], "response")
    return changes
