"""Agents that a reward must not pay, made from what any environment shows: its tools and its texts.

They see what a model sees (messages and tool schemas), never the scenario's context. `audit` plays them, and
those that the environment offers itself, which know its ways better.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stateset_agents.backends.tokenizers import ByteTokenizer
from stateset_agents.core.chat.history import num_replies
from stateset_agents.core.environment import Conversation, Environment
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.rollout.time_limited_environment import TimeLimitedEnvironment
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.schemas import inlined, mapping_of
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Status, Trajectory, Turn

Tools = Sequence[Mapping[str, Any]]
"""Schemas in OpenAI's shape, as a conversation offers them."""


class ScriptedAgent(Protocol):
    """Answers chat messages; it lives for one conversation."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """The agent's words, and the tools it calls, after `messages`."""
        ...


AgentFactory = Callable[[Tools], ScriptedAgent]
"""Makes the agent of one conversation from the tools that it may call."""

_CALLS_OF_A_REPLY = 4


@dataclass(slots=True)
class _GenericAgent:
    tools: Tools = ()


class Silent(_GenericAgent):
    """Never says a word."""

    def reply(self, messages: Sequence[Message]) -> Message:
        return _say("")


class Refuser(_GenericAgent):
    """Refuses every request, politely."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """A refusal; never the same twice in a row, for repeats may cost."""
        wordings = (
            "I am sorry, but I cannot help with that. Our policy does not allow it.",
            "I am sorry, I am unable to do this. Is there anything else?",
            "Thank you for your patience, but no, that is not possible. Goodbye.",
        )
        return _say(wordings[num_replies(messages) % len(wordings)])


class Liar(_GenericAgent):
    """Repeats the request and reports that it is done, without doing anything."""

    def reply(self, messages: Sequence[Message]) -> Message:
        request = " ".join(_said_by("user", messages)[:1])
        names = ", ".join(_ids(request))
        wordings = (
            f"Done! I have taken care of it{f' for {names}' if names else ''}. You asked: {request} It is "
            "all completed and confirmed, and you will get it within 5 days.",
            "Yes, that is done, I have checked it for you. Is there anything else?",
            "Everything is settled. Thank you, goodbye.",
        )
        return _say(wordings[min(num_replies(messages), len(wordings) - 1)])


class KeywordStuffer(_GenericAgent):
    """Says every word that may be a fact or a sign of good service: its own, the texts', the tools'."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """All keywords, from another one on in each reply."""
        texts = " ".join(message.content for message in messages if message.role != "assistant")
        schemas = [word for tool in self.tools for word in _words(_text_of(tool))]
        words = list(dict.fromkeys([*_words(_SERVICE), *_ids(texts), *_words(texts), *schemas]))[:400]
        start = num_replies(messages) * 7 % len(words)
        return _say(", ".join([*words[start:], *words[:start]]))


@dataclass(slots=True)
class ToolSpammer(_GenericAgent):
    """Calls one tool after another, writes included, with whatever arguments lie about, and never speaks."""

    _num_calls: int = field(default=0, init=False)

    def reply(self, messages: Sequence[Message]) -> Message:
        """The next few calls; each round through the tools tries other arguments."""
        facts = _Known(messages)
        calls = []
        for _ in range(min(_CALLS_OF_A_REPLY, max(1, len(self.tools)))):
            turn, index = divmod(self._num_calls, max(1, len(self.tools)))
            calls.append(_call(self.tools[index] if self.tools else _NO_TOOL, facts, turn))
            self._num_calls += 1
        return _say("", calls)


@dataclass(slots=True)
class ConsentSkipper(_GenericAgent):
    """Reads a little, does at once what was asked for as far as it understands it, reports it done.

    It never asks who calls or whether the user agrees. Where nobody's consent is needed that may be a fine
    agent: then leave it out of the audit.
    """

    _has_read: bool = field(default=False, init=False)
    _has_written: bool = field(default=False, init=False)

    def reply(self, messages: Sequence[Message]) -> Message:
        """First what may be read, then the write that the request sounds like, then success."""
        facts = _Known(messages)
        readers = [tool for tool in self.tools if _READS.match(_name(tool))]
        writers = [tool for tool in self.tools if tool not in readers]
        if readers and not self._has_read:
            self._has_read = True
            return _say("", [_call(tool, facts, 0) for tool in readers[:_CALLS_OF_A_REPLY]])
        if writers and not self._has_written:
            self._has_written = True
            return _say("", [_call(_most_similar(facts.request, writers), facts, 0)])
        wordings = ("Done, I have already done that for you.", "It is done. Is there anything else?")
        return _say(wordings[num_replies(messages) % len(wordings)])


DEGENERATE: Mapping[str, AgentFactory] = {
    "silent": Silent,
    "refuser": Refuser,
    "liar": Liar,
    "tool_spammer": ToolSpammer,
    "consent_skipper": ConsentSkipper,
    "keyword_stuffer": KeywordStuffer,
}
"""Adversarial agents that can be made for any environment, by name."""

_SERVICE = """
sorry thank you please done resolved refunded cancelled returned exchanged shipped delivered confirmed
completed cannot policy human yes no free 1 2 3 5 10 30 days monday tuesday wednesday thursday
friday saturday sunday
"""
_NO_TOOL: Mapping[str, Any] = {"function": {"name": "help"}}
_READS = re.compile(r"(?:get|find|list|track|search|look|show|check|read|fetch|view|query)", re.IGNORECASE)
_ID = re.compile(r"[#\w-]*\d[\w-]*")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_NAMED = re.compile(r"[\"']?(\w+)[\"']?\s*[:=]\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s,;{}\[\]\"']+))")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class _Known:
    """Arguments that can be read from the texts so far."""

    def __init__(self, messages: Sequence[Message]) -> None:
        inputs = [message for message in messages if message.role != "assistant"]
        self.request = " ".join(_said_by("user", inputs))
        self.texts = " ".join(message.content for message in inputs)
        self.named: dict[str, list[str]] = {}
        for name, *values in _NAMED.findall(self.texts):
            self.named.setdefault(name.lower(), []).append(next((v for v in values if v), ""))
        self.emails = _EMAIL.findall(self.texts)
        roles = ("user", "tool", "system")  # the likeliest first, of each the newest
        self.ids = [id for role in roles for text in _said_by(role, inputs)[::-1] for id in _ids(text)]
        self.words = [word for word in _words(self.request) if len(word) > 3]
        numbers = map(float, _NUMBER.findall(self.texts))
        self.numbers = [number for number in numbers if math.isfinite(number)]

    def text(self, name: str, described: str, turn: int) -> str:
        """A text for the parameter of that name; `turn` chooses among what would do."""
        name = name.lower()
        same = self.named.get(name, [])
        if "mail" in name:
            fitting = [*same, *self.emails]
        elif any(
            part in name for part in ("reason", "note", "text", "message", "comment", "query", "summary")
        ):
            fitting = [self.request]
        else:
            shaped, named = self._shaped(described), self._named_by(name)
            likely = sorted(self.ids, key=lambda id: -2 * (id in shaped) - (id in named))  # stable
            fitting = [*same, *likely, *self.words]
        fitting = list(dict.fromkeys(fitting))
        return fitting[turn % len(fitting)] if fitting else "x"

    def _named_by(self, name: str) -> list[str]:
        """The ids named by a parameter: for `customer_id` u62 of "customer u62", K7 of "customer is K7"."""
        matches = [
            re.findall(rf"\b{re.escape(part)}\W+(?:\w+\W+)?({_ID.pattern})", self.texts, re.IGNORECASE)
            for part in _words(name.replace("_", " "))
            if part != "id"
        ]
        return [id for ids in matches for id in ids if any(map(str.isdigit, id))]

    def _shaped(self, described: str) -> list[str]:
        """The ids that look like the description's example: for "such as u07" those of a letter and two
        digits."""
        shapes = {_shape(example) for example in _ids(described)}
        return [id for id in self.ids if _shape(id) in shapes]


def _shape(id: str) -> str:
    return re.sub(r"[A-Z]", "A", re.sub(r"[a-z]", "a", re.sub(r"\d", "9", id)))


def _most_similar(request: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The tool that has most words in common with a request; those of few tools weigh more."""
    request_words = set(_words(request.lower()))
    described = [
        set(
            _words(
                f"{_name(tool)} {tool.get('function', tool).get('description', '')}".lower().replace("_", " ")
            )
        )
        for tool in tools
    ]

    def likeness(index: int) -> float:
        return sum(1 / sum(word in other for other in described) for word in request_words & described[index])

    return tools[max(range(len(tools)), key=likeness)]


