"""A chat model behind an OpenAI-compatible endpoint in an agent's place, to be measured like any agent.

Messages, tools and calls go over the wire as a client sends them, and the endpoint's own template renders
them. Nobody is told tokens or log-probs, so nothing can be trained on what it said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from stateset_agents.backends.base import Session
from stateset_agents.backends.openai.client import ChatClient, NoAnswer
from stateset_agents.backends.openai.responses import ChatAnswer, Failure, words_of
from stateset_agents.core.agent import add_system_prompt
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.core.chat.history import Prompt, View
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.types.errors import BackendError, ConfigurationError, ContextLengthExceeded
from stateset_agents.types.messages import GREEDY_BELOW, Completion, Message, ToolCall
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import UNANSWERED

_NEVER = frozenset({401, 402, 404, 405})
"""Statuses that every other request would get too: the key, the account, the model's name, the url."""
_REFUSALS = 3
"""Number of refused requests, without any answer, after which all others would be refused too."""
_SEEDS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of requests to an agent's endpoint, and of tokens."""

    num_requests: int = 0
    """Further tries included."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_estimated: int = 0
    """Answers whose tokens the endpoint did not report: a token is taken as four characters."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def __sub__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) - getattr(other, name) for name in _COUNTS})

    def cost(self, price_in: float, price_out: float) -> float:
        """The cost in the currency of the prices, which are of a million tokens read and written.

        What the endpoint read from a cache of its own costs less with some; that is not looked at.
        """
        return (self.prompt_tokens * price_in + self.completion_tokens * price_out) / 1e6


_COUNTS = ("num_requests", "prompt_tokens", "completion_tokens", "num_estimated")


class EndpointAgent:
    """Plays conversations over a `ChatClient`; `evaluate` and `ComputationalEngine` take it as an agent.

        client = ChatClient("http://localhost:8000/v1", "my-model", timeout=300)
        result = await evaluate(EndpointAgent(client), environment, reward, scenarios)

    Of the client's settings url, key, timeouts, tries, concurrency and budget count, and `temperature=None`,
    which sends none. Of `config` persona, system_prompt, max_new_tokens and stop count; all else is the
    endpoint's own.

    Thoughts (`reasoning`, `reasoning_content`, or `<think>` in the content) are kept in the record and shown
    to nobody else; the endpoint gets them back as it sent them, for its template to choose from. With
    `send_thoughts=False` it gets none, for endpoints that refuse them.

    A conversation that is not answered, after all tries, fails and counts in nothing, as
    `Evaluation.num_unanswered`. What every request would meet (a refused key, an unknown model) raises
    ConfigurationError and so ends the evaluation. What the model itself got wrong (arguments that are no
    JSON, no words at all) is its reply, and what does not fit its context any more ends a conversation as a
    model's own context does.
    """

    def __init__(
        self, client: ChatClient, config: AgentConfig | None = None, *, send_thoughts: bool = True
    ) -> None:
        """Raises ConfigurationError for an url with a name, a password or a query: keys go in the
        environment."""
        expect("client", client, ChatClient, 'write ChatClient("http://localhost:8000/v1", "a-model")')
        if config is not None:
            expect("config", config, AgentConfig, "write AgentConfig(max_new_tokens=512)")
        parts = urlsplit(client.url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigurationError(
                f"the url of {parts.hostname} holds more than an address, which would stand in files and "
                f"logs: give the part up to the path, and the key in {client.settings.api_key_env}"
            )
        self.client = client
        self.config = config or AgentConfig()
        self.send_thoughts = send_thoughts
        self._answered = Usage()
        self._num_answers = 0
        self._num_refused = 0
        self._next_episode = 0

    @property
    def usage(self) -> Usage:
        """The usage of its client, so far."""
        return replace(self._answered, num_requests=self.client.num_calls)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that its replies depend on, besides conversation and temperature, as plain JSON."""
        config = self.config
        return {
            "url": self.client.url,
            "model": self.client.model,
            "persona": config.persona,
            "system_prompt": config.system_prompt,
            "max_new_tokens": config.max_new_tokens,
            "stop": list(config.stop),
            "sends_temperature": self.client.settings.temperature is not None,
            "send_thoughts": self.send_thoughts,
        }

    def new_episodes(self, number: int) -> range:
        """Numbers for so many episodes."""
        first, self._next_episode = self._next_episode, self._next_episode + number
        return range(first, first + number)

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The opening with the agent's own persona and system prompt in front."""
        return add_system_prompt(messages, self.config)

    def participate(self) -> AbstractContextManager[None]:
        """Nobody waits for a remote model's neighbours."""
        return nullcontext()

    async def release(self, session: Session) -> None:
        """The endpoint knows no conversations."""

    def speaker(self, session: Session, *, stream: int, temperature: float | None = None) -> EndpointSpeaker:
        """The agent's side of one conversation; turn t is asked for with a seed of `derive(stream, t)`."""
        if temperature is not None and temperature < 0:
            raise ConfigurationError(f"temperature must be at least 0 (greedy), got {temperature!r}")
        return EndpointSpeaker(self, stream, 1.0 if temperature is None else temperature)

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
    ) -> ChatAnswer:
        """The model's answer; raises as `Speaker.reply`."""
        if self.client.settings.temperature is None:
            sampling = {name: value for name, value in sampling.items() if name != "temperature"}
        try:
            answer = await self.client.turn(messages, tools=tools, sampling=sampling)
        except NoAnswer as error:
            self._expect_answers(error.failure, str(error))
            raise
        self._num_answers += 1
        self._answered += Usage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            num_estimated=not answer.is_counted,
        )
        return answer

    def _expect_answers(self, failure: Failure, reason: str) -> None:
        """Raises ContextLengthExceeded for a conversation that does not fit, and ConfigurationError for what
        would be refused whatever is asked."""
        if failure.exceeds_context:
            raise ContextLengthExceeded(reason)
        if failure.status == 401:
            variable = self.client.settings.api_key_env
            raise ConfigurationError(f"{reason}: put the right key in the environment variable {variable}")
        is_redirect = failure.status is not None and 300 <= failure.status < 400
        if failure.status in _NEVER or is_redirect:
            raise ConfigurationError(
                f"{reason}: check the url, the account and the model's name {self.client.model}"
            )
        self._num_refused += not failure.transient
        if not self._num_answers and self._num_refused >= _REFUSALS:
            raise ConfigurationError(f"{reason}: nothing was answered, and {_REFUSALS} requests were refused")


