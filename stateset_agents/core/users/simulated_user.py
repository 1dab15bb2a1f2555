"""Users that talk to the agent: from a script, or by rules.

An environment makes one user per conversation from (scenario, seed). The seed is shared by the
members of a group, so all of them meet the same user, who says the same to the same words.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from stateset_agents.runtime.named_code import NamedCall
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import OPENING_COLUMNS, Scenario
from stateset_agents.types.seeds import derive


class User(Protocol):
    """The other side of one conversation."""

    local: bool
    """True when `reply` waits on nothing remote; a user of your own counts as remote unless it says so."""

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The user's next words after `messages`, or None to leave.

        Asked for the opening, before anything was said, only where the scenario has none. It may also ask
        for `state` by name, the conversation's (see `ConversationEnvironment`).
        """
        ...

    def fork(self) -> User:
        """An independent copy that goes on from here; it may ask for `state`, that of its conversation."""
        ...


UserFactory = Callable[..., User]
"""Makes the user of one conversation from scenario and seed, and from its `state` if it asks for that."""


class ScriptedUser:
    """Says its lines one after another, whatever the agent says, then leaves."""

    local = True

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = _texts("lines", lines)
        self._next = 0

    async def reply(self, messages: Sequence[Message]) -> str | None:
        if self._next == len(self._lines):
            return None
        self._next += 1
        return self._lines[self._next - 1]

    def fork(self) -> ScriptedUser:
        return copy.copy(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When the agent's reply matches `pattern`, the user says one of `replies`."""

    pattern: str
    """A regular expression, searched for in the agent's last reply, upper and lower case alike."""
    replies: tuple[str, ...] = ()
    """Paraphrases, one is chosen by the seed; none means that the user leaves."""
    once: bool = False
    """Used at most once in a conversation."""

    def __post_init__(self) -> None:
        _texts("replies of a rule", self.replies)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigurationError(
                f"rule pattern {self.pattern!r} is no regular expression: {error}"
            ) from error


class RuleBasedUser:
    """Answers by the first rule that matches, and leaves when the goal is met or patience runs out.

    `goal(messages)`, or `goal(messages, state)`, says whether the user got what they came for; it is asked
    after every reply of the agent. `satisfied` is None for a user without a goal. A reply that no rule
    matches gets one of `otherwise`, and costs one of `patience`.
    """

    local = True

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        opening: Sequence[str] = (),
        otherwise: Sequence[str] = ("I'm not sure what you mean. Can you help me with this?",),
        goal: Callable[..., bool] | None = None,
        patience: int = 2,
        seed: int = 0,
    ) -> None:
        if patience < 0:
            raise ConfigurationError(f"patience must be at least 0, got {patience!r}")
        self._rules = tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Rule):
                raise ConfigurationError(
                    f"rules must be Rule(pattern=..., replies=(...)), got {type(rule).__name__} {rule!r:.60}"
                )
        self._opening = _texts("opening", opening)
        self._otherwise = _texts("otherwise", otherwise)
        self._goal: NamedCall | None = None
        if goal is not None:
            self._goal = NamedCall("goal", goal, ("messages", "state"), positional=("messages",))
        self._patience = patience
        self._seed = seed
        self._purposes: tuple[str, ...] = ()
        self.satisfied: bool | None = None if goal is None else False

    async def reply(self, messages: Sequence[Message], state: Any = None) -> str | None:
        if not messages or messages[-1].role == "system":
            return self._choose("opening", self._opening)
        if self._goal is not None:
            if state is None and "state" in self._goal.wanted:
                raise ConfigurationError(
                    "goal asks for the conversation's state, and the environment has none: give it state=..."
                )
            if await self._goal.call({"messages": messages, "state": state}):
                self.satisfied = True
                return None
        text = messages[-1].content
        for index, rule in enumerate(self._rules):
            purpose = f"rule {index}"
            if rule.once and purpose in self._purposes:
                continue
            if re.search(rule.pattern, text, re.IGNORECASE):
                return self._choose(purpose, rule.replies)
        if self._patience == 0:
            return None
        self._patience -= 1
        return self._choose("otherwise", self._otherwise)

    def fork(self) -> RuleBasedUser:
        return copy.copy(self)

    def _choose(self, purpose: str, paraphrases: Sequence[str]) -> str | None:
        """One paraphrase: a function of the seed, the purpose, and how often it came up before."""
        if not paraphrases:
            return None
        key = derive(self._seed, "user", purpose, self._purposes.count(purpose))
        self._purposes += (purpose,)
        return paraphrases[key % len(paraphrases)]


