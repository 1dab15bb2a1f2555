"""A user that needs no model: says what tau2 tells its users, answers what it is asked, and leaves.

It knows what tau2's own user simulator is told (`UserScenario`), and nothing else: not the gold actions, not
the database. Wishes that hang on what the agent says ("if that is not possible, ...") it tells or leaves out,
but does not act on.
"""

from __future__ import annotations

import copy
import random
import re
from typing import Any

from stateset_agents.environments.tau2.users.customer import Phone
from stateset_agents.environments.tau2.users.first_person import as_told, sentences
from stateset_agents.environments.tau2.users.phone_requests import carry_out
from stateset_agents.types.seeds import derive

_PATIENCE = 3
"""Replies in a row that neither ask nor tell it anything; after so many it leaves."""
_TRANSFERRED = re.compile(
    r"being transferred|transferr(?:ed|ing) (?:you|to a human)|hold on.{0,20}human agent", re.IGNORECASE
)
_CONFIRM = re.compile(r"\b(?:confirm|proceed|go ahead|yes/no|yes or no|do you agree)\b", re.IGNORECASE)
_OFFER = re.compile(
    r"\b(?:shall i|should i|would you like me to|is (?:that|this|it) (?:correct|right|ok|okay|fine))\b",
    re.IGNORECASE,
)
_IDENTITY = re.compile(
    r"\b(?:names?|e-?mail|zip(?:code)?|postal code|user id|customer id|account|identity|verify|phone number"
    r"|date of birth|order (?:id|number)s?|which order|reservation|confirmation (?:number|code)|booking"
    r"|who (?:are you|am i speaking))\b",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\?|\b(?:please|could you|can you|i need|i will need|provide|tell me|let me know|may i)\b", re.IGNORECASE
)
_CLOSING = re.compile(
    r"\b(?:anything else|good ?bye|bye|have a (?:nice|great|good|wonderful) (?:day|one)|glad i could"
    r"|is there something else)\b",
    re.IGNORECASE,
)
_MANNER = re.compile(r"^you are (?!willing|fine|ok|okay|also|currently|looking)", re.IGNORECASE)
"""How to behave, not what to say: "You are a private person ..."."""
_DIRECTION = re.compile(
    r"\b(?:agents?|representative|tool calls?|transferred|supervisor|insist|persistent|negotiat\w*|coercion"
    r"|never|always|make sure|ground|for example|ask for clarification)\b",
    re.IGNORECASE,
)
"""Directions for the play, which no user would say aloud."""

_YES = ("Yes, please.", "Yes, please go ahead.", "Yes, that is right.")
_OKAY = ("Okay.", "Okay, and now?", "All right.")
_KNOWN = ("That is all I know.", "I do not know more than that.", "I have told you all I know.")
_SILENCE = ("Hello? Are you there?", "Are you still there?", "Hello?")


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
            known = [instructions.known_info, instructions.unknown_info]
            self._known = as_told(" ".join(" ".join(text.split()) for text in known if text))
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
        if _TRANSFERRED.search(text):
            return None
        if phone.tools and (shown := carry_out(text, phone)) is not None:
            self._idle = 0
            return shown
        told = self._answered(text)
        self._idle = 0 if told else self._idle + 1
        if told:
            return told
        if _CLOSING.search(text) or self._idle >= _PATIENCE:
            return None
        if _ASKS.search(text):
            return self._pick(_KNOWN)
        return self._pick(_OKAY if text.strip() else _SILENCE)

    def _answered(self, text: str) -> str:
        """What there is to say to it; empty where that is nothing."""
        asks = _ASKS.search(text) is not None
        if "?" in text and _CONFIRM.search(text):
            return self._pick(_YES)
        if asks and _IDENTITY.search(text) and not self._told_known:
            self._told_known = True
            return self._known
        if _CLOSING.search(text):
            return self._untold()
        if "?" in text and _OFFER.search(text):
            return self._pick(_YES)
        if asks and _IDENTITY.search(text):
            return self._known
        return self._untold() if asks else ""

    def _untold(self) -> str:
        """What it has not said yet, once; empty when all was said."""
        if not self._told_rest:
            self._told_rest = True
            return self._rest
        return ""

    def _pick(self, wordings: tuple[str, ...]) -> str:
        return random.Random(derive(self._seed, "tau2 user", self._turn)).choice(wordings)

    def fork(self) -> ScriptedCustomer:
        return copy.copy(self)


def _told(instructions: str) -> list[str]:
    """Of the instructions what a user would say."""
    return [
        sentence
        for sentence in sentences(instructions)
        if not _MANNER.search(sentence) and not _DIRECTION.search(sentence)
    ]
