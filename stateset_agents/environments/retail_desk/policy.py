"""The desk's policy: one rule for each family of learnable calls.

A rule has the prompt's text, the required look-up, the check, the gold program, the facts to tell, and the
values of the one database fact in which the two scenarios of a matched pair differ; `policy.yaml` has all but
the check.
"""

from __future__ import annotations

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
        known = {name: context[name] for name in cls.__dataclass_fields__ if name in context}
        try:
            case = cls(**known)
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


Fact = frozenset[str]
"""Claims any of which tells the fact, such as {"returned", "refunded"}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """The policy of one family."""

    topic: str
    text: str
    """The rule in words, for the prompt and `get_policy`."""
    looks_up: str
    """The read tool that shows the deciding fact."""
    fact: str
    """The `Case` field on which the answer turns."""
    grants: Sequence[Any]
    """Values of the fact for which the request is granted."""
    denies: Sequence[Any]
    """Values for which it is denied: the matched pair's second scenario has one of them."""
    permits: Callable[[Case], bool]
    granted_facts: Sequence[str]
    """Facts that the caller must be told when permitted; `returned|refunded` is either claim, and
    `amount:{price}` is filled from the case."""
    otherwise_facts: Sequence[str]
    granted: Sequence[str] = ()
    """The gold program when permitted: a tool, and the case's fields that are its arguments."""
    otherwise: Sequence[str] = ()
    """The gold program when not."""

    def program(self, case: Case) -> tuple[DeskCall, ...]:
        """The gold program: the shop must end as after it."""
        return _calls(self.granted if self.permits(case) else self.otherwise, case)

    def facts(self, case: Case) -> tuple[Fact, ...]:
        """The facts that the caller must be told, and truly."""
        values = {name: getattr(case, name) for name in Case.__dataclass_fields__}
        facts = self.granted_facts if self.permits(case) else self.otherwise_facts
        return tuple(frozenset(fact.format(**values).split("|")) for fact in facts)

    def claims(self, case: Case) -> tuple[frozenset[Claim], ...]:
        """The facts as claims about the caller's order."""
        return tuple(frozenset(Claim(text, case.order_id) for text in fact) for fact in self.facts(case))

    def subject(self, case: Case) -> str:
        """The ground that the required look-up gives, such as `order:K27`."""
        kind = {"get_product": "item", "track_shipment": "tracking"}.get(self.looks_up, "order")
        return f"{kind}:{case.new_item if kind == 'item' else case.order_id}"

    def is_denial(self, case: Case) -> bool:
        """True where the right answer is no."""
        return any("refused" in fact for fact in self.facts(case))

    def consents(self, case: Case) -> frozenset[DeskCall]:
        """The writes that the opening asks for: in these families it counts as consent."""
        return frozenset({*_calls(self.granted, case), *_calls(self.otherwise, case)})


def _calls(words: Sequence[str], case: Case) -> tuple[DeskCall, ...]:
    """The call that `policy.yaml` words, its arguments read off the case; none for no words."""
    if not words:
        return ()
    tool, *fields = words
    pairs = [(field.split("=")[0], field.split("=")[-1]) for field in fields]
    return (DeskCall(tool, tuple((argument, getattr(case, source)) for argument, source in pairs)),)


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