def _call(tool: Mapping[str, Any], facts: _Known, turn: int) -> ToolCall:
    parameters = inlined(mapping_of(mapping_of(tool.get("function", tool)).get("parameters")))
    arguments = _value("", {**parameters, "type": "object"}, facts, turn)
    return ToolCall(name=_name(tool), arguments=arguments, id=f"call_{turn}_{_name(tool)}")


def _value(name: str, schema: Mapping[str, Any], facts: _Known, turn: int) -> Any:
    """A value that fits a JSON schema, made from the texts where possible."""
    choices = schema.get("enum")
    if isinstance(choices, Sequence) and choices:
        return choices[turn % len(choices)]
    if "const" in schema:
        return schema["const"]
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, Sequence) and options:
        return _value(name, mapping_of(options[0]), facts, turn)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            properties = mapping_of(schema.get("properties"))
            keys = schema.get("required", properties) if turn % 2 == 0 else properties
            return {
                key: _value(key, mapping_of(inner), facts, turn)
                for key, inner in properties.items()
                if key in keys
            }
        case "array":
            return [_value(name, mapping_of(schema.get("items")), facts, turn)]
        case "integer":
            return int(facts.numbers[turn % len(facts.numbers)]) if facts.numbers else 1
        case "number":
            return facts.numbers[turn % len(facts.numbers)] if facts.numbers else 1.0
        case "boolean":
            return turn % 2 == 0
        case "null":
            return None
    return facts.text(name, str(schema.get("description", "")), turn)


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _text_of(value: Any) -> str:
    """Keys and texts of a schema, in order."""
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_text_of(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_text_of(inner) for inner in value)
    return value if isinstance(value, str) else ""


