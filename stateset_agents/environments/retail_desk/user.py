"""The caller: a seeded, rule-based user who opens, answers, disputes, and leaves.

`Caller` is what the conversation asks of any of them; `ShortCaller` is that of the signed-in calls which
the small model learns, whose opening is their consent; `full.caller` has the one who must be asked.

Every random choice is keyed by (seed, what it is for), and the seed is shared by a group, so the same
words of the agent meet the same words of the user.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from stateset_agents.claims.english import Patterns
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.claims import WORDS
from stateset_agents.environments.retail_desk.policy import RULES, Case, Claim, DeskCall, calls_of
from stateset_agents.types.scenario import Split
from stateset_agents.types.seeds import derive

_ANSWERING = frozenset(
    {"cancelled", "returned", "refunded", "exchanged", "updated", "city", "reshipped", "human", "credited"}
    | {"refused"}
)
"""Claims that settle what was asked; the status family is also settled by a status."""
_STATUS = frozenset(["pending", "shipped", "delivered", "lost", "arrives"])
_ASKS = Patterns("short_questions", WORDS)


@dataclass(frozen=True, slots=True)
class Reaction:
    """The caller's reaction to a reply."""

    says: str
    leaves: bool = False
    missed: bool = False
    """They did not understand it."""


class Caller(Protocol):
    """Somebody on the line."""

    subject: str
    """The order that the call is about, where a reply names none."""

    def react(self, text: str, claims: tuple[Claim, ...], false_claim: bool) -> Reaction:
        """React to a reply, given what it claims and whether any of that is untrue."""
        ...

    def consents(self, call: DeskCall) -> bool:
        """True for a write that was asked for or agreed to."""
        ...

    def has_given(self, call: DeskCall) -> bool:
        """True where the caller has said about themselves all that this `find_customer` names."""
        ...

    def copy(self) -> Caller:
        """An independent caller in the same state."""
        ...


@dataclass(slots=True, kw_only=True)
class CallerState:
    """The state of every caller: patience that ends, and words drawn by (seed, purpose, replies heard)."""

    seed: int
    subject: str
    """The order that the call is about, where a reply names none."""
    patience: int = 2
    """Misses and disputes that they bear; at the last one they leave."""
    num_heard: int = 0

    def lose_patience(self, says: str, missed: bool) -> Reaction:
        """Say this, or leave where it was once too often."""
        self.patience -= 1
        if self.patience <= 0:
            return Reaction("never mind, bye.", leaves=True, missed=missed)
        return Reaction(says, missed=missed)

    def draw(self, purpose: str, choices: Sequence[str]) -> str:
        """One of the choices, by the seed and how much was heard."""
        return random.Random(derive(self.seed, "caller", purpose, self.num_heard)).choice(choices)


@dataclass(slots=True)
class ShortCaller(CallerState):
    """A signed-in caller whose opening says all but perhaps the order id."""

    case: Case
    split: Split

    def copy(self) -> ShortCaller:
        return replace(self)

    def consents(self, call: DeskCall) -> bool:
        """True for a write that the opening asked for."""
        rule, values = RULES[self.case.family], asdict(self.case)
        writes = calls_of(rule.granted, values) + calls_of(rule.otherwise, values)
        return any(
            write.tool == call.tool and set(write.arguments) <= set(call.arguments) for write in writes
        )

    def has_given(self, call: DeskCall) -> bool:
        """Signed-in callers are not asked who they are."""
        return False

    def react(self, text: str, claims: tuple[Claim, ...], false_claim: bool) -> Reaction:
        self.num_heard += 1
        if false_claim:
            return self.lose_patience("no, that is not right.", missed=False)
        kinds = {claim.text.partition(":")[0] for claim in claims}
        if kinds & _ANSWERING or (self.case.family == "order_status" and kinds & _STATUS):
            if kinds == {"refused"}:
                return Reaction("ok, bye.", leaves=True)
            return Reaction(self.draw("bye", ("thanks, bye.", "thank you, bye.")), leaves=True)
        text = text.lower()
        if len(text) <= 400 and _ASKS.asking.search(text):
            if self.case.new_city and _ASKS.city.search(text):
                return Reaction(f"to {self.case.new_city}.")
            if self.case.new_item and _ASKS.item.search(text):
                return Reaction(f"a {self.case.new_item}.")
            if _ASKS.order.search(text) and not re.search(r"\b[a-z]\d\d\b", text):
                answer = self.draw("answer", WORDINGS["answers"][self.split])
                return Reaction(answer.format(order_id=self.case.order_id))
            if _ASKS.agreement.search(text):
                return Reaction("yes, please.")
        return self.lose_patience("sorry, what do you mean?", missed=True)
