"""The desk's policy: one rule for each family of learnable calls.

A rule has the prompt's text, the required look-up, the check, the gold program, the facts to tell, and the
values of the one database fact in which the two scenarios of a matched pair differ; `policy.yaml` has all but
the check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError

RETURN_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The facts of one scenario's shop and the caller's wish; JSON values only."""

    family: str
    customer_id: str
    order_id: str
    item: str
    status: str = "delivered"
    """pending, shipped or delivered."""
    tracking: str = "moving"
    """moving, delivered or lost; read for shipped orders."""
    days: int = 10
    """Days since delivery; read for delivered orders."""
    arrives: str = "friday"
    price: int = 20
    """Dollars."""
    stock: int = 5
    """Stock of the wanted item."""
    new_item: str = ""
    city: str = ""
    """The city the parcel goes to."""
    new_city: str = ""
    name: str = "anna"
    other_order_id: str = ""
    """A second order of the caller's."""
    stranger_order_id: str = ""
    """An order of somebody else's."""
    tells_order_id: bool = True
    """True where the opening names the order."""

    @classmethod
    def from_context(cls, context: Mapping[str, Any]) -> Case:
        """The case that a scenario's context describes; other keys are left alone."""
        fields = {name: context[name] for name in cls.__dataclass_fields__ if name in context}
        try:
            case = cls(**fields)
        except TypeError as error:
            raise ConfigurationError(f"a retail desk scenario's context is incomplete: {error}") from error
        if case.family not in RULES:
            raise ConfigurationError(f"unknown desk family {case.family!r}; one of {', '.join(RULES)}")
        return case


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing asserted: `shipped`, `city:oslo`, `refused`; about which order."""

    text: str
    order_id: str


@dataclass(frozen=True, slots=True)
class DeskCall:
    """One tool call, such as a write that policy wants; arguments as (name, value)."""

    tool: str
    arguments: tuple[tuple[str, str], ...]


Fact = frozenset[Claim]
"""Claims any of which tells the fact, such as "returned" and "refunded"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The calls and the facts that policy wants."""

    programs: tuple[tuple[DeskCall, ...], ...] = ((),)
    """The shop must end as after any one of them; the order of a program's calls does not matter."""
    facts: tuple[Fact, ...] = ()

    @property
    def is_denial(self) -> bool:
        """True where any part of it is a refusal."""
        return any(claim.text == "refused" for fact in self.facts for claim in fact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The words and values of one rule, as `policy.yaml` has them."""

    topic: str
    text: str
    """The rule in words, for the prompt and `get_policy`."""
    looks_up: str
    """The read tool that shows the deciding fact."""
    fact: str
    """Path in the case of the fact on which the answer turns: `stock`, or `order.days`."""
    grants: Sequence[Any]
    """Values of the fact for which the request is granted."""
    denies: Sequence[Any]
    """Values for which it is denied: the matched pair's second scenario has one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule(Rule):
    """The policy of one family of learnable calls."""

    permits: Callable[[Case], bool]
    granted_facts: Sequence[str]
    """Facts that the caller must be told when permitted; `returned|refunded` is either claim, and
    `amount:{price}` is filled from the case."""
    otherwise_facts: Sequence[str]
    granted: Sequence[str] = ()
    """The gold program when permitted: a tool, and the case's fields that are its arguments."""
    otherwise: Sequence[str] = ()
    """The gold program when not."""

    def decision(self, case: Case) -> Decision:
        """The decision on a case; its facts are claims about the caller's order."""
        permitted = self.permits(case)
        return decision_of_words(
            self.granted if permitted else self.otherwise,
            self.granted_facts if permitted else self.otherwise_facts,
            dataclasses.asdict(case),
        )


def decision_of_words(call: Sequence[str], facts: Sequence[str], values: Mapping[str, Any]) -> Decision:
    """The decision that `policy.yaml` words; `values` fill its slots, and name its order."""
    claims = [fact.format(**values).split("|") for fact in facts]
    return Decision(
        programs=(calls_of(call, values),),
        facts=tuple(frozenset(Claim(text, values["order_id"]) for text in fact) for fact in claims),
    )


def calls_of(words: Sequence[str], values: Mapping[str, Any]) -> tuple[DeskCall, ...]:
    """The call that `policy.yaml` words, with the values that it names as arguments; none for no words."""
    if not words:
        return ()
    tool, *fields = words
    pairs = [(field.split("=")[0], field.split("=")[-1]) for field in fields]
    return (DeskCall(tool, tuple((argument, str(values[source])) for argument, source in pairs)),)


_PERMITS: Mapping[str, Callable[[Case], bool]] = {
    "order_status": lambda case: case.status == "shipped",
    "cancel": lambda case: case.status == "pending",
    "return": lambda case: case.status == "delivered" and case.days <= RETURN_DAYS,
    "exchange": lambda case: case.stock > 0,
    "address": lambda case: case.status == "pending",
    "lost_parcel": lambda case: case.tracking == "lost",
}
POLICY: Mapping[str, Any] = read_yaml(Path(__file__).with_name("policy.yaml"))
RULES: Mapping[str, FamilyRule] = {
    family: FamilyRule(
        **{**fields, "text": fields["text"].format(return_days=RETURN_DAYS)}, permits=_PERMITS[family]
    )
    for family, fields in POLICY["learnable"].items()
}
FAMILIES = tuple(RULES)
TOPICS: Mapping[str, str] = {rule.topic: rule.text for rule in RULES.values()}
"""The texts from which `get_policy` answers."""