def _asked(limits: ReplyLimits, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a conversation asks of a reply, as fields of a request; raises ConfigurationError for what no
    request can ask."""
    fields: dict[str, Any] = {}
    if limits.thinks or limits.answer_between is not None:
        raise ConfigurationError(
            "the environment asks for thoughts or answers between tags by a grammar, and no request to an "
            "endpoint can: set reply_format to free, or play a model here"
        )
    is_offered = limits.callable_tools is None or all(tool in tools for tool in limits.callable_tools)
    if limits.tool_choice not in ("auto", "none") and not (tools and is_offered):
        raise ConfigurationError(
            f"the environment asks for tool_choice {limits.tool_choice}, and its prompt does not list the "
            "tools, which an endpoint is told no other way: let the environment offer them"
        )
    if limits.tool_choice == "required" or (limits.tool_choice == "none" and tools):
        fields["tool_choice"] = limits.tool_choice
    elif limits.tool_choice not in ("auto", "none"):
        fields["tool_choice"] = {"type": "function", "function": {"name": limits.tool_choice}}
    if tools and not limits.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    if limits.answer_schema is not None:
        named = {"name": "answer", "schema": dict(limits.answer_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


class EndpointSpeaker:
    """An `EndpointAgent` in one conversation."""

    def __init__(self, agent: EndpointAgent, stream: int, temperature: float) -> None:
        self.metadata: Mapping[str, Any] = {}
        self._agent = agent
        self._stream = stream
        self._temperature = 0.0 if temperature < GREEDY_BELOW else temperature
        self._said: list[tuple[Message, Mapping[str, Any]]] = []
        """Replies, each without thoughts, as environments may repeat it, and as the endpoint wrote it."""
        self._num_turns = 0

    async def next_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """The conversation as it stands; it has no tokens here."""
        before = self._num_turns - 1 if self._num_turns else None
        return Prompt(messages=tuple(messages), tools=tuple(tools), view=View(), ids=(), follows=before)

    async def reply(self, prompt: Prompt, *, turn: int, limits: ReplyLimits) -> Completion:
        """The endpoint's answer, without tokens.

        Raises ContextLengthExceeded, ConfigurationError where no conversation would be answered, and
        BackendError where this one is not.
        """
        config = self._agent.config
        sampling: dict[str, Any] = {
            "temperature": self._temperature,
            "max_new_tokens": min(config.max_new_tokens, limits.max_new_tokens or config.max_new_tokens),
            "seed": derive(self._stream, turn) % _SEEDS,
        }
        if stops := [*config.stop, *limits.stop]:
            sampling["stop"] = stops
        sampling |= _asked(limits, prompt.tools)
        try:
            answer = await self._agent.ask(self._as_sent(prompt.messages), prompt.tools, sampling)
        except BackendError:
            self.metadata = {UNANSWERED: True}
            raise
        message = Message(
            role="assistant",
            content=answer.text,
            reasoning=answer.reasoning,
            tool_calls=_with_ids(answer.tool_calls, turn),
        )
        self._said.append((_heard(message), self._as_returned(answer, message)))
        return Completion(
            message=message,
            prompt_ids=(),
            token_ids=(),
            logprobs=(),
            finish_reason="length" if answer.finish_reason == "length" else "stop",
        )

    def add(self, prompt: Prompt, completion: Completion) -> None:
        """Go on from this turn."""
        self._num_turns += 1

    def _as_sent(self, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        """The conversation in OpenAI's shape; its own replies as the endpoint wrote them."""
        records: list[Mapping[str, Any]] = []
        place = 0
        for message in messages:
            index = None
            if message.role == "assistant":
                reply = _heard(message)
                index = next((n for n in range(place, len(self._said)) if self._said[n][0] == reply), None)
            if index is None:
                records.append(message.to_openai())
            else:
                records.append(self._said[index][1])
                place = index + 1
        return records

    def _as_returned(self, answer: ChatAnswer, message: Message) -> dict[str, Any]:
        """The endpoint's own message as it gets it back: the fields that say something, whatever they are.

        Arguments that were no JSON are `{}` there, for many templates parse them; the tool's error says
        what was wrong with them.
        """
        record = {name: value for name, value in answer.message.items() if value not in (None, [], {})}
        if not self._agent.send_thoughts:
            for name in ("reasoning", "reasoning_content", "reasoning_details"):
                record.pop(name, None)
            if isinstance(record.get("content"), str):
                record["content"] = words_of(record["content"])
        record.pop("tool_calls", None)
        if message.tool_calls:
            as_written = [
                item | {"id": call.id, "type": "function"}
                for item, call in _calls(answer, message.tool_calls)
            ]
            record["tool_calls"] = as_written
        return {"content": None if message.tool_calls else "", **record, "role": "assistant"}


def _calls(answer: ChatAnswer, calls: Sequence[ToolCall]) -> list[tuple[dict[str, Any], ToolCall]]:
    """Each call as the endpoint wrote it, with arguments that are the text of a JSON object."""
    items = []
    for item, call in zip(answer.message["tool_calls"], calls, strict=True):
        plain = Message(role="assistant", content="", tool_calls=(call,)).to_openai()["tool_calls"][0]
        text = item["function"].get("arguments")
        is_text = call.error is None and isinstance(text, str) and text
        arguments = text if is_text else plain["function"]["arguments"]
        fields = {name: value for name, value in item.items() if name != "index"}
        items.append(({**fields, "function": {**item["function"], "arguments": arguments}}, call))
    return items


def _with_ids(calls: Sequence[ToolCall], turn: int) -> tuple[ToolCall, ...]:
    """Every call has an id of its own, where the endpoint gave none too: the results name it.

    The error of one that could not be read shows what was written, which the endpoint is not sent again.
    """
    ids: set[str] = set()
    with_ids = []
    for place, call in enumerate(calls):
        id = call.id if call.id and call.id not in ids else f"call_{turn}_{place}"
        ids.add(id)
        error = None if call.error is None else f"{call.error}, got {call.written!r:.80}"
        with_ids.append(replace(call, id=id, error=error))
    return tuple(with_ids)


def _heard(message: Message) -> Message:
    return message if message.reasoning is None else replace(message, reasoning=None)
