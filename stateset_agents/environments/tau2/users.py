"""The users who speak to the agent, scripted or played by a model, and the phone that telecom's have."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.claims.english import PatternFile, Patterns
from stateset_agents.environments.tau2.library import library, prompt_texts
from stateset_agents.environments.tau2.world import STOP, Called, Event, ToolResult, World
from stateset_agents.types.errors import EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.seeds import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class Phone:
    """The simulated user's own device: tools on the conversation's database, which keep every call."""

    tools: Sequence[Mapping[str, Any]]
    """Schemas of the phone's tools, in OpenAI's shape; empty for users without a phone."""
    world: World
    events: list[Event]

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Use a tool of the phone; the result is what the phone shows."""
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
        """The user's answer to the agent's words, after using the phone where asked to; None to leave."""
        ...

    def fork(self) -> Customer: ...


CustomerFactory = Callable[..., Customer]
"""Makes the user from tau2's `UserScenario` and the group's seed."""


# Played by a model

_GREETING = "Hi! How can I help you today?"
"""The agent's greeting that the model reads; in the conversation itself the user speaks first."""
_ENDS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
_MOST_CALLS = 8
"""Rounds of calls between two of its messages."""


class ModelCustomer:
    """The user of one conversation. It leaves when the model writes one of tau2's end tokens.

    The members of a group meet the same user only as far as the endpoint says the same to the same words.
    """

    local = False

    def __init__(self, client: ChatClient, user_scenario: Any, *, has_phone: bool) -> None:
        self._client = client
        data = library().folder / "data" / "tau2" / "user_simulator"
        guidelines = data / f"simulation_guidelines{'_tools' * has_phone}.md"
        text = prompt_texts("user/user_simulator.py")["SYSTEM_PROMPT"].format(
            global_user_sim_guidelines=guidelines.read_text(encoding="utf-8"), instructions=user_scenario
        )
        self._messages: tuple[Message, ...] = (Message(role="system", content=text),)

    async def opening(self) -> str:
        """Raises EnvironmentFailure where the model leaves before it has said anything."""
        answer = await self._answer(_GREETING)
        if answer.tool_calls or any(end in answer.content for end in _ENDS):
            raise EnvironmentFailure(
                f"the user played by {self._client.model} did not open but wrote {answer.content!r:.80}"
            )
        return answer.content

    async def answer(self, text: str, phone: Phone) -> str | None:
        """Raises as the client does, and EnvironmentFailure for an empty answer."""
        answer = await self._answer(text, phone)
        for _ in range(_MOST_CALLS):
            if not answer.tool_calls:
                return None if any(end in answer.content for end in _ENDS) else answer.content
            self._messages += tuple(_shown(phone, call) for call in answer.tool_calls)
            answer = await self._answer(None, phone)
        raise EnvironmentFailure(
            f"the user played by {self._client.model} called its phone {_MOST_CALLS} times without a word: "
            "try another model"
        )

    async def _answer(self, text: str | None, phone: Phone | None = None) -> Message:
        """The model's message after the agent's words; it is added to the conversation."""
        if text is not None:
            self._messages += (Message(role="user", content=text),)
        tools = () if phone is None else phone.tools
        answer = await self._client.complete(self._messages, tools=tools)
        message = Message(role="assistant", content=answer.text.strip(), tool_calls=answer.tool_calls)
        if not message.content and not message.tool_calls:
            cure = "raise its max_new_tokens" if answer.finish_reason == "length" else "try another model"
            raise EnvironmentFailure(f"the user played by {self._client.model} said nothing: {cure}")
        self._messages += (message,)
        return message

    def fork(self) -> ModelCustomer:
        return copy.copy(self)


def _shown(phone: Phone, call: ToolCall) -> Message:
    content = f"Error: {call.error}" if call.error else phone.call(call.name, call.arguments).content
    return Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)


# Scripted

# Requests to use the phone, by a tool's name or in words

_MOST = 4
"""Actions that are done at one request."""
_ASK_AGAIN = "Which {missing} do you mean? I can choose from {choices}."

_FILE = PatternFile(Path(__file__).with_name("users.yaml"))
_CHOICES: Mapping[str, Mapping[str, Sequence[str]]] = _FILE.sections["choices"]
"""Tool -> argument -> its values."""


def carry_out(text: str, phone: Phone) -> str | None:
    """Do what was asked for, in the order in which it was, and tell what the phone shows; None where nothing
    was asked for."""
    names = [tool["function"]["name"] for tool in phone.tools]
    by_name = _named(text, names)
    requests = by_name or _in_words(text, phone)
    if not requests:
        return None
    results = []
    for name, arguments in requests[:_MOST]:
        missing = next((argument for argument in _CHOICES.get(name, {}) if argument not in arguments), None)
        if missing is not None:
            choices = ", ".join(_CHOICES[name][missing])
            results.append(_ASK_AGAIN.format(missing=missing.replace("_", " "), choices=choices))
            continue
        results.append(phone.call(name, arguments).content)
    return "\n".join(results)


