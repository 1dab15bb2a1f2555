"""The desk's policy: one rule for each family of learnable calls.

A rule has the prompt's text, the required look-up, the decision on a case, the gold programs, the facts to
tell, and the values of the one database fact in which the two scenarios of a matched pair differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stateset_agents.types.errors import ConfigurationError

RETURN_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is true in one scenario's shop and what the caller wants; JSON values only."""

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
    """In dollars."""
    stock: int = 5
    """Of the wanted item."""
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
    """Does the opening name the order?"""

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

    family: str
    topic: str
    text: str
    """As the prompt and `get_policy` word it."""
    looks_up: str
    """The read tool that shows the deciding fact."""
    fact: str
    """The `Case` field on which the answer turns."""
    grants: tuple[Any, ...]
    """Values of the fact for which the request is granted."""
    denies: tuple[Any, ...]
    """Values for which it is denied: the matched pair's second scenario has one of them."""
    permits: Callable[[Case], bool]
    granted_facts: Callable[[Case], tuple[Fact, ...]]
    """What the caller must be told when permitted."""
    otherwise_facts: Callable[[Case], tuple[Fact, ...]]
    granted: Callable[[Case], tuple[DeskCall, ...]] = lambda case: ()
    """The gold program when permitted; any order of its calls will do."""
    otherwise: Callable[[Case], tuple[DeskCall, ...]] = lambda case: ()
    """The gold program when not."""

    def programs(self, case: Case) -> tuple[tuple[DeskCall, ...], ...]:
        """The gold programs: the shop must end as after any one of them."""
        return (self.granted(case) if self.permits(case) else self.otherwise(case),)

    def facts(self, case: Case) -> tuple[Fact, ...]:
        """What the caller must be told, and truly."""
        return self.granted_facts(case) if self.permits(case) else self.otherwise_facts(case)

    def claims(self, case: Case) -> tuple[frozenset[Claim], ...]:
        """The facts as claims about the caller's order."""
        return tuple(frozenset(Claim(text, case.order_id) for text in fact) for fact in self.facts(case))

    def subject(self, case: Case) -> str:
        """What must be looked up: the ground that a look-up of it gives, such as `order:K27`."""
        kind = {"get_product": "item", "track_shipment": "tracking"}.get(self.looks_up, "order")
        return f"{kind}:{case.new_item if kind == 'item' else case.order_id}"

    def is_denial(self, case: Case) -> bool:
        """True where the right answer is no."""
        return any("refused" in fact for fact in self.facts(case))

    def consents(self, case: Case) -> frozenset[DeskCall]:
        """The writes that the opening asks for: in these families it counts as consent."""
        return frozenset({*self.granted(case), *self.otherwise(case)})


def _call(tool: str, *fields: str) -> Callable[[Case], tuple[DeskCall, ...]]:
    """One call whose arguments are read off the case; `city=new_city` names the argument `city`."""
    pairs = [(field.split("=")[0], field.split("=")[-1]) for field in fields]

    def program(case: Case) -> tuple[DeskCall, ...]:
        return (DeskCall(tool, tuple((argument, getattr(case, source)) for argument, source in pairs)),)

    return program


def _facts(*facts: str) -> Callable[[Case], tuple[Fact, ...]]:
    """Facts as text: `returned|refunded` is either claim, `amount:{price}` is filled from the case."""

    def facts_of(case: Case) -> tuple[Fact, ...]:
        values = {name: getattr(case, name) for name in Case.__dataclass_fields__}
        return tuple(frozenset(fact.format(**values).split("|")) for fact in facts)

    return facts_of


def _status_facts(case: Case) -> tuple[Fact, ...]:
    if case.status == "shipped":
        return frozenset({"shipped"}), frozenset({f"arrives:{case.arrives}"})
    return (frozenset({case.status}),)


RULES: Mapping[str, FamilyRule] = {
    rule.family: rule
    for rule in (
        FamilyRule(
            family="order_status",
            topic="status",
            text="tell the status of the order. if it is shipped, tell the day it arrives.",
            looks_up="get_order",
            fact="status",
            grants=("shipped",),
            denies=("pending", "delivered"),
            permits=lambda case: case.status == "shipped",
            granted_facts=_status_facts,
            otherwise_facts=_status_facts,
        ),
        FamilyRule(
            family="cancel",
            topic="cancel",
            text="cancel an order only while it is pending. a shipped order cannot be cancelled.",
            looks_up="get_order",
            fact="status",
            grants=("pending",),
            denies=("shipped",),
            permits=lambda case: case.status == "pending",
            granted=_call("cancel_order", "order_id"),
            granted_facts=_facts("cancelled"),
            otherwise_facts=_facts("refused", "shipped"),
        ),
        FamilyRule(
            family="return",
            topic="return",
            text=f"return an order within {RETURN_DAYS} days of delivery and tell the refund.",
            looks_up="get_order",
            fact="days",
            grants=(10, 14, 18, 22, 26, 29),
            denies=(33, 38, 45, 52, 60, 75),
            permits=lambda case: case.status == "delivered" and case.days <= RETURN_DAYS,
            granted=_call("return_items", "order_id"),
            granted_facts=_facts("returned|refunded", "amount:{price}"),
            otherwise_facts=_facts("refused", "outside|days:{days}"),
        ),
        FamilyRule(
            family="exchange",
            topic="exchange",
            text="exchange an item only for an item in stock.",
            looks_up="get_product",
            fact="stock",
            grants=(2, 3, 5, 7, 8),
            denies=(0,),
            permits=lambda case: case.stock > 0,
            granted=_call("exchange_item", "order_id", "new_item"),
            granted_facts=_facts("exchanged"),
            otherwise_facts=_facts("refused", "out_of_stock:{new_item}"),
        ),
        FamilyRule(
            family="address",
            topic="address",
            text="change the address only while the order is pending. a shipped order cannot be changed.",
            looks_up="get_order",
            fact="status",
            grants=("pending",),
            denies=("shipped",),
            permits=lambda case: case.status == "pending",
            granted=_call("update_address", "order_id", "city=new_city"),
            granted_facts=_facts("updated|city:{new_city}"),
            otherwise_facts=_facts("refused", "shipped"),
        ),
        FamilyRule(
            family="lost_parcel",
            topic="lost",
            text="send a lost parcel again. if tracking says delivered, transfer to a human.",
            looks_up="track_shipment",
            fact="tracking",
            grants=("lost",),
            denies=("delivered",),
            permits=lambda case: case.tracking == "lost",
            granted=_call("reship", "order_id"),
            otherwise=_call("transfer_to_human", "order_id"),
            granted_facts=_facts("reshipped"),
            otherwise_facts=_facts("human"),
        ),
    )
}
FAMILIES = tuple(RULES)
TOPICS: Mapping[str, str] = {rule.topic: rule.text for rule in RULES.values()}
"""What `get_policy` answers from."""
