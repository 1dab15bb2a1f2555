"""The policy of full calls: an ordered list of rules.

Each rule has its text, its check, the decision where a request violates it, and the values of the one
database fact in which the two scenarios of a matched pair differ. `decide` checks the rules on a request in
order; the first one that is violated decides.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.retail_desk.policy import (
    POLICY,
    RETURN_DAYS,
    Claim,
    Decision,
    DeskCall,
    Fact,
    Rule,
    decision_of_words,
)
from stateset_agents.types.errors import ConfigurationError

# Cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One order with the item that the call is about."""

    order_id: str
    item: str
    price: int = 20
    """Dollars."""
    extra_item: str = ""
    """A second item in the same order."""
    extra_price: int = 0
    status: str = "delivered"
    """pending, shipped or delivered."""
    tracking: str = "moving"
    """moving, delivered or lost; read for shipped orders."""
    days: int = 10
    """Days since delivery; read for delivered orders."""
    arrives: str = "friday"
    final_sale: bool = False
    note: str = ""
    mine: bool = True
    """True where it is the caller's own order."""

    @property
    def total(self) -> int:
        """Dollars paid for the whole order."""
        return self.price + self.extra_price


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCase:
    """One call: who it is, two orders, and what is wanted."""

    family: str
    customer_id: str
    order: Purchase
    other: Purchase
    """A second order of the caller's."""
    stranger_order_id: str
    name: str
    email: str
    zip: str
    """Zip code as the caller says it."""
    zip_on_file: str = ""
    """Empty where it is what the caller says."""
    city: str
    """City to which the orders go."""
    payment: str = "card"
    """Payment method of the orders."""
    payment_open: bool = True
    wanted_payment: str = ""
    """Payment method on which the caller would like the refund; empty where they do not mind."""
    stock: int = 5
    """Stock of the item wanted in exchange; without an exchange, of the order's own item."""
    new_item: str = ""
    second_choice: str = ""
    """Wanted where `new_item` is out of stock; always in stock."""
    new_city: str = ""
    gives: str = "email"
    """Detail by which the caller is found: email, or zip (with their name)."""
    tells_order_id: bool = True
    """True where the opening names the order."""
    tells_details: bool = False
    """True where the opening says who is calling."""
    persona: str = "friendly"

    @classmethod
    def from_context(cls, context: Mapping[str, Any]) -> FullCase:
        """The case that a scenario's context describes; other keys are left alone."""
        fields = {name: context[name] for name in cls.__dataclass_fields__ if name in context}
        try:
            for name in ("order", "other"):
                if isinstance(fields[name], Mapping):
                    fields[name] = Purchase(**fields[name])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ConfigurationError(f"a retail desk scenario's context is incomplete: {error}") from error

    def fill(self, wording: str, order: Purchase, *, named: bool = True) -> str:
        """A wording of a request with the case's words in it; `named` says the order's id."""
        return wording.format(
            order=f"order {order.order_id}" if named else "my order",
            item=order.item,
            new_item=self.new_item,
            new_city=self.new_city,
            wanted=self.wanted_payment,
        )

    def with_fact(self, fact: str, value: Any) -> FullCase:
        """Return the case with one fact changed: `stock`, or `order.days`."""
        outer, _, inner = fact.partition(".")
        if inner:
            value = dataclasses.replace(getattr(self, outer), **{inner: value})
        return dataclasses.replace(self, **{outer: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that the caller wants."""

    kind: str
    """status, cancel, return, exchange, address or lost."""
    order: Purchase
    new_item: str = ""
    city: str = ""


def payment_id_of(customer_id: str, kind: str) -> str:
    """`pay-c123-gift` is customer c123's gift card."""
    return f"pay-{customer_id}-{kind.split()[0]}"


BY_HAND = 200
"""Dollars above which a refund needs a human."""

Check = Callable[[FullCase, Request], bool]
Instead = Callable[[FullCase, Request], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule(Rule):
    """One rule on some kinds of request."""

    kinds: Sequence[str]
    """The requests it is about."""
    is_violated: Check
    instead: Instead
    """Decision where the request breaks the rule."""


def _fact(order: Purchase, *texts: str) -> Fact:
    return frozenset(Claim(text, order.order_id) for text in texts)


def _write(tool: str, request: Request, **arguments: str) -> tuple[DeskCall, ...]:
    return (DeskCall(tool, (("order_id", request.order.order_id), *arguments.items())),)


def _refuse(*reasons: str) -> Instead:
    """No, and why: any one of the reasons, in which `{status}` and `{days}` are the order's."""

    def decision(case: FullCase, request: Request) -> Decision:
        order = request.order
        claims = [reason.format(status=order.status, days=order.days) for reason in reasons]
        return Decision(facts=(_fact(order, "refused"), _fact(order, *claims)))

    return decision


def _transfer(case: FullCase, request: Request) -> Decision:
    with_order = _write("transfer_to_human", request)
    return Decision(
        programs=(with_order, (DeskCall("transfer_to_human", ()),)), facts=(_fact(request.order, "human"),)
    )


def _tell_status(case: FullCase, request: Request) -> Decision:
    order = request.order
    facts = [_fact(order, order.status)]
    if order.status == "shipped":
        facts.append(_fact(order, f"arrives:{order.arrives}"))
    return Decision(facts=tuple(facts))


def _return(case: FullCase, request: Request, payment: str) -> Decision:
    order = request.order
    more = {} if payment == case.payment else {"payment_id": payment_id_of(case.customer_id, payment)}
    facts = [_fact(order, "returned", "refunded"), _fact(order, f"amount:{order.price}")]
    if case.wanted_payment:
        facts.append(_fact(order, f"refund_to:{payment}"))
    program = _write("return_items", request, items=order.item, **more)
    return Decision(programs=(program,), facts=tuple(facts))


def _grant(kind: str, request: Request, **changed: str) -> Decision:
    """What `policy.yaml` has done for a request of this kind, with some of its values changed."""
    order, words = request.order, POLICY["grants"][kind]
    values = {
        "order_id": order.order_id,
        "item": order.item,
        "price": order.price,
        "total": order.total,
        "new_item": request.new_item,
        "city": request.city,
    }
    return decision_of_words(words["call"], words["facts"], {**values, **changed})


def _out_of_stock(case: FullCase, request: Request) -> Decision:
    """The second choice, or else the return that the caller falls back to; and the reason."""
    if case.second_choice:
        decision = _grant("exchange", request, new_item=case.second_choice)
    else:
        decision = decide(case, Request(kind="return", order=request.order))
    reason = frozenset({Claim(f"out_of_stock:{request.new_item}", request.order.order_id)})
    return Decision(programs=decision.programs, facts=(*decision.facts, reason))


def _as_asked(case: FullCase, request: Request) -> Decision:
    """The request itself."""
    if request.kind == "status":
        return _tell_status(case, request)
    if request.kind == "return":
        return _return(case, request, case.wanted_payment or case.payment)
    return _grant(request.kind, request)


_CHECKS: Mapping[str, tuple[Check, Instead]] = {
    "identity": (lambda case, request: case.zip_on_file not in ("", case.zip), _refuse("unverified")),
    "orders": (lambda case, request: not request.order.mine, _refuse("not_yours")),
    "status": (lambda case, request: request.order.status != "shipped", _tell_status),
    "cancel": (lambda case, request: request.order.status != "pending", _refuse("{status}")),
    "address": (lambda case, request: request.order.status != "pending", _refuse("{status}")),
    "return": (lambda case, request: request.order.days > RETURN_DAYS, _refuse("outside", "days:{days}")),
    "final sale": (lambda case, request: request.order.final_sale, _refuse("final_sale")),
    "limit": (lambda case, request: request.order.price > BY_HAND, _transfer),
    "payment": (
        lambda case, request: bool(case.wanted_payment) and case.payment_open,
        lambda case, request: _return(case, request, case.payment),
    ),
    "exchange": (lambda case, request: case.stock == 0, _out_of_stock),
    "lost": (lambda case, request: request.order.tracking != "lost", _transfer),
    "credit": (lambda case, request: case.stock == 0, lambda case, request: _grant("credit", request)),
}
"""Topic -> does a request break the rule, and what to do then."""


def _rule(topic: str, fields: Mapping[str, Any]) -> PolicyRule:
    is_violated, instead = _CHECKS[topic]
    text = fields["text"].format(return_days=RETURN_DAYS, by_hand=BY_HAND)
    return PolicyRule(**{**fields, "text": text}, topic=topic, is_violated=is_violated, instead=instead)


RULES: Mapping[str, PolicyRule] = {topic: _rule(topic, fields) for topic, fields in POLICY["full"].items()}
"""The rules by topic, in the order in which they are asked."""
FULL_TOPICS: Mapping[str, str] = {
    "always": POLICY["always"],
    **{rule.topic: rule.text for rule in RULES.values()},
}
"""The texts from which `get_policy` answers in full calls."""


def rules_on(kind: str) -> Sequence[PolicyRule]:
    """The rules on one kind of request, in order."""
    return [rule for rule in RULES.values() if kind in rule.kinds]


def decide(case: FullCase, request: Request) -> Decision:
    """The decision on one request."""
    for rule in rules_on(request.kind):
        if rule.is_violated(case, request):
            return rule.instead(case, request)
    return _as_asked(case, request)


# Families


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of call: what is wanted, and the rule on whose fact its twins differ."""

    name: str
    wants: Sequence[str]
    """Kinds of request; what was wanted first and given up in mid-call is left out."""
    rule: str
    at_first: str = ""
    """Request that the caller makes before they change their mind."""
    noted: bool = False
    """True where the order carries a note that poses as an instruction."""


FAMILIES: Mapping[str, Family] = {
    name: Family(name=name, **fields) for name, fields in POLICY["full_families"].items()
}


def requests_of(case: FullCase) -> tuple[Request, ...]:
    """The caller's final requests, in order; a second request is about the other order."""
    orders = (case.order, case.other)
    return tuple(
        Request(kind=kind, order=order, new_item=case.new_item, city=case.new_city)
        for kind, order in zip(FAMILIES[case.family].wants, orders, strict=False)
    )


def whole_decision(case: FullCase) -> Decision:
    """The decision on the whole call."""
    decisions = [decide(case, request) for request in requests_of(case)]
    return Decision(
        programs=tuple(
            tuple(call for part in parts for call in part)
            for parts in itertools.product(*(decision.programs for decision in decisions))
        ),
        facts=tuple(fact for decision in decisions for fact in decision.facts),
    )


def subject_of(case: FullCase) -> tuple[str, str]:
    """The read tool that shows the fact on which the answer turns, and the ground that it gives then."""
    rule = RULES[FAMILIES[case.family].rule]
    order = case.other if rule.fact.startswith("other.") else case.order
    item = case.new_item or order.item
    kind, value = {
        "find_customer": ("customer", case.customer_id),
        "list_orders": ("orders", case.customer_id),
        "get_order": ("order", order.order_id),
        "get_product": ("item", item),
        "track_shipment": ("tracking", order.order_id),
    }[rule.looks_up]
    if rule.topic == "identity" and rule.is_violated(case, requests_of(case)[0]):
        return rule.looks_up, "nobody"
    return rule.looks_up, f"{kind}:{value}"
