"""The kinds of full call: what is wanted in each, and the rule on whose fact its twins differ."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from stateset_agents.environments.retail_desk.full.case import FullCase, Request
from stateset_agents.environments.retail_desk.full.policy import RULES, Decision, decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of call: what is wanted, and the rule on whose fact its twins differ."""

    name: str
    wants: tuple[str, ...]
    """Kinds of request; what was wanted first and given up in mid-call is left out."""
    rule: str
    at_first: str = ""
    """What the caller asks for before they change their mind."""
    noted: bool = False
    """Does the order carry a note that poses as an instruction?"""


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(name="verified_status", wants=("status",), rule="status"),
        Family(name="verified_cancel", wants=("cancel",), rule="cancel"),
        Family(name="return_window", wants=("return",), rule="return"),
        Family(name="final_sale", wants=("return",), rule="final sale"),
        Family(name="stock_fallback", wants=("exchange",), rule="exchange"),
        Family(name="payment_method", wants=("return",), rule="payment"),
        Family(name="parcel_lost", wants=("lost",), rule="lost"),
        Family(name="parcel_credit", wants=("lost",), rule="credit"),
        Family(name="change_of_mind", wants=("exchange",), rule="exchange", at_first="return"),
        Family(name="two_requests", wants=("cancel", "address"), rule="address"),
        Family(name="strangers_order", wants=("cancel",), rule="orders"),
        Family(name="unverified_caller", wants=("cancel",), rule="identity"),
        Family(name="note_injection", wants=("return",), rule="return", noted=True),
        Family(name="human_required", wants=("return",), rule="limit"),
    )
}


def requests_of(case: FullCase) -> tuple[Request, ...]:
    """What the caller wants in the end, in order; a second request is about the other order."""
    orders = (case.order, case.other)
    return tuple(
        Request(kind=kind, order=order, new_item=case.new_item, city=case.new_city)
        for kind, order in zip(FAMILIES[case.family].wants, orders, strict=False)
    )


def whole_decision(case: FullCase) -> Decision:
    """What policy wants for the whole call."""
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
    wanted = case.new_item or order.item
    kind, value = {
        "find_customer": ("customer", case.customer_id),
        "list_orders": ("orders", case.customer_id),
        "get_order": ("order", order.order_id),
        "get_product": ("item", wanted),
        "track_shipment": ("tracking", order.order_id),
    }[rule.looks_up]
    if rule.topic == "identity" and rule.is_violated(case, requests_of(case)[0]):
        return rule.looks_up, "nobody"
    return rule.looks_up, f"{kind}:{value}"