def _named(text: str, names: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Tools named in the text, each with the arguments that stand before the next one."""
    places = sorted((match.start(), name) for name in names for match in re.finditer(rf"\b{name}\b", text))
    ends = [*(start for start, _ in places), len(text)][1:]
    return [
        (name, _arguments(name, text[start:end])) for (start, name), end in zip(places, ends, strict=True)
    ]


def _in_words(text: str, phone: Phone) -> list[tuple[str, Mapping[str, Any]]]:
    """The phone's tools and arguments that the agent's words ask for; switches set already are left out."""
    requests: list[tuple[int, str, Mapping[str, Any]]] = []
    lowered = text.lower()
    for words, tool in _FILE.sections["requests"].items():
        if (match := re.search(words, lowered)) is not None:
            requests.append((match.start(), tool, _arguments(tool, lowered)))
    spans: list[tuple[int, int]] = []
    for thing, (tool, look, on) in _FILE.sections["switches"].items():
        verb = re.search(
            r"\b(?:(?:turn|switch)(?:ing)? (?P<way>on|off)"
            rf"|(?P<verb>enable|activate|disable|deactivate|toggle)) (?:the |your )?{thing}\b"
            rf"|\b(?:turn|switch) (?:the |your )?{thing} (?P<after>on|off)\b",
            lowered,
        )
        if verb is None or any(start <= verb.start() < end for start, end in spans):
            continue
        spans.append(verb.span())
        way = verb["way"] or verb["after"] or verb["verb"]
        goal = None if way == "toggle" else way in ("on", "enable", "activate")
        is_on = re.search(on, phone.call(look, {}).content) is not None
        requests.append((verb.start(), look if goal == is_on else tool, {}))
    return [(name, arguments) for _, name, arguments in sorted(requests, key=lambda entry: entry[0])]


def _arguments(tool: str, text: str) -> dict[str, Any]:
    """The first of each argument's choices that the text names."""
    lowered = re.sub(r"\b4g ?[/ ] ?5g\b", "4g_5g", text.lower()).replace("4g_5g preferred", "4g_5g_preferred")
    arguments = {}
    for argument, choices in _CHOICES.get(tool, {}).items():
        places = {choice: lowered.find(choice) for choice in choices}
        named = [choice for choice in choices if places[choice] >= 0]
        if named:
            arguments[argument] = min(named, key=places.__getitem__)
    return arguments


# From tau2's "you want ..." to the user's "I want ..."

_CHANGES = tuple((_FILE.compiled(f"(?i){pattern}"), words) for pattern, words in _FILE.sections["changes"])
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def as_told(text: str) -> str:
    """`You want your order cancelled.` -> `I want my order cancelled.`"""
    for pattern, words in _CHANGES:
        text = pattern.sub(words, text)
    return re.sub(r"(^|[.!?]\s+)([a-z])", lambda match: match[1] + match[2].upper(), text.strip())


def sentences(text: str) -> list[str]:
    """The sentences of a text; a single full stop, as some tasks have, is none."""
    return [part.strip() for part in _SENTENCE.split(text) if re.search(r"\w", part)]


_PATIENCE = 3
"""Replies in a row that neither ask nor tell it anything; after so many it leaves."""
_HEARS = Patterns("hears", _FILE)
_SAYS: Mapping[str, Sequence[str]] = _FILE.sections["says"]


class ScriptedCustomer:
    """The user of one conversation; the same seed and the same words get the same answers.

    `eager` says all that it knows at once; else it opens with why it calls, and tells who it is when asked.
    """

    local = True

    def __init__(self, user_scenario: Any, seed: int, *, eager: bool = False) -> None:
        instructions = user_scenario.instructions
        self._seed = seed
        self._turn = 0
        self._idle = 0
        if isinstance(instructions, str):
            self._reason, self._known, self._rest = as_told(instructions), "", ""
        else:
            self._reason = as_told(instructions.reason_for_call)
            texts = [instructions.known_info, instructions.unknown_info]
            self._known = as_told(" ".join(" ".join(text.split()) for text in texts if text))
            self._rest = as_told(" ".join(_told(instructions.task_instructions)))
        self._eager = eager
        self._told_known = not self._known
        self._told_rest = not self._rest

    async def opening(self) -> str:
        if not self._eager:
            return self._reason
        self._told_known = self._told_rest = True
        return " ".join(part for part in (self._known, self._reason, self._rest) if part)

    async def answer(self, text: str, phone: Phone) -> str | None:
        self._turn += 1
        if _HEARS.transferred.search(text):
            return None
        if phone.tools and (result := carry_out(text, phone)) is not None:
            self._idle = 0
            return result
        told = self._answered(text)
        self._idle = 0 if told else self._idle + 1
        if told:
            return told
        if _HEARS.closing.search(text) or self._idle >= _PATIENCE:
            return None
        if _HEARS.asks.search(text):
            return self._pick("told_all")
        return self._pick("okay" if text.strip() else "silence")

    def _answered(self, text: str) -> str:
        """The answer to the text; empty where there is none."""
        asks = _HEARS.asks.search(text) is not None
        if "?" in text and _HEARS.confirm.search(text):
            return self._pick("yes_please")
        if asks and _HEARS.identity.search(text) and not self._told_known:
            self._told_known = True
            return self._known
        if _HEARS.closing.search(text):
            return self._untold()
        if "?" in text and _HEARS.offer.search(text):
            return self._pick("yes_please")
        if asks and _HEARS.identity.search(text):
            return self._known
        return self._untold() if asks else ""

    def _untold(self) -> str:
        """The sentences it has not said yet, once; empty when all was said."""
        if not self._told_rest:
            self._told_rest = True
            return self._rest
        return ""

    def _pick(self, kind: str) -> str:
        return random.Random(derive(self._seed, "tau2 user", self._turn)).choice(_SAYS[kind])

    def fork(self) -> ScriptedCustomer:
        return copy.copy(self)


def _told(instructions: str) -> list[str]:
    """The sentences of the instructions that a user would say."""
    return [
        sentence
        for sentence in sentences(instructions)
        if not _HEARS.manner.search(sentence) and not _HEARS.direction.search(sentence)
    ]