def _texts(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Raises ConfigurationError for one bare text, which would be said letter by letter."""
    if isinstance(texts, str):
        raise ConfigurationError(
            f"{name} must be a list of texts, got the text {texts!r:.60}: write [{texts!r:.60}]"
        )
    return tuple(texts)


def default_user(scenario: Scenario, seed: int) -> User:
    """The user of a scenario that brings none.

    Opens with a sentence made of topic and context, unless the scenario has its own opening. Then says
    the lines of `context["script"]` if there are any; else answers questions, asks what happens next,
    and leaves. With `context["expected_facts"]` the goal is to be told each of them in plain sentences.
    """
    openings = (scenario.opening,) if scenario.opening else _openings(scenario)
    script = scenario.context.get("script")
    if script is None:
        return RuleBasedUser(_rules(scenario), opening=openings, goal=_goal(scenario), seed=seed)
    if isinstance(script, str) or not isinstance(script, Sequence):
        raise ConfigurationError(
            f"scenario {scenario.id}: context['script'] must be a list of texts, got {script!r:.60}"
        )
    if not script:  # hears the reply, and leaves
        return RuleBasedUser((), opening=openings, goal=_goal(scenario), patience=0, seed=seed)
    opening = () if scenario.opening else (openings[derive(seed, "user", "opening", 0) % len(openings)],)
    return ScriptedUser([*opening, *map(str, script)])


def _openings(scenario: Scenario) -> tuple[str, ...]:
    column = next((column for column in OPENING_COLUMNS if scenario.context.get(column)), None)
    if column is not None:
        raise ConfigurationError(
            f"scenario {scenario.id} has no opening, and {column!r} could be it: give it as the opening"
        )
    topic = scenario.family.replace("_", " ")
    text = str(scenario.context.get("text", "")).strip()
    detail = f" {text if text[-1:] in ('.', '!', '?') else f'{text}.'}" if text else ""
    if scenario.family == "default":
        return (detail.strip() or "Hi, I need your help.",)
    return tuple(text.format(topic=topic, detail=detail) for text in _phrases()["openings"])


@cache
def _phrases() -> dict[str, Any]:
    phrases: dict[str, Any] = read_yaml(Path(__file__).with_name("default_user.yaml"))
    return phrases


def _rules(scenario: Scenario) -> list[Rule]:
    topic = scenario.family.replace("_", " ") if scenario.family != "default" else "this"
    order = scenario.context.get("order_id")
    rules = []
    for rule in _phrases()["rules"]:
        replies = rule["replies"] if order else rule.get("without_order", rule["replies"])
        texts = tuple(text.format(topic=topic, order=order) for text in replies)
        rules.append(Rule(pattern=rule["pattern"], replies=texts, once=rule.get("once", False)))
    return rules


def _goal(scenario: Scenario) -> Callable[[Sequence[Message]], bool] | None:
    # Here, since the English of claims takes a tenth of a second to load, and few environments need it.
    from stateset_agents.claims.fact_status import FactStatus, fact_statuses
    from stateset_agents.claims.text_checks import choices, facts, is_prose
    from stateset_agents.core.scoring.transcript import shown_texts

    expected = facts(scenario.context, "expected_facts")
    options = choices(scenario.context)
    if not expected:
        return None
    num_before = sum(message.role == "assistant" for message in scenario.prompt)

    def heard_everything(messages: Sequence[Message]) -> bool:
        replies = [message.content for message in messages if message.role == "assistant"][num_before:]
        statuses = fact_statuses(
            expected,
            replies,
            sound=[number for number, text in enumerate(replies) if is_prose(text)],
            user_texts=[message.content for message in messages if message.role == "user"],
            shown_texts=shown_texts(scenario.context, messages),
            choices=options,
        )
        return all(status is FactStatus.TOLD for status in statuses.values())

    return heard_everything