def _said_by(role: str, messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role == role]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text)


def _ids(text: str) -> list[str]:
    return list(dict.fromkeys(_ID.findall(text)))


def _say(text: str, calls: Sequence[ToolCall] = ()) -> Message:
    return Message(role="assistant", content=text, tool_calls=tuple(calls))


# Play

MAX_TURNS = 100
"""Replies after which a conversation is cut whose environment sets no limit."""
_TOKENIZER = ByteTokenizer()


def player(
    environment: Environment, *, seed: int, limits: RolloutLimits
) -> Callable[[Scenario, AgentFactory], Awaitable[Trajectory]]:
    """A function that plays a scenario once, with the user that a model meets there, within the limits."""
    in_time = TimeLimitedEnvironment(environment, limits.turn_timeout)
    free = asyncio.Semaphore(limits.max_concurrent)

    async def play_scenario(scenario: Scenario, make: AgentFactory) -> Trajectory:
        async with free:
            return await play(in_time, scenario, derive(seed, "user", 0, scenario.id), make)

    return play_scenario


async def play(environment: Environment, scenario: Scenario, seed: int, make: AgentFactory) -> Trajectory:
    """One conversation of an agent that is made for it; its tokens are its text's bytes.

    Failures of the environment give a FAILED trajectory as in an episode; mistakes in code travel.
    """
    start = Trajectory(scenario=scenario, seed=seed)
    try:
        conversation = await environment.start(scenario, seed)
        try:
            played = await _play_turns(replace(start, opening=conversation.opening), conversation, make)
            outcome = await conversation.outcome()
        finally:
            await conversation.close()
        return replace(played, outcome=outcome, metadata=outcome.metadata if outcome else {})
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:  # whatever a user's environment may raise is one failed conversation
        return replace(start, status=Status.FAILED, error=format_error(error))


async def _play_turns(start: Trajectory, conversation: Conversation, make: AgentFactory) -> Trajectory:
    agent = make(conversation.tools)
    messages = list(start.opening)
    feedback: Sequence[Message] = start.opening
    context_ids: list[int] = []
    turns: list[Turn] = []
    while True:
        reply = await in_thread(agent.reply, tuple(messages))
        delta = _token_ids(feedback)
        reply_ids = tuple(_token_ids([reply])) or _TOKENIZER.eos_ids[:1]
        context_ids += delta
        completion = Completion(
            message=reply,
            prompt_ids=tuple(context_ids),
            token_ids=reply_ids,
            logprobs=(0.0,) * len(reply_ids),
            finish_reason="stop",
        )
        context_ids += reply_ids
        observation = await conversation.step(reply)
        feedback = observation.messages
        turns.append(
            Turn(
                prompt_ids=tuple(delta),
                completion=completion,
                feedback=tuple(feedback),
                reward=observation.reward,
                breakdown=observation.breakdown,
            )
        )
        messages += [reply, *feedback]
        cut = observation.truncated or len(turns) >= MAX_TURNS
        if observation.terminated or cut:
            status = Status.TERMINATED if observation.terminated else Status.TRUNCATED
            return replace(start, turns=tuple(turns), status=status)


def _token_ids(messages: Sequence[Message]) -> list[int]:
    return [id for message in messages for id in _TOKENIZER.encode(message.content)]
